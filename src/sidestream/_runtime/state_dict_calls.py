"""Calls of ``state_dict()`` and ``load_state_dict()`` of the caller's objects, in the same order on all ranks.

Both methods may be collectives (FSDP). If ranks called them in the order of their own dicts, they would enter different
collectives at the same time and wait for each other for ever. So objects are called level by level (first the objects
in the state, then the objects in their state dicts), and within a level in the order of their paths, with keys compared
as the strings that make up names. A rank that lacks an object skips it; the order of the others is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import filterfalse
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from ..errors import LoadStateDictError, indented
from .torch_probes import PLAIN_TENSORS, attributes_of

LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, str, bytes, complex, type(None)})
_PLAIN = PLAIN_TENSORS | {type(None)}
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state", "modules", "named_modules")
_OF_TORCH = {name: getattr(torch.nn.Module, name) for name in _METHODS}
_SLICE = 1024  # values examined between two yields: up to a few microseconds each

ListContents: TypeAlias = Callable[[Any], Iterable[tuple[Any, Any]] | None]
"""Returns the contents of a container by key (of a list: by index), nothing for a leaf, and None for an object whose
``state_dict()`` is to be called. The result stays valid if the container is changed."""


class FoundObject(NamedTuple):
    """An object and its place: its path as sort keys, and its name."""

    order: tuple[str, ...]
    name: str
    instance: Any


def key_order(key: object, *, index: bool = False) -> str:
    """Return the text by which ``key`` is sorted. ``index``: ``key`` is a position in a list."""
    return f"{key:020d}" if index else str(key)


def _in_order(found: Iterable[FoundObject]) -> list[FoundObject]:
    """Return ``found`` in the order in which all ranks call these objects."""
    return sorted(found, key=lambda one: one.order)


def _find_objects(start: FoundObject, look: ListContents) -> Iterator[FoundObject | None]:
    """Yield every object in ``start.instance``, itself included, unordered; yield None whenever other tasks should run.

    Nothing but ``look`` is called. An object in several places is found in the first of them, and a container that
    contains itself is walked once.
    """
    stack = [start]
    seen: dict[int, FoundObject] = {}
    count = 0
    while stack:
        here = stack.pop()
        order, name, value = here
        contents = look(value)
        if contents is None:
            yield here
        if not contents or (id(value) in seen and seen[id(value)].order <= order):
            continue
        seen[id(value)] = here  # kept, so that no other container gets its id
        index = isinstance(value, list | tuple)
        for key, item in contents:
            count += 1
            if count % _SLICE == 0:
                yield None
            if type(item) in LEAVES:
                continue
            stack.append(
                FoundObject((*order, key_order(key, index=index)), f"{name}.{key}" if name else str(key), item)
            )


def state_dicts_in_order(
    state: Any, look: ListContents, known: dict[int, tuple[Any, Any]], *, aliased: bool = False
) -> Iterator[bool]:
    """Call ``state_dict()`` of every object in ``state`` once. ``known`` receives each object with its state dict, by
    the object's id. ``aliased``: the caller makes aliases of the tensors, so those of modules need not be detached.

    Called in the task or thread of the caller. Yields True after each level, and False whenever other tasks should run.
    """
    level = [FoundObject((), "", state)]
    while level:
        found: dict[int, FoundObject] = {}
        for start in level:
            for one in _find_objects(start, look):
                if one is None:
                    yield False
                elif id(one.instance) not in known:
                    other = found.setdefault(id(one.instance), one)
                    if one.order < other.order:
                        found[id(one.instance)] = one
        level = []
        # Level by level, because the objects in a state dict are known only when it was returned.
        for one in _in_order(found.values()):
            # Only for modules whose ``state_dict`` is that of torch: there ``keep_vars`` changes nothing but the
            # detach. A class with code of its own may do anything with that argument.
            answer = _undetached(one) if aliased and _is_plain(one.instance) else _call_state_dict(one)
            known[id(one.instance)] = (one.instance, answer)  # kept, so that no other object gets its id
            level.append(one._replace(instance=answer))
            yield False
        yield True


def _call_state_dict(one: FoundObject) -> Any:
    return one.instance.state_dict()


def call_load_state_dict(name: str, instance: Any, state_dict: Any, **options: Any) -> Any:
    """Call ``load_state_dict`` of the object called ``name``, and return its answer. Raises ``LoadStateDictError``."""
    parameters = instance.parameters() if isinstance(instance, torch.nn.Module) else ()
    inference = any(parameter.is_inference() for parameter in filterfalse(is_lazy, parameters))
    # Entering a mode that is already active would turn gradients on.
    mode = nullcontext() if inference == torch.is_inference_mode_enabled() else torch.inference_mode(inference)
    try:
        with mode:
            return instance.load_state_dict(state_dict, **options)
    except Exception as error:
        raise LoadStateDictError(
            f"{name}: {type(instance).__name__}.load_state_dict raised {type(error).__name__}: {indented(error)}"
        ) from error


def _undetached(one: FoundObject) -> Any:
    """Return the state dict of a plain module with its parameters themselves. Torch releases the GIL when it detaches a
    tensor, and again when it destroys the result."""
    return one.instance.state_dict(keep_vars=True)


def _is_plain(instance: Any) -> bool:
    """Return whether ``state_dict()`` of a module runs only code of torch, and returns plain tensors without
    attributes."""
    if not isinstance(instance, torch.nn.Module) or not _is_of_torch(type(instance)):
        return False
    modules = list(instance.modules())
    if not all(map(_is_of_torch, set(map(type, modules)))):
        return False
    tensors: list[Any] = []  # and None
    for own in map(vars, modules):
        if own["_state_dict_hooks"] or own["_state_dict_pre_hooks"] or not _OF_TORCH.keys().isdisjoint(own):
            return False
        tensors += own["_parameters"].values()
        tensors += own["_buffers"].values()
    return _PLAIN.issuperset(map(type, tensors)) and not any(map(attributes_of, tensors))


def _is_of_torch(kind: type) -> bool:
    return all(getattr(kind, name, None) is method for name, method in _OF_TORCH.items())
