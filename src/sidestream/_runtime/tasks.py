"""Tasks that outlive the call that started them, and steps that a cancel must not cut short."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from ..errors import CorruptCheckpointError, SidestreamError, WrongLoopError
from .abandoned import supervised_tasks, track_task
from .threads import time_limit

__all__ = [
    "check_no_running_loop",
    "create_owned_task",
    "first_error",
    "in_parallel",
    "run_shielded",
    "running_loop",
    "runs_in_trio",
    "supervise",
    "wait_for_supervised",
]


_WORKERS = 4


def running_loop(what: str) -> asyncio.AbstractEventLoop:
    """The loop that runs this code. Raises ``WrongLoopError`` where there is none."""
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
    """Raise ``WrongLoopError`` if ``what``, which blocks its thread, would block an event loop."""
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
    """Whether a task of trio runs this code. In trio's guest mode a loop of asyncio runs in this thread too."""
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
    """Run ``work`` on the running loop; a strong reference is kept until it has ended.

    ``work`` must not raise: it delivers every failure to whoever awaits its result. When the loop is closed by
    ``asyncio.run`` it is cancelled and waited for; when the loop ends otherwise, its coroutine is closed.
    """
    task = _create_task(work, name)
    track_task(task, "supervised")
    return task


def create_owned_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run ``work`` beside its owner, who keeps the task, cancels it and waits for it; ``wait_for_supervised`` does not wait for it.

    Like what is supervised, it must not raise."""
    task = _create_task(work, name)
    track_task(task, "accompanying")
    return task


def _create_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task without the deadline of the call that starts it."""
    with time_limit(None):
        return asyncio.get_running_loop().create_task(work, name=name)


async def wait_for_supervised() -> None:
    """Wait until everything supervised on this loop has ended."""
    while tasks := supervised_tasks():
        await asyncio.wait(tasks)


async def run_shielded(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``work()`` to its end, however often this task is cancelled meanwhile; the cancel is raised afterwards.

    anyio's shield alone does not do: ``Task.cancel()`` and ``asyncio.timeout`` go through it. ``work`` must be safe to
    run again: a closing loop cancels every task there is, the one that runs ``work`` included, once.

    Does nothing where no loop runs: there, the caller is a coroutine that is being closed because its loop has ended,
    and ``_abandoned`` has released its resources.
    """
    if asyncio._get_running_loop() is None:
        return
    cancelled: asyncio.CancelledError | None = None
    task = _begin(work)
    with anyio.CancelScope(shield=True):
        while True:
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as cancel:
                cancelled = cancelled or cancel
                continue
            if not task.cancelled():
                break
            task = _begin(work)
    if cancelled is not None:
        task.exception()
        raise cancelled
    task.result()


def _begin(work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work())
    track_task(task, "accompanying")
    return task


async def in_parallel(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` in several tasks, which share a queue. Raises ``first_error`` of what they raise."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_WORKERS):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one error to raise for a group: ``CorruptCheckpointError`` if there is one, or else the first error of
    sidestream, or else the first error."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.extend(error.exceptions if isinstance(error, BaseExceptionGroup) else [error])
    ours = [error for error in flat if isinstance(error, SidestreamError)]
    return next((error for error in ours if isinstance(error, CorruptCheckpointError)), (ours or flat)[0])
