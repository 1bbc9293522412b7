"""The saves of one run: started in turn, alone or with other ranks, watched until they have ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .._format.records import Node
from .._group import Operation, call_together
from .._layout.metadata import encode_metadata
from .._save.api import (
    PendingExport,
    PendingSave,
    SavedAs,
    Saver,
    SaveWork,
    Stager,
    plan_alone,
    prewarm,
    start_save,
    start_together,
)
from .._storage import FileSource, Location, check_sources, step_name
from ..errors import Busy, RankFailures
from ..options import Digest, Durability, Overlap, check_step
from .exports import Exports
from .maintenance import Upkeep
from .queue import JointTurn, QueuedSave, SaveQueue, Started, Turn
from .run import Run
from .steps import Generations

__all__ = ["SaveOptions", "Saves"]

EARLIER = "an earlier save"
"""The step in which a rank fails that raises, in its call, what it had not told anybody yet."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a save was asked to do."""

    state: Mapping[str, Any]
    step: int
    metadata: Node = None
    planner: Any = None
    files: Mapping[str, FileSource] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What all saves of a run have in common."""

    stager: Stager
    saver: tuple[Saver | None, bool]
    durability: Durability
    digest: Digest | None
    overlap: Overlap
    saved_as: SavedAs


class Saves:
    """The saves of one ``Checkpointer``. ``check_usable`` raises when that is closed; ``upkeep`` is what follows a save
    that was committed."""

    def __init__(
        self,
        run: Run,
        options: SaveOptions,
        exports: Exports,
        upkeep: Upkeep,
        check_usable: Callable[[], None],
        *,
        in_flight: int,
    ) -> None:
        self._run = run
        self.options = options
        self._exports = exports
        self._upkeep = upkeep
        self._check_usable = check_usable
        self._queue = SaveQueue(in_flight)
        self._pending: list[PendingSave] = []
        self._generations = Generations(run.store, in_flight)
        self._orders = itertools.count()
        self._under_way: dict[int, int] = {}  # the steps of saves that have not ended, by the order of their calls
        self._last_order = -1
        self.last: tuple[int, float] | None = None
        """The step that was committed last, and when."""

    async def prewarm(self, state: Mapping[str, Any] | int | None) -> None:
        """As ``Checkpointer.prewarm``."""
        run, options = self._run, self.options
        alone = options.saved_as.applied(plan_alone, run.url, others=False)
        with run.time_limit():
            await prewarm(state, options.stager, options.saver, plan=alone if run.together() is None else None)

    # --- one save ---

    async def save(
        self,
        state: Mapping[str, Any],
        step: int,
        metadata: Mapping[str, Any] | None = None,
        planner: Any = None,
        files: Mapping[str, FileSource] | None = None,
        *,
        promised: bool = False,
    ) -> PendingSave:
        """As ``Checkpointer.save``. ``promised``: never skipped, and made whatever became of other saves."""
        run, member = self._run, self._run.together()
        overlap: Overlap = "wait" if promised else self.options.overlap
        operation = None if member is None else member.begin("save", run.deadline(), run.rank_wait_s)
        turn = Turn(self._queue, overlap) if operation is None else self._joint_turn(operation, step, promised=promised)

        async def check() -> _Asked:
            check_step(step)
            asked = _Asked(state, step, encode_metadata(metadata), planner, check_sources(files))
            if not promised:
                self._raise_unheard_to_all(operation) if operation else self.raise_unheard()
            return asked

        try:
            asked = await (check() if operation is None else call_together(operation, check))
            queued = overlap == "latest" and (operation is not None or not turn.ask())
            exports = self._exports.of(step, run.at(step_name(step, 1)).url)
            checks = not (promised or queued)
            work = QueuedSave(run.url, step, turn, partial(self._start, turn, operation, asked, exports, checks=checks))
            if not queued and not await work.begin():
                if overlap == "fail":
                    raise Busy(f"{work.url} was not saved: {turn.why}, as many as in_flight= allows")
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

    def _joint_turn(self, operation: Operation, step: int, *, promised: bool) -> JointTurn:
        overlap, deadline = self.options.overlap, self._run.deadline
        return JointTurn(self._queue, overlap, operation, step, deadline, self._claim, promised=promised)

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
            if checks:  # for the others closing waits, and they are made whatever became of other saves
                self._check_usable()  # it may have been closed while this waited
                self.raise_unheard()
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
        options = self.options
        return start_save(
            asked.state,
            target,
            stager=options.stager,
            durability=options.durability,
            timeout_s=self._run.timeout_s,
            step=asked.step,
            generation=generation,
            metadata=asked.metadata,
            digest=options.digest,
            saver=options.saver,
            operation=operation,
            planner=asked.planner,
            exports=exports,
            files=asked.files,
            saved_as=options.saved_as,
        )

    # --- all saves ---

    def _watch_over(self, pending: PendingSave, step: int) -> None:
        order = next(self._orders)
        self._under_way[order] = step
        pending.when_done(lambda: self._on_done(pending, order, step))
        self._pending = [one for one in self._pending if not one.done() or one.unheard is not None] + [pending]
        self._exports.watch_over(pending.exports, deletes=self._run.leads)

    def _on_done(self, pending: PendingSave, order: int, step: int) -> None:
        del self._under_way[order]
        if pending.outcome == "committed":
            if order > self._last_order:  # of two that overlap, the one that was begun later is the last one
                self._last_order, self.last = order, (step, time.monotonic())
            if self._run.leads:
                self._upkeep.request()

    def protected(self) -> list[int]:
        """Return the step that was saved last, and those under way: a commit is listed before its save has ended."""
        return [*self._under_way.values(), *([] if self.last is None else [self.last[0]])]

    @property
    def in_flight(self) -> int:
        """How many have not ended."""
        return sum(not save.done() for save in self._pending)

    @property
    def failures(self) -> list[BaseException]:
        """What saves failed with that nobody has awaited."""
        return [save.unheard for save in self._pending if save.unheard is not None]

    def raise_unheard(self) -> None:
        """Raise what nobody has heard of, of saves and of what followed them: one error, with the others as its
        notes."""
        errors = self.failures
        for save in self._pending:
            if save.unheard is not None:
                save.hear()
        if self._upkeep.unheard is not None:
            errors.append(self._upkeep.unheard)
            self._upkeep.unheard = None
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"besides: {type(other).__name__}: {other}")
            raise errors[0]

    def _raise_unheard_to_all(self, operation: Operation) -> None:
        """It ends this save on all ranks. One that learns of that after its call does not raise it in its next one: a
        single failure would end save after save, by turns. Closing raises it."""
        self._pending = [save for save in self._pending if not _tells_of_earlier(save.unheard)]
        operation.step = EARLIER
        self.raise_unheard()
        operation.step = "start"

    def cancel(self) -> None:
        for save in self._pending:
            save.cancel()

    async def ended(self) -> None:
        """Wait until all have ended. Never raises what they raised."""
        for save in self._pending:
            await save.ended()


def _tells_of_earlier(error: BaseException | None) -> bool:
    """Whether a save failed for no reason of its own."""
    return isinstance(error, RankFailures) and all(one.step == EARLIER for one in error.failures)
