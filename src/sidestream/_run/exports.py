"""What follows a save of a run in the background: its exports, the deletion of old ones, and the record of failures."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._engine.loop import operation_loop
from .._runtime.tasks import run_shielded, supervise
from .._runtime.threads import Deadline, time_limit
from .._save.running import Save
from .._save.sinks import (
    Export,
    PendingExport,
    PendingOutcome,
    Publishes,
    Sink,
    all_ended,
    exports_in,
    publication,
    sinks_of,
)
from .._storage import parse_step, step_name
from ..errors import CorruptCheckpointError, InvalidOptionError, SidestreamError, printable_lines
from ..options import Durability, check_count
from .leases import Lease, Leases

_log = logging.getLogger("sidestream")


class Upkeep:
    """A background task that runs ``work`` on request. Requests that arrive during a run lead to one more run.

    ``damage`` returns the damage that is known after a run. A failure of another type than that of the run before, and
    damage that was not known then, are logged, and are in ``problems`` until a caller raises them. ``error`` is the
    text of the failure of the last run, or of the last damage; None if there is none.
    """

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, object]],
        name: str,
        damage: Callable[[], Sequence[CorruptCheckpointError]] = tuple,
    ) -> None:
        self._work = work
        self._name = name
        self._damage = damage
        self._task: asyncio.Task[None] | None = None
        self._requested = False
        self._failed: type[Exception | None] = type(None)
        self._known: Sequence[Exception] = ()
        self._problems: dict[object, _Problem] = {}
        self.error: str | None = None

    def problems(self) -> list[_Problem]:
        return [problem for problem in self._problems.values() if problem.unretrieved is not None]

    def request(self) -> None:
        """Request a run. Returns at once."""
        self._requested = True
        loop = operation_loop()
        self._begin() if loop.is_here() else loop.call(self._begin)

    def _begin(self) -> None:
        if self._task is None or self._task.done():
            self._task = supervise(self._run(), self._name)

    async def ended(self) -> None:
        """Wait until nothing is requested and nothing runs."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        """Cancel the task. Does not wait."""
        self._requested = False
        operation_loop().call(lambda: self._task is not None and self._task.cancel())

    async def stop(self) -> None:
        """Cancel the task, and wait until it has ended."""
        self._requested = False
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._requested:
            self._requested = False
            failure: Exception | None = None
            try:
                await self._work()
            except Exception as error:  # any class: a retention policy of the user may raise it
                failure = error
            # A failure that repeats is reported once. Retention runs after each save, and a bucket without permissions
            # would fill the log.
            if failure is not None and type(failure) is not self._failed:
                self._report(type(failure), failure)
            known, self._known = self._known, self._damage()
            for damage in self._known:
                if not any(damage is each for each in known):
                    self._report(str(damage), damage.reworded(str))  # a copy: a raised error keeps the caller's frames
            self._failed = type(failure)
            last = failure or next(reversed(self._known), None)
            self.error = None if last is None else str(last)

    def _report(self, key: object, error: Exception) -> None:
        _log.error("%s: %s: %s", self._name, type(error).__name__, printable_lines(str(error)))
        self._problems[key] = _Problem(error)


@dataclass
class _Problem:
    """A problem of upkeep, which a later call raises."""

    unretrieved: Exception | None

    def mark_retrieved(self) -> None:
        self.unretrieved = None


class Exports:
    """The exports of one ``Checkpointer`` of the run at ``run``. Steps that are multiples of ``every`` are exported.
    ``keep`` is the number of exports that are kept for each template; None for all.

    An export has a lease on its step, which it may have to read. ``after_each`` is called when it has ended, so that
    retention deletes a step that stayed because of the lease. Exports to one target work one after the other, in the
    order of their saves, so that the last one stays."""

    def __init__(
        self,
        export: Export | Sequence[Export] | None,
        run: str,
        leases: Leases,
        after_each: Callable[[], None] | None,
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
        self._leases, self._after_each = leases, after_each
        self._every, self._keep = every, keep
        self._durability: Durability = durability
        self._timeout_s = timeout_s
        self.pruning = Upkeep(self._prune, f"sidestream exports of {run}")
        """The deletion of old exports."""
        self._lock = threading.Lock()
        self._made: list[PendingOutcome] = []

    def of(
        self, step: int, target: str, publish: Publishes | None, metadata: Mapping[str, Any] | None
    ) -> tuple[PendingOutcome, ...]:
        """Return the exports of the save of ``step`` to the URL ``target``, and the version that it publishes. Called
        in the order of the saves, in any thread. The caller ends those that it does not give to a ``PendingSave``."""
        wanted = () if step % self._every else self._wanted
        sinks = sinks_of(wanted, target, step=step, durability=self._durability)
        version = publication(publish, step, metadata, partial(self._leased_and_in_order, []))
        with self._lock:
            made = (*map(self._pending_export, sinks), *version)
            self._made = [*(one for one in self._made if not one.done()), *made]
        return made

    def _pending_export(self, sink: Sink) -> PendingExport:
        before = [one for one in self._made if one.url == sink.url and not one.done()][-1:]
        return PendingExport(sink, partial(self._leased_and_in_order, before))

    @asynccontextmanager
    async def _leased_and_in_order(self, before: list[PendingOutcome], save: Save) -> AsyncIterator[None]:
        """Lease the step of ``save``, if this process commits it, and wait until ``before`` has ended. The
        lease is put before the step can be deleted, because the save is not committed yet."""
        lease: Lease | None = None
        if save.rank == 0:
            with suppress(SidestreamError, OSError), time_limit(Deadline.after(self._timeout_s)):
                lease = await self._leases.try_reading(save.location.name)
        try:
            # Exports to one target replace each other, so they work in the order of their saves: the last save stays.
            # The list is emptied, because an export that has ended refers to its save.
            while before:
                await before.pop().ended()
            yield
        finally:
            if lease is not None:
                await lease.release()

    def delete_after(self, outcomes: Sequence[PendingOutcome]) -> None:
        """Request the deletions of this process after each of these."""
        for one in outcomes:
            if self._after_each is not None:
                one.when_done(self._after_each)
            if self._keep is not None:
                one.when_done(self.pruning.request)

    async def ended(self) -> None:
        """Wait until all exports, and the deletions after them, have ended. Never raises their errors."""
        await all_ended(self._made)
        await self.pruning.ended()

    def cancel(self) -> None:
        """Cancel all exports."""
        for one in self._made:
            one.cancel()
        self.pruning.cancel()

    async def stop(self) -> None:
        """Cancel all exports, and wait until they have cleaned up."""
        for one in self._made:
            one.cancel()
        await run_shielded(self.ended)

    async def _prune(self) -> None:
        assert self._keep is not None
        with time_limit(Deadline.after(self._timeout_s)):
            for one in self._wanted:
                await one.prune(self._keep, durability=self._durability)
