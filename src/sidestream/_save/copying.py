"""Conversions and copies as save operations. Their data comes from another checkpoint, and they run in the caller's
task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from .._runtime.abandoned import register
from .._runtime.threads import io_threads
from .._storage import Transaction
from ..errors import SidestreamError
from .operation import Coordinator, Layout, SaveOperation, Solo
from .order import SaveOrder
from .pending import SaveProgress

__all__ = ["CopyingWriter", "run_here"]

T = TypeVar("T")

_DOING = {"export": "exporting", "convert": "converting", "copy": "copying"}


class CopyingWriter:
    """A writer that reads its data from another checkpoint, in the task of the caller. ``write`` writes all data files,
    and returns the facts about them that the layout needs."""

    def __init__(self, order: SaveOrder, write: Callable[[Transaction], Awaitable[Any]], nbytes: int) -> None:
        self._order = order
        self._write = write
        self._nbytes = nbytes

    def pass_on(self, staged: asyncio.Future[None]) -> None:
        # There are no sources that could change: the data comes from another checkpoint.
        staged.set_result(None)

    async def ended(self) -> tuple[Any, Any]:
        order = self._order
        await io_threads().run(order.space.take, order.transaction, self._nbytes)
        order.lifecycle.planned(order.save_id)
        return None, await self._write(order.transaction)

    async def release(self) -> None:
        """Do nothing: ``write`` has released its memory."""

    def interrupt(self) -> None:
        """Do nothing: the coroutines that wait for the threads stop them."""

    def leave(self) -> None:
        """Do nothing: each thread has ended when the coroutine that waits for it has."""

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
    """Run a save of ``nbytes`` in the task of the caller, and settle it if the loop of that task ends."""
    writer = CopyingWriter(order, write, nbytes)
    operation = SaveOperation(order=order, writer=writer, layout=layout, coordinator=coordinator or Solo(order))
    order.lifecycle.started()
    watched = register(_Unfinished(f"{_DOING[order.verb]} to {order.location.url}", operation))
    try:
        await operation.run(asyncio.get_running_loop().create_future())
    finally:
        watched.end()


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """An operation whose loop has ended."""

    what: str
    operation: SaveOperation

    @property
    def expires_at(self) -> float:
        return self.operation.expires_at

    def abandon(self) -> None:
        self.operation.abandon()

    def leave(self, *, stuck: bool) -> str:
        try:
            self.operation.leave(stuck=stuck)
        except (SidestreamError, OSError) as error:
            return f"outcome: {self.operation.outcome}; its files could not be removed: {error}"
        return f"outcome: {self.operation.outcome}"
