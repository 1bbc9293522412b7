"""The construction of objects from data that another writer pickled, for types that the caller allowed.

Only code of these types runs, as an unpickler would run it: ``__new__`` or the call, ``__setstate__`` or plain
attributes, ``append`` and item assignment. No name is looked up in a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from itertools import chain
from typing import Any

from .._runtime.steps import Steps
from ..errors import UnsafeObjectError, UnsupportedCheckpointError
from ..options import check_types
from .hashed import check_hashes

__all__ = ["NOTHING_ALLOWED", "Allowed", "allowed_types", "lookup", "rebuild", "rebuild_member"]

Allowed = Mapping[str, type]
"""Types by their qualified names, as a pickle has them."""

NOTHING_ALLOWED: Allowed = {}


def allowed_types(safe_globals: Iterable[type]) -> Allowed:
    """Return types by their qualified names. Raises ``InvalidOptionError`` as ``check_types`` does."""
    kinds = check_types("safe_globals", safe_globals)
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}


def rebuild(content: Any, decode: Callable[[Iterable[Any]], Steps[list[Any]]], allow: Allowed) -> Steps[Any]:
    """Make the object of an ``object`` node. ``decode`` decodes nodes.

    Raises ``UnsafeObjectError`` if its type is not allowed. Raises ``UnsupportedCheckpointError`` if the type does not
    accept what was saved. Its own exception is the cause.
    """
    kind = lookup(content["type"], allow)
    args = yield from decode(content["args"])
    elements = yield from decode(content.get("elements", ()))
    flat = yield from decode(chain.from_iterable((key, value) for key, value in content.get("items", ())))
    items = list(zip(flat[::2], flat[1::2], strict=True))
    yield from check_hashes(flat[::2])
    (state,) = yield from decode([content.get("state")])
    try:
        instance = kind.__new__(kind, *args) if content["new"] else kind(*args)
        for element in elements:
            instance.append(element)
        for key, value in items:
            instance[key] = value
        if state is not None:
            _set_state(instance, state)
    except Exception as error:
        raise UnsupportedCheckpointError(
            f"{content['type']} does not take what was saved of it: {type(error).__name__}: {error}"
        ) from error
    return instance


def lookup(name: str, allow: Allowed) -> type:
    """Return the type with this name. Raises ``UnsafeObjectError`` if it is not allowed."""
    try:
        return allow[name]
    except KeyError:
        raise UnsafeObjectError(f"the value holds a {name}, which is not among the types that were allowed") from None


def rebuild_member(enum: str, member: str, allow: Allowed) -> Any:
    """Return a member of an enum, as some releases of Python pickle it. No other attribute of a class can be named."""
    kind = lookup(enum, allow)
    if not issubclass(kind, Enum) or member not in kind.__members__:
        raise UnsafeObjectError(f"the value names {enum}.{member}, which is not a member of an enum")
    return kind.__members__[member]


def _set_state(instance: Any, state: Any) -> None:
    set_state = getattr(instance, "__setstate__", None)
    if set_state is not None:
        set_state(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        vars(instance).update(attributes)
    for name, value in (slots or {}).items():
        if name.startswith("__"):
            raise TypeError(f"a slot named {name}")
        setattr(instance, name, value)
