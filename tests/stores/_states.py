"""States that can be told apart, and what a reader in any process makes of what it reads."""

from __future__ import annotations

from typing import Any

import torch

PART_BYTES = 5 << 20
"""The smallest that S3 takes."""


def make_state(seed: int, mib: int = 11) -> dict[str, Any]:
    """Two parts and a bit, or less with another ``mib``. Every tensor and value tells the seed."""
    weight = torch.arange(mib << 16, dtype=torch.int32).view(64, -1)
    return {
        "seed": seed,
        "model": {
            "weight": weight + seed,
            "half": torch.full((33,), seed % 200, dtype=torch.bfloat16),
            "long": torch.arange(3 * mib << 14, dtype=torch.int64) * 3 + seed,
        },
        "optimizer": {"lr": seed / 7, "moments": torch.full((1000,), float(seed))},
    }


def files_of(seed: int) -> dict[str, bytes]:
    """Sidecar files that tell the seed."""
    return {"seed": str(seed).encode(), "log": f"{seed}\n".encode() * 300}


def blank_state(mib: int = 11) -> dict[str, Any]:
    """A template for ``load`` that holds nothing of any seed."""
    state = make_state(-1, mib)
    for tensor in tensors(state).values():
        tensor.zero_()
    return state


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    return {**found, "optimizer.moments": state["optimizer"]["moments"]}


def seed_in(state: dict[str, Any], mib: int = 11) -> int:
    """The seed of a state that was read. Raises ``AssertionError`` if it is a mix, or damaged."""
    seed = state["seed"]
    expected = make_state(seed, mib)
    wrong = [name for name, tensor in tensors(expected).items() if not torch.equal(tensors(state)[name], tensor)]
    assert not wrong, f"seed {seed}, but not in {wrong}"
    assert state["optimizer"]["lr"] == expected["optimizer"]["lr"]
    return int(seed)
