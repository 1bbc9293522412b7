"""Two marks on exceptions of any class, which decide how a failed save is cleaned up."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["is_stuck", "is_uncertain", "mark_stuck", "mark_uncertain"]

E = TypeVar("E", bound=BaseException)

_STUCK, _UNCERTAIN = "_sidestream_stuck", "_sidestream_uncertain"


def mark_stuck(error: E) -> E:
    """Mark an error: a thread was left behind in a system call, or a request may still take effect."""
    setattr(error, _STUCK, True)
    return error


def is_stuck(error: BaseException) -> bool:
    """Return whether ``mark_stuck`` has marked ``error``."""
    return getattr(error, _STUCK, False) is True


def mark_uncertain(error: E) -> E:
    """Mark an error: an earlier attempt of the request may have taken effect, because its response was lost."""
    setattr(error, _UNCERTAIN, True)
    return error


def is_uncertain(error: BaseException) -> bool:
    """Return whether ``mark_uncertain`` has marked ``error``."""
    return getattr(error, _UNCERTAIN, False) is True
