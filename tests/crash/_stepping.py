"""Something happens at exactly the k-th suspension of an operation, whichever of its tasks suspends."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Generator
from typing import Any, TypeVar

from sidestream._engine.loop import operation_loop
from sidestream._staging import cached

T = TypeVar("T")

OF_THE_PROCESS = frozenset(
    f"sidestream-{name}"
    for name in ("exit", "io", "operations", "parse", "ranks", "read", "saver", "storage", "unmap", "watch", "write")
)
"""The loop, the pools, and what watches calls into objects: they belong to no operation."""


class _Stepped(Coroutine[Any, Any, T]):
    """The coroutine ``inner``, with every suspension counted."""

    def __init__(self, inner: Coroutine[Any, Any, T], steps: Steps) -> None:
        self._inner = inner
        self._steps = steps

    def send(self, value: Any) -> Any:
        return self._suspended(self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        return self._suspended(self._inner.throw(*error))

    def _suspended(self, awaited: Any) -> Any:
        while self._steps.suspended() and self._steps.throwing:
            if hasattr(awaited, "cancel"):
                awaited.cancel()
            awaited = self._inner.throw(asyncio.CancelledError())
        return awaited

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError


class Steps:
    """Counts the suspensions of all tasks that are made while it is installed, and calls ``fire`` at those in ``at``.

    ``fire`` None: a ``CancelledError`` is thrown into the coroutine that suspends.
    """

    def __init__(self, at: set[int], fire: Callable[[], Any] | None) -> None:
        self._at = at
        self._fire = fire
        self.count = 0
        self.fired = 0

    @property
    def throwing(self) -> bool:
        return self._fire is None

    def suspended(self) -> bool:
        self.count += 1
        if self.count not in self._at:
            return False
        self.fired += 1
        if self._fire is not None:
            self._fire()
        return True

    def task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Stepped(coroutine, self), loop=loop, **options)


async def stepped(
    operation: Coroutine[Any, Any, T], at: set[int], fire: Callable[[asyncio.Task[T]], Any] | None
) -> tuple[asyncio.Task[T], Steps]:
    """Run ``operation`` as a task; ``fire`` gets it at each of its suspensions in ``at``, those of its children and of
    the tasks on the operation loop included.

    With ``fire`` None, a ``CancelledError`` is thrown right there instead. Returns when the task has ended.
    """
    here, theirs = asyncio.get_running_loop(), operation_loop()._loop
    running: list[asyncio.Task[T]] = []

    def fire_here() -> None:
        assert fire is not None
        if asyncio.get_running_loop() is here:
            fire(running[0])
            return
        # The operation stays at this suspension until the task has been resumed, and has passed the cancel on.
        resumed = threading.Event()

        def fired() -> None:
            fire(running[0])
            here.call_soon(here.call_soon, here.call_soon, resumed.set)

        here.call_soon_threadsafe(fired)
        assert resumed.wait(60)

    steps = Steps(at, None if fire is None else fire_here)
    factories = [(loop, loop.get_task_factory()) for loop in (here, theirs)]
    for loop, _ in factories:
        loop.set_task_factory(steps.task)
    try:
        running.append(here.create_task(operation))
        await asyncio.wait(running)
    finally:
        for loop, factory in factories:
            loop.set_task_factory(factory)
    return running[0], steps


def busy_threads() -> list[str]:
    """Functions of sidestream that a thread of a pool is in, and does not leave.

    The last thing that a thread does is to resolve a future; whoever awaits that may run before the thread has returned
    from there, so it is given the time to. What it must not do meanwhile, touch a file, the operations' hook tells.
    """
    end = time.monotonic() + 60.0
    while (busy := in_pools()) and time.monotonic() < end:
        time.sleep(0.001)
    return list(busy.values())


def leave_out_busy_threads() -> None:
    """Make ``busy_threads`` leave out the threads that are busy now: they belong to an earlier test."""
    _of_others.clear()
    _of_others.update(in_pools())


_of_others: set[int] = set()


def owned_threads(besides: list[str], before: Collection[threading.Thread] = ()) -> list[str]:
    """Names of the threads that belong to one save or one closed stager, and have not ended; each name in ``besides``
    may be there once, for the stager of the test. Those ``before`` are of other tests, and of the process."""
    cached.close_all()  # what is kept for the next save without a stager
    end = time.monotonic() + 60.0
    while True:
        there = [one for one in threading.enumerate() if one not in before]
        left = [one.name for one in there if one.name.startswith("sidestream-")]
        left = [name for name in left if name not in OF_THE_PROCESS]
        for name in besides:
            if name in left:
                left.remove(name)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.001)


def in_pools() -> dict[int, str]:
    """What threads of pools do now, by the number of the thread."""
    busy = {}
    for number, frame in sys._current_frames().items():
        names = []
        walk = frame
        while walk is not None:
            names.append((walk.f_code.co_filename, walk.f_code.co_name))
            walk = walk.f_back
        pool = "/sidestream/_runtime/threads.py"
        pooled = any(file.endswith(pool) for file, _ in names)
        inside = [f"{file}:{name}" for file, name in names if "/sidestream/" in file or "_operations.py" in file]
        inside = [place for place in inside if pool not in place]  # not the pool's own frames
        if pooled and inside and number not in _of_others:
            busy[number] = f"{number}: {inside}"
    return busy
