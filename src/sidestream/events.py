"""What happens behind a call, as frozen events, for whoever watches. No torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = [
    "Event",
    "GuaranteeLost",
    "LoadApplied",
    "LoadContext",
    "LoadEvent",
    "LoadFailed",
    "LoadFellBack",
    "LoadOpened",
    "LoadPlanned",
    "LoadRead",
    "LoadStarted",
    "LoadVerified",
    "Observer",
    "RanksMissing",
    "Retried",
    "SaveCommitted",
    "SaveContext",
    "SaveEvent",
    "SaveFailed",
    "SavePlanned",
    "SaveSkipped",
    "SaveStaged",
    "SaveStarted",
    "SaveWritten",
    "SlowPart",
    "Throttled",
    "WriterProcessLost",
    "emit",
    "observe",
]

_log = logging.getLogger("sidestream")


@dataclass(frozen=True, slots=True)
class Retried:
    """A request failed in a way that may pass; it is sent again after ``wait_s``. ``attempt`` counts from 1."""

    operation: str
    url: str
    attempt: int
    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Throttled:
    """The storage asked for fewer requests (503, 429, SlowDown): all requests of that store wait for ``wait_s``."""

    operation: str
    url: str
    attempt: int
    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SlowPart:
    """No part of an upload was accepted for ``waited_s``, though some are on their way: a slow or a stalled peer, or a
    client that repeats its requests by itself."""

    url: str
    waited_s: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class GuaranteeLost:
    """Something that sidestream promises does not hold on this storage, as ``promise`` says. What never holds is told
    once per storage; that uploads could not be listed, whenever it happens."""

    url: str
    promise: str


@dataclass(frozen=True, slots=True)
class WriterProcessLost:
    """The writer process ``pid`` ended in the middle of saving ``url``, for ``reason``. ``again``: a new one writes it
    once more, from the same staged memory."""

    url: str
    pid: int | None
    reason: str
    again: bool


@dataclass(frozen=True, slots=True)
class RanksMissing:
    """This rank waits for others at the beginning of ``operation`` (``"save"``, ``"load"``, ``"restore"``): the ranks
    in ``missing`` have not made the call. Emitted once for each call, after 5 s, and logged as a warning too."""

    operation: str
    rank: int
    missing: tuple[int, ...]
    waited_s: float


@dataclass(frozen=True, slots=True)
class SaveContext:
    """The save that an event belongs to.

    ``operation`` is the call: ``"save"``, ``"export"``, ``"convert"`` or ``"copy"``. ``url`` is the target. ``run`` is
    the URL of the run, and ``step`` and ``generation`` are those of the checkpoint in it; None and 1 outside of a run.
    ``rank`` is the rank of this process among the ``world`` ranks that save together. ``save_id`` is empty until the
    save is planned.
    """

    operation: Literal["save", "export", "convert", "copy"]
    url: str
    save_id: str = ""
    run: str | None = None
    step: int | None = None
    generation: int = 1
    rank: int = 0
    world: int = 1


@dataclass(frozen=True, slots=True)
class SaveEvent:
    """The base of the events in the life of a save: which one it is, and when, by ``time.monotonic_ns()`` and by
    ``time.time_ns()``. Every save that has started ends with one of ``SaveCommitted``, ``SaveFailed`` and
    ``SaveSkipped``, on each rank. A save through ``dcp.StorageWriter`` emits events on the rank that commits."""

    save: SaveContext
    monotonic_ns: int = field(default_factory=time.monotonic_ns, kw_only=True)
    time_ns: int = field(default_factory=time.time_ns, kw_only=True)


@dataclass(frozen=True, slots=True)
class SaveStarted(SaveEvent):
    """The copies of a save were launched, or the first bytes of a conversion or copy will be read."""


@dataclass(frozen=True, slots=True)
class SavePlanned(SaveEvent):
    """It is known which files this rank writes."""


@dataclass(frozen=True, slots=True)
class SaveStaged(SaveEvent):
    """The sources may change: no copy reads them any more."""


@dataclass(frozen=True, slots=True)
class SaveWritten(SaveEvent):
    """The data files of this rank are on storage, ``nbytes`` together."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveCommitted(SaveEvent):
    """The checkpoint is visible and, with ``durability="fsync"``, durable. ``nbytes`` counts the data files of all
    ranks; ``seconds`` has the phases ``staged``, ``written`` and ``committed``, as in ``SaveInfo``."""

    nbytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SaveFailed(SaveEvent):
    """The save raised an error of the class ``error_type``, or was cancelled (``"CancelledError"``), in ``phase``.
    ``outcome`` says whether the checkpoint is there: a commit whose last sync failed is ``"committed"`` all the
    same."""

    phase: Literal["plan", "write", "commit"]
    error_type: str
    reason: str
    outcome: Literal["committed", "absent", "unknown"]


