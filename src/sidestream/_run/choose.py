"""Which step a reader gets, with a lease on it before the first byte is read."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from .._load.open.steps import Step, look_at
from .._runtime.threads import current_deadline
from .._storage import Store
from .leases import Lease, Leases
from .steps import named_steps, still_listed

__all__ = ["Wish", "choose"]

_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Wish:
    """What a reader asks for: ``step``, or the newest if it is None; with ``or_older`` also any step before it."""

    step: int | None = None
    or_older: bool = False

    def admits(self, found: Step) -> bool:
        return self.step is None or found.step == self.step or (self.or_older and found.step < self.step)


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
