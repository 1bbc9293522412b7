"""What is done to one name again and again: a checkpoint that is replaced or removed, and exports beside steps.

And what has to stand there afterwards: old or new, never neither, never a mixture.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _look import Found, look_at_exports
from _seeded import files_of, make_state

import sidestream

OLD, NEW = 11, 12
GONE = 0
"""In place of a seed, where there is nothing."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What all kinds of work are done with. ``acked`` is called with a name and a seed for what was acknowledged."""

    acked: Callable[[str, int], object]
    stager: sidestream.AsyncStager | None = None
    saver: Any = "thread"


async def save_over(run: Path, doing: Doing, seed: int = NEW) -> None:
    options = sidestream.SaveOptions(writer=doing.saver)
    how = {"files": files_of(seed), "stager": doing.stager, "options": options}
    await sidestream.save(make_state(seed), run / "last", overwrite=True, **how)
    doing.acked("last", seed)


async def remove(run: Path, doing: Doing) -> None:
    await sidestream.remove(run / "last")
    doing.acked("last", GONE)


async def export(run: Path, doing: Doing, step: int = 2, seed: int = NEW) -> None:
    """Save a step with an export of the model beside it. The export of an earlier save of the step is replaced."""
    folder = run.with_name("exports")
    beside = sidestream.HF(folder / "step-{step}", select="model.*", max_shard_bytes=90_000, files=files_of(seed))
    async with sidestream.Checkpointer(
        run, stager=doing.stager, export=beside, save=sidestream.SaveOptions(writer=doing.saver)
    ) as checkpoints:
        pending = checkpoints.async_save(make_state(seed), step=step, files=files_of(seed))
        info = await pending
        doing.acked(Path(info.url).name, seed)
        report = await pending.exports[0]
        doing.acked(f"exports/{Path(report.url).name}", seed)


async def export_over(run: Path, doing: Doing, step: int = 1, seed: int = NEW) -> None:
    await export(run, doing, step, seed)


WORK: dict[str, Callable[..., Awaitable[None]]] = {
    "a save over another": save_over,
    "a removal": remove,
    "an export": export,
    "an export over another": export_over,
}

BEFORE = {"last": OLD, "step-1": OLD, "exports/step-1": OLD}
"""What ``prepare`` makes."""

AFTER: dict[str, dict[str, int]] = {
    "a save over another": {"last": NEW},
    "a removal": {"last": GONE},
    "an export": {"step-2": NEW, "exports/step-2": NEW},
    "an export over another": {"step-1.g2": NEW, "exports/step-1": NEW},
}
"""What each work adds or changes."""


async def prepare(root: Path) -> None:
    run, doing = root / "run", Doing(lambda name, seed: None)
    await save_over(run, doing, OLD)
    await export(run, doing, 1, OLD)


def judged(
    found: Found,
    root: Path,
    acked: Mapping[str, int],
    after: Mapping[str, int],
    before: Mapping[str, int] = BEFORE,
) -> list[str]:
    """What is wrong with ``found`` in ``root / "run"``, and with the exports in ``root``. What was acknowledged is
    there; everything else is as it was ``before`` or as it should be ``after``."""
    exports, wrong = look_at_exports(root / "exports")
    there = {**found.seeds, **{f"exports/{name}": seed for name, seed in exports.items()}}
    wrong += found.violations
    for name in sorted({*before, *after, *there}):
        old, seed = before.get(name, GONE), there.get(name, GONE)
        allowed = {acked[name]} if name in acked else {old, after.get(name, old)}
        if seed not in allowed:
            wrong.append(f"{name} holds {seed}, and not one of {sorted(allowed)}")
    wrong += [f"{name} is without its files" for name in found.seeds if name not in found.sidecars]
    return wrong


def left_behind(root: Path) -> list[str]:
    """Whatever is neither a checkpoint nor an export nor a lease."""
    return sorted(
        str(path.relative_to(root))
        for folder in ("run", "exports")
        for path in ((root / folder).iterdir() if (root / folder).exists() else ())
        if path.name.startswith(".") and path.name != ".leases"
    )
