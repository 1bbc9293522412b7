"""A writer process or its trainer is killed or stopped at file operations of either; what is left is judged."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _judge import Oracle
from _look import attempts_in
from _memory_group import killed_in, limit, memory_group
from _rows import Row, Size, spread
from _saver_trial import environment, happened, savers, wait_until_gone
from _seeded import make_state
from _trials import Told, Trials

import sidestream
from sidestream import errors, events
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._worker.client import worker_for

SHORT, LONG = 30, 500
SAVES = [(1, 11), (2, 12)]
OVER = [(1, 11), (1, 12)]
"""Saves to one name."""
WORK = {"steps": SAVES, "overwriting": OVER}
BUDGETS = (1 << 26, 1 << 20)
MEMORY = (4, 40)
KINDS = ("kill", "stop", "kill the trainer", "stop the trainer", "full", "kill the trainer at its own")


class Place:
    """One trial: its run, and what its savers note."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.run = self.root / "run"
        self.notes = folder / "notes"
        self.root.mkdir(parents=True)

    def trial(self, children: Trials, what: str, at: int, when: str, budget_bytes: int, work: str) -> Told:
        own = what == "kill the trainer at its own"
        env = environment(self.notes, self.root, "nothing" if own else what, 0 if own else at, when)
        return children.run(
            at=at if own else 0, when=when, root=str(self.root), run=str(self.run), work=work, saves=WORK[work],
            env=env, saver=True, budget_bytes=budget_bytes,
        )  # fmt: skip


def counted(children: Trials, folder: Path, budget_bytes: int, work: str) -> tuple[int, int]:
    """How many operations the saver and the trainer do when nothing happens."""
    place = Place(folder)
    told = place.trial(children, "nothing", 0, "before", budget_bytes, work)
    assert told.exit == 0, told
    assert told.acked == {"steps": {"step-1": 11, "step-2": 12}, "overwriting": {"plain-1": 12}}[work], told
    assert wait_until_gone(place.notes) == []
    return max(savers(place.notes).values()), len(told.get("operations"))


def judged(judge: Oracle, place: Place, what: str, told: Told, work: str) -> list[Any]:
    wrong: list[Any] = []
    ended = told.exit == 0
    if ended != ("kill the trainer" not in what) and happened(place.notes):
        wrong.append(f"the trainer ended with {told.exit}")
    if told.exit not in (0, -signal.SIGKILL):
        wrong.append(f"the trainer ended with {told.exit}")
    error = told.error
    if error is not None and ("untyped" in error or error["error"] not in ("WriterProcessError", "NoSpaceError")):
        wrong.append(f"it failed with {error}")
    acked = [report["seed"] for report in told.reports if "acked" in report]
    if ended and error is None and len(acked) < len(SAVES):
        wrong.append(f"of {SAVES} these were acknowledged: {acked}")
    if ended and what in ("stop the trainer", "nothing") and error is not None:
        wrong.append(f"nothing was lost, and it failed with {error}")
    left = wait_until_gone(place.notes)
    if left:
        wrong.append(f"savers that outlive their trainer: {left}")
    found = judge.look(place.run, further=9, stock=True)
    wrong += found.violations
    for name, seed in told.acked.items():
        newer = work == "overwriting" and found.seeds.get(name, 0) > seed
        if found.seeds.get(name) != seed and not newer:
            wrong.append(f"{name} was acknowledged with seed {seed}, and is {found.seeds.get(name)}")
    wrong += [f"{name} is without its files" for name in found.seeds if name not in found.sidecars and name != "step-9"]
    if ended and attempts_in(place.root):
        wrong.append(f"left behind: {attempts_in(place.root)}")
    return wrong


@pytest.mark.parametrize("what", KINDS)
def test_either_side(
    what: str, tmp_path: Path, row: Callable[..., Row], size: Size, judge: Oracle, children: Trials
) -> None:
    total = spread(size.of(SHORT, LONG), KINDS)[what]
    counting = row("saver", what)
    random = size.random("saver", what)
    counts: dict[tuple[int, str], tuple[int, int]] = {}
    for number in range(total):
        budget, work = BUDGETS[number % 2], random.choice([*WORK])
        if (budget, work) not in counts:
            counts[budget, work] = counted(children, tmp_path / f"count-{budget}-{work}", budget, work)
        operations = counts[budget, work][1 if what == "kill the trainer at its own" else 0]
        first = operations * number // total + 1
        at = random.randint(first, max(operations * (number + 1) // total, first))
        place = Place(tmp_path / f"trial-{number}")
        told = place.trial(children, what, at, random.choice(("before", "after")), budget, work)
        counting.trial({"at": at, "budget": budget, "work": work}, judged(judge, place, what, told, work))
        if happened(place.notes):
            counting.note("happened")
        shutil.rmtree(tmp_path / f"trial-{number}")
    counting.end(at_least=total)


async def test_a_saver_in_a_memory_group(tmp_path: Path, row: Callable[..., Row], size: Size, judge: Oracle) -> None:
    """The kernel ends it in the middle of a save, for want of memory; the one that takes its place has more."""
    counting = row("savers out of memory")
    for number in range(size.of(*MEMORY)):
        options = sidestream.WriterProcess(retries=number % 2, nice=number % 2)
        wrong = await short_of_memory(tmp_path / str(number), options, judge)
        counting.trial({"retries": options.retries}, wrong)
        worker_for(options).close()
        shutil.rmtree(tmp_path / str(number))
    counting.end(at_least=1)


async def short_of_memory(run: Path, options: sidestream.WriterProcess, judge: Oracle) -> list[Any]:
    heard: list[events.Event] = []
    wrong: list[Any] = []
    saver = worker_for(options)
    with time_limit(Deadline.after(60)):
        await saver.up()
    assert saver.pid is not None
    with memory_group() as group, events.observe(heard.append):
        limit(group, saver.pid, 8 << 20)
        large = make_state(1) | {"ballast": b"x" * (64 << 20)}  # what is no tensor goes through its own memory
        try:
            await sidestream.save(large, run / "large", options=sidestream.SaveOptions(writer=options))
        except errors.WriterProcessError:
            if options.retries:
                wrong.append("it was not tried again")
        else:
            if not options.retries:
                wrong.append("it was tried again")
        if killed_in(group) != 1:
            wrong.append(f"{killed_in(group)} processes ended for want of memory")
    if [event.again for event in heard if isinstance(event, events.WriterProcessLost)] != [bool(options.retries)]:
        wrong.append(f"heard of {heard}")
    if (run / "large").exists() != bool(options.retries) or attempts_in(run):
        wrong.append("what is there is not what was told")
    async with sidestream.Checkpointer(run / "steps", save=sidestream.SaveOptions(writer=options)) as checkpoints:
        await checkpoints.save(make_state(2), step=1)
    found = judge.look(run / "steps")
    return wrong + found.violations + ([] if found.seeds == {"step-1": 2} else [f"found {found.seeds}"])
