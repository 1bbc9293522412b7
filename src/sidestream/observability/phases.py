"""The saves and loads under way, and their phases, from the events of a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .. import events
from ..events import LoadContext, LoadEvent, SaveContext, SaveEvent

Outcome: TypeAlias = Literal["committed", "applied", "failed", "cancelled", "skipped"]
_PHASES: dict[type[SaveEvent | LoadEvent], str] = {
    events.SavePlanned: "plan",
    events.SaveStaged: "stage",
    events.SaveWritten: "write",
    events.SaveCommitted: "commit",
    events.SaveSkipped: "plan",
    events.LoadOpened: "open",
    events.LoadPlanned: "plan",
    events.LoadRead: "read",
    events.LoadVerified: "verify",
    events.LoadApplied: "apply",
}
_OUTCOMES: dict[type[SaveEvent | LoadEvent], Outcome] = {
    events.SaveCommitted: "committed",
    events.SaveFailed: "failed",
    events.SaveSkipped: "skipped",
    events.LoadApplied: "applied",
    events.LoadFailed: "failed",
}


@dataclass(slots=True, eq=False)
class UnderWay:
    """A save or load that has started and not ended. ``since`` is the end of its last phase. Times are the
    ``monotonic_ns`` and ``time_ns`` of events."""

    context: SaveContext | LoadContext
    began: tuple[int, int]
    since: tuple[int, int]
    nbytes: int = 0
    """The bytes that this rank has written or read."""
    staged: bool = False
    note: Any = None
    """What an observer keeps with it."""

    @property
    def kind(self) -> Literal["save", "load"]:
        return "save" if isinstance(self.context, SaveContext) else "load"


@dataclass(frozen=True, slots=True)
class Phase:
    """What an event has ended: a phase, or with an ``outcome`` the save or load as well. ``name`` is None for the
    event with which a save or load starts. Times are those of ``UnderWay``."""

    of: UnderWay
    name: str | None
    began: tuple[int, int]
    ended: tuple[int, int]
    outcome: Outcome | None = None
    error_type: str = ""


def context_of(event: SaveEvent | LoadEvent) -> SaveContext | LoadContext:
    """Return the save or load that an event belongs to."""
    return event.save if isinstance(event, SaveEvent) else event.load


@dataclass(slots=True)
class WorkInProgress:
    """The saves and loads under way. Each phase lasts from the end of the one before to its own event. Its user has a
    lock."""

    under_way: list[UnderWay] = field(default_factory=list)

    def follow(self, event: SaveEvent | LoadEvent) -> Phase | None:
        """Return what ``event`` has begun or ended. None for an event of what had started before."""
        kind, context, now = type(event), context_of(event), (event.monotonic_ns, event.time_ns)
        if kind in (events.SaveStarted, events.LoadStarted):
            begun = UnderWay(context, now, now)
            self.under_way.append(begun)
            return Phase(begun, None, now, now)
        outcome, error = _OUTCOMES.get(kind), getattr(event, "error_type", "")
        name, one = _PHASES.get(kind) or getattr(event, "phase", None), self._find(context)
        if name is None or one is None:
            return None
        if isinstance(event, (events.SaveWritten, events.LoadRead)):
            one.nbytes = event.nbytes
        began, one.since, one.context = one.since, now, context
        one.staged = one.staged or name == "stage"
        if outcome is not None:
            self.under_way.remove(one)
        return Phase(one, name, began, now, "cancelled" if error == "CancelledError" else outcome, error)

    def _find(self, context: SaveContext | LoadContext) -> UnderWay | None:
        # Several saves or loads of one URL may be under way. Ids tell them apart from the plan on.
        for save_id in (context.save_id, "", None):
            for one in self.under_way:
                if _key(one.context) == _key(context) and save_id in (one.context.save_id, None):
                    return one
        return None


def _key(context: SaveContext | LoadContext) -> tuple[object, ...]:
    return type(context), context.operation, context.url, context.rank