@dataclass(frozen=True, slots=True)
class SaveSkipped(SaveEvent):
    """The save gave way to another one, or found no slot or memory, as its policy says."""

    reason: str


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The load that an event belongs to.

    ``operation`` is the call: ``"load"``, ``"restore"``, or ``"dcp.load"`` for a load through ``dcp.StorageReader``.
    ``url`` is the checkpoint. ``save_id``, ``step`` and ``generation`` are those of the checkpoint, and unknown
    (``""``, None, 1) until it is open; ``save_id`` is empty if another writer made it. ``run`` is the URL of the run
    that is restored. ``rank`` is the rank of this process among the ``world`` ranks that load together.
    """

    operation: Literal["load", "restore", "dcp.load"]
    url: str
    save_id: str = ""
    run: str | None = None
    step: int | None = None
    generation: int = 1
    rank: int = 0
    world: int = 1


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """The base of the events in the life of a load: which one it is, and when, as in ``SaveEvent``. Every load that has
    started ends with one of ``LoadApplied`` and ``LoadFailed``, on each rank. A ``restore`` that passes over a damaged
    step is one load for each step that it tries."""

    load: LoadContext
    monotonic_ns: int = field(default_factory=time.monotonic_ns, kw_only=True)
    time_ns: int = field(default_factory=time.time_ns, kw_only=True)


@dataclass(frozen=True, slots=True)
class LoadStarted(LoadEvent):
    """The checkpoint will be opened."""


@dataclass(frozen=True, slots=True)
class LoadOpened(LoadEvent):
    """The marker and the manifest were read and validated. If the load starts over, because another checkpoint has
    taken the place of this one, this event and the next ones are emitted again."""


@dataclass(frozen=True, slots=True)
class LoadPlanned(LoadEvent):
    """The target fits the checkpoint, and it is known what this rank reads. Nothing was changed so far."""


@dataclass(frozen=True, slots=True)
class LoadRead(LoadEvent):
    """``nbytes`` of tensors were read by this rank."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class LoadVerified(LoadEvent):
    """What was read has the checksums that were saved. Emitted with ``verify="always"``. ``unverified`` is the number
    of tensors of which some bytes had no checksum."""

    unverified: int


@dataclass(frozen=True, slots=True)
class LoadApplied(LoadEvent):
    """The target has its new state. ``nbytes`` is as in ``LoadRead``; ``seconds`` has the phases ``opened``,
    ``planned``, ``read`` and ``applied``, counted from the start of the load."""

    nbytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LoadFailed(LoadEvent):
    """The load raised an error of the class ``error_type``, or was cancelled (``"CancelledError"``), in ``phase``.
    ``written`` is the number of tensors of the target that may have been changed."""

    phase: Literal["open", "plan", "read", "apply"]
    error_type: str
    reason: str
    written: int


@dataclass(frozen=True, slots=True)
class LoadFellBack(LoadEvent):
    """``restore`` has loaded ``taken`` in place of the step of this event, which is damaged as ``reason`` says. Emitted
    for each damaged step after the load of the other one has ended, on each rank."""

    taken: str
    reason: str


Event: TypeAlias = (
    Retried | Throttled | SlowPart | GuaranteeLost | WriterProcessLost | RanksMissing | SaveEvent | LoadEvent
)
Observer: TypeAlias = Callable[[Event], object]

_observers: tuple[Observer, ...] = ()
_lock = threading.Lock()


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Within, ``observer`` is called with every event of this process, in the thread where it happens: it must be quick
    and must not block. What it raises is logged and goes no further."""
    global _observers
    with _lock:
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _lock:
            remaining = list(_observers)
            remaining.remove(observer)
            _observers = tuple(remaining)


def emit(event: Event) -> None:
    """Call the observers. Troubles are logged too: a lost promise or process as a warning, all else for debugging."""
    if not isinstance(event, (SaveEvent, LoadEvent)):
        _log.log(
            logging.WARNING if isinstance(event, (GuaranteeLost, WriterProcessLost)) else logging.DEBUG, "%s", event
        )
    for observer in _observers:
        try:
            observer(event)
        except Exception:
            _log.exception("an observer failed on %s", type(event).__name__)
