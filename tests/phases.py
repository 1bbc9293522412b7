"""The events in the life of a save or a load."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sidestream import events

ALL_KINDS: list[events.Event] = [
    events.Retried("reading", "s3://a", 1, 0.5, "reset"), events.Throttled("reading", "s3://a", 1, 0.5, "503"),
    events.SlowPart("s3://a", 1.0, 5), events.GuaranteeLost("s3://a", "none"),
    events.WriterProcessLost("a", None, "killed", True), events.RanksMissing("save", 0, (1, 2), 5.0),
    events.CallerWaited("fence", 0.5, {"copies": 0.4}), events.RunPruned("run", ("step-1",), ("step-2", "step-3")),
    events.SaveFailed(events.SaveContext("save", "a"), "plan", "ValueError", "é\n", "absent"),
    events.LoadFellBack(events.LoadContext("restore", "a", step=3), "step-2", "damaged"),
]  # fmt: skip


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
