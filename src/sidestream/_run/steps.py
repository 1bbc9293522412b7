"""The steps of a run: their listing, and the numbers of their generations."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from .._load.open.steps import Step
from .._runtime.tasks import in_parallel
from .._runtime.threads import current_deadline, io_threads, paced
from .._storage import MARKER, Store
from ..errors import InvalidOptionError

_REMEMBERED = 256
"""The number of steps whose last started generation is remembered. With many slots it is more."""

_MANIFEST = re.compile("manifest-[0-9a-f]{32}")


class Generations:
    """The generations of the steps of one run that this process saves. At most ``most`` saves run at once."""

    def __init__(self, store: Store, most: int) -> None:
        self._store = store
        self._remembered = max(_REMEMBERED, 2 * most)
        self._started: dict[int, int] = {}  # the highest generation that a recent save was started for

    async def next(self, step: int) -> int:
        """Return the first generation of ``step`` that is free. A generation is taken if its directory exists, whether
        it is committed, damaged or foreign, or if a save of it was started here."""
        found = await named_steps(self._store, step)
        return max(self._started.get(step, 0), *(found.generation for found in found), 0) + 1

    def started(self, step: int, generation: int) -> None:
        """Record that a save of this generation was started. Old steps are forgotten, because the listing has their
        saves."""
        self._started.pop(step, None)
        self._started[step] = generation
        while len(self._started) > self._remembered:
            del self._started[next(iter(self._started))]

    async def claim(self, step: int) -> int:
        """Return ``next`` of the step, and record it, so that no other save of this process gets it."""
        generation = await self.next(step)
        self.started(step, generation)
        return generation


async def list_steps(store: Store) -> list[Step]:
    """Return the committed steps, oldest first, each in its highest generation. Damaged ones are included.

    A process that deletes a step has committed a newer one before. A listing may have been made before both, so it
    lacks the newer step. So if the newest listed steps have been deleted when they are read, the run is listed
    again."""
    while True:
        current_deadline().check("listing the steps of a run")
        steps: dict[int, Step] = {}
        hollow: list[str] = []
        for found in await named_steps(store):
            if found.step in steps:
                continue
            if (step := await found.current(store)) is not None:
                steps[found.step] = step
            elif not steps:
                hollow.append(found.name)
        if await still_listed(store, hollow):
            return list(steps.values())[::-1]  # examined newest first


async def still_listed(store: Store, names: Collection[str]) -> bool:
    """Return whether all of these directories still exist. They were listed and then found not to be checkpoints. Those
    that still exist were not checkpoints when they were listed either; those that do not were deleted meanwhile."""
    return not names or set(names) <= set(await store.directories())


async def list_generations(store: Store, known: Mapping[str, Step]) -> list[Step]:
    """Return all committed generations of all steps, oldest first, including damaged ones. The ``known`` ones, by name,
    are not read again, because a marker never changes."""
    current_deadline().check("listing the steps of a run")
    steps = []
    for found in await named_steps(store):
        step = known[found.name] if found.name in known else await found.current(store)
        if step is not None:
            steps.append(step)
    return steps[::-1]


async def changed_among(store: Store, steps: Iterable[Step]) -> list[Step]:
    """Return those of ``steps`` that were removed, replaced or damaged since they were read."""
    changed: list[Step] = []

    async def look(step: Step) -> None:
        now = await step.current(store)
        if now is None or now.marker != step.marker:
            changed.append(step)

    await in_parallel(steps, look)
    return changed


async def named_steps(store: Store, step: int | None = None) -> list[Step]:
    """Return every directory that is named like a step, or like ``step``; newest step and highest generation first.
    Raises ``InvalidOptionError`` if there is none because the root is a checkpoint and not a run."""
    names = await store.directories()
    found = await io_threads().run(Step.among, names)
    if not found:
        await check_run(store)
    return [each for each in found if step in (None, each.step)]


async def check_run(store: Store) -> None:
    """Raise ``InvalidOptionError`` if the root of ``store`` is itself a checkpoint. The checkpoints of a run are in its
    directories."""
    try:
        names = await store.sizes(".")
    except FileNotFoundError:
        return
    if MARKER not in names and not await io_threads().run(_has_own_manifest, names):
        return
    run = store.url.rstrip("/").rpartition("/")[0]
    raise InvalidOptionError(
        f"{store.url} is a checkpoint, not a run. A run is the directory that contains its checkpoints, here {run}: "
        "use that url, or read this checkpoint with sidestream.load or open_checkpoint"
    )


def _has_own_manifest(names: Iterable[str]) -> bool:
    """Return whether the names include a manifest of sidestream. Called in a worker thread."""
    return any(_MANIFEST.fullmatch(name) for name in paced(names))
