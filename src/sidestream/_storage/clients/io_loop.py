"""Coroutines of storage clients, run on the event loop that fsspec keeps in a thread of its own.

Asynchronous fsspec file systems run on that loop. All other requests to the network run there too. So threads without a
loop can make them, and they continue while the caller's loop is blocked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

from fsspec.asyn import get_loop, iothread

from ..._runtime.threads import Stop, Threads, current_deadline
from ...errors import ClosedError

__all__ = ["LoopCall", "in_io_thread", "on_io_loop"]

T = TypeVar("T")

_GRACE_S = 5.0
_waiter = Threads("sidestream-storage", 1)  # only its ``wait`` is used, so it never starts a thread


class LoopCall(Generic[T]):
    """A coroutine that runs on the loop. ``future`` is done when the coroutine has ended, also if it was cancelled."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.loop: asyncio.AbstractEventLoop = get_loop()
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()
        self._cancelled = False
        self._task: asyncio.Task[T] | None = None
        self.loop.call_soon_threadsafe(self._start, work)

    def cancel(self) -> None:
        """Cancel the coroutine. ``future`` raises ``ClosedError`` when it has ended. From any thread."""
        self._cancelled = True
        self.loop.call_soon_threadsafe(self._cancel)

    def result(self, name: str, stop: Stop | None = None) -> T:
        """Wait for the coroutine in a thread, and return its result. Raises what the coroutine raised, ``ClosedError``
        when ``stop`` is set, and ``DeadlineExceededError``."""
        stop, deadline = stop or Stop(), current_deadline()
        with stop.waking(self.cancel):
            if stop.is_set():
                self.cancel()
            try:
                return self.future.result(deadline.remaining_s())
            except FutureTimeout:
                if self.future.done():
                    raise
            self.cancel()
            try:
                return self.future.result(_GRACE_S)
            except ClosedError as error:
                raise deadline.exceeded(name) from error
            except FutureTimeout as error:
                raise deadline.exceeded(f"{name}, which does not end when it is cancelled") from error

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        if self._cancelled:
            self.future.set_exception(_stopped())
            return
        self._task = self.loop.create_task(work())
        self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if task.cancelled():
            self.future.set_exception(_stopped())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def in_io_thread() -> bool:
    """Return whether the calling thread runs the loop. Such a thread must not wait for a ``LoopCall``."""
    return threading.current_thread() is iothread[0]


def _stopped() -> ClosedError:
    return ClosedError("stopped before the work was done")


async def on_io_loop(work: Callable[[], Coroutine[Any, Any, T]], name: str, *, unstoppable: bool = False) -> T:
    """Run ``work()`` on the loop and wait for it. When this returns or raises, the work has ended.

    A cancel of the caller cancels the work, and is raised when the work has ended. ``unstoppable`` work is not
    cancelled: it has to end by the deadline, and the cancel is raised then.
    """
    call = LoopCall(work)
    if unstoppable:
        return await _waiter.wait(call.future, name)
    stop = Stop()
    with stop.waking(call.cancel):
        return await _waiter.wait(call.future, name, stop=stop)
