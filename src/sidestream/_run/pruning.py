"""The deletion of steps that retention does not keep, and of attempts that dead writers left behind. A step that a
reader uses is never deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .._load.open.manifest import metadata_of
from .._load.open.steps import Step
from .._load.verify import verify_at
from .._runtime.threads import io_threads, report
from .._storage import Leftover, Location, Store, target_of_attempt
from ..errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, printable
from ..events import RunPruned, emit
from ..options import Durability, check_seconds
from .leases import Leases
from .retention import (
    Pruned,
    Retention,
    SavedStep,
    deletable_steps,
    keeps_all,
    metrics_in,
    needs_metadata,
    unknown_metrics,
    uses_only_numbers,
)
from .steps import changed_among, list_generations

_log = logging.getLogger("sidestream")

_NAMES_SHOWN = 16

_DeleteOutcome = Literal["deleted", "leased", "changed"]


def abandoned(
    leftovers: Iterable[Leftover], live: Collection[str], ended: Collection[str], *, ended_s: float, after_s: float
) -> list[Leftover]:
    """Return the leftovers that may be discarded.

    An interrupted deletion may always be discarded, and so may an attempt whose process is known to have ended. Any
    other attempt may be discarded if its target is a step on which no living writer has a lease (``live``), and if the
    last write to it is old enough. If a dead writer has a lease on the step (``ended``), that is more than ``ended_s``
    ago, and otherwise more than ``after_s``.
    """
    found = []
    for leftover in leftovers:
        target = target_of_attempt(leftover.name)
        silence_s = ended_s if target in ended else after_s
        if leftover.is_certain or (target is not None and target not in live and leftover.age_s > silence_s):
            found.append(leftover)
    return found


@dataclass(slots=True)
class Pruner:
    """The deleter of the run in ``store``. One pass runs at a time in this process. Other processes may delete at the
    same time."""

    store: Store
    url: str
    keep: Retention
    leases: Leases
    durability: Durability
    lease_s: float
    abandoned_after_s: float
    last: Pruned = field(default_factory=Pruned)
    not_swept: StorageError | None = None
    _known: dict[str, Step] = field(default_factory=dict)
    _saved: dict[Step, SavedStep] = field(default_factory=dict)
    _verified: set[Step] = field(default_factory=set)
    _damaged: dict[str, CorruptCheckpointError] = field(default_factory=dict)
    _first_seen: dict[str, float] = field(default_factory=dict)
    _unknown: set[str] = field(default_factory=set)
    """The metrics of ``keep`` that no step had, of which a warning was logged."""

    def __post_init__(self) -> None:
        check_seconds("abandoned_after_s", self.abandoned_after_s)

    async def run(self, protected: Callable[[], Collection[int]]) -> Pruned:
        """Do one pass, and return what it did. ``protected`` is called after the run has been listed, and returns steps
        that are kept in any case.

        Raises what the storage raises; some steps may have been deleted before. If the leftovers of dead writers cannot
        be deleted, ``not_swept`` has the error, which is not raised because the user did not request that deletion."""
        swept: list[str] = []
        self.not_swept = None
        try:
            await self._sweep(swept)
        except StorageError as error:
            self.not_swept = error
        pruned = Pruned() if self.keeps_all else await self._retain(protected)
        self.last = replace(pruned, abandoned=tuple(swept))
        if pruned.deleted or pruned.damaged:
            await report(emit, RunPruned(self.url, pruned.deleted, pruned.damaged))
        return self.last

    async def preview(self, protected: Callable[[], Collection[int]]) -> Pruned:
        """Return what ``run`` would do, without verifying a step. Changes nothing."""
        if self.keeps_all:
            return Pruned()
        _, deletable = await self._find_deletable(protected, _assumes)
        leased = [step.name for step in deletable if await self._in_use(step.name)]
        names = tuple(step.name for step in deletable if step.name not in leased)
        return Pruned(names, tuple(leased), None, tuple(sorted(self._damaged)))

    @property
    def keeps_all(self) -> bool:
        """Whether no step is ever deleted."""
        return keeps_all(self.keep)

    @property
    def damaged(self) -> dict[str, CorruptCheckpointError]:
        """The errors of the directories that did not verify, by name."""
        return dict(self._damaged)

    # --- leftovers of dead writers ---

    async def _sweep(self, swept: list[str]) -> None:
        leases = await self.leases.seen()
        leftovers = await self.store.leftovers()
        live = {seen.directory for seen in leases if seen.kind == "save" and not self.leases.dead(seen)}
        ended = {seen.directory for seen in leases if seen.kind == "save"} - live
        old_enough = self._old_enough(leftovers)
        chosen = abandoned(old_enough, live, ended, ended_s=self.lease_s, after_s=self.abandoned_after_s)
        for leftover in chosen:
            await self.store.discard(leftover.name)
            swept.append(leftover.name)
        await self.leases.forget([seen for seen in leases if self.leases.dead(seen)])

    def _old_enough(self, leftovers: list[Leftover]) -> list[Leftover]:
        """Return the leftovers without attempts that this process has not seen for some time. When the storage's clock
        is set forward, all attempts look old at once. Before a later pass a living writer has written to its attempt
        again."""
        now = time.monotonic()
        self._first_seen = {each.name: self._first_seen.get(each.name, now) for each in leftovers}
        return [each for each in leftovers if each.is_certain or now - self._first_seen[each.name] >= self.lease_s / 2]

    # --- steps that retention does not keep ---

    async def _retain(self, protecting: Callable[[], Collection[int]]) -> Pruned:
        outcomes: dict[str, _DeleteOutcome] = {}
        while True:
            verified, deletable = await self._find_deletable(protecting, self._verifies)
            for step in deletable:
                # Looked at before each deletion. The step that justifies it may have been replaced or removed by
                # another process since it was verified, and then everything is judged again.
                if verified is None or await self._have_changed([verified]):
                    break
                outcomes[step.name] = await self._delete(step)
            else:
                break
        return Pruned(
            tuple(name for name, outcome in outcomes.items() if outcome == "deleted"),
            tuple(name for name, outcome in outcomes.items() if outcome == "leased"),
            None if verified is None else verified.name,
            tuple(sorted(self._damaged)),
        )

    async def _find_deletable(
        self, protecting: Callable[[], Collection[int]], verifies: Callable[[Step], Coroutine[Any, Any, bool]]
    ) -> tuple[Step | None, list[Step]]:
        """Return the newest step that stays, and the older steps that may be deleted because it ``verifies``. If no
        step could go, nothing is verified, and None is returned for the first."""
        while True:
            steps = await self._own_steps()
            protected = frozenset(protecting())  # after the listing, which may contain a step that was just committed
            newest: Step | None = None
            deletable: list[Step] = []
            # There are two cases. The newest step that stays verifies: older ones may go. It does not: it counts for no
            # policy, and the choice is made again without it. So a damaged step never costs a good one.
            while chosen := await self._choose(steps, protected):
                newest = max((step for name, step in steps.items() if name not in chosen), key=lambda step: step.order)
                if await verifies(newest):
                    deletable = [step for step in chosen.values() if step.order < newest.order]
                    break
                del steps[newest.name]
                newest = None
            names = {step.name for step in deletable}
            # Two processes may delete at the same time. Each has listed the run before the other deleted, and both
            # could count on a step that the other one removes. So what stays is looked at once more before anything
            # goes.
            if not deletable or not await self._are_stale([step for name, step in steps.items() if name not in names]):
                return newest, deletable

    async def _are_stale(self, staying: list[Step]) -> bool:
        """Return whether another process has changed steps on which the judgement about the others is based."""
        there = set(await self.store.directories())
        if not all(step.name in there for step in staying):
            return True
        return not uses_only_numbers(self.keep) and await self._have_changed(staying)

    async def _have_changed(self, steps: Sequence[Step]) -> bool:
        """Return whether there are some among ``steps`` that were removed, replaced or damaged since their markers were
        read. Forget those markers."""
        changed = await changed_among(self.store, steps)
        for step in changed:
            self._known.pop(step.name, None)
        return bool(changed)

    async def _own_steps(self) -> dict[str, Step]:
        """Return the committed steps that sidestream wrote, by name. Other directories are neither counted nor
        deleted. Damaged steps are read again, because they may have been removed and saved again."""
        known = {name: step for name, step in self._known.items() if name not in self._damaged}
        found = await list_generations(self.store, known)
        own = {step.name: step for step in found if step.damage is None and step.marker is not None}
        broken = {step.name for step in found if step.damage is not None}
        self._damaged = {
            name: error
            for name, error in self._damaged.items()
            if name in broken or (name in own and own[name] == self._known.get(name))
        }
        self._known = own
        self._verified.intersection_update(own.values())
        return {name: step for name, step in own.items() if name not in self._damaged}

    async def _choose(self, steps: dict[str, Step], protected: frozenset[int]) -> dict[str, Step]:
        """Return the steps that may be deleted, by name."""
        saved = {step: await self._saved_step(step) for step in list(steps.values())}
        for name in self._damaged.keys() & steps.keys():  # without their manifest no policy can decide about them
            del saved[steps.pop(name)]
        self._saved = saved
        self._warn_of_unknown_metrics()
        # In a thread, because a policy of the caller may take long.
        found = await io_threads().run(deletable_steps, list(saved.values()), self.keep, protected)
        deletable = {each.order for each in found}
        return {step.name: step for step in saved if step.order in deletable}

    def _warn_of_unknown_metrics(self) -> None:
        """Log, once, which metrics no step has, so that the policy keeps what it should have judged."""
        newest = {each.step: each for each in sorted(self._saved.values(), key=lambda each: each.order)}
        for metric in unknown_metrics(self.keep, newest.values()):
            if metric in self._unknown:
                continue
            self._unknown.add(metric)
            there = sorted({name for each in newest.values() for name in metrics_in(each.metadata)})
            _log.warning(
                "%s: no step has the metric %r in its metadata (%s), so KeepBest keeps all of them",
                self.url,
                metric,
                f"there are {printable(', '.join(there[:_NAMES_SHOWN]))}" if there else "there are no numbers in it",
            )

    async def _saved_step(self, step: Step) -> SavedStep:
        if step in self._saved:
            return self._saved[step]
        assert step.marker is not None
        metadata: dict[str, Any] = {}
        if needs_metadata(self.keep):
            try:
                async with aclosing(self.store.source(step.name)) as source:
                    metadata = await metadata_of(source, step.marker)
            except (CorruptCheckpointError, FileNotFoundError) as error:
                if not await self._is_another(step):
                    self._damaged[step.name] = CorruptCheckpointError(
                        f"{step.name}: its manifest cannot be read ({error}); it is not counted, and not deleted"
                    )
        return SavedStep(step.step, step.generation, step.marker.saved_at, metadata)

    async def _verifies(self, step: Step) -> bool:
        if step in self._verified:
            return True
        try:
            report = await verify_at(Location(self.store, step.name, f"{self.url}/{step.name}"), run=self.url)
        except CheckpointNotFoundError:  # another process has deleted it meanwhile
            return False
        if not report.ok:
            if await self._is_another(step):
                return False
            first, many = report.damaged[0], len(report.damaged)
            self._damaged[step.name] = CorruptCheckpointError(
                f"{step.name} does not verify ({many} places, the first: {first.message}); it is not counted, and "
                "nothing is deleted because of it",
                file=first.file,
                fqn=first.fqn,
                offset=first.offset,
            )
            return False
        self._verified.add(step)
        return True

    async def _is_another(self, step: Step) -> bool:
        """Return whether another process has deleted or replaced the step since its marker was read."""
        now = await step.current(self.store)
        return now is None or (now.damage is None and await self._have_changed([step]))

    async def _delete(self, step: Step) -> _DeleteOutcome:
        """Delete a step, unless it is in use or has changed."""
        if await self._in_use(step.name):
            return "leased"
        # A reader puts its lease and then looks for ours. We put ours and then look for those of readers. The second of
        # the two sees the first, whatever the order. If both see each other, both give up, and a later pass deletes the
        # step.
        own = await self.leases.take(step.name, "delete")
        try:
            if await self._have_changed([step]):
                return "changed"
            # Checked again with our own lease in place: from now on every reader sees that. Nothing comes between this
            # and the deletion, because a lease is only good for some time.
            if await self._in_use(step.name) or own.doubtful:
                return "leased"
            await self.store.remove_directory(step.name, durability=self.durability, use="retention")
        finally:
            await own.release()
        self._known.pop(step.name, None)
        return "deleted"

    async def _in_use(self, name: str) -> bool:
        seen = await self.leases.seen()
        return any(one.directory == name and one.kind == "read" and not self.leases.dead(one) for one in seen)


async def _assumes(step: Step) -> bool:
    """Count the step as verified, without reading it."""
    return True
