"""Several processes on one run: two writers to one step, and a reader while steps are written and pruned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _judge import Oracle
from _rows import Row, Size
from _seeded import blank_state, make_state, same
from _trials import Told, Trials, trials

import sidestream
from sidestream import errors

RACES = (200, 5_000)
LOADS = (5_000, 200_000)
QUICK_LOADS = 200
ROUNDS = 20


@pytest.fixture
def rivals(children: Trials) -> Iterator[Trials]:
    """A second process, to run at the same time as ``children``."""
    with trials() as running:
        yield running


async def test_two_writers_to_one_step(
    place: Path, children: Trials, rivals: Trials, judge: Oracle, row: Callable[..., Row], size: Size
) -> None:
    counts = row("two writers to one step")
    total = size.of(*RACES)
    while counts.trials < total:
        folder = place / str(counts.trials)
        folder.mkdir()
        work = {"work": "race", "root": "/nonexistent", "run": folder, "rounds": ROUNDS}
        told = await asyncio.gather(
            *(asyncio.to_thread(each.run, me=me, **work) for me, each in enumerate((children, rivals)))
        )
        found = judge.look(folder / "run").seeds
        plain = {path.name: judge_plain(path) for path in sorted(folder.glob("plain-*"))}
        seeds = {**found, **{name: await each for name, each in plain.items()}}
        for number in range(ROUNDS):
            counts.trial(number, raced(number, told, seeds))
        counts.trial("the race", [f"a writer ended with {each.error}" for each in told if each.error], count=0)
        counts.note("refused with Conflict", sum("lost" in report for each in told for report in each.reports))
    counts.end(at_least=total)


async def judge_plain(path: Path) -> int | None:
    state = await (await sidestream.open_checkpoint(path)).state_dict()
    return int(state["seed"]) if same(state, make_state(state["seed"])) else None


def raced(number: int, told: list[Told], seeds: dict[str, int]) -> list[str]:
    """One wins and the other is refused; or, in a run, both were in time for a generation of their own."""
    won = [report for each in told for report in each.reports if report.get("round") == number]
    lost = [report for each in told for report in each.reports if report.get("lost") == number]
    wrong = [f"{report['acked']} holds {seeds.get(report['acked'])}" for report in won
             if seeds.get(report["acked"]) != report["seed"]]  # fmt: skip
    if len(won) + len(lost) != 2 or not won:
        wrong.append(f"{len(won)} won, {len(lost)} were refused")
    if len({report["acked"] for report in won}) != len(won):
        wrong.append("both were told that they wrote the same one")
    return wrong


class Reader:
    """Loads again and again; every load is one save as a whole."""

    def __init__(self, run: Path, random: Any) -> None:
        self.random = random
        self.checkpoints = sidestream.Checkpointer(run)
        self.newest = 0

    async def load(self) -> list[str]:
        choice = self.random.random()
        if choice < 0.8:
            return await self.load_newest()
        steps = await self.checkpoints.steps()
        step = self.random.choice(steps or [1])
        try:
            if choice < 0.9:
                async with self.checkpoints.reading(step) as checkpoint:
                    state = await checkpoint.state_dict()
                return [] if same(state, make_state(step)) else [f"step {step} is a mix"]
            noted = await self.checkpoints.read_metadata(step)
            return [] if noted == {"seed": step} else [f"the metadata of step {step} is {noted}"]
        except errors.CheckpointNotFoundError:  # that is what a step is which was pruned since it was listed
            return []

    async def load_newest(self) -> list[str]:
        state = blank_state()
        step = await self.checkpoints.restore(state)
        if step is None:
            return ["there is no step"] if self.newest else []
        wrong = [] if same(state, make_state(step)) else [f"step {step} is a mix"]
        wrong += [f"after step {self.newest} came {step}"] if step < self.newest else []
        self.newest = step
        return wrong


async def test_a_reader_while_steps_are_written_and_pruned(
    place: Path, children: Trials, row: Callable[..., Row], size: Size
) -> None:
    counts = row("a reader beside a writer that prunes")
    total, stop = QUICK_LOADS if size.quick else size.of(*LOADS), place / "stop"
    work = asyncio.create_task(
        asyncio.to_thread(children.run, work="publish", root="/nonexistent", run=place / "run", stop=stop)
    )
    reader = Reader(place / "run", size.random("reader"))
    try:
        async with reader.checkpoints:
            while counts.trials < total and not work.done():
                try:
                    wrong = await reader.load()
                except Exception as error:
                    wrong = [f"a spurious error: {type(error).__name__}: {error}"]
                if reader.newest:
                    counts.trial(f"load {counts.trials}, newest {reader.newest}", wrong)
    finally:
        stop.touch()
        told = await work
    counts.note("steps published", told.get("published") or 0)
    counts.trial("the writer", [f"it ended with {told.error}"] if told.error else [], count=0)
    if reader.newest < 10:
        counts.trial("the writer", [f"only {reader.newest} steps were seen"], count=0)
    counts.end(at_least=total)
