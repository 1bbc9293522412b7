"""State dicts as flat lists of leaves, with the FQNs of DCP, and the calls of the objects in them, which only the
caller's thread may make."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from .._format.records import MAX_PATH_DEPTH, SAVED_DTYPES, DictKey, Key, shape_problem
from .._runtime.state_dict_calls import state_dicts_in_order
from .._runtime.torch_probes import PLAIN_TENSORS, Stateful
from .._staging import Composite, Form, consists_of_others, dismantle, settled
from ..errors import InvalidOptionError, KeyCollisionError, UnsafeObjectError, UnsupportedTensorError

LeafKind = Literal["tensor", "value", "empty", "composite"]
PlainPath = tuple[str | int, ...]


def plain_path(path: tuple[Key, ...]) -> PlainPath:
    """Return a path as DCP has it: every dict key is a string, and list indices are integers."""
    return tuple(str(key.value) if isinstance(key, DictKey) else key for key in path)


class Leaf(NamedTuple):
    """The leaf at ``path``: a tensor, an empty dict, or a value. It can be replaced in ``holder[slot]``.

    ``owner`` is the number of the outermost ``Stateful`` object to whose state dict the leaf belongs, or None.
    ``value`` is a ``StatefulRoot`` for the object itself, and its leaves follow. It is a ``CompositeLeaf`` for a tensor
    that consists of others, and its parts follow: their ``whole`` is the FQN of the tensor.
    """

    fqn: str
    path: tuple[Key, ...]
    value: Any
    holder: Any = None
    slot: Any = None
    owner: int | None = None
    whole: str | None = None

    @property
    def kind(self) -> LeafKind:
        if isinstance(self.value, torch.Tensor):
            return "tensor"
        if type(self.value) is CompositeLeaf:
            return "composite"
        return "empty" if type(self.value) is dict and not self.value else "value"


@dataclass(frozen=True, slots=True)
class CompositeLeaf:
    """A tensor that consists of others. In a captured state dict there is only the ``composite``."""

    form: Form
    composite: Composite
    tensor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StatefulRoot:
    """The object at a path. The leaves with its number as ``owner`` follow."""

    number: int
    instance: Stateful
    containers: dict[PlainPath, Mapping[Any, Any]] = field(default_factory=dict)
    """The mappings in its state dict that are not plain dicts, by path. Complete when all of its leaves have been
    yielded."""


class StateDicts:
    """``state_dict()`` of the ``Stateful`` objects in a state, and the items of mappings that are not plain dicts."""

    def __init__(self) -> None:
        self._state_dicts: dict[int, tuple[Any, Any]] = {}
        self._items: dict[
            int, tuple[Any, list[tuple[Any, Any]]]
        ] = {}  # refers to the mappings, because the id of a freed object can be reused

    def collect(self, state: object) -> Iterator[None]:
        """Call ``state_dict()`` of every object in ``state`` and in the returned state dicts, in the same order on all
        ranks. Yields to let other tasks run.

        A container that contains itself is traversed once. ``leaves_of`` raises an error for it.
        """
        for level_done in state_dicts_in_order(state, self._look, self._state_dicts):
            if not level_done:
                yield

    def state_dict(self, instance: Any) -> Any:
        try:
            return self._state_dicts[id(instance)][1]
        except KeyError:
            # An object that was not there when the answers were collected: the caller has changed the state meanwhile.
            raise self._changed() from None

    def items(self, mapping: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
        if type(mapping) is dict:
            return dict(mapping).items()  # the copy is one step, because the loop's thread may change the dict
        if type(mapping) is OrderedDict:
            return list(mapping.items())
        try:
            return self._items[id(mapping)][1]
        except KeyError:
            raise self._changed() from None

    @staticmethod
    def _changed() -> InvalidOptionError:
        return InvalidOptionError("the target was changed while it was being loaded into; leave its structure alone")

    def _look(self, value: Any) -> Iterable[tuple[Any, Any]] | None:
        if type(value) is tuple or isinstance(value, torch.Tensor):
            return ()
        if is_stateful(value):
            return None
        if isinstance(value, list):
            return enumerate(list(value))
        if not is_mapping(value):
            return ()
        if type(value) is dict or type(value) is OrderedDict:
            return zip(list(value), list(value.values()), strict=True)
        # A mapping that is not a plain dict has code of the user, which has to run in the caller's thread. So its items
        # are taken here, before the state is compared in a thread of ours, and are not asked for again.
        items = list(value.items())
        self._items[id(value)] = (value, items)
        return items


class _Walk:
    def __init__(self, state_dicts: StateDicts | None) -> None:
        self.state_dicts = state_dicts
        self.roots: list[StatefulRoot] = []

    def mapping(
        self, value: Mapping[Any, Any], prefix: str, path: tuple[Key, ...], owner: int | None
    ) -> Iterator[Leaf]:
        items = value.items() if self.state_dicts is None else self.state_dicts.items(value)
        self.note(value, path, owner)
        for key, item in items:
            fqn = f"{prefix}.{key}" if prefix else str(key)
            # Without a generator and a call for each: a state dict has 10,000 of them.
            if type(item) in PLAIN_TENSORS and item.layout is torch.strided:  # nearly always
                yield Leaf(fqn, (*path, _dict_key(key, fqn)), item, value, key, owner)
            else:
                yield from self.item(item, fqn, (*path, _dict_key(key, fqn)), value, key, owner)

    def item(
        self, value: Any, fqn: str, path: tuple[Key, ...], holder: Any, slot: Any, owner: int | None
    ) -> Iterator[Leaf]:
        if isinstance(value, torch.Tensor):
            yield from self.tensor(value, Leaf(fqn, path, value, holder, slot, owner))
            return
        if isinstance(value, Composite):
            yield from self.composite(value, None, Leaf(fqn, path, value, holder, slot, owner))
            return
        if len(path) > MAX_PATH_DEPTH:
            raise InvalidOptionError(
                f"{fqn[:200]}: nested deeper than {MAX_PATH_DEPTH} levels, or a container that contains itself"
            )
        if is_stateful(value):
            own = value.state_dict() if self.state_dicts is None else self.state_dicts.state_dict(value)
            # The outermost object owns what is below it. What an inner object returned is only a part of its state
            # dict, and is handed over with it.
            if owner is None:
                owner = len(self.roots)
                self.roots.append(StatefulRoot(owner, value))
                yield Leaf(fqn, path, self.roots[owner], holder, slot)
            value = own
        if is_mapping(value) and value:
            yield from self.mapping(value, fqn, path, owner)
        # As DCP decides: a list of numbers is one value, and a list with a tensor or a dict at any depth is a
        # container. Tuples are values always.
        elif isinstance(value, list) and not is_value(value):
            for index, item in enumerate(value):
                yield from self.item(item, f"{fqn}.{index}", (*path, index), value, index, owner)
        elif is_mapping(value):
            self.note(value, path, owner)
            yield Leaf(fqn, path, {}, holder, slot, owner)
        else:
            yield Leaf(fqn, path, value, holder, slot, owner)

    def note(self, value: Mapping[Any, Any], path: tuple[Key, ...], owner: int | None) -> None:
        if owner is not None and type(value) is not dict:
            self.roots[owner].containers[plain_path(path)] = value

    def tensor(self, tensor: torch.Tensor, leaf: Leaf) -> Iterator[Leaf]:
        tensor = settled(tensor)
        if not consists_of_others(tensor):
            yield leaf
            return
        composite = dismantle(tensor, leaf.fqn)
        assert composite is not None
        yield from self.composite(composite, tensor, leaf)

    def composite(self, composite: Composite, tensor: torch.Tensor | None, leaf: Leaf) -> Iterator[Leaf]:
        form = composite.form
        if form is None:
            yield leaf
            return
        yield leaf._replace(value=CompositeLeaf(form, composite, tensor))
        for name, part in zip(form.names, composite.parts, strict=True):
            # Without ``holder`` and ``slot``: a part cannot be replaced in its tensor.
            below = Leaf(f"{leaf.fqn}.{name}", (*leaf.path, name), part, owner=leaf.owner, whole=leaf.fqn)
            if not isinstance(part, Composite):
                yield below
                continue
            inner = None if tensor is None else settled(getattr(tensor, name))
            if part.form is None and inner is not None:  # a DTensor: the load itself finds its memory
                below = below._replace(value=inner)
            yield from self.composite(part, inner, below)


def leaves_of(state: Mapping[str, Any], state_dicts: StateDicts | None = None) -> Iterator[Leaf]:
    """Yield the leaves of ``state`` in order. Calls ``state_dict()`` of every ``Stateful`` object in it, or uses
    ``state_dicts``.

    The rule is that of DCP. It descends into dicts, and into lists that hold tensors, dicts or ``Stateful`` objects at
    some depth. Any other value, including a tuple, is one leaf. A tensor that consists of others (sparse, a wrapper
    subclass) is one leaf, and each of its parts is one more, below it. The FQN joins the keys with dots.

    Raises ``KeyCollisionError`` if two paths have the same FQN, ``UnsafeObjectError`` for a key that is not a string or
    a number, and ``InvalidOptionError`` if ``state`` is not a mapping.
    """
    if not isinstance(state, Mapping):
        raise InvalidOptionError(
            f"state is a mapping from names to tensors, values and objects with state_dict(), not a "
            f'{type(state).__name__}; write {{"model": model}}'
        )
    seen: dict[str, tuple[Key, ...]] = {}
    for leaf in _Walk(state_dicts).mapping(state, "", (), None):
        if isinstance(leaf.value, StatefulRoot):
            yield leaf
            continue
        if leaf.fqn in seen:
            raise KeyCollisionError(
                f"{leaf.fqn!r} stands for two paths, {_spell(seen[leaf.fqn])} and {_spell(leaf.path)}: "
                "DCP joins keys with dots and turns them into strings; rename one"
            )
        seen[leaf.fqn] = leaf.path
        yield leaf


# These types are compared first, because isinstance() with Mapping or Stateful takes a microsecond or more.
_PLAIN = frozenset({bool, int, float, str, bytes, complex, tuple, list, dict, OrderedDict, set, type, type(None)})


def is_stateful(value: Any) -> bool:
    return type(value) not in _PLAIN and not isinstance(value, type) and isinstance(value, Stateful)


def is_mapping(value: Any) -> bool:
    kind = type(value)
    return kind is dict or kind is OrderedDict or (kind not in _PLAIN and isinstance(value, Mapping))


def is_value(items: list[Any]) -> bool:
    """Return whether a list is one value: it has no tensors, mappings or objects at any depth."""
    return not any(
        isinstance(item, (torch.Tensor, Composite))
        or is_mapping(item)
        or (isinstance(item, list) and not is_value(item))
        or is_stateful(item)
        for item in items
    )


def check_saved(fqn: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise ``UnsupportedTensorError`` for a tensor that no reader would accept."""
    if dtype not in SAVED_DTYPES:
        raise UnsupportedTensorError(f"{fqn}: torch cannot serialize a tensor of dtype {dtype}; save a view of it")
    if problem := shape_problem(dtype, shape):
        raise UnsupportedTensorError(f"{fqn}: cannot save a tensor of {problem}")


def _dict_key(key: Any, fqn: str) -> Key:
    if type(key) is str:
        return key
    if key is None or type(key) in (int, bool) or (type(key) is float and math.isfinite(key)):
        return DictKey(key)
    raise UnsafeObjectError(
        f"{fqn}: a dict key of type {type(key).__name__}; keys are strings and finite numbers: save "
        "str(key), or the items as a list"
    )


def _spell(path: tuple[Key, ...]) -> str:
    return "".join(f"[{key.value!r}]" if isinstance(key, DictKey) else f"[{key!r}]" for key in path)
