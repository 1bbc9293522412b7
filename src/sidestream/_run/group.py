"""The steps of a run over several ranks: rank 0 looks and chooses, all others hear of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._group import Member, Operation, together
from .._load.api import LoadOptions, LoadReport, load_from
from .._load.open.steps import Step, look_at
from .._runtime.threads import current_deadline
from .._storage import Location, Store
from ..errors import CheckpointNotFound, Corrupt, NotShared, RankFailures, SidestreamError
from .choose import Wish, choose
from .leases import Lease, Leases
from .restore import fell_back, restore_context

__all__ = ["RestoringTogether"]

_RANKS_SHOWN = 10


@dataclass(slots=True)
class RestoringTogether:
    """One ``restore`` by all ranks. ``run`` it once. ``step`` is what was loaded in the end."""

    member: Member
    store: Store
    url: str
    leases: Leases
    wish: Wish
    options: LoadOptions
    rank_wait_s: float
    step: int | None = None
    _passed: list[tuple[Step, SidestreamError]] = field(default_factory=list)
    _missed: tuple[Step, RankFailures] | None = None
    """What other ranks than rank 0 did not find in the last round."""

    @property
    def passed_over(self) -> dict[str, str]:
        return {step.name: str(error) for step, error in self._passed}

    async def run(self, state: Mapping[str, Any]) -> LoadReport | None:
        """The report of the load; None if there is no step that the wish admits. Raises ``RankFailures``: by
        ``NotShared`` of rank 0 if a step that it sees is not there for others."""
        while True:
            attempt = _Attempt(self, state)
            operation = self.member.begin("restore", current_deadline(), self.rank_wait_s)
            self._missed = None
            try:
                report = await together(attempt.run, operation)
            except RankFailures as failures:
                kinds = {failure.kind for failure in failures.failures}
                if attempt.step is not None and kinds == {CheckpointNotFound.__name__}:
                    if all(failure.rank for failure in failures.failures):
                        self._missed = attempt.step, failures
                    continue  # it was deleted before it was leased, or rank 0 finds that it was not
                if attempt.step is None or kinds != {Corrupt.__name__}:
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
            passed = fell_back(self.url, self._passed, attempt.step, rank=operation.rank, world=operation.world)
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
            raise Corrupt(answer["damage"])
        context = restore_context(restoring.url, self.step)
        where = Location(restoring.store, self.step.name, context.url)
        options = restoring.options
        if restoring.wish.or_older and "partial" in options.strict:
            options = replace(options, atomic=True)
        return await load_from(where, self._state, options, context, operation)

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
        """Raises ``NotShared`` if the step that others did not find in the last round is there for rank 0."""
        if self._missed is None:
            return
        step, failures = self._missed
        seen = await look_at(self._restoring.store, step)
        if seen is not None and seen.damage is None:  # not gone, nor going
            ranks = ", ".join(str(failure.rank) for failure in failures.failures[:_RANKS_SHOWN])
            text = f"rank 0 sees this step, others do not (rank {ranks}): is the directory on storage that all share?"
            raise NotShared(2, text, f"{self._restoring.url}/{step.name}")
