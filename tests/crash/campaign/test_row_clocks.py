"""Clocks that jump by a month: nothing that is alive is taken for dead, and nothing that stays is deleted."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _judge import Oracle
from _rows import Row, Size
from _seeded import make_state
from _trials import Trials, trials

import sidestream

SHORT, LONG = 30, 1_000
MONTH_S = 30 * 86400


@pytest.fixture
def rivals(children: Trials) -> Iterator[Trials]:
    with trials() as running:
        yield running


async def test_the_clock_jumps_while_somebody_saves(
    place: Path, children: Trials, rivals: Trials, judge: Oracle, row: Callable[..., Row], size: Size
) -> None:
    """A writer waits in the middle of a save. The storage's times of everything are changed, and another one, whose
    clock jumps, saves and prunes. Then the first one goes on."""
    counts, random = row("clocks that jump"), size.random("clocks")
    total = size.of(SHORT, LONG)
    while counts.trials < total:
        folder = place / str(counts.trials)
        run, ready, go = folder / "run", folder / "ready", folder / "go"
        async with sidestream.Checkpointer(run) as checkpoints:
            await checkpoints.save(make_state(11), step=1)
        hold = random.randint(8, 40)
        first = asyncio.create_task(
            asyncio.to_thread(
                children.run, work="held", root="/nonexistent", run=run, saves=[(9, 19)], ready=ready, go=go, hold=hold
            )
        )
        try:
            while not ready.exists() and not first.done():
                await asyncio.sleep(0.001)
            shift(run, random)
            told = await asyncio.to_thread(
                rivals.run,
                work="odd_clock",
                root="/nonexistent",
                run=run,
                saves=[(step, step + 10) for step in (2, 3, 4)],
                jumps=random.randrange(1 << 30),
            )
        finally:
            go.touch()
            other = await first
        found = judge.look(run)
        wrong = list(found.violations)
        wrong += [f"a writer ended with {each.error}" for each in (told, other) if each.error]
        wrong += [] if found.seeds.get("step-9") == 19 else ["the save of the living writer is gone"]
        wrong += [f"step-{step} is gone" for step in (3, 4) if found.seeds.get(f"step-{step}") != step + 10]
        counts.trial(f"held at operation {hold}", wrong)
    counts.end(at_least=total)


def shift(run: Path, random: Any) -> None:
    """The times of all files, as a storage shows them whose clock was set."""
    by = random.choice([-MONTH_S, MONTH_S, -3600, 3600])
    for folder, _, names in os.walk(run):
        for path in (Path(folder), *(Path(folder) / name for name in names)):
            try:
                os.utime(path, (time.time() + by, time.time() + by))
            except FileNotFoundError:
                continue
