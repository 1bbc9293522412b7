"""``Opened``: the loop and the process of a ``Checkpointer``, and its resources while it is open."""

from __future__ import annotations

import asyncio
import math
import os
import weakref
from contextlib import suppress

from .._runtime.abandoned import RegisteredOperation, register
from .._runtime.tasks import run_shielded, running_loop
from .._save.api import STREAM_BYTES, check_stager
from .._staging import AsyncStager
from .._storage import Store
from .._worker.client import choose_worker
from ..errors import ClosedError, ForkedProcessError, InvalidOptionError, SidestreamError, WrongLoopError
from ..options import Backing, SaveOptions

__all__ = ["Opened"]


class Opened:
    """The state of the ``Checkpointer`` of the run at ``url``: not entered, open, or closed. ``stager`` and ``worker``
    are those of its saves. It owns the worker, and the stager unless the caller gave one.

    While it is open it is registered, so that its resources are released if its loop ends. So it refers to the loop
    weakly.
    """

    expires_at = math.inf

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
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._registration: RegisteredOperation | None = None
        self.closed = False

    def enter(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        if self._worker is not None:
            self._worker.acquire()
        self._registration = register(self, holds_loop=False)

    async def release(self) -> None:
        """Release the resources. A cancel does not interrupt this."""
        if self._registration is not None:
            self._release_worker()
            self._registration.end()
        if self._stager is not None:
            await run_shielded(self._stager.aclose)

    def check(self) -> None:
        """Raise ``ForkedProcessError``, ``ClosedError`` or ``WrongLoopError`` if the ``Checkpointer`` cannot be used
        here."""
        if os.getpid() != self._pid:
            raise ForkedProcessError("this Checkpointer was made before os.fork(); make a new one in the child")
        if self.closed:
            raise ClosedError(f"the Checkpointer of {self._url} is closed; make a new one")
        if self._loop is None:
            raise ClosedError("enter the Checkpointer first: async with sidestream.Checkpointer(...) as checkpoints")
        if running_loop("Checkpointer") is not self._loop():
            raise WrongLoopError(f"the Checkpointer of {self._url} belongs to another event loop")

    def _release_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.release()

    # --- after the end of the loop ---

    @property
    def what(self) -> str:
        return f"the Checkpointer of {self._url} was not closed"

    def abandon(self) -> None:
        """Do nothing: saves are registered separately."""

    def leave(self, *, stuck: bool) -> str:
        self._release_worker()
        if self._stager is not None:
            with suppress(SidestreamError):  # reported elsewhere
                self._stager.close()
        return "its staging memory and its writer process were released"
