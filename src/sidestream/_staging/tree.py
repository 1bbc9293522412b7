"""The plan for the copies of ``AsyncStager.stage``, and the state dict that is built over them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .._runtime.public import public
from .._runtime.threads import collected, paced, pause_point
from .._runtime.torch_probes import attributes_of, check_tensor, lazy_bits, storage_key, with_attributes
from .arena import Allocation
from .captured import Captured, Composite
from .image import Copy, ImageLayout
from .plans import PlanCache

_ALIGN_BYTES = 64
_ELEMENT_BYTES = 16
_EVERY = 64  # tensors between two releases of the GIL
_IMAGE_BYTES = 8 << 30
"""The most that an image holds, unless it holds one larger storage."""


@public
class StagedState(dict[str, Any]):
    """A state dict in host memory, with the structure of the one that was staged. Tensors that shared a storage share
    one.

    Its tensors lie in memory of the stager. Call ``release()`` when it has been used: the memory serves a later stage
    when no tensor taken from here is left.
    """

    def release(self) -> None:
        """Drop every tensor. Tensors that the program still refers to stay valid, and keep their memory."""
        self.clear()


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor within a slot. ``start`` and ``nbytes`` delimit the slot in the image. The tensor begins ``offset``
    elements after the start of the slot."""

    dtype: torch.dtype
    image: int
    start: int
    nbytes: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A state dict with a view of ``images`` for each of its tensors. All other values have been copied already."""

    root: Any
    """The structure, with the index of its view in place of each tensor."""
    views: tuple[_View, ...]
    images: tuple[ImageLayout, ...]

    def without_sources(self) -> StagePlan:
        """Return the plan without the copies, which refer to the sources."""
        return replace(self, images=())

    def build(self, leases: Sequence[Allocation]) -> StagedState:
        """Build the state dict over ``leases``, each of which has been filled according to its image."""
        slots: dict[tuple[int, int], torch.Tensor] = {}
        tensors = collected(_tensor(view, leases, slots) for view in self.views)
        return StagedState(_filled(self.root, tensors))


def _filled(node: Any, tensors: list[torch.Tensor]) -> Any:
    kind = type(node)
    if kind is _Leaf:
        return tensors[node]
    if kind is _Attributed:
        return with_attributes(tensors[node.leaf], node.attributes)
    if kind is _Parts:
        return node.rebuild([_filled(part, tensors) for part in node.parts])
    if kind is dict or kind is OrderedDict:
        return kind((key, _filled(item, tensors)) for key, item in node.items())
    if kind is list or isinstance(node, tuple):
        return _like(node, [_filled(item, tensors) for item in node])
    return node


class _Leaf(int):
    """The index of a tensor's view, in place of the tensor."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Attributed:
    """The index of a tensor's view and the attributes of the tensor, in place of the tensor."""

    leaf: _Leaf
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a composite tensor, in place of the tensor."""

    parts: tuple[Any, ...]
    rebuild: Any


def plan_stage(plans: PlanCache, captured: Captured) -> StagePlan:
    """Lay out images for all tensors in ``captured``. Uses a cached plan for a state dict with the same layout.

    Tensors that share a storage also share it in the copy. Bytes to which no tensor refers are not copied. Only the
    copies of the plan refer to sources. Raises ``UnsupportedTensorError`` for a tensor that cannot be staged.
    """
    # The structure is made for each stage, because values and attributes are of this state. What is cached is where
    # tensors lie, which depends on their look only.
    root = _template(captured.root, "", paced(itertools.count(), _EVERY), captured.held)
    return _planned(plans, root, captured.tensors)


def _planned(plans: PlanCache, root: Any, tensors: list[torch.Tensor]) -> StagePlan:
    views, images = plans.get_for(tensors, "stage", lambda: _place(tensors))
    layouts: list[ImageLayout] = []
    for image in images:
        layouts.append(image.over(tensors))
    return StagePlan(root, views, tuple(layouts))


def _template(node: Any, path: str, numbers: Iterator[int], held: set[int]) -> Any:
    """Return ``node`` with numbers in place of its tensors, in the order in which they were captured."""
    kind = type(node)
    if isinstance(node, torch.Tensor):
        check_tensor(node, path, held=bool(held) and node.layout is torch.strided and storage_key(node) in held)
        leaf, attributes = _Leaf(next(numbers)), attributes_of(node)
        return _Attributed(leaf, attributes) if isinstance(attributes, dict) and attributes else leaf
    if kind is Composite:
        return _Parts(tuple(_template(part, path, numbers, held) for part in node.parts), node.rebuild)
    if kind is dict or kind is OrderedDict:
        return kind(
            (key, _template(item, f"{path}.{key}" if path else str(key), numbers, held)) for key, item in node.items()
        )
    if kind is list or isinstance(node, tuple):
        return _like(node, [_template(item, f"{path}.{index}", numbers, held) for index, item in enumerate(node)])
    return node


def _like(node: Any, items: list[Any]) -> Any:
    """Return ``items`` as a list, tuple or named tuple of the same type as ``node``."""
    kind = type(node)
    if kind is list or kind is tuple:
        return kind(items)
    return kind._make(items) if hasattr(kind, "_make") else node


class _Place(NamedTuple):
    """A copy, with the index of its source."""

    source: int
    offset: int
    nbytes: int
    storage_start: int | None = None


@dataclass(frozen=True, slots=True)
class _Image:
    """The layout of an image, without the tensors."""

    nbytes: int
    places: tuple[_Place, ...]

    def over(self, tensors: Sequence[torch.Tensor]) -> ImageLayout:
        copies: list[Copy] = []
        for place in self.places:
            copies.append(Copy(tensors[place[0]], *place[1:]))
            pause_point()
        return ImageLayout(self.nbytes, tuple(copies))


class _Images:
    """The images of a plan, while storages are placed in them one after the other."""

    def __init__(self) -> None:
        self.closed: list[_Image] = []
        self._places: list[_Place] = []
        self._position = 0

    def place(self, source: int, nbytes: int, storage_start: int | None = None) -> tuple[int, int]:
        """Place ``nbytes``. Returns the number of the image and the offset in it."""
        # On cache lines, so that no two copies write to the same one from two threads.
        start = -(-self._position // _ALIGN_BYTES) * _ALIGN_BYTES
        # An image is memory in one piece. Several smaller ones are easier to find in an arena that has been in use than
        # one of the size of the state.
        if self._places and start + nbytes > _IMAGE_BYTES:
            self.close()
            start = 0
        if nbytes:
            self._places.append(_Place(source, start, nbytes, storage_start))
        self._position = start + nbytes
        return len(self.closed), start

    def close(self) -> None:
        if self._places:
            self.closed.append(_Image(self._position, tuple(self._places)))
        self._places, self._position = [], 0


def _place(tensors: list[torch.Tensor]) -> tuple[tuple[_View, ...], tuple[_Image, ...]]:
    views: dict[int, _View] = {}
    images = _Images()
    runs = _runs(tensors)
    for run in sorted(runs, key=lambda run: run.members[0]):
        pause_point()
        nbytes = run.end - run.start
        image, start = images.place(run.members[0], nbytes, run.start)
        for index in run.members:
            tensor = tensors[index]
            offset = (int(tensor.storage_offset()) * tensor.itemsize - run.start) // tensor.itemsize
            views[index] = _View(tensor.dtype, image, start, nbytes, offset, tensor.shape, tensor.stride())
    for index, tensor in enumerate(tensors):
        if index not in views:
            image, start = images.place(index, tensor.nbytes)
            # Not in a run: the tensor is empty, or lazily conjugated or negated. The copy has its values in row-major
            # order, so it gets the strides of such a tensor.
            stride = torch.empty(tensor.shape, device="meta").stride()
            views[index] = _View(tensor.dtype, image, start, tensor.nbytes, 0, tensor.shape, stride)
    images.close()
    return tuple(views[index] for index in range(len(tensors))), tuple(images.closed)


@dataclass(slots=True)
class _Run:
    """The bytes ``start`` to ``end`` of one storage, and the indices of the tensors in them."""

    start: int
    end: int
    members: list[int]


def _runs(tensors: list[torch.Tensor]) -> list[_Run]:
    """Group tensors by storage, and join tensors whose bytes overlap. Empty tensors are left out. So are lazily
    conjugated and negated ones, because their values are not the bytes of their storage."""
    storages: dict[int, list[tuple[int, int, int]]] = {}
    for index, tensor in enumerate(tensors):
        pause_point()
        if tensor.numel() == 0 or lazy_bits(tensor):
            continue
        start = int(tensor.storage_offset()) * tensor.itemsize
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extents = storages.setdefault(storage_key(tensor), [])
        # The start is a multiple of the largest element size, so that the offset is whole elements of every dtype.
        extents.append((start // _ELEMENT_BYTES * _ELEMENT_BYTES, start + (last + 1) * tensor.itemsize, index))
    runs: list[_Run] = []
    for extents in storages.values():
        current: _Run | None = None
        for start, end, index in sorted(extents):
            # Only overlapping parts of a storage share a slot. Of a large storage with two small views at its ends, the
            # bytes between them are not copied.
            if current is not None and start < current.end:
                current.end = max(current.end, end)
                current.members.append(index)
                continue
            current = _Run(start, end, [index])
            runs.append(current)
        pause_point()
    return runs


def _tensor(view: _View, leases: Sequence[Allocation], slots: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    if view.nbytes == 0:
        return torch.empty(view.shape, dtype=view.dtype)
    slot = slots.get((view.image, view.start))
    if slot is None:  # a storage of exactly these bytes, so that a writer of whole storages writes only them
        array = leases[view.image].array
        slot = torch.frombuffer(array, dtype=torch.uint8, count=view.nbytes, offset=view.start)
        slots[view.image, view.start] = slot
    return torch.empty(0, dtype=view.dtype).set_(slot.untyped_storage(), view.offset, view.shape, view.stride)
