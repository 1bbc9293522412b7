"""Checkpoints as stock DCP writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def stock_save(state: dict[str, Any], path: Path, **options: Any) -> None:
    """By a ``FileSystemWriter`` with these options, in one process."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)


def stock_load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def nested_state() -> dict[str, Any]:
    return {
        "layers": {"0": {"weight": torch.randn(70, 300).t()}, "1": [torch.arange(5), {"deep": torch.tensor(2.5)}, 3]},
        "bf16": torch.randn(200, 300).bfloat16(),
        "fp8": torch.randn(64).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "large": torch.randn(3 << 18),
        "step": 7,
        "name": "run",
        "betas": (0.9, 0.999),
        "rng": torch.get_rng_state(),
        "flags": {"a": None, "b": True, "c": [1, 2], "d": b"raw", "e": complex(1, 2), "f": {1, 2}},
    }


def blank(state: Any) -> Any:
    """The same structure with other contents."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(item, (dict, list, torch.Tensor)) for item in state):
        return [blank(item) for item in state]
    return "something else"
