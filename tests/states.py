"""State dicts for tests, and what it means that two are equal."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from sidestream._format.records import DTYPES

SAVED_DTYPES = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes, NaN patterns included; bool gets proper ones."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)
    return torch.empty(shape, dtype=dtype) if nbytes == 0 else raw.view(dtype).reshape(shape)


def values() -> dict[Any, Any]:
    """Every type that can be stored as data."""
    return {
        "int": 7,
        "big": 1 << 100,
        "negative": -(1 << 64),
        "float": 0.1,
        "inf": -math.inf,
        "nan": math.nan,
        "bool": True,
        "none": None,
        "text": "größer\n",
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"ab"),
        "complex": complex(1.5, -math.inf),
        "tuple": (1, (2, "x"), ()),
        "list": [1, [2, None]],
        "empty list": [],
        "empty dict": {},
        "nested empty": {"a": {"b": {}}},
        "set": {1},
        "frozenset": frozenset({"a"}),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "in tuple": (torch.arange(6).reshape(2, 3).t(), torch.tensor(2.5)),
        "dict in tuple": ({"a": 1, 2: OrderedDict(b=3)},),
        "numpy": (np.float32(0.1), np.int64(3), np.bool_(True), np.arange(6, dtype=np.uint32).reshape(2, 3)),
        "list of dicts": [{"lr": 0.1, "betas": (0.9, 0.999)}, {}],
        0: {"integer key": 1, 1.5: "float key", None: "none key", True: "bool key"},
    }


def raw_bytes(tensor: torch.Tensor) -> list[int]:
    """The row-major bytes."""
    if tensor.numel() == 0:
        return []
    # Not contiguous(), for which a dimension of one element may have any stride.
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return list(plain.view(torch.uint8).tolist())


def assert_same(a: Any, b: Any, path: str = "state") -> None:
    """Equal structure, types, keys and order of keys, and every byte of every tensor."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), path
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        equal = a.dtype in (torch.float32, torch.int64, torch.bfloat16, torch.complex64) and a.numel()
        same = torch.equal(a, b) if equal else False
        assert same or raw_bytes(a) == raw_bytes(b), path
    elif isinstance(a, Mapping):
        assert isinstance(b, Mapping), path
        assert list(a) == list(b), path
        assert [type(key) for key in a] == [type(key) for key in b], path
        for key in a:
            assert_same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b), path
        assert len(a) == len(b), path
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_same(left, right, f"{path}[{index}]")
    else:
        assert type(a) is type(b), path
        assert a == b or (a != a and b != b), path


def model_and_optimizer(seed: int = 0, width: int = 32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model with tied weights and a buffer, trained for a few steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(16, width), nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 16))
    model[3].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    for step in range(3):
        torch.manual_seed(seed + step)
        model(torch.randint(0, 16, (8,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer
