"""A queue of buffers from a thread to an asynchronous client."""

from __future__ import annotations

import asyncio

from ..._runtime.threads import Stop
from ...errors import ClosedError
from .requests import LoopCall


class _Aborted(Exception):
    """The error that makes the client abort its upload."""


class Feed:
    """A queue of one buffer. A thread puts buffers, and waits until the client has taken the one before. The client
    iterates over the queue on the loop of the storage clients, where everything but ``put`` is called."""

    def __init__(self) -> None:
        self.taken_bytes = 0
        self.ended = False
        self._closed = self._failed = False
        self._item: memoryview | None = None
        self._changed = asyncio.Event()

    def put(self, view: memoryview, stop: Stop) -> None:
        """Put one buffer, from a thread. Raises ``ClosedError`` when ``stop`` is set or the client has ended, and
        ``DeadlineExceededError``."""
        LoopCall(lambda: self._put(view)).result("uploading", stop)

    async def _put(self, view: memoryview) -> None:
        while self._item is not None and not self._closed:
            await self._change()
        if self._closed:
            raise ClosedError("the upload has ended")
        self._item = view
        self._changed.set()

    def end(self) -> None:
        """End the iteration of the client after the last buffer."""
        self.ended = True
        self._changed.set()

    def fail(self) -> None:
        """Raise an error in the client instead of passing the next buffer."""
        self._failed, self._item = True, None
        self._changed.set()

    def close(self) -> None:
        """Refuse further buffers, because the client has ended."""
        self._closed, self._item = True, None
        self._changed.set()

    @property
    def starving(self) -> bool:
        """Whether the client waits for the thread."""
        return self._item is None and not self.ended

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> memoryview:
        while not self._failed and self._item is None and not self.ended:
            await self._change()
        if self._failed:
            raise _Aborted("the upload was stopped")
        if self._item is None:
            raise StopAsyncIteration
        view, self._item = self._item, None
        self.taken_bytes += len(view)
        self._changed.set()
        return view

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
