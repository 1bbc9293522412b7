"""One ``restore``: choose, lease, load; and what is taken instead of a step that is damaged."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._load.api import LoadOptions, LoadReport, PassedOver, load_from
from .._load.open.steps import Step, look_at
from .._storage import Location, Store
from ..errors import CheckpointNotFound, Corrupt, Incomplete, SidestreamError
from ..events import LoadContext, LoadFellBack, emit
from .choose import Wish, choose
from .leases import Leases

__all__ = ["Restoring", "fell_back", "restore_context"]

_log = logging.getLogger("sidestream")


@dataclass(slots=True)
class Restoring:
    """``run`` it once. ``step`` is what was loaded in the end."""

    store: Store
    url: str
    leases: Leases
    wish: Wish
    options: LoadOptions
    step: int | None = None
    _passed: list[tuple[Step, Corrupt]] = field(default_factory=list)

    @property
    def passed_over(self) -> dict[str, str]:
        """Directories that were damaged, and why."""
        return {step.name: str(error) for step, error in self._passed}

    async def run(self, state: Mapping[str, Any]) -> LoadReport | None:
        """The report of the load; None if there is no step that the wish admits. Raises ``Corrupt`` if all that it
        admits are damaged, or the first is and no other will do."""
        while True:
            excluded = [step.name for step, _ in self._passed]
            chosen = await choose(self.store, self.leases, self.wish, excluded)
            if chosen is None:
                self._give_up()
                return None
            step, lease = chosen
            try:
                report = await self._load(step, state)
            except (CheckpointNotFound, Incomplete):  # deleted before it was leased, or without asking: look again
                continue
            except Corrupt as error:
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
            passed = fell_back(self.url, self._passed, step)
            return replace(report, passed_over=passed, leased=lease is not None)

    async def _load(self, step: Step, state: Mapping[str, Any]) -> LoadReport:
        if step.damage is not None:
            raise step.damage
        options = self.options
        if self.wish.or_older and "partial" in options.strict:
            # What an older step lacks would keep what was read of the damaged one.
            options = replace(options, atomic=True)
        context = restore_context(self.url, step)
        return await load_from(Location(self.store, step.name, context.url), state, options, context)

    def _give_up(self) -> None:
        """The damage of the newest one, if there is none that is good."""
        if not self._passed:
            return
        error = self._passed[0][1]
        for step, other in self._passed[1:]:
            error.add_note(f"{step.name} is damaged too: {other}")
        error.written = tuple(dict.fromkeys(fqn for _, each in self._passed for fqn in each.written))
        raise error


def restore_context(run: str, step: Step, *, rank: int = 0, world: int = 1) -> LoadContext:
    """Return the context of the load of ``step`` of the run at the URL ``run``."""
    url, generation = f"{run}/{step.name}", step.generation
    return LoadContext("restore", url, run=run, step=step.step, generation=generation, rank=rank, world=world)


def fell_back(
    run: str, passed: Sequence[tuple[Step, SidestreamError]], taken: Step, *, rank: int = 0, world: int = 1
) -> tuple[PassedOver, ...]:
    """Report the damaged steps in whose place ``taken`` was restored: a warning and an event for each."""
    for step, error in passed:
        _log.warning("%s is damaged, %s was restored in its place: %s", step.name, taken.name, error)
        emit(LoadFellBack(restore_context(run, step, rank=rank, world=world), f"{run}/{taken.name}", str(error)))
    return tuple(PassedOver(step.step, step.generation, error) for step, error in passed)
