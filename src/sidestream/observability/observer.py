"""``EventObserver``: what all observers of this package have in common, and those that have a thread of their own."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, Self

from .._runtime.threads import Threads
from ..events import Event, observing

_MOST = 10_000
_CLOSE_S = 5.0
_LATER_S = 0.1
"""How long events wait for others: a thread that woke for each would compete with the save for the GIL."""

_log = logging.getLogger("sidestream")


class EventObserver:
    """The base of the observers. It observes from the end of its construction to ``close()``, or to the end of its
    ``with`` block. What it raises is logged, and changes no save or load."""

    def __init__(self) -> None:
        self._observing = ExitStack()
        self._observing.enter_context(observing(self._observe, quick=True))

    def _observe(self, event: Event) -> None:
        """Take one event, and return at once. Called in any thread, by several at a time, and on the loop."""
        raise NotImplementedError

    def close(self) -> None:
        """Observe no more. Calling it again has no effect."""
        self._observing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class QueuedObserver(EventObserver):
    """The base of observers that may have to wait: for a disk, or for code of the user such as exporters and handlers.

    The thread that emits an event puts it into a queue. One thread takes the events, in their order, within 0.1 s if
    nothing holds it up. If it is 10,000 events late, events are lost. In a forked child the observer takes none.

    Args:
        name: What warnings call it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._lost = 0
        self._warned = False
        self._closed = threading.Event()
        self._queue: queue.SimpleQueue[tuple[Event, Any] | None] = queue.SimpleQueue()
        threads = Threads(f"sidestream-{type(self).__name__}", 1)
        self._done: Future[None] = threads.submit(self._take_all)
        threads.close()
        atexit.register(self.close)
        super().__init__()

    @property
    def lost(self) -> int:
        """The number of events that were lost."""
        return self._lost

    def close(self) -> None:
        """Observe no more, and take what is in the queue. Calling it again has no effect.

        It blocks for 5 s at most. What is left in the queue then is lost.
        """
        super().close()
        atexit.unregister(self.close)
        if os.getpid() != self._pid or self._closed.is_set() or self._done.done():
            return
        self._closed.set()
        self._queue.put(None)
        try:
            self._done.result(_CLOSE_S)
        except TimeoutError:
            self._lose(self._queue.qsize() - 1, f"it took more than {_CLOSE_S:g} s to close")

    def _observe(self, event: Event) -> None:
        if os.getpid() != self._pid:
            return
        if self._queue.qsize() >= _MOST:
            self._lose(1, f"it is {_MOST:,} events late")
        else:
            self._queue.put((event, self._noted()))

    def _noted(self) -> Any:
        """Return what has to be known of the moment, and of the thread, in which an event is emitted."""
        return time.time_ns()

    def _lose(self, count: int, why: object) -> None:
        self._lost += count
        if not self._warned:
            self._warned = True
            _log.warning("%s loses events: %s", self._name, why)

    # --- the thread ---

    def _take_all(self) -> None:
        try:
            while (item := self._next()) is not None:
                try:
                    self._take(*item)
                except Exception as error:
                    self._lose(1, error)
        finally:
            try:
                self._end()
            except Exception as error:  # ``close`` of a file may be the first to say that the disk is full
                self._lose(0, error)

    def _next(self) -> tuple[Event, Any] | None:
        with suppress(queue.Empty):
            return self._queue.get_nowait()
        item = self._queue.get()
        self._closed.wait(_LATER_S)
        return item

    def _take(self, event: Event, noted: Any) -> None:
        """Take one event, and what was noted when it was emitted."""
        raise NotImplementedError

    def _end(self) -> None:
        """Finish, after the last event."""
