"""Dicts and sets whose keys come from a file.

The hash of a string or of bytes depends on a secret of the process. The hash of a number, and of a tuple of numbers,
does not: a hostile file can hold thousands of keys with the same hash, and each of them is compared with all others. A
bound on the size of integers does not help, because tuples and complex numbers can be constructed for any hash. So the
hashes are counted before the container is built.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from typing import Any, TypeVar

from .._runtime.threads import politely
from ..errors import Corrupt

__all__ = ["MOST_ALIKE", "check_hashes", "fill", "set_of"]

MOST_ALIKE = 256
"""How many keys of one container may share a hash. Some tens can in a sound file: powers of two do."""

_M = TypeVar("_M", bound=MutableMapping[Any, Any])


def check_hashes(keys: Sequence[Hashable]) -> None:
    """Raise ``Corrupt`` if more than ``MOST_ALIKE`` of ``keys`` have the same hash. Call in a worker thread if there
    are many."""
    if len(keys) <= MOST_ALIKE:
        return
    counts: dict[bytes, int] = {}
    for key in politely(keys):
        if type(key) is str:
            continue
        alike = hash(key).to_bytes(8, "little", signed=True)  # bytes, whose hash depends on a secret of the process
        counts[alike] = count = counts.get(alike, 0) + 1
        if count > MOST_ALIKE:
            raise Corrupt(
                f"more than {MOST_ALIKE} keys of one dict or set have the same hash; no sound file has such keys"
            )


def fill(container: _M, pairs: Sequence[tuple[Hashable, object]]) -> _M:
    """Set all ``pairs`` in order. Raises ``Corrupt`` as ``check_hashes`` does, ``TypeError`` for a key without a hash.

    Keys with different hashes can still be chosen so that each insertion probes many slots. So a long container is
    built one key at a time, and a passed deadline ends the loop.
    """
    check_hashes([key for key, _ in pairs])
    for key, value in _in_steps(pairs):
        container[key] = value
    return container


def set_of(elements: Sequence[Hashable]) -> set[Hashable]:
    """Build a set. Raises what ``fill`` raises."""
    check_hashes(elements)
    found: set[Hashable] = set()
    for element in _in_steps(elements):
        found.add(element)
    return found


_T = TypeVar("_T")


def _in_steps(items: Sequence[_T]) -> Iterable[_T]:
    return politely(items) if len(items) > MOST_ALIKE else items
