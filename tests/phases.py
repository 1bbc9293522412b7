"""The events in the life of a save or a load."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sidestream import events


@contextmanager
def watched(kind: type) -> Iterator[list[Any]]:
    """The events of ``kind`` that are emitted meanwhile."""
    seen: list[Any] = []
    with events.observe(lambda event: isinstance(event, kind) and seen.append(event)):
        yield seen


def warned(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged as a warning or worse. Committed saves and restores are logged at the level INFO."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def names(seen: list[Any]) -> list[str]:
    return [type(event).__name__ for event in seen]
