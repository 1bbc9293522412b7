"""What is under way when a modelled disk loses its power, and what has to be found afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from _look import Found
from _seeded import make_state

import sidestream


async def one_step(run: Path, acked: Callable[[str, int], None], *, step: int) -> None:
    async with (
        sidestream.AsyncStager(budget_bytes=1 << 20) as stager,
        sidestream.Checkpointer(run, stager=stager) as checkpoints,
    ):
        info = await (await checkpoints.save(make_state(12), step=step))
        acked(Path(info.url).name, 12)


async def next_step(run: Path, acked: Callable[[str, int], None]) -> None:
    await one_step(run, acked, step=2)


async def same_step(run: Path, acked: Callable[[str, int], None]) -> None:
    await one_step(run, acked, step=1)


async def new_run(run: Path, acked: Callable[[str, int], None]) -> None:
    """Directories that are made on the way have to be synced too."""
    await one_step(run / "new" / "below", acked, step=2)


async def plain(run: Path, acked: Callable[[str, int], None]) -> None:
    info = await sidestream.save(make_state(12), run / "plain", snapshot=False)
    acked(Path(info.url).name, 12)


async def prune(run: Path, acked: Callable[[str, int], None]) -> None:
    """Step 1 may go as soon as step 2 is there."""
    async with (
        sidestream.AsyncStager(budget_bytes=1 << 20) as stager,
        sidestream.Checkpointer(run, stager=stager, keep=sidestream.KeepLast(1)) as checkpoints,
    ):
        info = await (await checkpoints.save(make_state(12), step=2))
        acked(Path(info.url).name, 12)


WORK: dict[str, Callable[..., Any]] = {
    "the next step": next_step,
    "the same step again": same_step,
    "a new run": new_run,
    "a plain save": plain,
    "a retention pass": prune,
}


def judged(found: Found, acked: dict[str, int], older: Found, name: str) -> list[str]:
    """``older``: the run that was there before."""
    wrong = list(found.violations)
    wrong += [f"acknowledged {name} is lost" for name, seed in acked.items() if found.seeds.get(name) != seed]
    wrong += [f"{name} holds {seed}" for name, seed in found.seeds.items() if seed not in (11, 12)]
    if older.seeds.get("step-1") != 11 and not (name == "a retention pass" and found.seeds.get("step-2") == 12):
        wrong.append("the older step is lost")
    return wrong
