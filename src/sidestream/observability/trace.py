"""Journals as one trace in the JSON format of Chrome, which Perfetto opens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..events import (
    CallerWaited,
    Event,
    LoadEvent,
    LoadFellBack,
    LoadRead,
    SaveCommitted,
    SaveEvent,
    SaveWritten,
)
from .costs import CostReport, Sums
from .phases import UnderWay, WorkInProgress
from .records import JournalContent


def report_of(journal: JournalContent) -> CostReport:
    """Return the costs that a journal shows, for the time from its first event to its last.

    Args:
        journal: The journal.

    Returns:
        The report. It has no dilation, which needs the training steps.
    """
    sums = Sums()
    for _, event in journal.events:
        sums.take(event)
    times = [time_ns for time_ns, _ in journal.events] or [0]
    return sums.report((times[-1] - times[0]) / 1e9, times[-1])


def trace_of(journals: Sequence[JournalContent]) -> dict[str, Any]:
    """Return one trace of journals: a process for each rank, with an asynchronous slice for each save and load, and in
    it one for each of its phases, counters of bytes, and an instant for each commit of a step, wait, retry and warning.

    Args:
        journals: The journals, in any order.

    Returns:
        The object to write as JSON. Times are in microseconds since the first event.
    """
    start_ns = min((one.events[0][0] for one in journals if one.events), default=0)
    found: list[dict[str, Any]] = []
    for number, journal in enumerate(journals):
        found += _Trace(journal.rank, number, start_ns).of(journal.events)
    return {"traceEvents": found, "displayTimeUnit": "ms"}


@dataclass(slots=True)
class _Trace:
    """The part of one journal in a trace."""

    rank: int
    number: int
    start_ns: int
    found: list[dict[str, Any]] = field(default_factory=list)
    _work: WorkInProgress = field(default_factory=WorkInProgress)
    _begun: int = 0
    _bytes: Counter[str] = field(default_factory=Counter)

    def of(self, recorded: Sequence[tuple[int, Event]]) -> list[dict[str, Any]]:
        self._put("M", "process_name", None, args={"name": f"rank {self.rank}"})
        self._put("M", "process_sort_index", None, args={"sort_index": self.rank})
        for time_ns, event in recorded:
            if isinstance(event, (SaveEvent, LoadEvent)):
                self._put_phase(event)
            if not isinstance(event, (SaveEvent, LoadEvent)) or isinstance(event, (SaveCommitted, LoadFellBack)):
                self._put_instant(time_ns, event)
        for one in self._work.under_way:  # the process was killed, or the journal closed
            self._put_end(one, recorded[-1][0], "unknown")
        return self.found

    def _put(self, kind: str, name: str, time_ns: int | None, **more: Any) -> None:
        at = {} if time_ns is None else {"ts": (time_ns - self.start_ns) / 1e3}
        self.found.append({"ph": kind, "name": name, "pid": self.rank, "tid": 0, **at, **more})

    def _put_phase(self, event: SaveEvent | LoadEvent) -> None:
        phase = self._work.follow(event)
        if isinstance(event, (SaveWritten, LoadRead)):
            name = "bytes written" if isinstance(event, SaveWritten) else "bytes read"
            self._bytes[name] += event.nbytes
            self._put("C", name, event.time_ns, args={"bytes": self._bytes[name]})
        if phase is None:
            return
        one, (_, began), (_, ended) = phase.of, phase.began, phase.ended
        if phase.name is None:
            self._put_begin(one)
            return
        self._put("b", phase.name, began, **one.note)
        self._put("e", phase.name, max(began, ended), **one.note)
        if phase.outcome is not None:
            self._put_end(one, max(began, ended), phase.outcome)

    def _put_begin(self, one: UnderWay) -> None:
        self._begun += 1
        one.note = {"cat": one.kind, "id": f"{self.rank}.{self.number}.{self._begun}"}
        about = one.context
        args = {"url": about.url, "step": about.step, "rank": about.rank, "world": about.world}
        self._put("b", _name_of(one), one.began[1], **one.note, args=args)

    def _put_end(self, one: UnderWay, time_ns: int, outcome: str) -> None:
        args = {"outcome": outcome, "save_id": one.context.save_id, "bytes": one.nbytes}
        self._put("e", _name_of(one), time_ns, **one.note, args=args)

    def _put_instant(self, time_ns: int, event: Event) -> None:
        name = type(event).__name__
        args = {one.name: getattr(event, one.name) for one in fields(event) if not one.name.endswith("_ns")}
        if isinstance(event, CallerWaited):
            name = f"waited: {event.cause}"
        elif isinstance(event, SaveCommitted):
            if event.save.step is None:
                return
            name = f"step {event.save.step}"
        args |= {key: args[key].url for key in ("save", "load") if args.get(key) is not None}
        self._put("i", name, time_ns, cat="instant", s="p", args=args)


def _name_of(one: UnderWay) -> str:
    step, operation = one.context.step, one.context.operation
    return operation if step is None or one.kind == "load" else f"{operation} step {step}"
