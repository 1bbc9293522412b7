"""The public path of a name as its ``__module__``."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["public"]

T = TypeVar("T")


def public(named: T) -> T:
    """Set ``__module__`` of a class or function that users import from ``sidestream``, and return it.

    Tracebacks, ``repr`` and pickles then name the path that users import, and a pickle stays readable when the module
    that defines the name moves. ``typing.get_type_hints`` of such a class needs the defining module's names as its
    ``globalns``.
    """
    named.__module__ = "sidestream"
    return named
