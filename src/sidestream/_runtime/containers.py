"""The dicts of the standard library that are more than a dict, by names. A file may name them, and no other type."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

_FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str, Counter, OrderedDict)
}
_DEFAULTS = "defaultdict of "


def container_kind(value: Mapping[Any, Any]) -> str | None:
    """Return the name of the type of ``value``. None for a plain dict, for other types, and for a dict that only code
    can make (``defaultdict`` with a function, or with attributes, such as the state dict of a module)."""
    if type(value) is Counter or type(value) is OrderedDict:
        return None if vars(value) else type(value).__name__
    if type(value) is not defaultdict:
        return None
    if value.default_factory is None:
        return "defaultdict"
    name = getattr(value.default_factory, "__name__", "")
    return f"{_DEFAULTS}{name}" if _FACTORIES.get(name) is value.default_factory else None


def empty_container(kind: str | None) -> dict[Any, Any] | None:
    """Return an empty dict of the type that ``container_kind`` has named. None for other names."""
    match kind:
        case "Counter":
            return Counter()
        case "OrderedDict":
            return OrderedDict()
        case "defaultdict":
            return defaultdict()
        case str() if kind.startswith(_DEFAULTS) and kind.removeprefix(_DEFAULTS) in _FACTORIES:
            return defaultdict(_FACTORIES[kind.removeprefix(_DEFAULTS)])
    return None


def filled_like(like: Mapping[Any, Any] | None, items: dict[Any, Any]) -> dict[Any, Any]:
    """Return ``items`` in a dict of the type of ``like``, if it is a dict of the standard library."""
    made: dict[Any, Any]
    match like:
        case Counter() if type(like) is Counter:
            return Counter(items)
        case defaultdict() if type(like) is defaultdict:
            return defaultdict(like.default_factory, items)
        case OrderedDict() if type(like) is OrderedDict:
            made = OrderedDict(items)
            vars(made).update(vars(like))  # the versions of a module's layout: without them it assumes the first
            return made
    return items
