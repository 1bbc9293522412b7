"""The saves and loads under way, and their phases, from the events of a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..events import (
    LoadApplied,
    LoadContext,
    LoadEvent,
    LoadFailed,
    LoadOpened,
    LoadPlanned,
    LoadRead,
    LoadStarted,
    LoadVerified,
    SaveCommitted,
    SaveContext,
    SaveEvent,
    SaveFailed,
    SavePlanned,
    SaveSkipped,
    SaveStaged,
    SaveStarted,
    SaveWritten,
)

__all__ = ["Outcome", "Phase", "UnderWay", "WorkInProgress", "context_of"]

Outcome: TypeAlias = Literal["committed", "applied", "failed", "cancelled", "skipped"]
_PHASES: dict[type[SaveEvent | LoadEvent], str] = {
    SavePlanned: "plan",
    SaveStaged: "stage",
    SaveWritten: "write",
    SaveCommitted: "commit",
    LoadOpened: "open",
    LoadPlanned: "plan",
    LoadRead: "read",
    LoadVerified: "verify",
    LoadApplied: "apply",
}
_Key: TypeAlias = tuple[type[SaveContext | LoadContext], str, str, int]


@dataclass(slots=True)
class UnderWay:
    """A save or load that has started and not ended. ``since`` is the end of its last phase. Times are the
    ``monotonic_ns`` and ``time_ns`` of events."""

    context: SaveContext | LoadContext
    began: tuple[int, int]
    since: tuple[int, int]
    nbytes: int = 0
    """The bytes that this rank has written or read."""
    staged: bool = False
    span: Any = None
    """What an observer keeps with it."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What an event has ended: a phase, or with an ``outcome`` the save or load as well. ``name`` is None for the
    event with which a save or load starts."""

    of: UnderWay
    name: str | None
    seconds: float
    began_ns: int
    ended_ns: int
    outcome: Outcome | None = None
    error_type: str = ""
    total_s: float = 0.0


def context_of(event: SaveEvent | LoadEvent) -> SaveContext | LoadContext:
    """Return the save or load that an event belongs to."""
    return event.save if isinstance(event, SaveEvent) else event.load


def _outcome(event: SaveEvent | LoadEvent) -> tuple[Outcome | None, str]:
    match event:
        case SaveCommitted():
            return "committed", ""
        case LoadApplied():
            return "applied", ""
        case SaveSkipped():
            return "skipped", ""
        case SaveFailed(error_type=error) | LoadFailed(error_type=error):
            return ("cancelled" if error == "CancelledError" else "failed"), error
    return None, ""


@dataclass(slots=True)
class WorkInProgress:
    """The saves and loads under way. Each phase lasts from the end of the one before to its own event. Its user has a
    lock."""

    _found: dict[_Key, list[UnderWay]] = field(default_factory=dict)
    saves: int = 0
    """How many saves are under way."""
    started: int = 0
    """How many saves have started."""

    def follow(self, event: SaveEvent | LoadEvent) -> Phase | None:
        """Return what ``event`` has begun or ended. None for an event of what had started before."""
        context, now = context_of(event), (event.monotonic_ns, event.time_ns)
        key = (type(context), context.operation, context.url, context.rank)
        if isinstance(event, (SaveStarted, LoadStarted)):
            begun = UnderWay(context, now, now)
            self._found.setdefault(key, []).append(begun)
            self.saves += isinstance(event, SaveStarted)
            self.started += isinstance(event, SaveStarted)
            return Phase(begun, None, 0.0, event.time_ns, event.time_ns)
        one = self._find(key, context)
        if one is None:
            return None
        if isinstance(event, (SaveWritten, LoadRead)):
            one.nbytes = event.nbytes
        one.staged = one.staged or isinstance(event, SaveStaged)
        outcome, error = _outcome(event)
        name = _PHASES.get(type(event)) or getattr(event, "phase", "plan")
        (since, since_ns), one.since, one.context = one.since, now, context
        if outcome is not None:
            self._remove(key, one, event)
        total_s = (now[0] - one.began[0]) / 1e9
        return Phase(one, name, (now[0] - since) / 1e9, since_ns, event.time_ns, outcome, error, total_s)

    def all(self) -> list[UnderWay]:
        """Return the saves and loads under way."""
        return [one for same in self._found.values() for one in same]

    def _find(self, key: _Key, context: SaveContext | LoadContext) -> UnderWay | None:
        # Several saves or loads of one URL may be under way. Ids tell them apart from the plan on.
        same = self._found.get(key, [])
        for wanted in (context.save_id, ""):
            for one in same:
                if one.context.save_id == wanted:
                    return one
        return same[0] if same else None

    def _remove(self, key: _Key, one: UnderWay, event: SaveEvent | LoadEvent) -> None:
        self.saves -= isinstance(event, SaveEvent)
        same = self._found[key]
        del same[next(number for number, each in enumerate(same) if each is one)]
        if not same:
            del self._found[key]
