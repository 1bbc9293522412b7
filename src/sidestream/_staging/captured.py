"""The capture of a state dict at the moment of the call. It takes some 0.5 us per tensor on the caller's thread.

Names, checks and layout take longer. Another thread makes them afterwards from the captured state dict. Tensors that
consist of other tensors are divided into plain tensors, and rebuilt over the copies of these.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from .._runtime.containers import container_kind
from .._runtime.imports import collecting_later
from .._runtime.state_dict_calls import LEAVES, state_dicts_in_order
from .._runtime.torch_probes import (
    PLAIN_TENSORS,
    Stateful,
    attributes_of,
    has_shards,
    shard_attributes,
    shard_runs,
    shards_held,
    storage_key,
    tensor_class,
    with_attributes,
    with_shards_of,
)
from ..errors import InvalidOptionError, UnsafeObjectError, UnsupportedTensorError

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


def consists_of_others(tensor: torch.Tensor) -> bool:
    """Return whether ``dismantle`` returns a ``form`` for ``tensor``."""
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
        return False
    if type(tensor) not in PLAIN_TENSORS:
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
    return type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "__tensor_flatten__")


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` after waiting for a collective that still writes its bytes."""
    # A collective may still be writing to this tensor. The copies are made in another thread or on another stream, so
    # the wait has to come first, here.
    pending = tensor_class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if pending is not None and isinstance(tensor, pending):
        elem: torch.Tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
        return elem
    return tensor


