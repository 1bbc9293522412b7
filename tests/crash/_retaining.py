"""A run with steps of every kind, one pass of retention, and what must never go."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from _look import seed_of
from _seeded import make_state

import sidestream
from sidestream import errors


async def trial(run: Path, random: Any) -> list[str]:
    """Make a run, damage some of it, lease some of it, prune it: what is wrong afterwards."""
    steps = sorted(random.sample(range(1, 20), random.randint(2, 5)))
    last = random.randint(1, 3)
    names = await make(run, steps, random)
    shutil.copytree(run / names[0], run / "copied-by-hand")
    (run / "step-500").mkdir()
    (run / "step-500" / "notes.txt").write_text("not a checkpoint")
    damaged = random.random() < 0.4
    if damaged:
        shard = next((run / names[-1]).glob("*.distcp"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    leased = random.choice(steps) if random.random() < 0.5 else None
    wrong = await prune(run, last, None if damaged and leased == steps[-1] else leased)
    return wrong + await judged(run, steps, names, last, damaged, leased)


async def make(run: Path, steps: list[int], random: Any) -> list[str]:
    names = []
    async with sidestream.Checkpointer(run, save=sidestream.SaveOptions(durability="flush")) as checkpoints:
        for step in steps:
            for _ in range(random.choice([1, 1, 2])):
                info = await checkpoints.save(make_state(step), step=step)
                names.append(Path(info.url).name)
    return names


async def prune(run: Path, last: int, leased: int | None) -> list[str]:
    async with (
        sidestream.Checkpointer(run) as reader,
        sidestream.Checkpointer(run, keep=sidestream.KeepLast(last)) as checkpoints,
    ):
        try:
            if leased is None:
                await checkpoints.prune()
                return []
            async with reader.reading(leased) as checkpoint:
                await checkpoints.prune()
                if (await checkpoint.value("seed")) != leased:
                    return ["what a reader has a lease on was changed"]
        except errors.SidestreamError as error:
            return [f"{type(error).__name__}: {error}"]
    return []


async def judged(
    run: Path, steps: list[int], names: list[str], last: int, damaged: bool, leased: int | None
) -> list[str]:
    wrong = []
    newest = {step: max(name for name in names if name.split(".")[0] == f"step-{step}") for step in steps}
    if damaged and names[-1].endswith(".g2"):  # the generation before it is good
        newest[steps[-1]] = names[-2]
    good = [step for step in steps if not (damaged and newest[step] == names[-1])]
    for step in good[-last:]:
        if not (run / newest[step]).exists():
            wrong.append(f"KeepLast({last}) has deleted {newest[step]}")
        elif await seed_of(run / newest[step]) != step:
            wrong.append(f"{newest[step]} was harmed")
    if damaged and not (run / names[-1]).exists():
        wrong.append("what does not verify was deleted")
    if not good and any(not (run / name).exists() for name in names):
        wrong.append("something was deleted, and nothing is good")
    wrong += [f"{name} is no step of ours, and is gone" for name in ("copied-by-hand", "step-500/notes.txt")
              if not (run / name).exists()]  # fmt: skip
    if leased is not None and not damaged and not (run / newest[leased]).exists():
        wrong.append("what a reader has a lease on was deleted")
    return wrong
