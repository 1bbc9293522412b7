"""What follows a save of a run in the background: its exports, the deletion of old ones, and the record of failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from .._runtime.tasks import run_shielded, supervise
from .._runtime.threads import Deadline, time_limit
from .._save.sinks import Export, PendingExport, all_ended, exports_in, sinks_of
from .._storage import parse_step, step_name
from ..errors import InvalidOptionError, printable_lines
from ..options import Durability, check_count

__all__ = ["Exports", "Upkeep"]


_log = logging.getLogger("sidestream")


class Upkeep:
    """A background task that runs ``work`` on request. Requests that arrive during a run lead to one more run.

    ``work`` raises a failure, or returns the damage that it knows of, newest first. ``error`` is the first of them in
    the last run, or None. A failure of another type than that of the run before, or another damage, is logged. It is
    also in ``unretrieved``, or among its notes, until a caller raises it.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Sequence[Exception]]], name: str) -> None:
        self._work = work
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._requested = False
        self._failed: type[Exception] | None = None
        self._damage: Sequence[Exception] = ()
        self.error: Exception | None = None
        self.unretrieved: Exception | None = None

    def mark_retrieved(self) -> None:
        self.unretrieved = None

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
                damage = await self._work()
            except Exception as failure:  # any class: a retention policy of the user may raise it
                if type(failure) is not self._failed:
                    self._report(failure)
                self._failed, self.error = type(failure), failure
                continue
            for error in reversed(damage):
                if not any(error is known for known in self._damage):
                    self._report(error)
            self._failed, self._damage, self.error = None, damage, next(iter(damage), None)

    def _report(self, error: Exception) -> None:
        _log.error("%s: %s: %s", self._name, type(error).__name__, printable_lines(str(error)))
        if self.unretrieved is None:
            self.unretrieved = error
        else:
            self.unretrieved.add_note(f"another failure: {type(error).__name__}: {error}")


class Exports:
    """The exports of one ``Checkpointer`` of the run at ``run``. Steps that are multiples of ``every`` are exported.
    ``keep`` is the number of exports that are kept for each template; None for all."""

    def __init__(
        self,
        export: Export | Sequence[Export] | None,
        run: str,
        *,
        every: int,
        keep: int | None,
        durability: Durability,
        timeout_s: float,
    ) -> None:
        check_count("exports_every", every)
        self._wanted = exports_in(export)
        if keep is not None:
            check_count("exports_keep", keep)
            if not all(one.counts_steps for one in self._wanted):
                raise InvalidOptionError("exports_keep= needs {step} in the last part of the URL of each export")
        for sink in sinks_of(self._wanted, f"{run}/{step_name(0, 1)}", step=0, durability=durability):
            parent, _, name = sink.url.rpartition("/")
            if parent == run and parse_step(name) is not None:
                raise InvalidOptionError(
                    f"{sink.url} would be taken for a step of the run: export to another directory"
                )
        self._every, self._keep = every, keep
        self._durability: Durability = durability
        self._timeout_s = timeout_s
        self._pruning = Upkeep(self._prune, f"sidestream exports of {run}")
        self._pending: list[PendingExport] = []

    def of(self, step: int, target: str) -> tuple[PendingExport, ...]:
        """Return the exports of the save of ``step`` to the URL ``target``. Called on the loop."""
        if step % self._every:
            return ()
        sinks = sinks_of(self._wanted, target, step=step, durability=self._durability)
        return tuple(PendingExport(sink) for sink in sinks)

    def watch_over(self, exports: Sequence[PendingExport], *, deletes: bool) -> None:
        """Add these exports to those that ``ended`` waits for. With ``deletes``, apply ``keep`` after each of them.
        They belong to a save that will end, so they will end too."""
        self._pending = [*(one for one in self._pending if not one.done()), *exports]
        for one in exports if deletes and self._keep is not None else ():
            one.when_done(self._pruning.request)

    async def ended(self) -> None:
        """Wait until all exports, and the deletions after them, have ended. Never raises their errors."""
        await all_ended(self._pending)
        await self._pruning.ended()

    async def stop(self) -> None:
        """Cancel all exports, and wait until they have cleaned up."""
        for one in self._pending:
            one.cancel()
        await run_shielded(self.ended)

    async def _prune(self) -> Sequence[Exception]:
        assert self._keep is not None
        with time_limit(Deadline.after(self._timeout_s)):
            for one in self._wanted:
                await one.prune(self._keep, durability=self._durability)
        return ()
