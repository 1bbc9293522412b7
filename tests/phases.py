"""The events in the life of a save or a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sidestream import events


@contextmanager
def watched(kind: type) -> Iterator[list[Any]]:
    """The events of ``kind`` that are emitted meanwhile."""
    seen: list[Any] = []
    with events.observe(lambda event: isinstance(event, kind) and seen.append(event)):
        yield seen


def names(seen: list[Any]) -> list[str]:
    return [type(event).__name__ for event in seen]
