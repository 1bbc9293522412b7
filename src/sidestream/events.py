"""Events: frozen records of what happens during a call, which observers receive. Imports no torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = [
    "CallerWaited",
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
    "ReadCall",
    "Retried",
    "RunPruned",
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
    "VersionPassedOver",
    "VersionServed",
    "WaitCause",
    "WaitReason",
    "WriterProcessLost",
    "emit",
    "observe",
]

_log = logging.getLogger("sidestream")


@dataclass(frozen=True, slots=True)
class Retried:
    """A request to the storage failed with a transient error and will be sent again.

    Attributes:
        operation: What the request does, such as ``"reading"``.
        url: The object, or the storage.
        attempt: The number of attempts so far, from 1.
        wait_s: The seconds until the request is sent again.
        reason: The error.
    """

    operation: str
    url: str
    attempt: int
    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Throttled:
    """The storage asked for fewer requests (503, 429, SlowDown). All requests to that store wait.

    Attributes:
        operation: What the request does, such as ``"reading"``.
        url: The object, or the storage.
        attempt: The number of attempts so far, from 1.
        wait_s: The seconds that all requests to the store wait.
        reason: The response of the storage.
    """

    operation: str
    url: str
    attempt: int
    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SlowPart:
    """No part of an upload was accepted for some time, although parts are being sent: the server is slow or stalled, or
    the client repeats its requests by itself.

    Attributes:
        url: The object that is uploaded.
        waited_s: The seconds since a part was accepted.
        sent_bytes: The bytes that were accepted so far.
    """

    url: str
    waited_s: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class GuaranteeLost:
    """A guarantee of sidestream does not hold on this storage. Emitted once per storage. Also logged as a
    warning.

    Attributes:
        url: The storage, or the object.
        promise: The guarantee, and why it does not hold.
    """

    url: str
    promise: str


@dataclass(frozen=True, slots=True)
class WriterProcessLost:
    """A writer process ended during a save. Also logged as a warning.

    Attributes:
        url: The target of the save.
        pid: The PID of the process, or None if it never started.
        reason: Why it ended.
        again: Whether a new process writes the files again, from the same staged memory.
    """

    url: str
    pid: int | None
    reason: str
    again: bool


@dataclass(frozen=True, slots=True)
class RanksMissing:
    """This rank waits for other ranks that have not made a call of all ranks. Emitted once for each call, after 5 s,
    and also logged as a warning.

    Attributes:
        operation: The call: ``"save"``, ``"load"`` or ``"restore"``.
        rank: This rank.
        missing: The ranks that have not made the call.
        waited_s: The seconds that this rank has waited.
    """

    operation: str
    rank: int
    missing: tuple[int, ...]
    waited_s: float


@dataclass(frozen=True, slots=True)
class SaveContext:
    """The save that an event belongs to.

    Attributes:
        operation: The call: ``"save"``, ``"export"``, ``"convert"`` or ``"copy"``.
        url: The target.
        save_id: The id of the save; empty until it is planned.
        run: The URL of the run, or None outside of a run.
        step: The step in the run, or None outside of a run.
        generation: The generation of the step.
        rank: The rank of this process among the ranks that save together.
        world: The number of these ranks.
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
    """The base of the events of a save.

    Every save that has started ends with one of ``SaveCommitted``, ``SaveFailed`` and ``SaveSkipped``, on each rank. A
    save through ``dcp.StorageWriter`` emits events only on the rank that commits.

    Attributes:
        save: The save.
        monotonic_ns: The time of the event, by ``time.monotonic_ns()``.
        time_ns: The time of the event, by ``time.time_ns()``.
    """

    save: SaveContext
    monotonic_ns: int = field(default_factory=time.monotonic_ns, kw_only=True)
    time_ns: int = field(default_factory=time.time_ns, kw_only=True)


@dataclass(frozen=True, slots=True)
class SaveStarted(SaveEvent):
    """The copies of a save were launched, or a conversion or copy begins to read."""


