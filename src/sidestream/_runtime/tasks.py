"""Tasks that outlive the call that started them, and coroutines that a cancel must not interrupt."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

import anyio

from ..errors import CorruptCheckpointError, SidestreamError, WrongLoopError
from .threads import time_limit

P = ParamSpec("P")
T = TypeVar("T")


_WORKERS = 4


def running_loop(what: str) -> asyncio.AbstractEventLoop:
    """Return the asyncio loop that runs this code. Raises ``WrongLoopError``, which names ``what``, if there is
    none."""
    if runs_in_trio():
        raise WrongLoopError(
            f"{what} needs a running event loop of asyncio, and this code runs in trio: call sidestream.blocking in a "
            "thread, with trio.to_thread.run_sync(), or run the program with asyncio"
        )
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoopError(
            f"{what} needs a running event loop; use sidestream.blocking where there is none"
        ) from None


def check_no_running_loop(what: str) -> None:
    """Raise ``WrongLoopError`` if an event loop runs in this thread, which ``what`` would block."""
    if runs_in_trio():
        raise WrongLoopError(
            f"{what} would block the event loop of trio: call it in a thread, with trio.to_thread.run_sync()"
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise WrongLoopError(
        f"{what} would block this event loop: await the functions of sidestream instead. If a synchronous framework "
        "makes this call in a notebook, run it in: with sidestream.blocking.stopping_the_loop(): ..."
    )


def runs_in_trio() -> bool:
    """Return whether a task of trio runs this code. In trio's guest mode a loop of asyncio runs in this thread too."""
    current_task = getattr(sys.modules.get("trio.lowlevel"), "current_task", None)
    if current_task is None:
        return False
    try:
        current_task()
    except RuntimeError:
        return False
    try:
        return asyncio.current_task() is None  # with trio-asyncio a task of asyncio runs within one of trio
    except RuntimeError:
        return True


def supervise(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task that runs ``work`` on the running loop, and keep a strong reference to it until it has ended.
    The end of the program waits for it.

    ``work`` must not raise; it sets its failures on the futures that callers await.
    """
    task = _create_task(work, name)
    _supervised.add(task)
    task.add_done_callback(_supervised.discard)
    return task


def create_owned_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task that runs ``work``. The caller owns it: the caller cancels it and waits for it, and
    the end of the program does not. ``work`` must not raise."""
    task = _create_task(work, name)
    _owned.add(task)
    task.add_done_callback(_owned.discard)
    return task


def _create_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task that does not inherit the deadline of the current call."""
    # The task may outlive the call, and then the deadline of the call is over. Work that needs a limit sets one of its
    # own.
    with time_limit(None):
        return asyncio.get_running_loop().create_task(work, name=name)


_supervised: set[asyncio.Task[None]] = set()
_owned: set[asyncio.Task[None]] = set()
"""Strong references: a loop has only weak ones to its tasks."""


_of_the_parent: list[asyncio.Task[None]] = []


def _forget_after_fork() -> None:
    _of_the_parent.extend((*_supervised, *_owned))  # kept: a child must not destroy tasks of its parent
    _supervised.clear()
    _owned.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def supervised_tasks() -> list[asyncio.Task[None]]:
    """Return the supervised tasks that have not ended. Called on their loop."""
    return list(_supervised)


async def run_shielded(work: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs) -> None:
    """Run ``work`` with these arguments to its end, however often this task is cancelled. A cancel is raised
    afterwards.

    The shield of anyio is not enough, because ``Task.cancel()`` and ``asyncio.timeout`` pass through it. ``work`` must
    be safe to run again: a closing loop cancels all tasks once, including the one that runs ``work``.

    Does nothing where no loop runs: there, the caller is a coroutine that is being closed because its loop has ended.
    """
    if asyncio._get_running_loop() is None:
        return
    cancelled: asyncio.CancelledError | None = None
    while True:
        # In a task of its own, which the cancels of this one do not reach.
        task = asyncio.get_running_loop().create_task(work(*args, **kwargs))
        cancel = await wait_out(task, shielded=True)
        cancelled = cancelled or cancel
        if not task.cancelled():
            break
    if cancelled is not None:
        task.exception()
        raise cancelled
    task.result()


async def wait_out(
    waiter: asyncio.Future[Any],
    on_cancel: Callable[[asyncio.CancelledError], object] | None = None,
    *,
    shielded: bool = False,
) -> asyncio.CancelledError | None:
    """Wait until ``waiter`` is done, and return the first cancel that arrived meanwhile. ``on_cancel`` is called with
    each. From the first one on, or from the beginning if ``shielded``, the wait is shielded from scopes of anyio, which
    cancel a task again and again."""
    first: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=shielded) as scope:
        while not waiter.done():
            try:
                await asyncio.wait([waiter])
            except asyncio.CancelledError as cancel:
                # From the first cancel on. Before it, a cancel of a scope of anyio has to arrive, or the caller could
                # not be cancelled at all; after it, anyio would deliver the same cancel in each iteration of the loop.
                scope.shield = True
                first = first or cancel
                if on_cancel is not None:
                    on_cancel(cancel)
    try:
        return first
    finally:
        del first  # it refers to this frame


async def in_parallel(
    items: Iterable[T], work: Callable[[T], Coroutine[Any, Any, None]], workers: int = _WORKERS
) -> None:
    """Run ``work`` for each of ``items``, in so many tasks. Raises the ``first_error`` of their errors."""
    queue = iter(items)

    async def worker() -> None:
        for item in queue:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error to raise for a group of errors: a ``CorruptCheckpointError`` if there is one, or else the first
    error of sidestream, or else the first error."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.extend(error.exceptions if isinstance(error, BaseExceptionGroup) else [error])
    ours = [error for error in flat if isinstance(error, SidestreamError)]
    return next((error for error in ours if isinstance(error, CorruptCheckpointError)), (ours or flat)[0])
