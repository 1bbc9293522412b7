"""``Journal``: the events in a file, a JSON object in each line."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import time
from concurrent.futures import Future
from contextlib import suppress
from os import PathLike
from typing import TypeAlias

from .._runtime.threads import Threads
from ..events import Event
from .observer import EventObserver
from .records import head, line_of

__all__ = ["Journal"]

_MOST = 10_000
_BATCH = 500
_CLOSE_S = 5.0
_Item: TypeAlias = tuple[Event, int, int] | None

_log = logging.getLogger("sidestream")


class Journal(EventObserver):
    """Appends each event to a file, as one JSON object in a line, for ``sidestream report`` and ``sidestream trace``.

    The observer puts events into a queue, and one thread writes them. If the disk is full, or too slow for 10,000
    events, events are lost, which is counted and logged once. In a forked child it writes nothing.

    Args:
        path: The file; each process needs its own. It is created if it does not exist.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._pid = os.getpid()
        self._lost = self._told = 0
        self._warned = False
        self._queue: queue.Queue[_Item] = queue.Queue(_MOST)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._threads = Threads("sidestream-journal", 1)
        self._done: Future[None] = self._threads.submit(self._write_all, descriptor)
        self._threads.close()
        atexit.register(self.close)
        super().__init__()

    @property
    def lost(self) -> int:
        """The number of events that were not written."""
        return self._lost

    def close(self) -> None:
        """Write what is in the queue, and close the file. Calling it again has no effect.

        It blocks for 5 s at most. If the disk does not respond by then, what is left in the queue is lost.
        """
        super().close()
        atexit.unregister(self.close)
        if os.getpid() != self._pid or self._done.done():
            return
        limit = time.monotonic() + _CLOSE_S
        try:
            self._queue.put(None, timeout=_CLOSE_S)
            self._done.result(max(limit - time.monotonic(), 0))
        except (queue.Full, TimeoutError):
            self._lose(self._queue.qsize(), "the disk does not respond")

    def _observe(self, event: Event) -> None:
        if os.getpid() != self._pid:
            return
        try:
            self._queue.put_nowait((event, time.time_ns(), time.monotonic_ns()))
        except queue.Full:
            self._lose(1, "the disk is too slow")

    def _lose(self, count: int, why: object) -> None:
        self._lost += count
        if not self._warned:
            self._warned = True
            _log.warning("the journal %s loses events: %s", self._path, why)

    # --- the thread ---

    def _write_all(self, descriptor: int) -> None:
        torn = os.fstat(descriptor).st_size > 0  # a process that was killed may have left a part of a line
        items: list[_Item] = []
        lines = [head()]
        try:
            while True:
                torn = self._write(descriptor, lines, torn=torn)
                if None in items:
                    return
                items = [self._queue.get()]
                with suppress(queue.Empty):
                    while len(items) < _BATCH and items[-1] is not None:
                        items.append(self._queue.get_nowait())
                lines = [line_of(*item) for item in items if item is not None]
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int, lines: list[bytes], *, torn: bool) -> bool:
        """Write ``lines``. Return whether the file may end with a part of a line, as it did if it is ``torn``."""
        untold = self._lost - self._told
        left = memoryview(b"\n" * torn + b"".join(lines) + (head(untold) if untold else b""))
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError as error:
            self._lose(len(lines), error)
            return True
        self._told += untold
        return False