@dataclass(frozen=True, slots=True)
class SavePlanned(SaveEvent):
    """The files that this rank writes have been planned."""


@dataclass(frozen=True, slots=True)
class SaveStaged(SaveEvent):
    """No copy reads the sources any more, so they may change."""


@dataclass(frozen=True, slots=True)
class SaveWritten(SaveEvent):
    """The data files of this rank have been written.

    Attributes:
        nbytes: Their size together.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveCommitted(SaveEvent):
    """The checkpoint is visible and, with ``durability="fsync"``, durable.

    Attributes:
        nbytes: The size of the data files of all ranks.
        seconds: The times of the phases ``staged``, ``written`` and ``committed``, as in ``SaveInfo``.
    """

    nbytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SaveFailed(SaveEvent):
    """The save raised an error or was cancelled.

    Attributes:
        phase: The phase in which it failed.
        error_type: The name of the error's class; ``"CancelledError"`` for a cancel.
        reason: The message of the error.
        outcome: Whether the checkpoint is visible. A commit whose last sync failed is ``"committed"``.
    """

    phase: Literal["plan", "write", "commit"]
    error_type: str
    reason: str
    outcome: Literal["committed", "absent", "unknown"]


@dataclass(frozen=True, slots=True)
class SaveSkipped(SaveEvent):
    """The save was not made, as its policy says: a newer save replaced it, or no slot or memory was free.

    Attributes:
        reason: Why it was not made.
    """

    reason: str


WaitCause: TypeAlias = Literal["call", "staged", "fence"]
"""The cause for which a caller was held up: the call of ``async_save``, an await of ``staged`` or
``synchronize_staging``, or a thread's wait in ``fence()`` or a guarded step."""

WaitReason: TypeAlias = Literal["slot", "ranks", "memory", "copies"]
"""The reason for a wait: a slot of the run, other ranks, staging memory, or the copies of the sources."""


@dataclass(frozen=True, slots=True)
class CallerWaited:
    """A caller was held up for 0.1 ms or more. Emitted where it waited, when the wait has ended.

    A wait has one cause, and each of its seconds at most one reason. Several tasks that wait at the same time emit an
    event each. The wait for the end of a save (``await pending``, ``save``, ``blocking``) is not such a wait: it is
    made by code that wants the result.

    Attributes:
        cause: What held up the caller.
        seconds: How long.
        waited_for: How many of these seconds were due to each reason. The others are the work of the call itself, or
            the time until a busy event loop continued the task.
        save: The save, or None for waits of a stager, which may concern several.
        monotonic_ns: The end of the wait, by ``time.monotonic_ns()``.
        time_ns: The end of the wait, by ``time.time_ns()``.
    """

    cause: WaitCause
    seconds: float
    waited_for: Mapping[WaitReason, float]
    save: SaveContext | None = None
    monotonic_ns: int = field(default_factory=time.monotonic_ns, kw_only=True)
    time_ns: int = field(default_factory=time.time_ns, kw_only=True)


@dataclass(frozen=True, slots=True)
class RunPruned:
    """A pass of pruning has deleted steps of a run, or found damaged ones.

    Attributes:
        run: The URL of the run.
        deleted: The names of the deleted steps.
        damaged: The names of all damaged steps that are known. They are not deleted.
        monotonic_ns: The time of the event, by ``time.monotonic_ns()``.
        time_ns: The time of the event, by ``time.time_ns()``.
    """

    run: str
    deleted: tuple[str, ...]
    damaged: tuple[str, ...]
    monotonic_ns: int = field(default_factory=time.monotonic_ns, kw_only=True)
    time_ns: int = field(default_factory=time.time_ns, kw_only=True)


