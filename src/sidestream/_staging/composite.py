"""Tensors that consist of other tensors. They are divided into plain tensors, and rebuilt over the copies of these."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .._runtime.torch_probes import has_shards, shard_attributes, shard_runs, shards_held, tensor_class, with_shards_of
from ..errors import UnsupportedTensorError

__all__ = ["Composite", "Form", "Sharding", "consists_of_others", "dismantle", "settled"]

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


@dataclass(frozen=True, slots=True)
class Sharding:
    """The larger tensor of which the parts are shards. Two shardings with an equal ``key`` have equal places.

    ``places()`` returns, for each piece, the index of its part, the offsets in the larger tensor, the sizes, and the
    offsets in the part. It is for worker threads.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: Hashable
    places: Callable[[], tuple[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]]


@dataclass(frozen=True, slots=True)
class Form:
    """The properties of a composite tensor apart from its parts. ``type`` is its layout or the qualified name of its
    class, ``names`` are the names of the parts. ``attributes`` are the names of what ``__tensor_flatten__`` lists
    although it is not a tensor."""

    type: str
    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    context: Any
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Composite:
    """The parts of a tensor. ``rebuild(parts)`` makes such a tensor over copies of ``parts``, in their order.

    It refers to the parts, not to the original tensor. ``kind`` names the tensor in errors. ``sharding`` is set if the
    parts are this rank's shards of a larger tensor. ``form`` is set if the tensor can be made from the parts and a few
    plain values.
    """

    kind: str
    parts: tuple[torch.Tensor | Composite, ...]
    rebuild: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    sharding: Sharding | None = None
    form: Form | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        for part in self.parts:
            if isinstance(part, Composite):
                yield from part.tensors()
            else:
                yield part


def dismantle(tensor: torch.Tensor, path: str) -> Composite | None:
    """Divide ``tensor`` into its parts. Returns None for a plain tensor. Raises ``UnsupportedTensorError`` with the
    ``path``."""
    kind = type(tensor)
    if (fake := tensor_class("torch._subclasses.fake_tensor", "FakeTensor")) and isinstance(tensor, fake):
        raise UnsupportedTensorError(f"{path}: cannot save a fake tensor: it has no bytes")
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedTensorError(f"{path}: cannot save an uninitialized {kind.__name__}: run the module once first")
    if (sharded := tensor_class("torch.distributed._shard.sharded_tensor", "ShardedTensor")) and kind is sharded:
        return _sharded(tensor, path)
    if (dtensor := tensor_class("torch.distributed.tensor", "DTensor")) and isinstance(tensor, dtensor):
        return _dtensor(tensor, path)
    if tensor.layout is torch.sparse_coo:
        return _coordinates(tensor, path)
    if tensor.layout in _COMPRESSED:
        return _compressed(tensor, path)
    if kind not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        return _wrapper(tensor, path, f"the wrapper subclass {kind.__name__}")
    return _holder(tensor, path) if has_shards(tensor) else None


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def consists_of_others(tensor: torch.Tensor) -> bool:
    """Return whether ``dismantle`` returns a ``form`` for ``tensor``."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return False
    if type(tensor) not in _PLAIN:
        others = (
            tensor_class("torch._subclasses.fake_tensor", "FakeTensor"),
            tensor_class("torch.distributed._shard.sharded_tensor", "ShardedTensor"),
            tensor_class("torch.distributed.tensor", "DTensor"),
        )
        if any(other is not None and isinstance(tensor, other) for other in others):
            return False
        if torch.nn.parameter.is_lazy(tensor):
            return False
    if tensor.layout is torch.sparse_coo or tensor.layout in _COMPRESSED:
        return True
    return type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__")


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` after waiting for a collective that still writes its bytes."""
    pending = tensor_class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if pending is not None and isinstance(tensor, pending):
        elem: torch.Tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
        return elem
    return tensor


def _part(tensor: torch.Tensor, path: str) -> torch.Tensor | Composite:
    tensor = settled(tensor)
    return dismantle(tensor, path) or tensor.detach()


def _dtensor(tensor: Any, path: str) -> Composite:
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedTensorError(
            f"{path}: a DTensor with a Partial placement holds only this rank's term of a sum; redistribute() it first"
        )
    shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)
    sharding = Sharding(
        shape, tensor.dtype, (shape, mesh, placements), partial(_dtensor_places, shape, mesh, placements)
    )
    return replace(_wrapper(tensor, path, "a DTensor"), sharding=sharding, form=None)


