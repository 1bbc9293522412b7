"""The selection of names by patterns."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from ..errors import MissingKeysError

__all__ = ["selected"]


def selected(names: Iterable[str], select: str | Collection[str] | None, url: str) -> list[str]:
    """Return the ``names`` that match one of the patterns in ``select`` (``"model.*"``), in their order. With None,
    return all. Called in a worker thread. Raises ``MissingKeysError`` for a pattern that matches nothing."""
    names = list(names)
    if select is None:
        return names
    patterns = [select] if isinstance(select, str) else list(select)
    unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if unused or not patterns:
        raise MissingKeysError(f"{url}: no name matches {', '.join(unused) or 'an empty selection'}", unused)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