@dataclass(frozen=True, slots=True)
class VersionServed:
    """Other weights are served: a ``Follower`` has exchanged them.

    Attributes:
        source: The URL of the run.
        stamp: The stamp of the version, such as ``"step-300"``.
        save_id: The id of the save that wrote it. Empty if another writer did.
        seconds: The time since its fetch began.
        monotonic_ns: The time of the event, by ``time.monotonic_ns()``.
        time_ns: The time of the event, by ``time.time_ns()``.
    """

    source: str
    stamp: str
    save_id: str
    seconds: float
    monotonic_ns: int = field(default_factory=time.monotonic_ns, kw_only=True)
    time_ns: int = field(default_factory=time.time_ns, kw_only=True)


@dataclass(frozen=True, slots=True)
class VersionPassedOver:
    """A step is not served, because it is damaged, does not fit, or was refused. Emitted once for each save. Also
    logged as a warning.

    Attributes:
        source: The URL of the run.
        stamp: The name of the step.
        error_type: The name of the class of the error.
        reason: Its message.
        monotonic_ns: The time of the event, by ``time.monotonic_ns()``.
        time_ns: The time of the event, by ``time.time_ns()``.
    """

    source: str
    stamp: str
    error_type: str
    reason: str
    monotonic_ns: int = field(default_factory=time.monotonic_ns, kw_only=True)
    time_ns: int = field(default_factory=time.time_ns, kw_only=True)


ReadCall: TypeAlias = Literal["open_checkpoint", "state_dict", "tensor", "value", "file", "verify"]
"""The calls that read a checkpoint and change no state: ``open_checkpoint``, those on its result, and ``verify``."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The load that an event belongs to.

    Attributes:
        operation: The call: ``"load"``, ``"restore"``, ``"dcp.load"`` for a load through ``dcp.StorageReader``, or one
            of ``ReadCall``.
        url: The checkpoint.
        save_id: The id of the checkpoint; empty until it is open, and if another writer made it.
        run: The URL of the run that is restored, or None.
        step: The step of the checkpoint, or None until it is open.
        generation: The generation of the step; 1 until the checkpoint is open.
        rank: The rank of this process among the ranks that load together.
        world: The number of these ranks.
    """

    operation: Literal["load", "restore", "dcp.load"] | ReadCall
    url: str
    save_id: str = ""
    run: str | None = None
    step: int | None = None
    generation: int = 1
    rank: int = 0
    world: int = 1


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """The base of the events of a load.

    Every load that has started ends with one of ``LoadApplied`` and ``LoadFailed``, on each rank. A ``restore`` that
    falls back is one load for each step that it tries. ``open_checkpoint``, each call on its result, and ``verify``
    emit the events of a load too, except those of phases that the call does not have.

    Attributes:
        load: The load.
        monotonic_ns: The time of the event, by ``time.monotonic_ns()``.
        time_ns: The time of the event, by ``time.time_ns()``.
    """

    load: LoadContext
    monotonic_ns: int = field(default_factory=time.monotonic_ns, kw_only=True)
    time_ns: int = field(default_factory=time.time_ns, kw_only=True)


@dataclass(frozen=True, slots=True)
class LoadStarted(LoadEvent):
    """A load begins to open the checkpoint."""


@dataclass(frozen=True, slots=True)
class LoadOpened(LoadEvent):
    """The marker and the manifest were read and validated. If the load starts over because another checkpoint has
    replaced this one, this event and the following ones are emitted again."""


@dataclass(frozen=True, slots=True)
class LoadPlanned(LoadEvent):
    """The target matches the checkpoint, and the reads of this rank have been planned. Nothing has been changed yet."""


