"""The examination of a directory of a run: whether it is a committed step, a damaged one, or something else."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace

from ..._format.marker import METADATA_NAME, Marker
from ..._runtime.threads import collected, io_threads, paced
from ..._storage import RangeSource, Store, is_unfinished, parse_step
from ...errors import CorruptCheckpointError, IncompleteCheckpointError
from .parts import is_whole

_FEW_NAMES = 256
_MOST_LOOKED_AT = 8


@dataclass(frozen=True, slots=True)
class Step:
    """Generation ``generation`` of ``step``, in the directory ``name``. Both numbers are those of the name: the
    checkpoint may have been saved outside of the run, or as another step. ``damage`` is the reason why it cannot be
    read. ``marker`` is None if it is damaged, or if another writer made it."""

    step: int
    generation: int
    name: str
    damage: CorruptCheckpointError | None = None
    marker: Marker | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.step, self.generation

    @staticmethod
    def among(names: Iterable[str]) -> list[Step]:
        """Return the steps, newest step and highest generation first. Called in a worker thread."""
        parsed = collected((parse_step(name), name) for name in names)
        found = (Step(*order, name) for order, name in parsed if order is not None)
        return sorted(found, key=lambda each: each.order, reverse=True)

    async def current(self, store: Store) -> Step | None:
        """Return this step if it is a committed checkpoint, of sidestream or of stock DCP. Return it with ``damage`` if
        it is a damaged checkpoint of sidestream. Return None if it never was a checkpoint.

        On storage that publishes directories by a rename, no directory with such a name has a manifest before it is
        published. So there a directory with a manifest and without a marker is a damaged checkpoint, unless it was
        moved since it was opened: then its files are being deleted."""
        found = replace(self, marker=None, damage=None)  # what is known of it from before is not what is there now
        while True:
            async with aclosing(store.source(found.name)) as source:
                seen = await _look_at(source, found, store)
                if (seen is not None and seen.damage is None) or not await source.moved():
                    return seen


async def _look_at(source: RangeSource, found: Step, store: Store) -> Step | None:
    try:
        marker = await source.committed_marker()
    except FileNotFoundError:
        marker = None
        missing = True
    except CorruptCheckpointError as damage:
        return replace(found, damage=damage.within(found.name))
    else:
        missing = False
    if marker is None:
        try:
            names = await source.sizes()
        except FileNotFoundError:  # the directory was removed since it was listed
            return None
        few = len(names) <= _FEW_NAMES  # checked faster than a thread starts
        # There are four cases without a marker. The directory has a manifest of ours although the marker is gone: a
        # damaged checkpoint, unless attempts are written in place here. It has ``.metadata``: stock DCP's. It is a
        # whole checkpoint of another format. Everything else was never a checkpoint.
        ours = own_manifest_among(names) if few else await io_threads().run(own_manifest_among, names)
        renamed = store.capabilities.rename and not await io_threads().run(is_unfinished, names)
        if ours is not None and (renamed or not missing):
            return replace(
                found, damage=CorruptCheckpointError(f"{found.name}: its {METADATA_NAME} is missing or was altered")
            )
        if not missing:
            return found
        try:
            return found if await is_whole(source, names) else None
        except IncompleteCheckpointError:
            return None
        except CorruptCheckpointError as damage:
            return replace(found, damage=damage.within(found.name))
    return replace(found, marker=marker)


async def newest_committed(store: Store, run: str, names: Iterable[str]) -> list[Step]:
    """Return the directories of a run that are named like steps, oldest first, up to the newest committed one."""
    steps = (await io_threads().run(Step.among, names))[::-1]
    for _ in range(_MOST_LOOKED_AT):
        if not steps or await replace(steps[-1], name=f"{run}/{steps[-1].name}").current(store) is not None:
            return steps
        steps.pop()
    return []


def own_manifest_among(names: Iterable[str]) -> str | None:
    """Return the first name of a manifest, which only sidestream writes; None if there is none."""
    return next((name for name in paced(names) if name.startswith("manifest-")), None)
