"""Work that all ranks of a group do together and that ends in the same way on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from .._runtime.tasks import wait_out
from .operation import Operation, Stopped

P = ParamSpec("P")
T = TypeVar("T")


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
    try:
        return await work(*args, **kwargs)
    except BaseException as error:
        verdict = await operation.failed(error)
        if not isinstance(error, Exception):
            raise
        verdict.written = getattr(error, "written", ())
        raise operation.cancelled or verdict from error


async def stoppable(operation: Operation | None, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``. If another rank fails, cancel it and raise ``Stopped``. Without an operation, do ``work`` alone."""
    if operation is None:
        return await work
    task = asyncio.ensure_future(work)
    operation.on_stop(task.cancel)
    cancelled = await wait_out(task, lambda _: task.cancel())
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    if task.cancelled():
        raise Stopped
    return task.result()
