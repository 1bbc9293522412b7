"""Journals as one trace in the JSON format of Chrome, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..events import CallerWaited, Event, LoadContext, LoadEvent, LoadRead, SaveCommitted, SaveEvent, SaveWritten
from .costs import CostReport, Sums
from .phases import Phase, UnderWay, WorkInProgress, context_of
from .records import JournalContent

__all__ = ["report_of", "trace_of"]


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
    """Return one trace of journals: a process for each rank, with an asynchronous slice for each save and load, a slice
    for each of their phases, counters of bytes, and an instant for each commit of a step, wait, retry and warning.

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
    _lanes: list[UnderWay | None] = field(default_factory=list)
    _ids: int = 0
    _bytes: dict[str, int] = field(default_factory=dict)

    def of(self, events: Sequence[tuple[int, Event]]) -> list[dict[str, Any]]:
        self._put("M", "process_name", None, args={"name": f"rank {self.rank}"})
        self._put("M", "process_sort_index", None, args={"sort_index": self.rank})
        for time_ns, event in events:
            if isinstance(event, (SaveEvent, LoadEvent)):
                self._count(event)
                phase = self._work.follow(event)
                if phase is not None:
                    self._put_phase(phase)
            if not isinstance(event, (SaveEvent, LoadEvent, CallerWaited)) or _is_instant(event):
                self._put_instant(time_ns, event)
        for one in self._work.all():  # the process was killed, or the journal closed
            self._end(one, events[-1][0], "unknown")
        return self.found

    def _put(self, kind: str, name: str, time_ns: int | None, tid: int = 0, **more: Any) -> None:
        at = {} if time_ns is None else {"ts": (time_ns - self.start_ns) / 1e3}
        self.found.append({"ph": kind, "name": name, "pid": self.rank, "tid": tid, **at, **more})

    def _put_phase(self, phase: Phase) -> None:
        one = phase.of
        if phase.name is None:
            self._begin(one)
            return
        # Phases of one save follow each other. Saves that overlap have their phases on lanes of their own.
        lane = next(number for number, each in enumerate(self._lanes, 1) if each is one)
        self._put("X", phase.name, phase.began_ns, lane, cat="phase", dur=max(phase.ended_ns - phase.began_ns, 0) / 1e3)
        if phase.outcome is not None:
            self._end(one, phase.ended_ns, phase.outcome)

    def _begin(self, one: UnderWay) -> None:
        self._ids += 1
        one.span = f"{self.rank}.{self.number}.{self._ids}"
        free = next((number for number, each in enumerate(self._lanes) if each is None), None)
        if free is None:
            self._lanes.append(one)
            self._put("M", "thread_name", None, len(self._lanes), args={"name": f"phases {len(self._lanes)}"})
        else:
            self._lanes[free] = one
        about = one.context
        args = {"url": about.url, "step": about.step, "rank": about.rank, "world": about.world}
        self._put("b", _name_of(one), one.began[1], cat=_category(one), id=one.span, args=args)

    def _end(self, one: UnderWay, time_ns: int, outcome: str) -> None:
        self._lanes = [None if each is one else each for each in self._lanes]
        args = {"outcome": outcome, "save_id": one.context.save_id, "bytes": one.nbytes}
        self._put("e", _name_of(one), time_ns, cat=_category(one), id=one.span, args=args)

    def _count(self, event: SaveEvent | LoadEvent) -> None:
        if isinstance(event, (SaveWritten, LoadRead)):
            name = "bytes written" if isinstance(event, SaveWritten) else "bytes read"
            self._bytes[name] = self._bytes.get(name, 0) + event.nbytes
            self._put("C", name, event.time_ns, args={"bytes": self._bytes[name]})

    def _put_instant(self, time_ns: int, event: Event) -> None:
        name = type(event).__name__
        if isinstance(event, CallerWaited):
            name = f"waited: {event.cause}"
        elif isinstance(event, SaveCommitted):
            name = f"step {event.save.step}"
        args = {one.name: getattr(event, one.name) for one in fields(event) if not one.name.endswith("_ns")}
        if isinstance(event, (SaveEvent, LoadEvent)):
            args = {"url": context_of(event).url}
        elif args.get("save") is not None:
            args["save"] = args["save"].url
        self._put("i", name, time_ns, cat="instant", s="p", args=args)


def _is_instant(event: Event) -> bool:
    return isinstance(event, CallerWaited) or (isinstance(event, SaveCommitted) and event.save.step is not None)


def _category(one: UnderWay) -> str:
    return "load" if isinstance(one.context, LoadContext) else "save"


def _name_of(one: UnderWay) -> str:
    step = one.context.step
    operation = one.context.operation
    return operation if step is None or _category(one) == "load" else f"{operation} step {step}"
