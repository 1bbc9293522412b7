"""The saves of one run, from their calls to their ends, in one process or in a group."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from .._format.records import Node
from .._group import Operation, prepare_together
from .._layout.metadata import encode_metadata
from .._runtime.threads import Deadline
from .._save.api import (
    PendingExport,
    PendingSave,
    SavedAs,
    SaveWork,
    Stager,
    Worker,
    plan_alone,
    prewarm,
    start_save,
    start_together,
)
from .._storage import FileSource, Location, check_sources, step_name
from ..errors import InvalidOptionError, RankFailuresError, TooManySavesError
from ..options import SaveOptions, WhenFull, check_step, options_of
from .exports import Exports
from .maintenance import Upkeep
from .queue import JointTurn, QueuedSave, SaveQueue, Started, Turn
from .run import Run
from .steps import Generations

__all__ = ["Saves"]

EARLIER = "an earlier save"
"""The step of the failure of a rank whose call raises the unretrieved error of an earlier save."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of a save, checked."""

    state: Mapping[str, Any]
    step: int
    options: SaveOptions
    metadata: Node = None
    files: Mapping[str, FileSource] = field(default_factory=dict)


class Saves:
    """The saves of one ``Checkpointer``. ``check_usable`` raises if the ``Checkpointer`` is closed. ``upkeep`` runs
    after each committed save. ``options`` are the defaults of each save."""

    def __init__(
        self,
        run: Run,
        options: SaveOptions,
        stager: Stager,
        worker: tuple[Worker | None, bool],
        exports: Exports,
        upkeep: Upkeep,
        check_usable: Callable[[], None],
        *,
        slots: int,
        when_full: WhenFull,
    ) -> None:
        self._run = run
        self.options = options
        self._stager = stager
        self._worker = worker
        self._when_full: WhenFull = when_full
        self._exports = exports
        self._upkeep = upkeep
        self._check_usable = check_usable
        self._queue = SaveQueue(slots)
        self._pending: list[PendingSave] = []
        self._generations = Generations(run.store, slots)
        self._orders = itertools.count()
        self._under_way: dict[int, int] = {}  # the steps of saves that have not ended, by the order of their calls
        self._last_order = -1
        self.last: tuple[int, float] | None = None
        """The step that was committed last, and the time of that (``time.monotonic`` seconds)."""

    async def prewarm(self, state: Mapping[str, Any] | int | None) -> None:
        """Do ``Checkpointer.prewarm``, or ``reserve`` if ``state`` is a number of bytes."""
        run, options = self._run, self.options
        alone = SavedAs(options.names, options.dtype).applied(plan_alone, run.url, others=False)
        with run.time_limit():
            await run.store.connect()
            await prewarm(state, self._stager, self._worker, plan=alone if run.together() is None else None)

    # --- one save ---

    async def save(
        self,
        state: Mapping[str, Any],
        step: int,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, FileSource] | None = None,
        options: SaveOptions | None = None,
        *,
        promised: bool = False,
    ) -> PendingSave:
        """Do ``Checkpointer.async_save``. A ``promised`` save is never skipped, and is made also if other saves have
        failed."""
        options = self.options if options is None else self._checked(options)
        run, member = self._run, self._run.together()
        when_full: WhenFull = "wait" if promised else self._when_full
        limit = Deadline.after(options.timeout_s)
        operation = None if member is None else member.begin("save", limit, options.rank_wait_s)
        if operation is None:
            turn = Turn(self._queue, when_full)
        else:
            turn = self._joint_turn(operation, step, promised=promised)

        async def check() -> _Asked:
            check_step(step)
            asked = _Asked(state, step, options, encode_metadata(metadata), check_sources(files))
            if not promised:
                self._raise_unretrieved_to_all(operation) if operation else self.raise_unretrieved()
            return asked

        try:
            asked = await (check() if operation is None else prepare_together(operation, check))
            queued = when_full == "latest" and (operation is not None or not turn.ask())
            exports = self._exports.of(step, run.at(step_name(step, 1)).url)
            checks = not (promised or queued)
            work = QueuedSave(run.url, step, turn, partial(self._start, turn, operation, asked, exports, checks=checks))
            if not queued and not await work.begin():
                if when_full == "fail":
                    raise TooManySavesError(f"{work.url} was not saved: {turn.why}, as many as slots= allows")
                return PendingSave(work)
            pending = PendingSave(work, exports)
        except BaseException:
            turn.leave()
            raise
        self._watch_over(pending, step)
        return pending

    async def _claim(self, step: int) -> int:
        with self._run.time_limit():
            return await self._generations.claim(step)

    def _checked(self, options: SaveOptions) -> SaveOptions:
        """Return the options of one save. Raises ``InvalidOptionError`` for those that belong to the whole run."""
        options, mine, default = options_of(options, SaveOptions), self.options, SaveOptions()
        for name in ("writer", "streaming"):
            if getattr(options, name) not in (getattr(mine, name), getattr(default, name)):
                raise InvalidOptionError(
                    f"{name}= is the same for all saves of a Checkpointer: "
                    f"pass Checkpointer(save=SaveOptions({name}=...))"
                )
        return replace(options, writer=mine.writer, streaming=mine.streaming)

    def _joint_turn(self, operation: Operation, step: int, *, promised: bool) -> JointTurn:
        deadline = self._run.deadline
        return JointTurn(self._queue, self._when_full, operation, step, deadline, self._claim, promised=promised)

    async def _start(
        self,
        turn: Turn,
        operation: Operation | None,
        asked: _Asked,
        exports: tuple[PendingExport, ...],
        *,
        checks: bool,
    ) -> Started:
        run, generation = self._run, turn.generation
        if generation is None:
            with run.time_limit():
                generation = await self._generations.next(asked.step)
            if checks:  # closing waits for promised and queued saves, which are made also if other saves have failed
                self._check_usable()  # the Checkpointer may have been closed while this save waited
                self.raise_unretrieved()
        target = run.at(step_name(asked.step, generation))
        launch = partial(self._launch, asked, generation, exports, target)
        if operation is not None:
            work = start_together(launch, operation, target.url)
            return work, None if operation.rank else run.leases.announce(target.name, "save")
        work = launch(None)
        self._generations.started(asked.step, generation)
        return work, run.leases.announce(target.name, "save")

    def _launch(
        self,
        asked: _Asked,
        generation: int,
        exports: tuple[PendingExport, ...],
        target: Location,
        operation: Operation | None,
    ) -> SaveWork:
        return start_save(
            asked.state,
            target,
            asked.options,
            stager=self._stager,
            step=asked.step,
            generation=generation,
            metadata=asked.metadata,
            worker=self._worker,
            operation=operation,
            exports=exports,
            files=asked.files,
        )

    # --- all saves ---

    def _watch_over(self, pending: PendingSave, step: int) -> None:
        order = next(self._orders)
        self._under_way[order] = step
        pending.when_done(lambda: self._on_done(pending, order, step))
        self._pending = [one for one in self._pending if not one.done() or one.unretrieved is not None] + [pending]
        self._exports.watch_over(pending.exports, deletes=self._run.leads)

    def _on_done(self, pending: PendingSave, order: int, step: int) -> None:
        del self._under_way[order]
        if pending.outcome == "committed":
            if order > self._last_order:  # of two saves that overlap, the last one is that with the later call
                self._last_order, self.last = order, (step, time.monotonic())
            if self._run.leads:
                self._upkeep.request()

    def protected(self) -> list[int]:
        """Return the step that was saved last, and the steps of saves that have not ended. A listing may contain the
        commit of a save that has not ended."""
        return [*self._under_way.values(), *([] if self.last is None else [self.last[0]])]

    @property
    def pending(self) -> int:
        """The number of saves that have not ended."""
        return sum(not save.done() for save in self._pending)

    @property
    def failures(self) -> list[BaseException]:
        """The errors of saves that were not retrieved."""
        return [save.unretrieved for save in self._pending if save.unretrieved is not None]

    def raise_unretrieved(self) -> None:
        """Raise the unretrieved errors of saves and of upkeep: the first one, with the others as its notes. They are
        retrieved then."""
        errors = self.failures
        for save in self._pending:
            if save.unretrieved is not None:
                save.mark_retrieved()
        if self._upkeep.unretrieved is not None:
            errors.append(self._upkeep.unretrieved)
            self._upkeep.unretrieved = None
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"besides: {type(other).__name__}: {other}")
            raise errors[0]

    def _raise_unretrieved_to_all(self, operation: Operation) -> None:
        """Raise the unretrieved errors of this rank, which ends this save on all ranks.

        Another rank may receive the failure of this save after its own call has returned. It does not raise that
        failure in its next call, because then one failure would end one save after another, on one rank after another.
        Closing raises it."""
        self._pending = [save for save in self._pending if not _ended_by_earlier(save.unretrieved)]
        operation.step = EARLIER
        self.raise_unretrieved()
        operation.step = "start"

    def cancel(self) -> None:
        for save in self._pending:
            save.cancel()

    async def ended(self) -> None:
        """Wait until all saves have ended. Never raises their errors."""
        for save in self._pending:
            await save.ended()


def _ended_by_earlier(error: BaseException | None) -> bool:
    """Return whether a save failed only because a rank raised the error of an earlier save."""
    return isinstance(error, RankFailuresError) and all(one.step == EARLIER for one in error.failures)
