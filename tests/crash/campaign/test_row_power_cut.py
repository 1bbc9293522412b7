"""Power cuts on real file systems: one disk is used on from cut to cut, as in a life of crashes.

The child asks the kernel to shut the file system down without flushing its log: what has not reached the disk by then
never will. Needs root.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _judge import Oracle
from _look import Found
from _mounts import Disk
from _rows import Row, Size, spread
from _seeded import make_state
from _trials import Told, Trials

import sidestream

SHORT, LONG = 300, 5_000
CHAIN = 12  # cuts before the disk is replaced by an empty one
PARTS = [(kind, part) for kind in ("ext4", "xfs") for part in (0, 1)]


def judged(found: Found, acked: dict[str, int], tried: dict[str, int]) -> list[str]:
    """``acked``: what stood there before or was acknowledged. ``tried``: what may have come to be besides."""
    wrong = list(found.violations)
    wrong += [f"acknowledged {name} is lost" for name, seed in acked.items() if found.seeds.get(name) != seed]
    allowed = {**tried, **acked}
    wrong += [f"{name} came from nowhere" for name, seed in found.seeds.items() if allowed.get(name) != seed]
    return wrong


class Life:
    """A run on one disk, and what of it must never be lost again."""

    def __init__(self, disk: Disk, children: Trials, judge: Oracle, random: Any) -> None:
        self.disk, self.children, self.judge, self.random = disk, children, judge, random
        self.run = "run"
        self.acked: dict[str, int] = {}
        self.tried: dict[str, int] = {}
        self.seed = 0

    async def begin(self) -> None:
        self.disk.renew()
        self.acked, self.tried = {}, {}
        self.run = self.random.choice(["run", "new/run/below"])
        with self.disk.mount() as place:
            if self.run == "run":
                async with sidestream.Checkpointer(place / "run") as checkpoints:
                    await checkpoints.save(make_state(11), step=1)
                self.acked = {"step-1": 11}

    def cut(self, operations: int, number: int) -> tuple[Any, list[str]]:
        """What the last cut left is judged; then a save begins, and the power goes. Where, and what is wrong."""
        with self.disk.mount() as place:
            found = self.judge.look(place / self.run, stock=number % 8 == 0)
            wrong = judged(found, self.acked, self.tried)
            self.acked = found.seeds
            at = 0 if number % 3 == 0 else self.random.randint(1, operations)
            when = self.random.choice(["before", "after"])
            told = self.save(place, at, when)
            name = f"cut at {told.get('killed_at') or 'the acknowledgement'}, operation {at}, {when}"
            if told.exit != -signal.SIGKILL:
                wrong.append(f"{name}: the child ended otherwise: {told}")
            self.acked = {**self.acked, **told.acked}
        return (name, self.run), wrong

    def save(self, place: Path, at: int, when: str) -> Told:
        self.seed += 1
        steps = [int(name.removeprefix("step-").split(".")[0]) for name in self.acked]
        step = max(steps, default=0) + 1
        again = bool(steps) and self.random.random() < 0.25
        if again:
            step = max(steps)
            generation = max(int(name.partition(".g")[2] or 1) for name in self.acked if f"step-{step}" in name) + 1
        name = f"step-{step}.g{generation}" if again else f"step-{step}"
        self.tried = {name: self.seed}
        return self.children.run(
            root=place, run=place / self.run, saves=[(step, self.seed)], at=at, when=when, cut=str(place)
        )


@pytest.mark.parametrize(("kind", "part"), PARTS)
async def test_the_power_is_cut(
    kind: str, part: int, place: Path, children: Trials, judge: Oracle, row: Callable[..., Row], size: Size
) -> None:
    counts = row("power cuts", kind)
    total = spread(size.of(SHORT, LONG), PARTS)[kind, part]
    life = Life(Disk(kind, place), children, judge, size.random(kind, part))
    await life.begin()
    with life.disk.mount() as mount:
        operations = len(life.save(mount, 0, "before").get("operations"))
    await life.begin()
    while counts.trials < total:
        where, wrong = life.cut(operations, counts.trials)
        counts.trial(where, wrong)
        if counts.trials % CHAIN == 0 or counts.trials == total:
            with life.disk.mount() as mount:  # what the last cut of this disk left
                found = judge.look(mount / life.run, further=1_000_000)
            counts.trial(where, judged(found, life.acked, life.tried), count=0)
            await life.begin()
    counts.end(at_least=total)
