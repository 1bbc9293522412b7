"""Work that all ranks of a group do together and that ends in the same way on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from .._runtime.abandoned import register
from .operation import Operation, Stopped

__all__ = ["prepare_together", "run_together", "stoppable"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallPart:
    """The registered resources of an operation that runs in the caller's task: if the loop of that task ends, the other
    ranks are notified."""

    operation: Operation

    @property
    def what(self) -> str:
        return f"this rank's part in a {self.operation.kind}"

    @property
    def expires_at(self) -> float:
        return self.operation.expires_at

    def abandon(self) -> None:
        self.operation.report(asyncio.CancelledError())

    def leave(self, *, stuck: bool) -> None:
        """Do nothing: the part has no other resources."""


async def run_together(work: Callable[[Operation], Awaitable[T]], operation: Operation) -> T:
    """Do ``work`` on this rank, as every rank does, and close the operation. If it fails on one rank, it fails on all
    with the same ``RankFailuresError``. A rank that is cancelled raises its own cancel."""
    watched = register(CallPart(operation))
    try:
        result = await work(operation)
    except BaseException as error:
        verdict = await operation.failed(error)
        if not isinstance(error, Exception):
            raise
        verdict.written = getattr(error, "written", ())
        raise verdict from error
    finally:
        watched.end()
    operation.close()
    return result


async def prepare_together(operation: Operation, work: Callable[[], Awaitable[Any]]) -> Any:
    """Do ``work``, which precedes the operation's own work, and leave the operation open. If it fails on one rank, the
    operation fails on all of them with the same ``RankFailuresError``. A rank that is cancelled raises its own
    cancel."""
    watched = register(CallPart(operation))
    try:
        return await work()
    except BaseException as error:
        verdict = await operation.failed(error)
        if isinstance(error, asyncio.CancelledError):
            raise
        raise verdict from error
    finally:
        watched.end()


async def stoppable(operation: Operation, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``. If another rank fails, cancel it and raise ``Stopped``."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(task.cancel)

    operation.on_stop(stop)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as cancel:
            cancelled = cancel
            task.cancel()
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    if task.cancelled():
        raise Stopped
    return task.result()