@dataclass(frozen=True, slots=True)
class LoadRead(LoadEvent):
    """This rank has read its tensors.

    Attributes:
        nbytes: The bytes that it has read.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class LoadVerified(LoadEvent):
    """The data that was read has the checksums that were saved. Emitted only with ``verify="always"``.

    Attributes:
        unverified: The number of tensors some of whose bytes have no checksum.
    """

    unverified: int


@dataclass(frozen=True, slots=True)
class LoadApplied(LoadEvent):
    """The target has its new state, or the call returns what it has read.

    Attributes:
        nbytes: The bytes that this rank has read.
        seconds: The times of the phases ``opened``, ``planned``, ``read`` and ``applied``, in seconds since the start.
    """

    nbytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LoadFailed(LoadEvent):
    """The load raised an error or was cancelled. A ``verify`` that finds damage ends with this event too.

    Attributes:
        phase: The phase in which it failed.
        error_type: The name of the error's class; ``"CancelledError"`` for a cancel, ``"CorruptCheckpointError"`` for a
            ``verify`` that finds damage.
        reason: The message of the error, or the first damage in the report of ``verify``.
        written: The number of tensors of the target that may have been changed.
    """

    phase: Literal["open", "plan", "read", "apply"]
    error_type: str
    reason: str
    written: int


@dataclass(frozen=True, slots=True)
class LoadFellBack(LoadEvent):
    """``restore`` has loaded another step in place of the damaged step of this event. Emitted on each rank, for each
    damaged step, after the load of the other step has ended.

    Attributes:
        taken: The step that was loaded.
        reason: The damage.
    """

    taken: str
    reason: str


Event: TypeAlias = (
    Retried
    | Throttled
    | SlowPart
    | GuaranteeLost
    | WriterProcessLost
    | RanksMissing
    | CallerWaited
    | RunPruned
    | VersionServed
    | VersionPassedOver
    | SaveEvent
    | LoadEvent
)
"""Any event. Those of saves have the base ``SaveEvent``, those of loads ``LoadEvent``."""

Observer: TypeAlias = Callable[[Event], object]
"""A function that is called with each event, as ``observe`` says. What it returns is ignored."""

_observers: tuple[tuple[Observer, bool], ...] = ()
"""Each observer, and whether it is quick."""
_lock = threading.Lock()


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call ``observer`` with every event of this process during the ``with`` block.

    An error that the observer raises is logged and has no other effect.

    Args:
        observer: Called in the thread in which the event happens, or, while that of an earlier event of the same save
            is still called, in the thread of that one. It must be quick: a call on the event loop blocks the loop.
    """
    with observing(observer, quick=False):
        yield


@contextmanager
def observing(observer: Observer, *, quick: bool) -> Iterator[None]:
    """Do ``observe``. A ``quick`` observer never waits, so it is called on the loop of operations too."""
    global _observers
    with _lock:
        _observers = (*_observers, (observer, quick))
    try:
        yield
    finally:
        with _lock:
            remaining = list(_observers)
            remaining.remove((observer, quick))
            _observers = tuple(remaining)


def may_wait() -> bool:
    """Return whether there is an observer that may wait, which the loop of operations must not call."""
    return not all(quick for _, quick in _observers)


def emit(event: Event) -> None:
    """Call the observers with ``event``, and log it: ``GuaranteeLost``, ``WriterProcessLost`` and
    ``VersionPassedOver`` as warnings, a committed save and the end of a restore at the level INFO, the others at DEBUG
    except those of a save or load.

    Args:
        event: The event.
    """
    match event:
        case SaveCommitted(save=save):
            _log.info("%s: %d bytes committed in %.3f s", save.url, event.nbytes, event.seconds.get("committed", 0.0))
        case LoadApplied(load=LoadContext(operation="restore") as load):
            _log.info("%s: %d bytes restored in %.3f s", load.url, event.nbytes, event.seconds.get("applied", 0.0))
        case SaveEvent() | LoadEvent():
            pass
        case VersionPassedOver():
            _log.warning("%s: %s is not served: %s: %s", event.source, event.stamp, event.error_type, event.reason)
        case GuaranteeLost():
            _log.warning("%s: %s", event.url, event.promise)
        case WriterProcessLost():
            then = "; a new one writes the files again" if event.again else ""
            _log.warning("%s: %s (PID %s)%s", event.url, event.reason, event.pid, then)
        case _:
            _log.debug("%s", event)
    for observer, _ in _observers:
        try:
            observer(event)
        except Exception:
            _log.exception("an observer failed on %s", type(event).__name__)
