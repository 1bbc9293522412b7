"""Work that all ranks of a group do together and that ends in the same way on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from .._runtime.abandoned import register
from .._runtime.tasks import wait_out
from .operation import Operation, Stopped

__all__ = ["prepare_together", "run_together", "stoppable"]

P = ParamSpec("P")
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
    """Do ``work`` as ``prepare_together`` does, and close the operation."""
    result = await prepare_together(operation, work, operation)
    operation.close()
    return result


async def prepare_together(
    operation: Operation | None, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Do ``work`` with these arguments on this rank, as every rank does, and leave the operation open. If it fails on
    one rank, it fails on all with the same ``RankFailuresError``. A rank that is cancelled raises its own cancel.
    Without an operation, do ``work`` alone."""
    if operation is None:
        return await work(*args, **kwargs)
    watched = register(CallPart(operation))
    try:
        return await work(*args, **kwargs)
    except BaseException as error:
        verdict = await operation.failed(error)
        if not isinstance(error, Exception):
            raise
        verdict.written = getattr(error, "written", ())
        raise operation.cancelled or verdict from error
    finally:
        watched.end()


async def stoppable(operation: Operation | None, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``. If another rank fails, cancel it and raise ``Stopped``. Without an operation, do ``work`` alone."""
    if operation is None:
        return await work
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(task.cancel)

    operation.on_stop(stop)
    cancelled = await wait_out(task, lambda _: task.cancel())
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    if task.cancelled():
        raise Stopped
    return task.result()
