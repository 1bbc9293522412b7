"""Dicts and sets whose keys come from a file.

The hash of a string or of bytes depends on a secret of the process. The hash of a number, and of a tuple of numbers,
does not: a hostile file can hold thousands of keys with the same hash, and a dict compares each of them with all
others. A limit on the size of integers does not help, because tuples and complex numbers can be constructed for any
hash. So the hashes are counted before the container is built.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any, TypeVar

from .._runtime.pauses import pause_point
from ..errors import CorruptCheckpointError

MOST_ALIKE = 256
"""The most keys of one container that may have the same hash. In a valid file some tens can: powers of two do."""

_M = TypeVar("_M", bound=MutableMapping[Any, Any])


def check_hashes(keys: Sequence[Hashable]) -> None:
    """Raise ``CorruptCheckpointError`` if more than ``MOST_ALIKE`` of ``keys`` have the same hash."""
    if len(keys) <= MOST_ALIKE:
        return
    counts: dict[bytes, int] = {}
    for key in keys:
        pause_point()
        if type(key) is str:
            continue
        alike = hash(key).to_bytes(8, "little", signed=True)  # the hash of bytes depends on a secret of the process
        counts[alike] = count = counts.get(alike, 0) + 1
        if count > MOST_ALIKE:
            raise CorruptCheckpointError(
                f"more than {MOST_ALIKE} keys of one dict or set have the same hash; no sound file has such keys"
            )


def fill(container: _M, pairs: Sequence[tuple[Hashable, object]]) -> _M:
    """Set all ``pairs`` in order. Raises ``CorruptCheckpointError`` as ``check_hashes`` does, and ``TypeError`` for a
    key without a hash.

    An attacker can still choose keys with different hashes so that each insertion probes many slots. So a long
    container is built with a point for pauses after each key, where a deadline can end it.
    """
    check_hashes([key for key, _ in pairs])
    long = len(pairs) > MOST_ALIKE
    for key, value in pairs:
        container[key] = value
        if long:
            pause_point()
    return container


def set_of(elements: Sequence[Hashable]) -> set[Hashable]:
    """Build a set. Raises what ``fill`` raises."""
    check_hashes(elements)
    found: set[Hashable] = set()
    long = len(elements) > MOST_ALIKE
    for element in elements:
        found.add(element)
        if long:
            pause_point()
    return found
