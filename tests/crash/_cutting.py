"""What is under way when a modelled disk loses its power, and what has to be found afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import _one_name
from _disk_model import Recording, record
from _look import Found
from _saver_trial import environment, processes_in
from _seeded import make_state

import sidestream
from sidestream._worker.client import worker_for
from sidestream.options import WriterChoice

Acked = Callable[[str, int], None]


async def one_step(run: Path, acked: Acked, saver: WriterChoice, *, step: int) -> None:
    async with (
        sidestream.AsyncStager(budget_bytes=1 << 20) as stager,
        sidestream.Checkpointer(run, stager=stager, save=sidestream.SaveOptions(writer=saver)) as checkpoints,
    ):
        info = await checkpoints.save(make_state(12), step=step)
        acked(Path(info.url).name, 12)


async def next_step(run: Path, acked: Acked, saver: WriterChoice) -> None:
    await one_step(run, acked, saver, step=2)


async def same_step(run: Path, acked: Acked, saver: WriterChoice) -> None:
    await one_step(run, acked, saver, step=1)


async def new_run(run: Path, acked: Acked, saver: WriterChoice) -> None:
    """Directories that are made on the way have to be synced too."""
    await one_step(run / "new" / "below", acked, saver, step=2)


async def plain(run: Path, acked: Acked, saver: WriterChoice) -> None:
    info = await sidestream.save(
        make_state(12), run / "plain", options=sidestream.SaveOptions(streaming=saver == "thread", writer=saver)
    )
    acked(Path(info.url).name, 12)


async def prune(run: Path, acked: Acked, saver: WriterChoice) -> None:
    """Step 1 may go as soon as step 2 is there."""
    async with (
        sidestream.AsyncStager(budget_bytes=1 << 20) as stager,
        sidestream.Checkpointer(
            run, stager=stager, keep=sidestream.KeepLast(1), save=sidestream.SaveOptions(writer=saver)
        ) as checkpoints,
    ):
        info = await checkpoints.save(make_state(12), step=2)
        acked(Path(info.url).name, 12)


async def one_name(name: str, run: Path, acked: Acked, saver: WriterChoice) -> None:
    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        await _one_name.WORK[name](run, _one_name.Doing(acked, stager, saver))


WORK: dict[str, Callable[[Path, Acked, WriterChoice], Any]] = {
    "the next step": next_step,
    "the same step again": same_step,
    "a new run": new_run,
    "a plain save": plain,
    "a retention pass": prune,
    **{name: partial(one_name, name) for name in _one_name.WORK},
}

Writer = Literal["threads", "a writer process"]


async def recorded(place: Path, name: str, writer: Writer) -> Recording:
    """``WORK[name]`` below ``place / "root"``, in a run that has step 1, with what either process did to the disk."""
    root, options = place / "root", sidestream.WriterProcess(retries=0)
    if name in _one_name.WORK:
        await _one_name.prepare(root)
    else:
        async with sidestream.Checkpointer(root / "run") as checkpoints:
            await checkpoints.save(make_state(11), step=1)

    async def work(acked: Acked, journal: Path) -> None:
        if writer == "threads":
            await WORK[name](root / "run", acked, "thread")
            return
        worker_for(options).close()
        try:
            with processes_in(environment(place / "notes", root, "nothing", journal=journal)):
                await WORK[name](root / "run", acked, options)
        finally:
            worker_for(options).close()

    return await record(root, place / "before", work)


def runs(name: str) -> tuple[str, ...]:
    """What to look at after a cut: where the work was done, and the run that was there before."""
    return ("run/new/below", "run") if name == "a new run" else ("run", "run")


def judged(cut: Path, looks: Sequence[Found], acked: dict[str, int], name: str) -> list[str]:
    """What is wrong with what was found in ``runs(name)`` below ``cut``."""
    found, older = looks
    if name in _one_name.WORK:
        return _one_name.judged(found, cut, acked, _one_name.AFTER[name])
    wrong = list(found.violations)
    wrong += [f"acknowledged {name} is lost" for name, seed in acked.items() if found.seeds.get(name) != seed]
    wrong += [f"{name} holds {seed}" for name, seed in found.seeds.items() if seed not in (11, 12)]
    if older.seeds.get("step-1") != 11 and not (name == "a retention pass" and found.seeds.get("step-2") == 12):
        wrong.append("the older step is lost")
    return wrong
