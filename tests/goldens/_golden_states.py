"""The states that the golden checkpoints hold, built without random numbers, and what equality of two states means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "complex32", "complex64", "complex128", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip


def patterned(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor whose bytes follow a fixed pattern, including bit patterns of NaN; bool holds only 0 and 1."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    raw = (torch.arange(nbytes, dtype=torch.int64) * (37 + 2 * seed) + 11 * seed) % 251
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def counted(*shape: int, plus: float = 0.0) -> torch.Tensor:
    """The numbers from ``plus`` on."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + plus


def tensors() -> dict[str, Any]:
    """Every dtype, several layouts, tied and conjugated tensors, nested lists."""
    base, numbers = patterned((6, 5, 4)), counted(4, 3).to(torch.complex64) * (1 + 2j)
    return {
        "dtypes": {name: patterned((3, 8), getattr(torch, name), seed) for seed, name in enumerate(DTYPES)},
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "strided": base[::2, 1:, ::3],
        "transposed": base.permute(2, 0, 1),
        "expanded": base[:1].expand(3, 5, 4),
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "tied": [base, {"again": base}],
        "list": [[1, 2], [torch.ones(2), [torch.arange(3)]], []],
        "parameter": nn.Parameter(counted(3)),
        0: {"integer key": torch.arange(2)},
    }


def model_and_optimizer(plus: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with tied weights and buffers, and an optimizer with state; every number is fixed."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    model[3].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(counted(*parameter.shape, plus=number + plus))
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0 + plus),
                "exp_avg": counted(*parameter.shape, plus=number + 0.25 + plus),
                "exp_avg_sq": counted(*parameter.shape, plus=number + 0.5 + plus),
                "max_exp_avg_sq": counted(*parameter.shape, plus=number + 0.75 + plus),
            }
    return model, optimizer


def training(plus: float = 0.0) -> dict[str, Any]:
    """What a training script saves. ``plain`` gives its contents."""
    model, optimizer = model_and_optimizer(plus)
    return {"model": model, "optimizer": optimizer, "epoch": 4, "config": {"lr": 0.1, "layers": [1, 2]}}


def small(plus: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": counted(3, 4, plus=plus), "b": counted(3, plus=plus).double()}, "step": 7 + int(plus)}


def blocks() -> dict[str, Any]:
    """A tensor of two checksum blocks (1 MiB each), the second one partial, and one beside it."""
    return {"large": torch.arange(150_000) % 113, "short": counted(5), "name": "blocks"}


def plain(state: Any) -> Any:
    """``state`` with every object replaced by its ``state_dict()``."""
    if not isinstance(state, (dict, list, torch.Tensor)) and hasattr(state, "state_dict"):
        return plain(dict(state.state_dict()))
    if isinstance(state, dict):
        return {key: plain(item) for key, item in state.items()}
    return [plain(item) for item in state] if type(state) is list else state


def blank(state: Any) -> Any:
    """A template of the same structure with other contents."""
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=torch.uint8).to(state.dtype) if state.numel() == 0 else _other(state)
    if type(state) is dict:
        return {key: blank(item) for key, item in state.items()}
    if type(state) is list:
        return [blank(item) for item in state]
    return "not loaded yet"


def _other(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.numel() * tensor.dtype.itemsize, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def differences(one: Any, other: Any, path: str = "state") -> list[str]:
    """What differs: structure, types, order of keys, every byte of every tensor. Empty if nothing does."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return [f"{path}: {one!r:.80} and {other!r:.80}"]
        return [] if raw_bytes(one) == raw_bytes(other) else [f"{path}: other elements"]
    if isinstance(one, np.ndarray):
        same = isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
        return [] if same else [f"{path}: {one!r} and {other!r}"]
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping) or list(map(_key, one)) != list(map(_key, other)):
            return [f"{path}: keys {list(one)!r} and {list(other) if isinstance(other, Mapping) else other!r}"]
        return [line for key in one for line in differences(one[key], other[key], f"{path}[{key!r}]")]
    if type(one) is not type(other):
        return [f"{path}: {one!r} and {other!r}"]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} items"]
        pairs = enumerate(zip(one, other, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{path}[{index}]")]
    return [] if one == other or (one != one and other != other) else [f"{path}: {one!r} and {other!r}"]


def _key(key: Any) -> tuple[str, Any]:
    return type(key).__name__, key


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order."""
    dense = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(dense.view(torch.uint8).tolist()) if dense.numel() else b""
