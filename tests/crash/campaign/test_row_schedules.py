"""Schedules: two writers, a reader and a cancelling hand on one run, on virtual time, seed after seed.

Replay one with ``nox -s campaign -- -k schedules --seed N``; a violation names the trial, whose seed is ``N`` and it.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _look import look, reference
from _rows import Row, Size
from _seeded import blank_state, make_state, same
from _simulation import Hang, Simulation

import sidestream
from sidestream import KeepEvery, KeepLast, errors

SCHEDULES = (300, 20_000)
ALLOWED = (errors.SkippedError, errors.TooManySavesError, errors.CheckpointExistsError, errors.CheckpointNotFoundError)
KEEP = (None, KeepLast(1), KeepLast(2) | KeepEvery(steps=3))
PAUSE_S = 0.05


@dataclass
class Story:
    """What a program was told, and what it saw that must not be."""

    acked: dict[str, int] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


class Program:
    """What the tasks of one schedule do; all chance is the simulation's."""

    def __init__(self, simulation: Simulation, run: Path) -> None:
        self.simulation, self.run, self.random = simulation, run, simulation.random
        self.story = Story()
        self.keep = self.random.choice(KEEP)
        self.seeds = iter(range(1, 1000))

    async def main(self) -> Story:
        overlap = self.random.choice(["wait", "skip", "latest", "fail"])
        async with asyncio.timeout(3600):
            async with asyncio.TaskGroup() as group:
                for name in ("one", "two"):
                    group.create_task(self.write(name, overlap))
                group.create_task(self.read())
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        self.story.wrong += [f"a task is left: {task.get_name()}" for task in left]
        return self.story

    async def pause(self) -> None:
        await asyncio.sleep(self.random.expovariate(1 / PAUSE_S))

    async def write(self, name: str, overlap: Any) -> None:
        in_flight = self.random.choice([1, 2])
        async with sidestream.Checkpointer(self.run, keep=self.keep, when_full=overlap, slots=in_flight) as checkpoints:
            hands = [asyncio.create_task(self.save(checkpoints, step)) for step in await self.plan()]
            await asyncio.wait(hands)
            for hand in hands:
                if not hand.cancelled() and hand.exception() is not None:
                    self.story.wrong.append(f"writer {name}: {type(hand.exception()).__name__}: {hand.exception()}")

    async def plan(self) -> list[int]:
        await self.pause()
        return sorted(self.random.choices(range(1, 6), k=4))

    async def save(self, checkpoints: sidestream.Checkpointer, step: int) -> None:
        await asyncio.sleep(step * PAUSE_S * self.random.random())
        seed = next(self.seeds)
        self.story.given.add(seed)
        pending = None
        try:
            pending = checkpoints.async_save(make_state(seed), step=step)
            if self.random.random() < 0.3:
                await self.pause()
                pending.cancel()
            info = await pending
            self.story.acked[Path(info.url).name] = seed
        except ALLOWED:
            return
        except asyncio.CancelledError:
            assert pending is not None
            await pending.ended()
            name = Path(pending.url).name
            (self.story.acked if pending.outcome == "committed" else self.story.absent)[name] = seed
            if pending.outcome == "unknown":
                self.story.wrong.append(f"{name}: nothing was out of order, and its outcome is unknown")
        finally:
            self.simulation.note(f"save of {step} ended")

    async def read(self) -> None:
        async with sidestream.Checkpointer(self.run) as checkpoints:
            for _ in range(6):
                await self.pause()
                state = blank_state()
                try:
                    async with asyncio.timeout(self.random.choice([0.02, 0.2, None])):
                        step = await checkpoints.restore(
                            state, fallback="older", options=sidestream.LoadOptions(atomic=True)
                        )
                except (*ALLOWED, TimeoutError):
                    continue
                finally:
                    self.simulation.note("restore ended")
                if step is not None and (
                    state["seed"] not in self.story.given or not same(state, reference(state["seed"]))
                ):
                    self.story.wrong.append(f"a reader got a mix for step {step}")


async def judged(run: Path, program: Program) -> list[str]:
    found, story = await look(run), program.story
    wrong = [*story.wrong, *found.violations]
    wrong += [f"{name} holds {found.seeds[name]}, {seed} was acknowledged" for name, seed in story.acked.items()
              if found.seeds.get(name, seed) != seed]  # fmt: skip
    wrong += [f"{name} is there, and its save was cancelled as absent" for name, seed in story.absent.items()
              if found.seeds.get(name) == seed]  # fmt: skip
    wrong += [f"{name} is there, and nobody was told" for name in found.seeds if name not in story.acked]
    wrong += [f"{name} was left behind" for name in found.attempts]
    if program.keep is None:
        wrong += [f"{name} is gone" for name in story.acked if name not in found.seeds]
    elif story.acked:
        newest = max(int(name.removeprefix("step-").partition(".g")[0]) for name in story.acked)
        wrong += [] if newest in found.steps else [f"step {newest}, the newest one, is gone"]
    return wrong


def simulated(seed: int, run: Path) -> tuple[Simulation, Program, list[str]]:
    simulation = Simulation(seed)
    program = Program(simulation, run)
    try:
        simulation.run(program.main)
    except Hang as hang:
        return simulation, program, [str(hang)]
    except BaseExceptionGroup as group:
        return simulation, program, [f"{type(error).__name__}: {error}" for error in group.exceptions]
    return simulation, program, []


def digest(simulation: Simulation, run: Path) -> str:
    return hashlib.sha256("\n".join(simulation.trace).replace(str(run), "").encode()).hexdigest()


@pytest.mark.parametrize("part", range(2))
def test_schedules(part: int, place: Path, row: Callable[..., Row], size: Size) -> None:
    counts = row("schedules on virtual time", str(part))
    total = size.of(*SCHEDULES) // 2
    for number in range(part * total, (part + 1) * total):
        run = place / str(number)
        seed = size.seed * 1_000_003 + number
        simulation, program, wrong = simulated(seed, run)
        wrong = wrong or asyncio.run(judged(run, program))
        counts.trial(f"schedule {number}", wrong)
        counts.note("steps", len(simulation.trace))
        counts.note("acknowledged", len(program.story.acked))
        counts.note("cancelled", len(program.story.absent))
        if number % 50 == 0:
            again, _, _ = simulated(seed, place / f"{number}-again")
            same_again = digest(again, place / f"{number}-again") == digest(simulation, run)
            counts.trial(f"schedule {number}", [] if same_again else ["the seed gives another schedule"], count=0)
        shutil.rmtree(run, ignore_errors=True)
    counts.end(at_least=total)
