"""Dict keys for boxes and shapes that were read from a file."""

from __future__ import annotations

__all__ = ["name_of"]


def name_of(*dims: tuple[int, ...]) -> str:
    """Return a dict key for offsets, sizes or a shape that have not been checked yet.

    The hash of a tuple of integers is the same in every process, so a file can hold thousands of tuples with the same
    hash (for example, -1 and -2 have the same hash), which would make a dict slow. The hash of a string depends on a
    secret.
    """
    return repr(dims)
