"""Names for boxes and shapes that stand in a file."""

from __future__ import annotations

__all__ = ["name_of"]


def name_of(*dims: tuple[int, ...]) -> str:
    """A dict key for offsets, sizes or a shape that nobody has checked yet.

    The hash of a tuple of integers is the same in every process, so a file can hold thousands of tuples with one hash
    (those of -1 and -2 are equal, for a start). The hash of a string depends on a secret.
    """
    return repr(dims)
