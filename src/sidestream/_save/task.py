"""Saves whose data a coroutine writes, in the task of the caller: conversions, copies, exports, and saves of DCP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from .._runtime.threads import Stop, ThreadFuture, io_threads, report
from .._storage import Transaction
from .operation import Coordinator, SaveOperation, unchecked
from .order import SaveOrder
from .pending import SaveInfo, SaveProgress

__all__ = ["run_here", "write_here"]


class _TaskWriter:
    """A writer without a live state. ``write`` returns when all data is on storage, with what the layout needs to know
    of it."""

    def __init__(self, write: Callable[[], Awaitable[Any]], finish: Callable[[Any, Any, Stop], Any]) -> None:
        self._write = write
        self._finish = finish

    def pass_on(self, staged: Future[None]) -> None:
        # There are no sources that could change.
        staged.set_result(None)

    async def ended(self) -> Any:
        written, stop = await self._write(), Stop()
        return await io_threads().run(self._finish, None, written, stop, stop=stop)

    async def release(self) -> None:
        """Do nothing: ``write`` has released its memory."""

    def interrupt(self) -> None:
        """Do nothing: the coroutines that wait for the threads stop them."""

    def progress(self) -> SaveProgress:
        """Return nothing: a callback of the caller reports the progress."""
        return SaveProgress()


async def run_here(order: SaveOrder, write: Callable[[], Awaitable[Any]], coordinator: Coordinator) -> SaveInfo:
    """Run a save in this task. ``write`` writes all data files, and returns what the layout needs to know of them."""
    writer = _TaskWriter(write, coordinator.finish)
    return await SaveOperation(order=order, writer=writer, coordinator=coordinator).run(ThreadFuture())


async def write_here(
    order: SaveOrder,
    write: Callable[[Transaction], Awaitable[Any]],
    nbytes: int,
    coordinator: Coordinator,
    before_commit: Callable[[], Awaitable[None]] = unchecked,
) -> None:
    """Run a save of ``nbytes`` in this task, from its start on. If ``before_commit`` raises, nothing is committed."""

    async def work() -> Any:
        await io_threads().run(order.space.take, order.transaction, nbytes)
        await report(order.lifecycle.planned, order.save_id)
        written = await write(order.transaction)
        await before_commit()
        return written

    await report(order.lifecycle.started)
    await run_here(order, work, coordinator)
