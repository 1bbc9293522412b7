"""SIGKILL at every file operation of a save; what is left is judged in another process."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _faults import Found, look, make_state
from _trials import Told, Trials

import sidestream


@dataclass(frozen=True)
class Scenario:
    """``before``: the (step, seed) pairs that are there; ``saves``: those that the child makes, by ``work``.
    ``steady``: every run does the same operations in the same order."""

    before: tuple[tuple[int, int], ...]
    saves: tuple[tuple[int, int], ...]
    work: str = "steps"
    steady: bool = True


SCENARIOS = {
    "a fresh run": Scenario((), ((1, 11),)),
    "the next step": Scenario(((1, 11),), ((2, 12),)),
    "the same step again": Scenario(((1, 11), (2, 12)), ((2, 22),)),
    "a plain save": Scenario(((1, 11),), ((2, 12),), "plain"),
    "two saves at once": Scenario(((1, 11),), ((2, 12), (3, 13)), "together", steady=False),
    "cleaning up a failed save": Scenario(((1, 11),), ((2, 12),), "failing"),
}


async def prepare(folder: Path, scenario: Scenario) -> Path:
    base = folder / "base"
    base.mkdir()
    if scenario.before:
        async with sidestream.Checkpointer(base / "run") as checkpoints:
            for step, seed in scenario.before:
                await (await checkpoints.save(make_state(seed), step=step))
    return base


def judge(found: Found, told: Told, scenario: Scenario) -> list[str]:
    """What is wrong with what was found after the child had ended like that."""
    wrong = list(found.violations)
    older = {f"step-{step}": seed for step, seed in scenario.before}
    allowed = {seed for _, seed in scenario.saves}
    wrong += [f"{name} was harmed" for name, seed in older.items() if found.seeds.get(name) != seed]
    wrong += [f"acknowledged {name} is lost" for name, seed in told.acked.items() if found.seeds.get(name) != seed]
    wrong += [
        f"{name} came from nowhere" for name in found.seeds if name not in older and found.seeds[name] not in allowed
    ]
    for step, seed in found.steps.items():
        expected = {seed for at, seed in (*scenario.before, *scenario.saves) if at == step}
        if seed not in expected:
            wrong.append(f"step {step} restores to seed {seed}")
    return wrong


@pytest.mark.parametrize("name", SCENARIOS)
async def test_kill_at_every_operation(name: str, tmp_path: Path, children: Trials, record_property: Any) -> None:
    scenario = SCENARIOS[name]
    base = await prepare(tmp_path, scenario)
    root = tmp_path / "trial"
    run = root / "run"

    def trial(at: int, when: str) -> Told:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        return children.run(root=root, run=run, work=scenario.work, saves=scenario.saves, at=at, when=when)

    whole = trial(0, "before")
    operations = whole.get("operations")
    assert whole.exit == 0
    assert len(whole.acked) == (0 if scenario.work == "failing" else len(scenario.saves))
    assert {"open", "mkdir"} <= set(operations)
    assert scenario.work == "failing" or {"pwrite", "fsync", "rename", "chmod"} <= set(operations)

    # One point before each operation, which is just after the one before it, and one after the last.
    points = [(at, "before") for at in range(1, len(operations) + 1)] + [(len(operations), "after")]
    if not scenario.steady:
        points = points[::2]
    violations, unreached = [], []
    committed = 0
    for at, when in points:
        told = trial(at, when)
        expected = operations[at - 1] if scenario.steady else told.get("killed_at")
        if (told.exit, told.get("killed_at")) != (-signal.SIGKILL, expected):
            unreached.append((at, when, told))
        found = await look(run)
        wrong = judge(found, told, scenario)
        committed += len(found.seeds) > len(scenario.before)
        async with sidestream.Checkpointer(run, durability="flush") as checkpoints:
            await (await checkpoints.save(make_state(99), step=9))
        after = await look(run)
        if after.seeds != {**found.seeds, "step-9": 99} or after.violations:
            wrong.append(f"a further save gave {after}")
        violations += [(at, when, told.reports, one) for one in wrong]
    print(f"{name}: {len(points)} kills, {len(unreached)} not reached, {len(violations)} violations")
    record_property("kills", len(points))
    assert violations == []
    if scenario.steady:
        assert unreached == []
        # Nothing is visible before the rename, everything is after it.
        renamed = operations.index("rename") if "rename" in operations else len(operations)
        assert committed == (len(operations) - renamed if renamed < len(operations) else 0)
    else:
        assert len(unreached) <= 4, unreached  # which of the two lists the other's step first may differ
