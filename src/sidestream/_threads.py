"""Deadlines, and the one way off the event loop.

``asyncio.to_thread`` and ``anyio.to_thread.run_sync`` abandon their thread when the task is cancelled natively; the
thread then goes on writing into a buffer or descriptor that has been given to somebody else. ``Threads.run`` waits for
its thread under ``Task.cancel()``, ``asyncio.timeout`` and anyio scopes alike, and only then lets the cancel through.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple, Unpack

import anyio

from .errors import Closed, DeadlineExceeded, ForkedProcess

__all__ = ["Deadline", "Stop", "Threads", "io_threads"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_GRACE_S = 5.0
"""How long past the deadline a thread that was told to stop is waited for before it is left to its system call."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time (``time.monotonic`` seconds) by which an operation has to have ended."""

    at: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(time.monotonic() + timeout_s, timeout_s)

    def remaining_s(self) -> float:
        return max(0.0, self.at - time.monotonic())

    def check(self, doing: str) -> None:
        """Raise ``DeadlineExceeded`` when the time is over."""
        if self.remaining_s() == 0.0:
            raise self.exceeded(doing)

    def exceeded(self, doing: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"{doing}: not done within timeout_s={self.timeout_s:g}")


class Stop:
    """A request to stop, for threads: long loops look at it between two chunks.

    A thread that sleeps on something else (a condition, a queue) does so under ``waking``.
    """

    __slots__ = ("_event", "_lock", "_wakers")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    @contextmanager
    def waking(self, waker: Callable[[], None]) -> Iterator[None]:
        """Within, ``set()`` calls ``waker`` in its own thread; it must not block."""
        with self._lock:
            self._wakers.append(waker)
        try:
            yield
        finally:
            with self._lock:
                self._wakers.remove(waker)

    def set(self) -> None:
        with self._lock:
            self._event.set()
            wakers = list(self._wakers)
        for waker in wakers:
            waker()

    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raise ``Closed`` in a worker thread; the task that waits for it raises its own ``CancelledError`` instead."""
        if self._event.is_set():
            raise Closed("stopped before the work was done")


class Threads:
    """A pool of ``size`` threads of our own, started as they are needed."""

    def __init__(self, name: str, size: int) -> None:
        self._pid = os.getpid()
        self._pool = ThreadPoolExecutor(size, thread_name_prefix=name)

    def submit(self, fn: Callable[[Unpack[Ts]], T], *args: Unpack[Ts]) -> Future[T]:
        """Run ``fn`` in a thread. Raises ``ForkedProcess`` in a child of the process that made the pool."""
        if os.getpid() != self._pid:
            raise ForkedProcess("this handle was made before os.fork(); make a new one in the child")
        return self._pool.submit(fn, *args)

    async def run(
        self,
        fn: Callable[[Unpack[Ts]], T],
        *args: Unpack[Ts],
        stop: Stop | None = None,
        deadline: Deadline | None = None,
    ) -> T:
        """Run ``fn`` in a thread and return what it returns; when this returns or raises, the thread has left ``fn``.

        A cancel sets ``stop`` and is raised after the thread has ended. When ``deadline`` passes, ``stop`` is set too;
        a thread that sits in a system call for 5 s longer is left behind and ``DeadlineExceeded`` is raised. So that
        this is safe, ``fn`` owns what it uses: it opens and closes its own descriptors and keeps its own references.
        """
        waiter = asyncio.wrap_future(self.submit(fn, *args))
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not waiter.done():
                patience = None if deadline is None else deadline.remaining_s() or _GRACE_S
                overdue = deadline is not None and deadline.remaining_s() == 0.0
                try:
                    done, _ = await asyncio.wait([waiter], timeout=patience)
                except asyncio.CancelledError as cancel:
                    cancelled = cancelled or cancel
                    if stop is not None:
                        stop.set()
                    continue
                if done or deadline is None:
                    continue
                if overdue:
                    waiter.add_done_callback(_consume)
                    raise deadline.exceeded(f"{getattr(fn, '__name__', fn)} is stuck in a system call")
                if stop is not None:
                    stop.set()
        if cancelled is not None:
            _consume(waiter)
            raise cancelled
        return waiter.result()

    def close(self) -> None:
        """Take no more work. Threads end when the work that was submitted has ended; this does not wait for them."""
        if os.getpid() == self._pid:
            self._pool.shutdown(wait=False)


def _consume(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()


_shared: Threads | None = None
_shared_lock = threading.Lock()


def io_threads() -> Threads:
    """The pool for storage and planning that all saves and loads of this process share."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Threads("sidestream-io", min(32, (os.cpu_count() or 1) + 8))
        return _shared


def _forget_after_fork() -> None:
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
