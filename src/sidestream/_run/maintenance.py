"""Background work that follows a save, and the record of its failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from .._runtime.tasks import supervise
from ..errors import printable_lines

__all__ = ["Upkeep"]

_log = logging.getLogger("sidestream")


class Upkeep:
    """A background task that runs ``work`` on request. Requests that arrive during a run lead to one more run.

    A failure may be raised or returned. ``error`` has the failure of the last run, or None. A failure of another type
    than that of the run before is logged, and is also in ``unretrieved`` until a caller raises it.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Exception | None]], name: str) -> None:
        self._work = work
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._requested = False
        self.error: Exception | None = None
        self.unretrieved: Exception | None = None

    def request(self) -> None:
        """Request a run. Returns at once. Called on the loop."""
        self._requested = True
        if self._task is None or self._task.done():
            self._task = supervise(self._run(), self._name)

    async def ended(self) -> None:
        """Wait until nothing is requested and nothing runs."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Cancel the task, and wait until it has ended."""
        self._requested = False
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._requested:
            self._requested = False
            try:
                error = await self._work()
            except Exception as failure:  # any class: a retention policy of the user may raise it
                error = failure
            if error is not None and type(error) is not type(self.error):
                self.unretrieved = error
                _log.error("%s: %s: %s", self._name, type(error).__name__, printable_lines(str(error)))
            self.error = error