def _dtensor_places(
    shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]
) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
    runs = shard_runs(shape, mesh, placements)
    if runs is None:
        return ()
    boxes = itertools.product(*runs)
    return tuple((0, *(tuple(run[at] for run in box) for at in range(3))) for box in boxes)  # type: ignore[misc]


def _wrapper(tensor: Any, path: str, name: str) -> Composite:
    names, context = tensor.__tensor_flatten__()
    context = _with_own_containers(context)
    inner = {name: getattr(tensor, name) for name in names}
    # From torch 2.13 on, a DTensor lists its mesh among the names.
    others = {name: value for name, value in inner.items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in inner.items() if name not in others}
    kind, size, stride, dtype = type(tensor), tensor.size(), tensor.stride(), tensor.dtype
    del tensor, inner

    def rebuild(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        inner = dict(zip(order, parts, strict=True)) | others
        made: torch.Tensor = kind.__tensor_unflatten__(inner, context, size, stride)
        return made.detach()

    order = tuple(tensors)
    form = Form(
        f"{kind.__module__}.{kind.__qualname__}", order, dtype, tuple(size), tuple(stride), context, tuple(others)
    )
    parts = tuple(_part(value, f"{path}.{one}") for one, value in tensors.items())
    return Composite(name, parts, rebuild, form=form)


def _with_own_containers(value: Any) -> Any:
    """Copy the containers in a context, because the tensor may refer to the same objects."""
    if type(value) in (list, tuple):
        return type(value)(map(_with_own_containers, value))
    return {key: _with_own_containers(item) for key, item in value.items()} if type(value) is dict else value


def _coordinates(tensor: torch.Tensor, path: str) -> Composite:
    size, coalesced = tensor.size(), tensor.is_coalesced()
    form = Form("sparse_coo", ("indices", "values"), tensor.dtype, tuple(size), None, coalesced)
    parts = (_part(tensor._indices(), path), _part(tensor._values(), path))
    make: Any = torch.sparse_coo_tensor  # its stub lacks is_coalesced

    def rebuild(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        indices, values = parts
        made: torch.Tensor = make(indices, values, size, is_coalesced=coalesced, check_invariants=False)
        return made

    return Composite(f"a tensor of layout {tensor.layout}", parts, rebuild, form=form)


def _compressed(tensor: torch.Tensor, path: str) -> Composite:
    size, layout = tensor.size(), tensor.layout
    names = (*_COMPRESSED[layout], "values")
    form = Form(str(layout).removeprefix("torch."), names, tensor.dtype, tuple(size), None, None)
    make: Any = torch.sparse_compressed_tensor
    parts = tuple(_part(getattr(tensor, name)(), path) for name in names)

    def rebuild(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        compressed, plain, values = parts
        made: torch.Tensor = make(compressed, plain, values, size, layout=layout, check_invariants=False)
        return made

    return Composite(f"a tensor of layout {layout}", parts, rebuild, form=form)


def _holder(tensor: torch.Tensor, path: str) -> Composite:
    """Return the composite of a plain tensor whose attributes name the shards of a larger tensor that it holds."""
    shape, shards = shards_held(tensor, path)
    attributes = shard_attributes(tensor)
    places = tuple((0, shard.offsets, shard.sizes, shard.local) for shard in shards if 0 not in shard.sizes)

    def rebuild(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return with_shards_of(parts[0].detach(), attributes)

    sharding = Sharding(shape, tensor.dtype, (shape, places), lambda: places)
    return Composite("shards of a larger tensor", (tensor.detach(),), rebuild, sharding)


def _sharded(tensor: Any, path: str) -> Composite:
    metadata, group = tensor.metadata(), tensor._process_group
    placed = [shard.metadata for shard in tensor.local_shards()]
    parts = tuple(_part(shard.tensor, f"{path} (shard {n})") for n, shard in enumerate(tensor.local_shards()))
    module = sys.modules["torch.distributed._shard.sharded_tensor"]

    def rebuild(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        whole, own = copy.deepcopy((metadata, placed))
        for shard in (*whole.shards_metadata, *own):
            shard.placement._device = torch.device("cpu")
        made: torch.Tensor = module.ShardedTensor._init_from_local_shards_and_global_metadata(
            [module.Shard(part, one) for part, one in zip(parts, own, strict=True)], whole, process_group=group
        )
        return made

    places = tuple(
        (n, tuple(shard.shard_offsets), tuple(shard.shard_sizes), (0,) * len(shard.shard_sizes))
        for n, shard in enumerate(placed)
    )
    sharding = Sharding(tuple(metadata.size), metadata.tensor_properties.dtype, places, lambda: places)
    return Composite("a ShardedTensor", parts, rebuild, sharding)
