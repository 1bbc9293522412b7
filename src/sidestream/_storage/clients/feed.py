"""Buffers from a thread that makes them to an asynchronous client that takes them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from ..._runtime.threads import Stop, current_deadline
from ...errors import ClosedError

__all__ = ["Feed"]


class _Aborted(Exception):
    """Makes the client abort its upload."""


class Feed:
    """One thread puts, and waits while the client has not taken the last one yet; the client iterates on its loop."""

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
        """Raises ``ClosedError`` when ``stop`` is set or the client has ended, ``DeadlineExceededError``."""
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
        """There is no more."""
        self.ended = True
        self._notify()

    def fail(self) -> None:
        """The client gets an error instead of the next buffer. From any thread."""
        self.failed = True
        with self._changed:
            self._items.clear()
        self._notify()

    def close(self) -> None:
        """The client has ended: nobody takes anything any more."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def closed_early(self, error: BaseException) -> bool:
        """Whether ``error`` only says that the client had ended before."""
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
        """Done when ``fail`` was called."""
        if self._failing is None:
            self._bind()
        assert self._failing is not None
        return self._failing

    @property
    def starving(self) -> bool:
        """Whether it is the thread that the client waits for."""
        return not self._items and not self.ended

    def _bind(self) -> asyncio.Event:
        if self._arrived is None:
            self._arrived = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            self._failing = self._loop.create_future()
            self._on_loop()  # what came before
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
