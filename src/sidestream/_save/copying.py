"""Conversions and copies as save operations. Their data comes from another checkpoint, and they run in the caller's
task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .._runtime.threads import ThreadFuture, io_threads, report
from .._storage import Transaction
from .operation import Coordinator, Layout, SaveOperation, Solo
from .order import SaveOrder
from .pending import SaveProgress

__all__ = ["CopyingWriter", "run_here"]

T = TypeVar("T")


class CopyingWriter:
    """A writer that reads its data from another checkpoint, in the task of the caller. ``write`` writes all data files,
    and returns the facts about them that the layout needs."""

    def __init__(self, order: SaveOrder, write: Callable[[Transaction], Awaitable[Any]], nbytes: int) -> None:
        self._order = order
        self._write = write
        self._nbytes = nbytes

    def pass_on(self, staged: Future[None]) -> None:
        # There are no sources that could change: the data comes from another checkpoint.
        staged.set_result(None)

    async def ended(self) -> tuple[Any, Any]:
        order = self._order
        await io_threads().run(order.space.take, order.transaction, self._nbytes)
        await report(order.lifecycle.planned, order.save_id)
        return None, await self._write(order.transaction)

    async def release(self) -> None:
        """Do nothing: ``write`` has released its memory."""

    def interrupt(self) -> None:
        """Do nothing: the coroutines that wait for the threads stop them."""

    def progress(self) -> SaveProgress:
        """Return nothing: a callback of the caller reports the progress."""
        return SaveProgress()


async def run_here(
    order: SaveOrder,
    write: Callable[[Transaction], Awaitable[Any]],
    layout: Layout,
    nbytes: int,
    coordinator: Coordinator | None = None,
) -> None:
    """Run a save of ``nbytes`` in this task."""
    writer = CopyingWriter(order, write, nbytes)
    operation = SaveOperation(order=order, writer=writer, layout=layout, coordinator=coordinator or Solo(order))
    await report(order.lifecycle.started)
    await operation.run(ThreadFuture())
