"""SIGKILL at every file operation; what is left is judged in another process."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _judge import Oracle
from _look import Found, look_at_exports
from _rows import Row, Size, spread
from _seeded import make_state
from _trials import Told, Trials

import sidestream
from sidestream._storage.names import attempt_name

SHORT, LONG = 2_000, 50_000


@dataclass(frozen=True)
class Scenario:
    """``before``: the (step, seed) pairs that are there; ``saves``: those that the child makes, by ``work``. ``goes``:
    directories that may be gone afterwards, once what is acknowledged or stands in ``unless`` is there. ``wreck``:
    what another killed process left besides. ``steady``: every run does the same operations in the same order.
    ``options`` may be drawn for a trial."""

    before: tuple[tuple[int, int], ...]
    saves: tuple[tuple[int, int], ...]
    work: str = "steps"
    steady: bool = True
    goes: tuple[str, ...] = ()
    wreck: bool = False
    options: tuple[dict[str, Any], ...] = field(default=({"budget_bytes": 1 << 20}, {"budget_bytes": 1 << 16}))


SCENARIOS = {
    "a fresh run": Scenario((), ((1, 11),)),
    "the next step": Scenario(((1, 11),), ((2, 12),)),
    "the same step again": Scenario(((1, 11), (2, 12)), ((2, 22),)),
    "a plain save": Scenario(((1, 11),), ((2, 12),), "plain", options=({"streaming": True}, {"streaming": False})),
    "two saves at once": Scenario(((1, 11),), ((2, 12), (3, 13)), "together", steady=False),
    "saves to one name": Scenario(((1, 11),), ((2, 12), (2, 22)), "overwriting", steady=False),
    "saves with an export": Scenario(((1, 11),), ((2, 12), (2, 22)), "exported", steady=False),
    "cleaning up a failed save": Scenario(((1, 11),), ((2, 12),), "failing"),
    "a retention pass": Scenario(
        ((1, 11), (2, 12), (3, 13)), ((4, 14),), "prune", steady=False, goes=("step-1", "step-2")
    ),
    "a recovery": Scenario(((1, 11), (2, 12)), (), "recover", steady=False, wreck=True),
}
RECOVERIES = 3  # of what a kill left, some are killed again, others end


async def prepare(folder: Path, scenario: Scenario) -> Path:
    base = folder / "base"
    base.mkdir()
    if scenario.before:
        async with sidestream.Checkpointer(base / "run") as checkpoints:
            for step, seed in scenario.before:
                await checkpoints.save(make_state(seed), step=step)
    if scenario.wreck:
        wreck(base / "run")
    return base


def wreck(run: Path) -> None:
    """An attempt that got far, one that has just begun, a deletion that was interrupted, and the leases of the dead."""
    save_id = "0123456789abcdef0123456789abcdef"
    shutil.copytree(run / "step-2", run / attempt_name("step-3", save_id))
    (run / f".step-4.{save_id}.partial").mkdir()
    shutil.copytree(run / "step-1", run / f".retired-step-0-{save_id}")
    next((run / f".retired-step-0-{save_id}").glob(".metadata")).unlink()
    (run / ".leases").mkdir(exist_ok=True)
    for name in (f"step-3.save1.{save_id}", f"step-2.read1.{save_id}", f"step-1.delete1.{save_id}"):
        (run / ".leases" / name).write_text("{}")
        os.utime(run / ".leases" / name, (1, 1))


def judged(found: Found, told: Told, scenario: Scenario) -> list[str]:
    """What is wrong with what was found after the child had ended like that."""
    wrong = list(found.violations)
    older = {f"step-{step}": seed for step, seed in scenario.before}
    if any(found.seeds.get(name) == seed for name, seed in told.acked.items()) or not_acked(found, scenario):
        older = {name: seed for name, seed in older.items() if name not in scenario.goes or name in found.seeds}
    allowed = {seed for _, seed in scenario.saves}
    wrong += [f"{name} was harmed" for name, seed in older.items() if found.seeds.get(name) != seed]
    wrong += [
        f"acknowledged {name} is lost"
        for name, seed in told.acked.items()
        if found.seeds.get(name) != seed and not (scenario.work == "overwriting" and found.seeds.get(name, 0) > seed)
    ]
    if scenario.work in ("steps", "overwriting"):
        wrong += [f"{name} is without its files" for name in told.acked if name not in found.sidecars]
    wrong += [
        f"{name} came from nowhere" for name in found.seeds if name not in older and found.seeds[name] not in allowed
    ]
    for step, seed in found.steps.items():
        expected = {seed for at, seed in (*scenario.before, *scenario.saves) if at == step}
        if seed not in expected:
            wrong.append(f"step {step} restores to seed {seed}")
    return wrong


def judged_exports(folder: Path, told: Told) -> list[str]:
    """What is wrong with the exports: the one that was acknowledged last is there, or one that was made after it."""
    seeds, wrong = look_at_exports(folder)
    acked = [report["seed"] for report in told.reports if "exported" in report]
    if acked and seeds.get("step-2", 0) < acked[-1]:
        wrong.append(f"the export of seed {acked[-1]} is lost: there is {seeds}")
    return wrong


def not_acked(found: Found, scenario: Scenario) -> bool:
    """The new step stands there whole, though its writer did not live to say so."""
    return any(found.seeds.get(f"step-{step}") == seed for step, seed in scenario.saves)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_killed_at_every_operation(
    name: str, place: Path, children: Trials, judge: Oracle, row: Callable[..., Row], size: Size
) -> None:
    scenario = SCENARIOS[name]
    base = await prepare(place, scenario)
    root = place / "trial"
    counts = row("kill -9", name)

    def trial(at: int, when: str, options: dict[str, Any]) -> Told:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        return children.run(
            root=root, run=root / "run", work=scenario.work, saves=scenario.saves, at=at, when=when, **options
        )

    whole = trial(0, "before", {})
    operations = whole.get("operations")
    assert whole.exit == 0
    names = {step for step, _ in scenario.saves} if scenario.work == "overwriting" else scenario.saves
    assert len(whole.acked) == (0 if scenario.work == "failing" else len(names))
    assert {"open", "mkdir"} <= set(operations) or not scenario.saves
    assert scenario.work in ("failing", "recover") or {"pwrite", "fsync", "rename", "chmod"} <= set(operations)
    assert scenario.work not in ("prune", "recover") or {"rename", "unlink", "rmdir"} <= set(operations)

    assert scenario.work != "prune" or whole.get("pruned")["deleted"] == list(scenario.goes)

    before = whole.points(size.quick)
    points: list[tuple[int, str, dict[str, Any]]] = [(at, "before", {}) for at in before]
    points.append((len(operations), "after", {}))
    random = size.random(name)
    total = spread(size.of(SHORT, LONG), SCENARIOS)[name]
    while len(points) < total:
        at, when = random.randint(1, len(operations)), random.choice(["before", "after"])
        points.append((at, when, random.choice(scenario.options)))
    committed = 0
    for number, (at, when, options) in enumerate(points):
        told = trial(at, when, options)
        steady = scenario.steady and not options
        reached = (told.exit, told.get("killed_at")) == (-signal.SIGKILL, operations[at - 1])
        if told.exit not in (0, -signal.SIGKILL) or (steady and not reached):
            counts.trial((at, when, options), [f"was not killed there: {told}"], count=0)
        if told.exit == 0:
            counts.note("that ended before they were killed")
        recovers = scenario.work in ("prune", "recover") and number % RECOVERIES == 0
        found = judge.look(root / "run", further=None if recovers or number % 4 else 9, stock=number % 16 == 0)
        committed += steady and len(found.seeds) > len(scenario.before)
        wrong = judged(found, told, scenario)
        if scenario.work == "exported":
            wrong += judged_exports(root / "exports", told)
        if recovers:
            again = {"at": random.randint(1, len(operations)), "when": "before"} if number % 2 else {"at": 0}
            children.run(root=root, run=root / "run", work="recover", saves=[], **again)
            recovered = judge.look(root / "run")
            wrong += [f"after a recovery: {one}" for one in judged(recovered, told, scenario)]
            counts.note("recoveries after the kill")
        counts.trial((at, when, options, told.reports), wrong)
    if scenario.steady:  # nothing is visible before the rename, everything is after it
        renamed = operations.index("rename") + 1 if "rename" in operations else None
        if committed != (sum(at > renamed for at in before) + 1 if renamed else 0):
            counts.trial(name, [f"visible {committed} times"], count=0)
    counts.end(at_least=min(total, len(points)))
