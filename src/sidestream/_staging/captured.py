"""The capture of a state dict at the moment of the call. It takes some 0.5 us per tensor on the caller's thread.

Names, checks and layout take longer. Another thread makes them afterwards from the captured state dict.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from .._runtime.state_dict_calls import LEAVES, state_dicts_in_order
from .._runtime.torch_probes import Stateful, attributes_of, has_shards, storage_key, with_attributes
from ..errors import InvalidOptionError, UnsafeObjectError
from .aliases import aliases_of
from .composite import Composite, dismantle, settled

__all__ = ["Captured", "capture", "named"]

_MAX_DEPTH = 64
_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
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


def capture(state: Mapping[str, Any], convert: Callable[[Any], Any] = copy.deepcopy) -> Captured:
    """Capture ``state`` without access to the bytes of a tensor.

    ``convert`` copies each value that is not a tensor, a container or an immutable built-in. Mappings become dicts, and
    lists stay lists. Tuples and the mappings in them keep their types. The order of the caller's dicts is kept.
    ``state_dict()`` is called on the objects in an order that is the same on all ranks.

    Raises ``InvalidOptionError`` if ``state`` is not a mapping or contains itself, ``UnsupportedTensorError`` for a
    tensor without bytes, and ``UnsafeObjectError`` in place of what ``convert`` raises.
    """
    if not isinstance(state, Mapping):
        raise InvalidOptionError(
            f"state is a mapping from names to tensors, values and objects with state_dict(), not a "
            f'{type(state).__name__}; write {{"model": model}}'
        )
    walk = _Walk(state, convert)
    root = walk.mapping(state, "", 0)
    return Captured(root, walk.tensors, walk.volatile, sharded=walk.sharded)


class _Walk:
    def __init__(self, state: Mapping[str, Any], convert: Callable[[Any], Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.volatile: set[int] = set()
        self.sharded = False
        self._convert = convert
        self._answers: dict[int, tuple[Any, Any]] = {}
        self._asking = state_dicts_in_order(state, _contents, self._answers, aliased=True)

    def mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
        if _PLAIN_TENSORS.issuperset(map(type, value.values())) and not any(map(attributes_of, value.values())):
            aliases, dense = aliases_of(value.values())  # all in C: 0.4 us per tensor, not 0.8
            if dense or _STRIDED.issuperset(map(_layout, aliases)):  # the aliases are in the processor's cache
                self.tensors.extend(aliases)
                return dict(zip(value, aliases, strict=True))
        taken: dict[Any, Any] = {}
        keep = self.tensors.append
        for key, item in value.items():
            kind = type(item)
            if kind in _PLAIN_TENSORS and item.layout is torch.strided and not attributes_of(item):
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
                for buffer in value.buffers():
                    composite = dismantle(buffer, path)
                    self.volatile.update(map(storage_key, composite.tensors() if composite else [buffer]))
            return self.item(self.state_dict(value), path, depth + 1)
        return self.value(value, path)

    def state_dict(self, instance: Stateful) -> Any:
        """Return the state dict of ``instance``. The call for the first object of a level calls ``state_dict()`` of all
        objects of that level, in their order."""
        for level_done in self._asking:
            if level_done and id(instance) in self._answers:
                break
        if id(instance) not in self._answers:
            raise InvalidOptionError(
                "the state was changed while its objects returned their state_dict(); do not change it"
            )
        return self._answers[id(instance)][1]

    def inside(self, value: Any, path: str, depth: int) -> Any:
        """Capture a value within a tuple. DCP saves a tuple as one value, so an ``OrderedDict`` in it keeps its
        type."""
        if type(value) is OrderedDict:
            return OrderedDict(self.mapping(value, path, depth))
        return self.item(value, path, depth)

    def tensor(self, value: torch.Tensor, path: str) -> torch.Tensor | Composite:
        value = settled(value)
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
