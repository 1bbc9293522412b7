"""The golden checkpoint of tensors that consist of others, and of dtypes of less than a byte."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.two_tensor import TwoTensor

COMPOSITES = Path(__file__).parent / "checkpoints" / "composites"


def composites(plus: int = 0) -> dict[str, Any]:
    dense = torch.zeros(4, 6)
    dense[1, 2], dense[3, 5] = 1.5 + plus, -2.0
    uncoalesced = torch.sparse_coo_tensor([[1, 1], [2, 2]], [1.0 + plus, 2.0], (4, 4), check_invariants=True)
    low = (torch.arange(6, dtype=torch.uint8) + plus).reshape(2, 3)
    with warnings.catch_warnings(action="ignore"):  # torch calls them a beta
        return {
            "model": {
                "two": TwoTensor(torch.arange(4.0) + plus, torch.ones(4)),
                "nested": [TwoTensor(two(plus), two(plus + 1)), torch.ones(3) + plus],
            },
            "coo": dense.to_sparse(),
            "uncoalesced": uncoalesced,
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
            "bsr": dense.to_sparse_bsr((2, 3)),
            "bsc": dense.to_sparse_bsc((2, 3)),
            "int4": low.view(torch.int4),
            "uint1": low.t().view(torch.uint1),
            "step": 7,
        }


def two(plus: int) -> TwoTensor:
    return TwoTensor(torch.arange(3.0) + plus, torch.zeros(3) - plus)


def unfolded(state: Any) -> Any:
    """``state`` with plain tensors only: each composite one is a dict of its type and its parts."""
    if isinstance(state, dict):
        return {key: unfolded(item) for key, item in state.items()}
    if isinstance(state, list):
        return [unfolded(item) for item in state]
    if not isinstance(state, torch.Tensor):
        return state
    told = {"type": type(state).__name__, "layout": str(state.layout), "dtype": str(state.dtype), "shape": state.shape}
    if isinstance(state, TwoTensor):
        return {**told, "a": unfolded(state.a), "b": unfolded(state.b)}
    if state.layout is torch.sparse_coo:
        parts: dict[str, Any] = {"indices": state._indices(), "values": state._values()}
        return {**told, **parts, "coalesced": state.is_coalesced()}
    if state.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {**told, "crow": state.crow_indices(), "col": state.col_indices(), "values": state.values()}
    if state.layout in (torch.sparse_csc, torch.sparse_bsc):
        return {**told, "ccol": state.ccol_indices(), "row": state.row_indices(), "values": state.values()}
    return {**told, "bytes": state.view(torch.uint8)} if state.itemsize == 1 else state
