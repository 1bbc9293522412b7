"""What ``AsyncStager.stage`` copies of a nested state dict, and how the copy is put together again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import Stateful, check_tensor
from ..errors import InvalidOption, UnsafeObject
from .arena import Lease
from .image import Copy, ImageLayout

__all__ = ["StagedState", "Template", "plan_stage"]

_ALIGN_BYTES = 64
_ELEMENT_BYTES = 16
_MAX_DEPTH = 64


class StagedState(dict[str, Any]):
    """A state dict in host memory: the same structure, its tensors over leased memory, shared storages shared.

    ``release()`` when it has been used: the memory serves the next stage as soon as no tensor taken from here is left.
    """

    def release(self) -> None:
        """Let go of every tensor. Tensors that the caller still holds stay valid, and keep their memory."""
        self.clear()


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor within a slot: ``start`` and ``nbytes`` delimit the slot in the image, ``offset`` elements into it."""

    dtype: torch.dtype
    start: int
    nbytes: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """The structure of a state dict with a view where each tensor stands; everything else has been copied already."""

    root: Any
    views: tuple[_View, ...]

    def build(self, lease: Lease) -> StagedState:
        """The state dict over ``lease``, which has been filled according to its layout."""
        slots: dict[int, torch.Tensor] = {}
        tensors = [_tensor(view, lease, slots) for view in self.views]
        return StagedState(_fill(self.root, tensors))


class _Leaf(int):
    """The index of a tensor's view, standing where the tensor stood."""


def plan_stage(state_dict: Mapping[str, Any]) -> tuple[Template, ImageLayout]:
    """Walk ``state_dict`` (``Stateful`` objects give theirs) and lay out one image for its tensors.

    Tensors that share a storage share it in the copy too, and bytes that no tensor refers to are not copied. Raises
    ``UnsupportedTensor`` for what cannot be staged, before anything is copied.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidOption(
            f"a state dict is a mapping from names to tensors and values, not {type(state_dict).__name__}"
        )
    found: dict[int, tuple[torch.Tensor, _Leaf]] = {}
    root = _walk(state_dict, "", found, 0)
    tensors = [tensor for tensor, _ in found.values()]
    views, layout = _place(tensors)
    return Template(root, tuple(views)), layout


def _walk(value: Any, path: str, found: dict[int, tuple[torch.Tensor, _Leaf]], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in found:
            check_tensor(value, path)
            # An alias pins the storage of the call: param.data may be bound to another while it is copied.
            found[id(value)] = (value.detach(), _Leaf(len(found)))
        return found[id(value)][1]
    if depth > _MAX_DEPTH:
        raise InvalidOption(f"{path}: nested deeper than {_MAX_DEPTH} levels, or a container that contains itself")
    if isinstance(value, Mapping):
        return {
            key: _walk(item, f"{path}.{key}" if path else str(key), found, depth + 1) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_walk(item, f"{path}.{index}", found, depth + 1) for index, item in enumerate(value)]
    if type(value) is tuple:
        return tuple(_walk(item, f"{path}.{index}", found, depth + 1) for index, item in enumerate(value))
    if isinstance(value, Stateful) and not isinstance(value, type):
        return _walk(value.state_dict(), path, found, depth + 1)
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise UnsafeObject(f"{path}: a {type(value).__qualname__} cannot be copied: {error}") from error


def _fill(node: Any, tensors: list[torch.Tensor]) -> Any:
    if type(node) is _Leaf:
        return tensors[node]
    if type(node) is dict:
        return {key: _fill(item, tensors) for key, item in node.items()}
    if type(node) is list:
        return [_fill(item, tensors) for item in node]
    if type(node) is tuple:
        return tuple(_fill(item, tensors) for item in node)
    return node


@dataclass(slots=True)
class _Run:
    """Bytes ``start`` to ``end`` of one storage, with the tensors (by index) that lie in it."""

    source: torch.Tensor
    start: int
    end: int
    members: list[int]


def _place(tensors: list[torch.Tensor]) -> tuple[list[_View], ImageLayout]:
    views: list[_View | None] = [None] * len(tensors)
    copies: list[Copy] = []
    position = 0
    for run in _runs(tensors):
        position = -(-position // _ALIGN_BYTES) * _ALIGN_BYTES
        nbytes = run.end - run.start
        copies.append(Copy(run.source, position, nbytes, storage_start=run.start))
        for index in run.members:
            tensor = tensors[index]
            offset = (int(tensor.storage_offset()) * tensor.itemsize - run.start) // tensor.itemsize
            views[index] = _View(tensor.dtype, position, nbytes, offset, tensor.shape, tensor.stride())
        position += nbytes
    for index, tensor in enumerate(tensors):
        if views[index] is not None:
            continue
        position = -(-position // _ALIGN_BYTES) * _ALIGN_BYTES
        stride = torch.empty(tensor.shape, device="meta").stride()
        views[index] = _View(tensor.dtype, position, tensor.nbytes, 0, tensor.shape, stride)
        if tensor.nbytes:
            copies.append(Copy(tensor, position, tensor.nbytes))
        position += tensor.nbytes
    return [view for view in views if view is not None], ImageLayout(position, tuple(copies))


def _runs(tensors: list[torch.Tensor]) -> Iterable[_Run]:
    """Group tensors by storage and join those whose bytes overlap. Lazily conjugated, negated and empty ones are left
    out: their values are not the bytes of their storage."""
    storages: dict[int, list[tuple[int, int, int]]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
            continue
        start = int(tensor.storage_offset()) * tensor.itemsize
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extents = storages.setdefault(tensor.untyped_storage().data_ptr(), [])
        # From a multiple of the largest element on, so that each dtype in the run can address it.
        extents.append((start // _ELEMENT_BYTES * _ELEMENT_BYTES, start + (last + 1) * tensor.itemsize, index))
    for extents in storages.values():
        current: _Run | None = None
        for start, end, index in sorted(extents):
            if current is not None and start < current.end:
                current.end = max(current.end, end)
                current.members.append(index)
                continue
            if current is not None:
                yield current
            current = _Run(tensors[index], start, end, [index])
        if current is not None:
            yield current


def _tensor(view: _View, lease: Lease, slots: dict[int, torch.Tensor]) -> torch.Tensor:
    if view.nbytes == 0:
        return torch.empty(view.shape, dtype=view.dtype)
    slot = slots.get(view.start)
    if slot is None:  # a storage of exactly these bytes: writers that save whole storages write no neighbours
        slot = torch.frombuffer(lease.array, dtype=torch.uint8, count=view.nbytes, offset=view.start)
        slots[view.start] = slot
    return torch.empty(0, dtype=view.dtype).set_(slot.untyped_storage(), view.offset, view.shape, view.stride)
