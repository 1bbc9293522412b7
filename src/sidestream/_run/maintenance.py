"""Work that follows a save, in the background, and whose failure is heard of."""

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
    """Runs ``work`` once for any number of requests that come while it runs.

    A failure, raised or returned, is logged, stands in ``error`` until a run succeeds, and is ``unretrieved`` until
    somebody has been told; the same kind of failure in the next run is not told again.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Exception | None]], name: str) -> None:
        self._work = work
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._requested = False
        self.error: Exception | None = None
        self.unretrieved: Exception | None = None

    def request(self) -> None:
        """On the loop. Returns at once."""
        self._requested = True
        if self._task is None or self._task.done():
            self._task = supervise(self._run(), self._name)

    async def ended(self) -> None:
        """Wait until nothing is requested and nothing runs."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Cancel it, and wait until it has stopped."""
        self._requested = False
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._requested:
            self._requested = False
            try:
                error = await self._work()
            except Exception as failure:  # also of a policy of the user's own
                error = failure
            if error is not None and type(error) is not type(self.error):
                self.unretrieved = error
                _log.error("%s: %s: %s", self._name, type(error).__name__, printable_lines(str(error)))
            self.error = error
