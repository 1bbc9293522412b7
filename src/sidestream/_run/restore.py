"""Restoring and reading the steps of a run, with leases on them, in one process or in a group.

``restore`` chooses a step, leases it, and loads it. If the step is damaged, an older one may be loaded instead.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .._group import Member, Operation, run_together
from .._load.open.manifest import read_metadata
from .._load.open.steps import Step
from .._load.operation import load_from
from .._load.report import LoadReport, LoadRequest, PassedOver
from .._load.verification import VerifyReport
from .._load.verify import verify_at
from .._runtime.tasks import in_parallel
from .._runtime.threads import current_deadline
from .._storage import Location, Store
from ..errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    InvalidOptionError,
    RankFailuresError,
    SidestreamError,
    StorageNotSharedError,
)
from ..events import LoadContext, LoadFellBack, emit
from ..options import (
    Fallback,
    Latest,
    LoadOptions,
    Progress,
    Tolerated,
    check_choice,
    step_number,
    tolerance_of,
)
from .leases import Lease, Leases
from .retention import SavedStep, best_of
from .run import Run
from .steps import check_run, list_steps, named_steps, still_listed

__all__ = ["Latest", "Reading", "StepSelector", "choose"]


_log = logging.getLogger("sidestream")

_PAUSE_S = 0.05
_RANKS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class StepSelector:
    """The steps that a reader accepts: ``step``, or the newest if it is None. With ``or_older`` any step before it is
    accepted too."""

    step: int | None = None
    or_older: bool = False

    def accepts(self, found: Step) -> bool:
        return self.step is None or found.step == self.step or (self.or_older and found.step < self.step)


@dataclass(slots=True)
class Restoring(ABC):
    """One ``restore``. ``run`` may be called once. Afterwards ``step`` is the step that was loaded."""

    place: Run
    selector: StepSelector
    request: LoadRequest
    step: int | None = None
    _passed: list[tuple[Step, SidestreamError]] = field(default_factory=list)

    @property
    def passed_over(self) -> dict[str, str]:
        """The errors of the damaged directories, by name."""
        return {step.name: str(error) for step, error in self._passed}

    async def _load(self, step: Step, state: Mapping[str, Any], operation: Operation | None = None) -> LoadReport:
        request = self.request
        # With a tolerance for missing tensors, an older step may leave tensors of the target unchanged. If an older
        # step may be loaded after a damaged one, the damaged step must not have changed these tensors.
        if self.selector.or_older and request.tolerance.missing:
            request = replace(request, options=replace(request.options, atomic=True))
        return await load_from(self.place.at(step.name), state, request, _context(self.place.url, step), operation)

    @abstractmethod
    async def run(self, state: Mapping[str, Any]) -> LoadReport | None:
        """Return the report of the load; None if there is no step that the selector accepts."""


class RestoringAlone(Restoring):
    """A ``restore`` by one process."""

    async def run(self, state: Mapping[str, Any]) -> LoadReport | None:
        """Return the report of the load; None if there is no step that the selector accepts. Raises
        ``CorruptCheckpointError`` if the chosen step is damaged, and no older one is admitted or all are damaged."""
        gone: SidestreamError | None = None
        while True:
            excluded = [step.name for step, _ in self._passed]
            chosen = await choose(self.place.store, self.place.leases, self.selector, excluded)
            if chosen is None:
                self._raise_damage()
                if gone is not None and gone.written:  # without an error the target would count as unchanged
                    raise gone
                return None
            step, lease = chosen
            try:
                if step.damage is not None:
                    raise step.damage
                report = await self._load(step, state)
            # There are three failures of a chosen step. It is gone: the listing was older than its deletion, so the
            # choice is made again. It is damaged: an older one is taken if the caller admits that. Everything else is
            # an error of this load, and not a reason to continue with an older state.
            except (CheckpointNotFoundError, IncompleteCheckpointError) as error:
                gone = error  # deleted before it was leased, or by a process that ignores leases: choose again
                continue
            except CorruptCheckpointError as error:
                if lease is None and step.damage is None and await step.current(self.place.store) is None:
                    gone = error  # deleted during the load, because this process could not put a lease
                    continue
                self._passed.append((step, error))
                if not self.selector.or_older:
                    raise
                continue
            finally:
                if lease is not None:
                    await lease.release()
            self.step = step.step
            passed = _fell_back(self.place.url, self._passed, step)
            return replace(report, passed_over=passed, leased=lease is not None)

    def _raise_damage(self) -> None:
        """Raise the error of the newest damaged step. Do nothing if no step was damaged."""
        if not self._passed:
            return
        # The newest one: it is what the caller would have got without a fallback. The others are notes.
        error = self._passed[0][1]
        for step, other in self._passed[1:]:
            error.add_note(f"{step.name} is damaged too: {other}")
        error.written = tuple(dict.fromkeys(fqn for _, each in self._passed for fqn in each.written))
        raise error


@dataclass(slots=True)
class RestoringTogether(Restoring):
    """A ``restore`` by all ranks of a group, where rank 0 chooses the step."""

    member: Member = field(kw_only=True)
    _missed: tuple[Step, RankFailuresError] | None = None
    """The step that ranks other than rank 0 did not find in the last round, and their failures."""

    async def run(self, state: Mapping[str, Any]) -> LoadReport | None:
        """Return the report of the load; None if there is no step that the selector accepts. Raises
        ``RankFailuresError``. If rank 0 sees a step that other ranks do not find, the failure is
        ``StorageNotSharedError`` on rank 0."""
        while True:
            # Each round is an operation of its own, so messages of the round before are not taken for messages of this
            # one.
            load = _StepLoad(self, state)
            operation = self.member.begin("restore", current_deadline(), self.request.options.rank_wait_s)
            self._missed = None
            try:
                report = await run_together(load.run, operation)
            except RankFailuresError as failures:
                kinds = {failure.kind for failure in failures.failures}
                gone = {CheckpointNotFoundError.__name__, IncompleteCheckpointError.__name__}
                # If rank 0 found the step and only other ranks did not, there are two explanations: it was deleted in
                # between, or they see other storage. The next round tells them apart: rank 0 looks whether the step is
                # still there.
                if load.step is not None and kinds <= gone:
                    if all(failure.rank for failure in failures.failures):
                        self._missed = load.step, failures
                    continue  # deleted before it was leased, or without regard to leases; if not, rank 0 finds that out
                if load.step is None or kinds != {CorruptCheckpointError.__name__}:
                    raise
                self._passed.append((load.step, failures))
                if not self.selector.or_older:
                    raise
                continue
            finally:
                if load.lease is not None:
                    await load.lease.release()
            if report is None:
                if self._passed:
                    raise self._passed[0][1]
                return None
            assert load.step is not None
            self.step = load.step.step
            passed = _fell_back(self.place.url, self._passed, load.step, rank=operation.rank, world=operation.world)
            return replace(report, passed_over=passed, leased=load.leased)


class _StepLoad:
    """The load of one step, which rank 0 chooses and leases and all ranks load."""

    def __init__(self, restoring: RestoringTogether, state: Mapping[str, Any]) -> None:
        self._restoring = restoring
        self._missed = restoring._missed
        self._state = state
        self.step: Step | None = None
        self.lease: Lease | None = None
        self.leased = False

    async def run(self, operation: Operation) -> LoadReport | None:
        answer = json.loads(await operation.aexchange("choose", b"", self._choose))
        if answer is None:
            return None
        self.step = Step(answer["step"], answer["generation"], answer["name"])
        self.leased = answer["leased"]
        if answer["damage"] is not None:
            raise CorruptCheckpointError(answer["damage"])
        return await self._restoring._load(self.step, self._state, operation)

    async def _choose(self, _: Sequence[bytes]) -> bytes:
        """Choose a step, lease it, and return it as JSON. Called on rank 0."""
        restoring, place = self._restoring, self._restoring.place
        await self._check_shared()
        excluded = [step.name for step, _ in restoring._passed]
        chosen = await choose(place.store, place.leases, restoring.selector, excluded)
        if chosen is None:
            return b"null"
        step, self.lease = chosen
        choice = {"step": step.step, "generation": step.generation, "name": step.name, "leased": self.lease is not None}
        return json.dumps({**choice, "damage": None if step.damage is None else str(step.damage)}).encode()

    async def _check_shared(self) -> None:
        """Raise ``StorageNotSharedError`` if rank 0 finds the step that other ranks did not find in the last round."""
        if self._missed is None:
            return
        step, failures = self._missed
        seen = await step.current(self._restoring.place.store)
        if seen is not None and seen.damage is None:  # neither deleted nor being deleted
            ranks = ", ".join(str(failure.rank) for failure in failures.failures[:_RANKS_SHOWN])
            text = f"rank 0 sees this step, others do not (rank {ranks}): is the directory on storage that all share?"
            raise StorageNotSharedError(2, text, f"{self._restoring.place.url}/{step.name}")


def _context(run: str, step: Step, *, rank: int = 0, world: int = 1) -> LoadContext:
    """Return the context of the load of ``step`` of the run at the URL ``run``."""
    url, generation = f"{run}/{step.name}", step.generation
    return LoadContext("restore", url, run=run, step=step.step, generation=generation, rank=rank, world=world)


def _fell_back(
    run: str, passed: Sequence[tuple[Step, SidestreamError]], taken: Step, *, rank: int = 0, world: int = 1
) -> tuple[PassedOver, ...]:
    """Log a warning and emit an event for each damaged step in whose place ``taken`` was restored."""
    for step, error in passed:
        _log.warning("%s is damaged, %s was restored in its place: %s", step.name, taken.name, error)
        emit(LoadFellBack(_context(run, step, rank=rank, world=world), f"{run}/{taken.name}", str(error)))
    return tuple(PassedOver(step.step, step.generation, error) for step, error in passed)


# --- the choice ---


async def choose(
    store: Store, leases: Leases, selector: StepSelector, excluded: Collection[str]
) -> tuple[Step, Lease | None] | None:
    """Return the newest step, in its highest generation, that the selector accepts, and a reader's lease on it. Return
    None if there is no such step.

    A damaged step is returned too, without a lease. There is no lease if this process may not write to the run. Raises
    what the storage raises. A cancel leaves no lease.
    """
    while True:
        step = await newest(store, selector, excluded)
        if step is None:
            return None
        if step.damage is not None:
            return step, None
        lease = await leases.try_reading(step.name, of_caller=True)
        if lease is None or await _still_there(store, leases, step, lease):
            return step, lease
        # The step is being deleted: list the run again.


async def newest(store: Store, selector: StepSelector, excluded: Collection[str]) -> Step | None:
    """Return the newest step, in its highest generation, that the selector accepts. It may be damaged. Return None if
    there is no such step."""
    while True:
        current_deadline().check("choosing a step")
        candidates = [
            found for found in await named_steps(store) if found.name not in excluded and selector.accepts(found)
        ]
        passed: list[str] = []
        for found in candidates:
            step = await found.current(store)
            if step is None:
                passed.append(found.name)
                continue
            # The directories in ``passed`` have never been checkpoints, or were deleted since they were listed. In the
            # second case a newer checkpoint has been committed, which this listing does not show. Then this candidate
            # would be too old.
            if not await still_listed(store, passed):
                break
            return step
        else:
            if await still_listed(store, passed):
                return None


async def _still_there(store: Store, leases: Leases, step: Step, lease: Lease) -> bool:
    """Return whether no process has begun to delete the step, now that it has our lease. If one has, release the
    lease."""
    there = False
    try:
        seen = await leases.seen()
        going = any(one.directory == step.name and one.kind == "delete" and not leases.dead(one) for one in seen)
        there = not going and await step.current(store) is not None
    finally:
        if not there:
            await lease.release()
    if not there:
        await asyncio.sleep(_PAUSE_S)
    return there


class Reading:
    """The operations with which one ``Checkpointer`` reads its run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.restored: LoadReport | None = None
        self.passed_over: Mapping[str, str] = {}
        """The errors of the directories that the last ``restore`` passed over, by name."""

    async def check(self) -> None:
        """Raise ``InvalidOptionError`` if the URL is that of a checkpoint."""
        if self._run.store.capabilities.rename:  # on object storage the first listing of the run does this check
            with self._run.time_limit():
                await check_run(self._run.store)

    async def restore(
        self,
        state: Mapping[str, Any],
        step: int | Latest,
        fallback: Fallback,
        options: LoadOptions,
        tolerated: tuple[bool, Tolerated, Tolerated, Tolerated],
    ) -> int | None:
        """As ``Checkpointer.restore``. ``tolerated`` are the arguments of ``tolerance_of``."""
        request = LoadRequest(options, tolerance_of(*tolerated))
        run, member, selector = self._run, self._run.together(), step_selector(step, fallback)
        given = (run, selector, request)
        restoring = RestoringAlone(*given) if member is None else RestoringTogether(*given, member=member)
        with run.time_limit(request.options.timeout_s):
            self.restored = await restoring.run(state)
        self.passed_over = restoring.passed_over
        if self.restored is None:
            if selector.step is not None:
                raise await self._not_found(selector.step)
            return None
        return restoring.step

    @asynccontextmanager
    async def step(self, step: int | Latest) -> AsyncIterator[tuple[Step, Location]]:
        """A committed step, which may be damaged, and where it is; it is leased within the ``async with``."""
        run, selector = self._run, step_selector(step, "never")
        with run.time_limit():
            chosen = await choose(run.store, run.leases, selector, ())
        if chosen is None:
            raise await self._not_found(selector.step)
        found, lease = chosen
        try:
            yield found, run.at(found.name)
        finally:
            if lease is not None:
                await lease.release()

    async def verify(self, step: int | Latest, progress: Progress | None) -> VerifyReport:
        """As ``Checkpointer.verify``."""
        async with self.step(step) as (_, location):
            with self._run.time_limit():
                return await verify_at(location, progress, self._run.url)

    async def metadata(self, step: int | Latest) -> dict[str, Any]:
        """As ``Checkpointer.read_metadata``."""
        async with self.step(step) as (found, _):
            if found.damage is not None:
                raise found.damage
            with self._run.time_limit():
                return await read_metadata(self._run.store, found.name)

    async def best(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """As ``Checkpointer.best``."""
        return best_of(await self.with_metadata(), metric, mode)

    async def steps(self) -> list[Step]:
        """Return the committed steps, in order, including damaged ones."""
        with self._run.time_limit():
            return await list_steps(self._run.store)

    async def with_metadata(self) -> list[SavedStep]:
        """Return the committed steps with their metadata, in order. Left out are damaged ones, and those that are
        deleted meanwhile."""
        found: list[SavedStep] = []

        async def look(step: Step) -> None:
            with suppress(FileNotFoundError, CorruptCheckpointError):
                metadata = await read_metadata(self._run.store, step.name)
                found.append(SavedStep(step.step, step.generation, metadata=metadata))

        with self._run.time_limit():
            await in_parallel([step for step in await list_steps(self._run.store) if step.damage is None], look)
        return sorted(found, key=lambda each: each.order)

    async def _not_found(self, step: int | None) -> CheckpointNotFoundError:
        there = [found.step for found in await self.steps()]
        wanted = "step" if step is None else f"step {step}"
        return CheckpointNotFoundError(f"{self._run.url} has no committed {wanted}; it has {there or 'none'}")


def step_selector(step: int | Latest, fallback: Fallback) -> StepSelector:
    check_choice("fallback", fallback, Fallback)
    if step == "latest":
        return StepSelector(None, fallback == "older")
    given: object = step
    if given is None or isinstance(given, str):
        raise InvalidOptionError(f'step={step!r} has to be "latest" or the number of a step')
    return StepSelector(step_number(given), fallback == "older")
