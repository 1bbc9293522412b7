"""A queue of buffers from a thread to an asynchronous client."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from ..._runtime.threads import Stop, current_deadline
from ...errors import ClosedError

__all__ = ["Feed"]


class _Aborted(Exception):
    """The error that makes the client abort its upload."""


class Feed:
    """A queue of one buffer. A thread puts buffers, and waits until the client has taken the one before. The client
    iterates over the queue on its loop."""

    def __init__(self) -> None:
        self.taken_bytes = 0
        self.ended = False
        self.failed = False
        self._closed = False
        self._items: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Event | None = None
        self._failing: asyncio.Future[None] | None = None

    # --- the thread's side ---

    def put(self, view: memoryview, stop: Stop) -> None:
        """Put one buffer. Raises ``ClosedError`` when ``stop`` is set or the client has ended, and
        ``DeadlineExceededError``."""
        deadline = current_deadline()
        with stop.waking(self._wake), self._changed:
            while self._items and not self._closed:
                stop.check()
                if not self._changed.wait(deadline.remaining_s()):
                    raise deadline.exceeded("uploading")
            stop.check()
            if self._closed:
                raise ClosedError("the upload has ended")
            self._items.append(view)
        self._notify()

    def end(self) -> None:
        """End the iteration of the client after the last buffer."""
        self.ended = True
        self._notify()

    def fail(self) -> None:
        """Raise an error in the client instead of passing the next buffer. From any thread."""
        self.failed = True
        with self._changed:
            self._items.clear()
        self._notify()

    def close(self) -> None:
        """Refuse further buffers, because the client has ended."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def closed_early(self, error: BaseException) -> bool:
        """Return whether ``error`` was only raised because the client had ended before."""
        return isinstance(error, ClosedError) and self._closed

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _notify(self) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._on_loop)

    # --- the loop's side ---

    @property
    def failing(self) -> asyncio.Future[None]:
        """A future that is done when ``fail`` was called."""
        if self._failing is None:
            self._bind()
        assert self._failing is not None
        return self._failing

    @property
    def starving(self) -> bool:
        """Whether the client waits for the thread."""
        return not self._items and not self.ended

    def _bind(self) -> asyncio.Event:
        if self._arrived is None:
            self._arrived = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            self._failing = self._loop.create_future()
            self._on_loop()  # for calls of ``put``, ``end`` and ``fail`` before the loop was known
        return self._arrived

    def _on_loop(self) -> None:
        assert self._arrived is not None
        assert self._failing is not None
        self._arrived.set()
        if self.failed and not self._failing.done():
            self._failing.set_result(None)

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> memoryview:
        arrived = self._bind()
        while True:
            arrived.clear()
            if self.failed:
                raise _Aborted("the upload was stopped")
            with self._changed:
                if self._items:
                    view = self._items.popleft()
                    self.taken_bytes += len(view)
                    self._changed.notify_all()
                    return view
            if self.ended:
                raise StopAsyncIteration
            await arrived.wait()
