"""``restore``, alone or over ranks: choose, lease, load; and what is taken instead of a step that is damaged."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._group import Member, Operation, run_together
from .._load.api import LoadReport, LoadRequest, PassedOver, load_from
from .._load.open.steps import Step, look_at
from .._runtime.threads import current_deadline
from .._storage import Location, Store
from ..errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    RankFailuresError,
    SidestreamError,
    StorageNotSharedError,
)
from ..events import LoadContext, LoadFellBack, emit
from .leases import Lease, Leases
from .steps import named_steps, still_listed

__all__ = ["Restoring", "RestoringTogether", "Wish", "choose"]

_log = logging.getLogger("sidestream")

_PAUSE_S = 0.05
_RANKS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Wish:
    """What a reader asks for: ``step``, or the newest if it is None; with ``or_older`` also any step before it."""

    step: int | None = None
    or_older: bool = False

    def admits(self, found: Step) -> bool:
        return self.step is None or found.step == self.step or (self.or_older and found.step < self.step)


@dataclass(slots=True)
class Restoring:
    """``run`` it once. ``step`` is what was loaded in the end."""

    store: Store
    url: str
    leases: Leases
    wish: Wish
    request: LoadRequest
    step: int | None = None
    _passed: list[tuple[Step, CorruptCheckpointError]] = field(default_factory=list)

    @property
    def passed_over(self) -> dict[str, str]:
        """Directories that were damaged, and why."""
        return {step.name: str(error) for step, error in self._passed}

    async def run(self, state: Mapping[str, Any]) -> LoadReport | None:
        """The report of the load; None if there is no step that the wish admits. Raises ``CorruptCheckpointError`` if
        all that it admits are damaged, or the first is and no other will do."""
        while True:
            excluded = [step.name for step, _ in self._passed]
            chosen = await choose(self.store, self.leases, self.wish, excluded)
            if chosen is None:
                self._give_up()
                return None
            step, lease = chosen
            try:
                report = await self._load(step, state)
            except (
                CheckpointNotFoundError,
                IncompleteCheckpointError,
            ):  # deleted before it was leased, or without asking: look again
                continue
            except CorruptCheckpointError as error:
                if lease is None and step.damage is None and await look_at(self.store, step) is None:
                    continue  # deleted under a reader that could take no lease
                self._passed.append((step, error))
                if not self.wish.or_older:
                    raise
                continue
            finally:
                if lease is not None:
                    await lease.release()
            self.step = step.step
            passed = _fell_back(self.url, self._passed, step)
            return replace(report, passed_over=passed, leased=lease is not None)

    async def _load(self, step: Step, state: Mapping[str, Any]) -> LoadReport:
        if step.damage is not None:
            raise step.damage
        context, request = _context(self.url, step), _request(self.request, self.wish)
        return await load_from(Location(self.store, step.name, context.url), state, request, context)

    def _give_up(self) -> None:
        """The damage of the newest one, if there is none that is good."""
        if not self._passed:
            return
        error = self._passed[0][1]
        for step, other in self._passed[1:]:
            error.add_note(f"{step.name} is damaged too: {other}")
        error.written = tuple(dict.fromkeys(fqn for _, each in self._passed for fqn in each.written))
        raise error


@dataclass(slots=True)
class RestoringTogether:
    """One ``restore`` by all ranks: rank 0 chooses. ``run`` it once. ``step`` is what was loaded in the end."""

    member: Member
    store: Store
    url: str
    leases: Leases
    wish: Wish
    request: LoadRequest
    step: int | None = None
    _passed: list[tuple[Step, SidestreamError]] = field(default_factory=list)
    _missed: tuple[Step, RankFailuresError] | None = None
    """What other ranks than rank 0 did not find in the last round."""

    @property
    def passed_over(self) -> dict[str, str]:
        return {step.name: str(error) for step, error in self._passed}

    async def run(self, state: Mapping[str, Any]) -> LoadReport | None:
        """The report of the load; None if there is no step that the wish admits. Raises ``RankFailuresError``: by
        ``StorageNotSharedError`` of rank 0 if a step that it sees is not there for others."""
        while True:
            attempt = _Attempt(self, state)
            operation = self.member.begin("restore", current_deadline(), self.request.options.rank_wait_s)
            self._missed = None
            try:
                report = await run_together(attempt.run, operation)
            except RankFailuresError as failures:
                kinds = {failure.kind for failure in failures.failures}
                if attempt.step is not None and kinds == {CheckpointNotFoundError.__name__}:
                    if all(failure.rank for failure in failures.failures):
                        self._missed = attempt.step, failures
                    continue  # it was deleted before it was leased, or rank 0 finds that it was not
                if attempt.step is None or kinds != {CorruptCheckpointError.__name__}:
                    raise
                self._passed.append((attempt.step, failures))
                if not self.wish.or_older:
                    raise
                continue
            finally:
                if attempt.lease is not None:
                    await attempt.lease.release()
            if report is None:
                if self._passed:
                    raise self._passed[0][1]
                return None
            assert attempt.step is not None
            self.step = attempt.step.step
            passed = _fell_back(self.url, self._passed, attempt.step, rank=operation.rank, world=operation.world)
            return replace(report, passed_over=passed, leased=attempt.leased)


class _Attempt:
    """One step, chosen and leased by rank 0 and loaded by all."""

    def __init__(self, restoring: RestoringTogether, state: Mapping[str, Any]) -> None:
        self._restoring = restoring
        self._missed = restoring._missed
        self._state = state
        self.step: Step | None = None
        self.lease: Lease | None = None
        self.leased = False

    async def run(self, operation: Operation) -> LoadReport | None:
        restoring = self._restoring
        answer = json.loads(await operation.aexchange("choose", b"", self._choose))
        if answer is None:
            return None
        self.step = Step(answer["step"], answer["generation"], answer["name"])
        self.leased = answer["leased"]
        if answer["damage"] is not None:
            raise CorruptCheckpointError(answer["damage"])
        context = _context(restoring.url, self.step)
        where = Location(restoring.store, self.step.name, context.url)
        request = _request(restoring.request, restoring.wish)
        return await load_from(where, self._state, request, context, operation)

    async def _choose(self, _: Sequence[bytes]) -> bytes:
        """On rank 0."""
        restoring = self._restoring
        await self._check_shared()
        excluded = [step.name for step, _ in restoring._passed]
        chosen = await choose(restoring.store, restoring.leases, restoring.wish, excluded)
        if chosen is None:
            return b"null"
        step, self.lease = chosen
        told = {"step": step.step, "generation": step.generation, "name": step.name, "leased": self.lease is not None}
        return json.dumps({**told, "damage": None if step.damage is None else str(step.damage)}).encode()

    async def _check_shared(self) -> None:
        """Raises ``StorageNotSharedError`` if the step that others did not find in the last round is there for rank
        0."""
        if self._missed is None:
            return
        step, failures = self._missed
        seen = await look_at(self._restoring.store, step)
        if seen is not None and seen.damage is None:  # not gone, nor going
            ranks = ", ".join(str(failure.rank) for failure in failures.failures[:_RANKS_SHOWN])
            text = f"rank 0 sees this step, others do not (rank {ranks}): is the directory on storage that all share?"
            raise StorageNotSharedError(2, text, f"{self._restoring.url}/{step.name}")


def _request(request: LoadRequest, wish: Wish) -> LoadRequest:
    """Return how a step is loaded.

    What a step lacks may stay as it is in the target, so where an older step may follow, a damaged one must not leave
    there what was read of it.
    """
    if not (wish.or_older and request.tolerance.missing):
        return request
    return replace(request, options=replace(request.options, atomic=True))


def _context(run: str, step: Step, *, rank: int = 0, world: int = 1) -> LoadContext:
    """Return the context of the load of ``step`` of the run at the URL ``run``."""
    url, generation = f"{run}/{step.name}", step.generation
    return LoadContext("restore", url, run=run, step=step.step, generation=generation, rank=rank, world=world)


def _fell_back(
    run: str, passed: Sequence[tuple[Step, SidestreamError]], taken: Step, *, rank: int = 0, world: int = 1
) -> tuple[PassedOver, ...]:
    """Report the damaged steps in whose place ``taken`` was restored: a warning and an event for each."""
    for step, error in passed:
        _log.warning("%s is damaged, %s was restored in its place: %s", step.name, taken.name, error)
        emit(LoadFellBack(_context(run, step, rank=rank, world=world), f"{run}/{taken.name}", str(error)))
    return tuple(PassedOver(step.step, step.generation, error) for step, error in passed)


# --- the choice ---


async def choose(
    store: Store, leases: Leases, wish: Wish, excluded: Collection[str]
) -> tuple[Step, Lease | None] | None:
    """The newest step, highest generation, that the wish admits, and a reader's lease on it; None if there is none.

    A damaged one is returned too (without a lease), for the caller to judge. There is no lease where this process may
    not write. Raises what the storage raises. A cancel leaves no lease.
    """
    hollow: set[str] = set()
    while True:
        current_deadline().check("choosing a step")
        candidates = [found for found in await named_steps(store) if found.name not in excluded and wish.admits(found)]
        passed: list[str] = []
        for found in candidates:
            if found.name in hollow:
                continue
            step = await look_at(store, found)
            if step is None:
                passed.append(found.name)
                continue
            # The directories that were passed over have never been checkpoints, or were deleted since they were listed.
            # In the second case a newer checkpoint has been committed, which this listing does not show: this candidate
            # would be too old.
            if not await still_listed(store, passed):
                break
            hollow.update(passed)
            if step.damage is not None:
                return step, None
            lease = await leases.try_reading(step.name)
            if lease is None or await _still_there(store, leases, step, lease):
                return step, lease
            break  # it is being deleted: look again
        else:
            if await still_listed(store, passed):
                return None


async def _still_there(store: Store, leases: Leases, step: Step, lease: Lease) -> bool:
    """Now that our lease lies there: whether nobody had begun to delete the step before. If not, the lease is given
    back."""
    try:
        seen = await leases.seen()
        going = any(one.directory == step.name and one.kind == "delete" and not leases.dead(one) for one in seen)
        if not going and await look_at(store, step) is not None:
            return True
    except BaseException:
        await lease.release()
        raise
    await lease.release()
    await asyncio.sleep(_PAUSE_S)
    return False
