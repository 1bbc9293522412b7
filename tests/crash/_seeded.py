"""States that can be told apart: each is made from a seed, and every part of it tells the seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def make_state(seed: int) -> dict[str, Any]:
    """A small state with tensors above and below a page, several dtypes, plain values. Every part tells the seed."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 257, generator=generator)
    return {
        "seed": seed,
        "model": {
            "weight": weight,
            "tied": weight,
            "half": torch.randn(33, generator=generator).to(torch.bfloat16),
            "scale": torch.tensor(float(seed)),
            "mask": torch.randint(0, 255, (3, 5), generator=generator, dtype=torch.uint8),
        },
        "optimizer": {"state": {0: {"moment": torch.randn(1000, generator=generator)}}, "lr": seed / 7},
    }


def blank_state() -> dict[str, Any]:
    """A template for ``load`` that holds nothing of any seed."""
    state = make_state(-1)
    for part in (state["model"], state["optimizer"]["state"][0]):
        for tensor in part.values():
            tensor.zero_()
    return state


def files_of(seed: int) -> dict[str, bytes]:
    """Sidecar files of that save."""
    return {"seed": str(seed).encode(), "log": f"{seed}\n".encode() * 300}


def same(left: Any, right: Any) -> bool:
    """Equal, and tensors bit for bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and torch.equal(_bits(left), _bits(right))
        )
    if isinstance(left, Mapping):
        return isinstance(right, Mapping) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    return type(left) is type(right) and bool(left == right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
