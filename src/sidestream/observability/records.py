"""Events as the lines of a journal: JSON objects that can be turned into events again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from os import PathLike
from typing import Any

from .. import events
from ..events import Event, LoadContext, SaveContext


@dataclass(frozen=True, slots=True)
class JournalContent:
    """What a journal holds.

    Attributes:
        events: Each event, after the Unix time of it in nanoseconds. In the order of these times.
        rank: The rank whose process wrote the journal.
        lost: How many events the journal has lost, as far as it could write that.
        unreadable: How many lines are not those of a journal, such as the last one of a process that was killed.
    """

    events: list[tuple[int, Event]]
    rank: int
    lost: int
    unreadable: int


def head(lost: int = 0) -> bytes:
    """Return the line that begins a journal, or that says how many events it has lost so far."""
    return json.dumps({"journal": 1, "lost": lost}).encode() + b"\n"


def line_of(event: Event, time_ns: int) -> bytes:
    """Return the line of an event. The time is for events that have none of their own."""
    return json.dumps({"event": type(event).__name__, "time_ns": time_ns} | _plain(event)).encode() + b"\n"


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return dict(value) if isinstance(value, Mapping) else value


def read_journal(path: str | PathLike[str]) -> JournalContent:
    """Read a journal.

    Args:
        path: The file.

    Returns:
        What it holds. Lines that cannot be read are counted.

    Raises:
        OSError: The file cannot be read.
    """
    found: list[tuple[int, Event]] = []
    lost = unreadable = 0
    rank: int | None = None
    with open(path, "rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if "journal" in record:
                    lost += record["lost"]
                    continue
                time_ns, event = int(record["time_ns"]), _event_of(record)
            except (ValueError, KeyError, TypeError, AttributeError):
                unreadable += 1
                continue
            found.append((time_ns, event))
            context = getattr(event, "save", None) or getattr(event, "load", None)
            rank = context.rank if rank is None and context is not None else rank
    found.sort(key=lambda one: one[0])
    return JournalContent(found, rank or 0, lost, unreadable)


def _event_of(record: dict[str, Any]) -> Event:
    kind: Any = getattr(events, record["event"])
    values = {field.name: record[field.name] for field in fields(kind) if field.name in record}
    for name, context in (("save", SaveContext), ("load", LoadContext)):
        if values.get(name) is not None:
            values[name] = context(**values[name])
    event: Event = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    return event
