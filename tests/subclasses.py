"""Tensor subclasses as their users write them: int8 weights with a scale, as of torchao, in a class of our own."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten


class Kernel(enum.Enum):
    AUTO = "auto"
    FAST = "fast"


@dataclass(frozen=True)
class Activation:
    """What is beside the tensors in a context."""

    dim: int
    kernel: Kernel


class Int8(torch.Tensor):
    """``qdata * scale``, which reports the dtype of the scale."""

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, qdata: torch.Tensor, scale: torch.Tensor, context: Any) -> Int8:
        made: Int8 = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype, device=qdata.device)
        made.qdata, made.scale, made.context = qdata, scale, context  # type: ignore[attr-defined]
        return made

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor, context: Any) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale"], self.context  # type: ignore[attr-defined]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Int8:
        return cls(inner["qdata"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.alias.default):
            each = (func(one, *args[1:], **kwargs) for one in (args[0].qdata, args[0].scale))
            return cls(*each, args[0].context)
        if func is aten.copy_.default:
            target, source = args[:2]
            target.qdata.copy_(source.qdata)
            target.scale.copy_(source.scale)
            return target
        raise NotImplementedError(f"{func} of {cls.__name__}")


CONTEXT = {"block": [1, 4], "dtype": torch.bfloat16, "kernel": Kernel.AUTO, "activation": Activation(-1, Kernel.FAST)}


def int8(shape: tuple[int, ...], seed: int, context: Any = CONTEXT) -> Int8:
    generator = torch.Generator().manual_seed(seed)
    qdata = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    return Int8(qdata, torch.rand(shape[0], 1, generator=generator).bfloat16(), context)


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All plain tensors that ``tensor`` consists of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is not torch.strided:
        rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        indices = (tensor.crow_indices, tensor.col_indices) if rows else (tensor.ccol_indices, tensor.row_indices)
        return [*(one() for one in indices), tensor.values()]
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor]
    return [plain for name in tensor.__tensor_flatten__()[0] for plain in plain_parts(getattr(tensor, name))]


def differ(one: Any, other: Any) -> list[str]:
    """The paths at which two state dicts differ, in type, layout, or any byte."""
    return list(_differ(one, other, ""))


def _differ(one: Any, other: Any, path: str) -> Iterable[str]:
    if isinstance(one, dict):
        if not isinstance(other, dict) or list(one) != list(other):
            yield f"{path}: keys"
            return
        for key in one:
            yield from _differ(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list):
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from _differ(mine, theirs, f"{path}.{index}")
    elif not isinstance(one, torch.Tensor):
        if one != other:
            yield path
    elif (_kind(one), one.layout, one.dtype, one.shape) != (_kind(other), other.layout, other.dtype, other.shape):
        yield f"{path}: kind"
    elif one.layout is torch.sparse_coo and one.is_coalesced() != other.is_coalesced():
        yield f"{path}: coalesced"
    else:
        if isinstance(one, Int8) and one.context != other.context:  # type: ignore[attr-defined]
            yield f"{path}: context"
        for number, (mine, theirs) in enumerate(zip(plain_parts(one), plain_parts(other), strict=True)):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype or _bytes(mine) != _bytes(theirs):
                yield f"{path}: part {number}"


def _kind(tensor: torch.Tensor) -> type:
    return torch.Tensor if type(tensor) is torch.nn.Parameter else type(tensor)


def _bytes(tensor: torch.Tensor) -> bytes:
    same_size = tensor.detach().view(torch.uint8) if tensor.itemsize == 1 else tensor.detach()
    return bytes(same_size.contiguous().reshape(-1).view(torch.uint8).tolist())
