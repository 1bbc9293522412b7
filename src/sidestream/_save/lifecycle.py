"""``Lifecycle``: the phases of a save, their times, and the events that tell observers of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextvars import copy_context
from dataclasses import replace
from typing import Literal

from ..errors import SidestreamError, SkippedError
from ..events import (
    SaveCommitted,
    SaveContext,
    SaveEvent,
    SaveFailed,
    SavePlanned,
    SaveSkipped,
    SaveStaged,
    SaveStarted,
    SaveWritten,
    emit,
)
from ..options import Outcome


class Lifecycle:
    """The phases of one save: their times in seconds since the call, and an event for each.

    Phases end in different threads, the loop among them, and an observer may take long, wait for another thread, or end
    the save. So observers are called without a lock: events are queued in their order, and one thread at a time emits
    what is in the queue. A thread that finds another one emitting leaves its event to that one.
    """

    def __init__(self, save: SaveContext) -> None:
        self.seconds: dict[str, float] = {}
        self._save = save
        self._context = copy_context()
        self._phase: Literal["plan", "write", "commit"] = "plan"
        self._began = time.monotonic()
        self._open = False  # started, and not ended
        self._lock = threading.Lock()  # never held while an observer runs
        self._queued: deque[SaveEvent] = deque()
        self._emitting = False

    @property
    def context(self) -> SaveContext:
        """The save, as the next event will describe it."""
        return self._save

    def mark(self, phase: str) -> None:
        """Record that ``phase`` has ended, the first time that this is called for it."""
        self.seconds.setdefault(phase, time.monotonic() - self._began)

    def started(self, world: int | None = None) -> None:
        """Emit the start of the save. ``world`` is the number of ranks, if another library coordinates them."""
        self.will_start(world)
        self.emit_queued()

    def will_start(self, world: int | None = None) -> None:
        """Do ``started``, but leave the event to the next ``emit_queued``, in another thread."""
        with self._lock:
            self._save = self._save if world is None else replace(self._save, world=world)
            self._open = True
            self._queue(SaveStarted(self._save))

    def planned(self, save_id: str) -> None:
        with self._lock:
            self._phase = "write"
            self._save = replace(self._save, save_id=save_id)
            self._queue(SavePlanned(self._save))
        self.emit_queued()

    def staged(self) -> None:
        """Record that everything is staged, the first time that this is called. The event is left to the next
        ``emit_queued``."""
        with self._lock:
            if "staged" not in self.seconds:
                self.mark("staged")
                self._queue(SaveStaged(self._save))

    def written(self, nbytes: int) -> None:
        with self._lock:
            self.mark("written")
            self._phase = "commit"
            self._queue(SaveWritten(self._save, nbytes))
        self.emit_queued()

    def committed(self, nbytes: int, seconds: Mapping[str, float]) -> None:
        with self._lock:
            self._queue(SaveCommitted(self._save, nbytes, seconds))
            self._open = False
        self.emit_queued()

    def failed(self, error: BaseException, outcome: Outcome) -> None:
        """Emit the failure of a save, unless the save has ended before or never started."""
        with self._lock:
            if isinstance(error, SidestreamError):
                error.about(phase=self._phase, url=self._save.url, step=self._save.step)
            if isinstance(error, SkippedError):
                self._queue(SaveSkipped(self._save, str(error)))
            else:
                self._queue(SaveFailed(self._save, self._phase, type(error).__name__, str(error), outcome))
            self._open = False
        self.emit_queued()

    def _queue(self, event: SaveEvent) -> None:
        """Queue ``event`` if the save has started and not ended. A thread that was left behind emits nothing."""
        if self._open:
            self._queued.append(event)

    def emit_queued(self) -> None:
        """Emit the events in the queue, unless another thread, or a caller of this one, is emitting: it continues until
        the queue is empty."""
        while True:
            with self._lock:
                if self._emitting or not self._queued:
                    return
                event = self._queued.popleft()
                self._emitting = True
            try:
                # With the context variables of the call, which may tell an observer what the program was doing.
                self._context.run(emit, event)
            finally:
                # Without the lock. Only the thread that has set the flag resets it, and the next round of the loop
                # looks at the queue again. An event that was queued in between is emitted there or by the thread that
                # has queued it.
                self._emitting = False
