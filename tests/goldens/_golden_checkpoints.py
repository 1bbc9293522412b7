"""The golden checkpoints: what each holds, and which readers can read it. ``record_checkpoints.py`` wrote them once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _golden_states import blocks, counted, plain, small, tensors, training
from states import values

CHECKPOINTS = Path(__file__).parent / "checkpoints" / "a3c8103"
ROWS = torch.arange(70.0).reshape(10, 7)
COLUMNS = torch.arange(60, dtype=torch.int32).reshape(6, 10)
METADATA = {"loss": 0.25, "tags": ["a", "b"], "nested": {"epoch": 3}}


@dataclass(frozen=True)
class Golden:
    """The checkpoint at ``path`` holds ``contents()``.

    ``stock``: stock DCP reads it, without further options. ``checked``: every payload has a checksum, so ``verify``
    reports nothing as unverified."""

    path: str
    contents: Callable[[], dict[Any, Any]]
    stock: bool = True
    checked: bool = True
    metadata: Any = None
    step: int | None = None


def ranks_together() -> dict[Any, Any]:
    """What two ranks saved as shards, replicas and values."""
    return {
        "rows": ROWS,
        "deep": {"columns": COLUMNS, "plain": torch.arange(5)},
        "whole": [ROWS + 1, {"empty": {}}],
        "step": 7,
        "betas": (0.9, 0.99),
        3: torch.ones(2),
    }


def ranks_planned() -> dict[Any, Any]:
    """``ranks_together()`` through a planner of torch, which turns every key into text and drops empty containers."""
    return {str(key): item for key, item in ranks_together().items()} | {"whole": [ROWS + 1]}


def part(rank: int) -> dict[str, Any]:
    """What one of three ranks saves by itself, see ``apart``."""
    return {
        f"layer{rank}": counted(6, 10, plus=rank),
        "common": {"weight": torch.arange(7), "lr": 0.25},
        "rng": {f"rank{rank}": rank},
    }


def apart() -> dict[Any, Any]:
    whole: dict[Any, Any] = {"common": part(0)["common"], "rng": {}}
    for rank in range(3):
        whole[f"layer{rank}"] = part(rank)[f"layer{rank}"]
        whole["rng"][f"rank{rank}"] = rank
    return whole


def floats() -> dict[str, Any]:
    """What safetensors can hold."""
    return {"model.w": counted(3, 4), "model.b": counted(3).to(torch.bfloat16), "head": torch.arange(5)}


def foreign() -> dict[str, Any]:
    """What stock DCP saved in one process."""
    return {
        "layers": {"0": {"weight": counted(7, 3).t()}, "1": [torch.arange(5), {"deep": torch.tensor(2.5)}, 3]},
        "bf16": counted(20, 3).bfloat16(),
        "fp8": counted(64).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "step": 7,
        "name": "run",
        "betas": (0.9, 0.999),
        "flags": {"a": None, "b": True, "c": [1, 2], "d": b"raw", "e": complex(1, 2), "f": {1}},
    }


def foreign_ranks() -> dict[Any, Any]:
    return {
        "rows": ROWS,
        "columns": COLUMNS,
        "deep": {"whole": ROWS + 1, "plain": torch.arange(5)},
        "step": 7,
        "betas": (0.9, 0.99),
    }


def selected() -> dict[str, Any]:
    """``small()`` after ``convert(select="model.*", names=strip_prefix("model."))``."""
    return dict(small()["model"])


def _training() -> dict[Any, Any]:
    return plain(training())


def _shifted() -> dict[Any, Any]:
    return small(1.0)


GOLDENS = {
    "tensors": Golden("tensors", tensors),
    "values": Golden("values", values),
    "training": Golden("training", _training),
    "blocks": Golden("blocks", blocks),
    "metadata": Golden("metadata", small, metadata=METADATA),
    "digest": Golden("digest", small),
    "signed": Golden("signed", small),
    "writer process": Golden("writer-process", small),
    "empty": Golden("empty", dict, stock=False),
    "planner": Golden("planner", small),
    "storage writer": Golden("storage-writer", foreign),
    "run, step 1": Golden("run/step-1", small, step=1, metadata={"loss": 1.5}),
    "run, step 2": Golden("run/step-2", _shifted, step=2, metadata={}),
    "run, step 2, generation 2": Golden("run/step-2.g2", small, step=2, metadata={}),
    "ranks": Golden("ranks", ranks_together),
    "ranks, planner": Golden("ranks-planner", ranks_planned),
    "ranks, storage writer": Golden("ranks-storage-writer", foreign_ranks),
    "parts": Golden("parts", apart, stock=False),  # stock DCP reads the part of one rank, and no whole
    "copied": Golden("copied", small),
    "converted, dcp": Golden("converted/dcp", selected),
    "converted, safetensors": Golden("converted/directory", selected, stock=False, checked=False),
    "converted, one safetensors file": Golden(
        "converted/model.safetensors", selected, stock=False, checked=False
    ),
    "converted, torch.save": Golden("converted/model.pt", small, stock=False),
    "stock": Golden("stock", foreign),
    "stock, safetensors": Golden("stock-safetensors", floats, stock=False, checked=False),
    "stock, zstd": Golden("stock-zstd", foreign),
    "stock, ranks": Golden("stock-ranks", foreign_ranks),
    "stock, hugging face": Golden("stock-hf", floats, stock=False, checked=False),
    "hugging face": Golden("hf", floats, stock=False, checked=False),
    "torch.save": Golden("torch-save.pt", foreign, stock=False),
}  # fmt: skip
