"""Saves whose data a coroutine writes, in the task of the caller: conversions, copies, exports, and saves of DCP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from .._runtime.threads import Stop, ThreadFuture, write_threads
from .operation import Coordinator, Layout, SaveOperation, Solo
from .pending import SaveInfo, SaveProgress
from .running import Save


class _TaskWriter:
    """A writer without a live state. ``write`` returns when all data is on storage, with what the layout needs to know
    of it."""

    def __init__(
        self, save: Save, write: Callable[[], Awaitable[Any]], finish: Callable[[Any, Any, Stop], Any]
    ) -> None:
        self._save = save
        self._write = write
        self._finish = finish

    def pass_on(self, staged: Future[None]) -> None:
        # There are no sources that could change.
        staged.set_result(None)

    async def ended(self) -> Any:
        if self._save.reads_files:
            await self._save.read_files()
        written, stop = await self._write(), Stop()
        return await write_threads().run(self._finish, None, written, stop, stop=stop)

    async def release(self) -> None:
        """Do nothing: ``write`` has released its memory."""

    def interrupt(self) -> None:
        """Do nothing: the coroutines that wait for the threads stop them."""

    def progress(self) -> SaveProgress:
        """Return nothing: a callback of the caller reports the progress."""
        return SaveProgress()


async def run_here(
    save: Save, write: Callable[[], Awaitable[Any]], layout: Layout, coordinator: Coordinator | None = None
) -> SaveInfo:
    """Run a save in this task. ``write`` writes all data files, and returns what ``layout`` needs to know of them."""
    coordinator = coordinator or Solo(save, layout)
    writer = _TaskWriter(save, write, coordinator.finish)
    return await SaveOperation(save=save, writer=writer, coordinator=coordinator).run(ThreadFuture())
