"""``Opened``: the loop and the process that a ``Checkpointer`` belongs to, and what it holds while it is open."""

from __future__ import annotations

import asyncio
import math
import os
from contextlib import suppress
from dataclasses import dataclass

from .._runtime.abandoned import RegisteredOperation, register
from .._runtime.tasks import run_shielded, running_loop
from .._staging import AsyncStager
from .._worker.client import Worker
from ..errors import ClosedError, ForkedProcessError, SidestreamError, WrongLoopError

__all__ = ["Opened"]


@dataclass(slots=True)
class _Holding:
    """The resources of an open ``Checkpointer``, registered in case its loop ends. Nothing here refers to that loop."""

    url: str
    stager: AsyncStager | None
    worker: Worker | None
    expires_at: float = math.inf

    def release(self) -> None:
        """Release the writer process."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.release()

    @property
    def what(self) -> str:
        return f"the Checkpointer of {self.url} was not closed"

    def abandon(self) -> None:
        """Do nothing: saves are registered separately."""

    def leave(self, *, stuck: bool) -> str:
        self.release()
        if self.stager is not None:
            with suppress(SidestreamError):  # reported elsewhere
                self.stager.close()
        return "its staging memory and its writer process were released"


class Opened:
    """Whether the ``Checkpointer`` of the run at ``url`` may be used. ``stager`` and ``saver`` are its own."""

    def __init__(self, url: str, stager: AsyncStager | None, worker: Worker | None) -> None:
        self._url = url
        self._stager = stager
        self._worker = worker
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holding: _Holding | None = None
        self._watch: RegisteredOperation | None = None
        self.closed = False

    def enter(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        if self._worker is not None:
            self._worker.acquire()
        self._holding = _Holding(self._url, self._stager, self._worker)
        self._watch = register(self._holding, holds_loop=False)

    async def release(self) -> None:
        """Release what it holds, cancelled or not."""
        if self._holding is not None and self._watch is not None:
            self._holding.release()
            self._watch.end()
        if self._stager is not None:
            await run_shielded(self._stager.aclose)

    def check(self) -> None:
        """Raise ``ForkedProcessError``, ``ClosedError`` or ``WrongLoopError`` if it cannot be used here."""
        if os.getpid() != self._pid:
            raise ForkedProcessError("this Checkpointer was made before os.fork(); make a new one in the child")
        if self.closed:
            raise ClosedError(f"the Checkpointer of {self._url} is closed")
        if self._loop is None:
            raise ClosedError("enter the Checkpointer first: async with sidestream.Checkpointer(...) as checkpoints")
        if running_loop("Checkpointer") is not self._loop:
            raise WrongLoopError(f"the Checkpointer of {self._url} belongs to another event loop")
