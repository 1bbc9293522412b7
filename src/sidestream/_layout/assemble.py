"""The construction of nested dicts and lists from paths and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from .._format.records import DictKey, Key
from .._runtime.containers import filled_like
from .._runtime.pauses import pause_point
from ..errors import CorruptCheckpointError
from .flatten import PlainPath
from .hashed import MOST_ALIKE

_WORD_BITS = 63
_Like: TypeAlias = Callable[[PlainPath], Mapping[Any, Any] | None]


class _ListParts(dict[int, Any]):
    """The elements of a list by index, in any order."""


def assemble(
    leaves: Iterable[tuple[tuple[Key, ...], Any]],
    *,
    gaps: bool = False,
    like: _Like = lambda _: None,
) -> dict[Any, Any]:
    """Return the state dict with these leaves. With ``gaps``, a list of which elements before others are missing
    becomes a dict by index. ``like`` returns a mapping for the path of a dict, which gets its type.

    Raises ``CorruptCheckpointError`` if paths contradict each other, and without ``gaps`` also if a list has holes.
    """
    root: dict[Any, Any] = {}
    alike: dict[tuple[int, bytes], int] = {}
    for path, value in leaves:
        pause_point()
        holder: dict[Any, Any] = root
        for depth, key in enumerate(path[:-1]):
            kind = _ListParts if type(path[depth + 1]) is int else dict
            _count(key, holder, alike)
            holder = holder.setdefault(_plain(key), kind())
            if type(holder) is not kind:
                raise CorruptCheckpointError(
                    f"the checkpoint has a {type(holder).__name__} and a container at {path[: depth + 1]}"
                )
        _count(path[-1], holder, alike)
        if _plain(path[-1]) in holder:
            raise CorruptCheckpointError(f"the checkpoint has two values at {path}")
        holder[_plain(path[-1])] = value
    result: dict[Any, Any] = _close(root, (), gaps, like)
    return result


def _count(key: Key, holder: dict[Any, Any], alike: dict[tuple[int, bytes], int]) -> None:
    """Count a key. Raises ``CorruptCheckpointError`` if too many keys of one dict have the same hash (see
    ``hashed.py``). Only integers beyond 64 bits can."""
    if isinstance(key, DictKey) and type(key.value) is int and key.value.bit_length() > _WORD_BITS:
        if key.value in holder:  # a container of several leaves, which was counted before
            return
        which = (id(holder), hash(key.value).to_bytes(8, "little", signed=True))
        alike[which] = alike.get(which, 0) + 1
        if alike[which] > MOST_ALIKE:
            raise CorruptCheckpointError(
                f"the checkpoint has more than {MOST_ALIKE} integer keys in one dict that have the same hash"
            )


def _plain(key: Key) -> Any:
    return key.value if isinstance(key, DictKey) else key


def _close(node: Any, path: PlainPath, gaps: bool, like: _Like) -> Any:
    if type(node) is dict:
        items = {key: _close(value, (*path, str(key)), gaps, like) for key, value in node.items()}
        return filled_like(like(path), items)
    if type(node) is not _ListParts:
        return node
    indices = sorted(node)
    whole = indices == list(range(len(node)))
    if not whole and not gaps:
        raise CorruptCheckpointError("a list in the checkpoint has holes")
    elements = {index: _close(node[index], (*path, index), gaps, like) for index in indices}
    return list(elements.values()) if whole else elements
