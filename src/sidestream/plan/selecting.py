"""Names that match patterns."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from ..errors import MissingKeys

__all__ = ["selected"]


def selected(names: Iterable[str], select: str | Collection[str] | None, url: str) -> list[str]:
    """Those of ``names`` that match one of the patterns of ``select`` (``"model.*"``), in their order; all if it is
    None. In a worker thread. Raises ``MissingKeys`` for a pattern that matches nothing."""
    names = list(names)
    if select is None:
        return names
    patterns = [select] if isinstance(select, str) else list(select)
    unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if unused or not patterns:
        raise MissingKeys(f"{url}: nothing is named like {', '.join(unused) or 'that'}", unused)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