def _without_mesh(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a ``DTensor`` if this rank is the only one of its mesh, and other tensors as they
    are."""
    kind = tensor_class("torch.distributed.tensor", "DTensor")
    if kind is None or not isinstance(tensor, kind):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    if mesh.size() > 1 or mesh.get_coordinate() is None or any(placement.is_partial() for placement in placements):
        return tensor
    with torch.no_grad():
        return settled(tensor.to_local())  # type: ignore[attr-defined]


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
        # The placements are changed below, and those of the original must stay as they are.
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


_MAX_DEPTH = 64
_FEW = 16  # values of a dict for which calls of built-ins over all of them cost more than they save
_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
_STRIDED = frozenset({torch.strided})
_alias = attrgetter("data")  # half the time of detach()
_layout = attrgetter("layout")


@dataclass(frozen=True, slots=True)
class Captured:
    """A state dict that the program cannot change: ``root`` has copies of all containers and values.

    Each tensor is replaced by an alias of its storage, or by a ``Composite`` of such aliases. Objects with
    ``state_dict()`` are replaced by what that returned. An alias of a plain tensor has the attributes of the tensor
    (``tensor.mine = 1``) as the same objects, except tensors. An alias keeps the memory of the call: ``param.data`` may
    be bound to other memory while it is copied.

    ``tensors`` are all aliases in ``root``, in the order in which they were found. ``volatile`` and ``held`` are keys
    of storages. Those in ``volatile`` belong to buffers of modules, which forward changes. Those in ``held`` have been
    copied already.
    """

    root: dict[Any, Any]
    tensors: list[torch.Tensor]
    volatile: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    sharded: bool = False
    """Whether some of the tensors are shards of a larger tensor."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """The dtypes, by FQN, of the tensors that are converted while they are staged. The others keep their dtype."""
    containers: Mapping[str, str] = field(default_factory=dict)
    """The types of dicts in the state of objects, by FQN (``container_kind``). In ``root`` all are plain dicts."""


def capture(
    state: Mapping[str, Any], convert: Callable[[Any], Any] = copy.deepcopy, *, alone: bool = False
) -> Captured:
    """Capture ``state`` without access to the bytes of a tensor, and without a garbage collection.

    ``convert`` copies each value that is not a tensor, a container or an immutable built-in. Mappings become dicts, and
    lists stay lists. Tuples and the mappings in them keep their types. The order of the caller's dicts is kept.
    ``state_dict()`` is called on the objects in an order that is the same on all ranks. With ``alone``, for a save by
    one process, a ``DTensor`` over a mesh of one rank becomes its local tensor, which is all of it.

    Raises ``InvalidOptionError`` if ``state`` is not a mapping or contains itself, ``UnsupportedTensorError`` for a
    tensor without bytes, and ``UnsafeObjectError`` in place of what ``convert`` raises.
    """
    if not isinstance(state, Mapping):
        raise InvalidOptionError(
            f"state is a mapping from names to tensors, values and objects with state_dict(), not a "
            f'{type(state).__name__}; write {{"model": model}}'
        )
    walk = _Walk(state, convert, alone)
    with collecting_later():
        root = walk.mapping(state, "", 0)
    return Captured(root, walk.tensors, walk.volatile, sharded=walk.sharded, containers=walk.containers)


class _Walk:
    def __init__(self, state: Mapping[str, Any], convert: Callable[[Any], Any], alone: bool) -> None:
        self._alone = alone
        self.tensors: list[torch.Tensor] = []
        self.volatile: set[int] = set()
        self.sharded = False
        self.containers: dict[str, str] = {}
        self._depth_in_objects = 0
        self._convert = convert
        self._state_dicts: dict[int, tuple[Any, Any]] = {}
        self._calls = state_dicts_in_order(state, _contents, self._state_dicts, aliased=True)

    def mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
        if self._depth_in_objects and (kind_of_dict := container_kind(value)):
            self.containers[path] = kind_of_dict
        values = list(value.values()) if len(value) > _FEW else []
        # There are two ways. A dict of plain tensors, as nearly all state dicts consist of, is taken by calls in C.
        # Everything else is looked at item by item. An alias is made without a detach where that is possible: torch
        # releases the GIL for each detach, and beside a training thread 10,000 tensors would hand it over some 400
        # times.
        if values and PLAIN_TENSORS.issuperset(map(type, values)) and not any(map(attributes_of, values)):
            aliases = list(map(_alias, values))  # all in C: 0.4 us per tensor, not 0.8
            if _STRIDED.issuperset(map(_layout, aliases)):  # the aliases are in the processor's cache
                self.tensors.extend(aliases)
                return dict(zip(value, aliases, strict=True))
        taken: dict[Any, Any] = {}
        keep = self.tensors.append
        for key, item in value.items():
            kind = type(item)
            if kind in PLAIN_TENSORS and item.layout is torch.strided and not attributes_of(item):
                alias = _alias(item)
                keep(alias)
                taken[key] = alias
            elif kind in _IMMUTABLE:
                taken[key] = item
            else:
                taken[key] = self.item(item, f"{path}.{key}" if path else str(key), depth + 1)
        return taken

    def item(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if depth > _MAX_DEPTH:
            raise InvalidOptionError(
                f"{path[:200]}: nested deeper than {_MAX_DEPTH} levels, or a container that contains itself"
            )
        if kind is dict:  # first, because an optimizer has one for each parameter
            return self.mapping(value, path, depth)
        if isinstance(value, list):
            if _IMMUTABLE.issuperset(map(type, value)):
                return list(value)
            return [self.item(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]
        if kind is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
            items = [self.inside(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]
            return tuple(items) if kind is tuple else kind._make(items)
        if isinstance(value, Mapping):
            return self.mapping(value, path, depth)
        if isinstance(value, Stateful) and not isinstance(value, type):
            if isinstance(value, torch.nn.Module):
                # Buffers change in forward, which no fence precedes. So on a device they are copied at the call, in
                # every mode.
                for buffer in value.buffers():
                    composite = dismantle(buffer, path)
                    self.volatile.update(map(storage_key, composite.tensors() if composite else [buffer]))
            # Only within objects, because there the type of a dict may matter to ``load_state_dict``. In the caller's
            # own state every mapping becomes a dict, as in DCP.
            self._depth_in_objects += 1
            taken = self.item(self.state_dict(value), path, depth + 1)
            self._depth_in_objects -= 1
            return taken
        return self.value(value, path)

    def state_dict(self, instance: Stateful) -> Any:
        """Return the state dict of ``instance``. The call for the first object of a level calls ``state_dict()`` of all
        objects of that level, in their order."""
        for level_done in self._calls:
            if level_done and id(instance) in self._state_dicts:
                break
        if id(instance) not in self._state_dicts:
            raise InvalidOptionError(
                "the state was changed while its objects returned their state_dict(); do not change it"
            )
        return self._state_dicts[id(instance)][1]

    def inside(self, value: Any, path: str, depth: int) -> Any:
        """Capture a value within a tuple. DCP saves a tuple as one value, so an ``OrderedDict`` in it keeps its
        type."""
        if type(value) is OrderedDict:
            return OrderedDict(self.mapping(value, path, depth))
        return self.item(value, path, depth)

    def tensor(self, value: torch.Tensor, path: str) -> torch.Tensor | Composite:
        value = settled(value)
        if self._alone:
            value = _without_mesh(value)
        composite = dismantle(value, path)
        attributes = _carried(value)
        if composite is not None:
            if attributes and has_shards(value):
                composite = replace(composite, rebuild=partial(_rebuilt, composite.rebuild, attributes))
            self.sharded = self.sharded or composite.sharding is not None
            self.tensors.extend(composite.tensors())
            return composite
        alias = with_attributes(value.detach(), attributes)
        self.tensors.append(alias)
        return alias

    def value(self, value: Any, path: str) -> Any:
        try:
            return self._convert(value)
        except Exception as error:
            raise UnsafeObjectError(f"{path}: a {type(value).__qualname__} cannot be copied: {error}") from error


def _carried(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a copy gets. Tensors are left out, because their bytes are not copied."""
    attributes = attributes_of(tensor)
    if not isinstance(attributes, dict):  # a subclass with slots
        return {}
    return {name: value for name, value in attributes.items() if not isinstance(value, torch.Tensor)}


def _rebuilt(
    rebuild: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    attributes: Mapping[str, Any],
    parts: Sequence[torch.Tensor],
) -> torch.Tensor:
    return with_attributes(rebuild(parts), attributes)


def _contents(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the contents of a container in which there may be objects with ``state_dict()``, as ``_Walk`` reads it.
    Returns None for such an object, and nothing for other values."""
    if type(value) in _IMMUTABLE or isinstance(value, torch.Tensor):
        return ()
    if type(value) is tuple or isinstance(value, list) or (isinstance(value, tuple) and hasattr(value, "_make")):
        return () if LEAVES.issuperset(map(type, value)) else enumerate(value)
    if isinstance(value, Mapping):
        return () if LEAVES.issuperset(map(type, value.values())) else value.items()
    return None if isinstance(value, Stateful) and not isinstance(value, type) else ()


def named(root: Mapping[Any, Any], storages: Collection[int]) -> list[str]:
    """Return the paths of the tensors in ``root``, a captured state dict, that use ``storages``."""
    found: list[str] = []
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        path, value = left.pop()
        if isinstance(value, (torch.Tensor, Composite)):
            tensors = [value] if isinstance(value, torch.Tensor) else value.tensors()
            if any(storage_key(one) in storages for one in tensors):
                found.append(path)
        elif isinstance(value, (Mapping, list, tuple)):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            left += [(f"{path}.{key}" if path else str(key), item) for key, item in items]
    return found[::-1]
