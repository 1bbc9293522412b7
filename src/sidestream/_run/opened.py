"""``Opened``: the process of a ``Checkpointer``, and its resources while it is open."""

from __future__ import annotations

import os

from .._runtime.tasks import run_shielded
from .._save.api import STREAM_BYTES, check_stager
from .._staging import AsyncStager
from .._storage import Store
from .._worker.client import choose_worker
from ..errors import ClosedError, ForkedProcessError, InvalidOptionError
from ..options import Backing, SaveOptions


class Opened:
    """The state of the ``Checkpointer`` of the run at ``url``: not entered, open, or closed. ``stager`` and ``worker``
    are those of its saves. It owns the worker, and the stager unless the caller gave one.
    """

    def __init__(self, url: str, store: Store, options: SaveOptions, stager: AsyncStager | None) -> None:
        check_stager(stager)
        if options.streaming and stager is not None:
            raise InvalidOptionError("streaming=True passes through memory of its own: leave out stager=")
        self._url = url
        self.worker = choose_worker(options.writer, store)
        self._worker = self.worker[0]
        self._stager: AsyncStager | None = None
        if stager is None:
            backing: Backing = "private" if self._worker is None else "shared"
            budget_bytes = STREAM_BYTES if options.streaming else None
            stager = self._stager = AsyncStager(budget_bytes=budget_bytes, timeout_s=options.timeout_s, backing=backing)
        self.stager = stager
        self._pid = os.getpid()
        self.entered = False
        self.closed = False

    def enter(self) -> None:
        self.entered = True
        if self._worker is not None:
            self._worker.acquire()

    async def release(self) -> None:
        """Release the resources. A cancel does not interrupt this."""
        worker, self._worker = self._worker, None
        if worker is not None and self.entered:
            worker.release()
        if self._stager is not None:
            await run_shielded(self._stager.aclose)

    def check(self) -> None:
        """Raise ``ForkedProcessError`` or ``ClosedError`` if the ``Checkpointer`` cannot be used."""
        if os.getpid() != self._pid:
            raise ForkedProcessError("this Checkpointer was made before os.fork(); make a new one in the child")
        if self.closed:
            raise ClosedError(f"the Checkpointer of {self._url} is closed; make a new one")
        if not self.entered:
            raise ClosedError(
                "enter the Checkpointer first: async with sidestream.Checkpointer(...) as checkpoints, or await open()"
            )
