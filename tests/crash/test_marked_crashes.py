"""``commit="marker"``: kills at every change, modelled power cuts after every change, two writers of one target."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from _disk_model import Keeps, Tree, record
from _look import Found, look
from _operations import Intercept, Operation
from _seeded import blank_state, make_state
from _trials import Told, Trials, trials
from torch.distributed.checkpoint import FileSystemReader

import sidestream
from sidestream import errors
from sidestream._storage import id_of

MARKER = sidestream.Storage(commit="marker")


@pytest.fixture
async def base(tmp_path: Path) -> Path:
    """A run that has step 1."""
    async with sidestream.Checkpointer(tmp_path / "base" / "run", storage=MARKER) as checkpoints:
        await checkpoints.save(make_state(11), step=1)
    return tmp_path / "base"


def age(folder: Path) -> None:
    """Let an hour pass."""
    for path in folder.iterdir():
        os.utime(path, (1, 1))


def judged(found: Found, acked: dict[str, int]) -> list[str]:
    wrong = list(found.violations)
    wrong += [f"acknowledged {name} is lost" for name, seed in acked.items() if found.seeds.get(name) != seed]
    wrong += [f"{name} holds {seed}" for name, seed in found.seeds.items() if seed not in (11, 12)]
    return wrong + ["the older step was harmed"] * (found.seeds.get("step-1") != 11)


async def continued(run: Path, found: Found) -> list[str]:
    """What is wrong when the next process goes on: it collects what the dead one left, and saves to its target."""
    target, wrong = run / "plain-2", []
    if target.exists():
        age(target)
        try:
            await sidestream.save(make_state(13), target, storage=MARKER)
        except errors.CheckpointExistsError:
            wrong += ["the target of a dead save is refused"] * ("plain-2" not in found.seeds)
        names = [name for name in os.listdir(target) if name != ".metadata"]
        wrong += ["files of a dead save are left"] * (len({id_of(name) for name in names}) != 1)
    async with sidestream.Checkpointer(run, storage=MARKER, lease_s=1e-3, abandoned_after_s=1e-3) as checkpoints:
        for _ in range(3):  # what is not known to be dead is looked at twice
            await checkpoints.prune()
    left = await look(run, marked=True)
    return wrong + left.violations + [f"{name} was not collected" for name in left.attempts]


@pytest.mark.parametrize("work", ["steps", "plain"])
async def test_killed_at_every_change(work: str, base: Path, tmp_path: Path, children: Trials) -> None:
    root = tmp_path / "trial"

    def trial(at: int, when: str) -> Told:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        options = {"root": root, "run": root / "run", "saves": [(2, 12)], "commit": "marker", "budget_bytes": 1 << 20}
        return children.run(work=work, at=at, when=when, **options)

    whole = trial(0, "before")
    operations = whole.get("operations")
    assert len(whole.acked) == 1
    assert "rename" not in operations
    assert "link" not in operations
    seen = [True, *whole.get("visible")]
    points = [(at, "before") for at in range(1, len(operations) + 1) if seen[at - 1]]
    committed = set()
    for number, (at, when) in enumerate([*points, (len(operations), "after")]):
        told = trial(at, when)
        assert told.exit in (0, -signal.SIGKILL), told
        found = await look(root / "run", marked=True)
        committed.add(len(found.seeds))
        wrong = judged(found, told.acked)
        if number % 3 == 0 or found.attempts:
            wrong += await continued(root / "run", found)
        assert wrong == [], (at, when, told.reports)
    assert committed == {1, 2}


@pytest.mark.parametrize("work", ["a step", "a plain save"])
async def test_the_power_is_cut_after_every_change(work: str, base: Path, tmp_path: Path) -> None:
    """What was not synced reaches the disk or does not: names, content, pages of files, among them the marker's."""
    state = {**make_state(12), "many": {f"name {number}": number for number in range(400)}}  # a marker of several pages

    async def save(acked: Any, journal: Path) -> None:
        if work == "a step":
            async with sidestream.Checkpointer(base / "run", storage=MARKER) as checkpoints:
                info = await checkpoints.save(state, step=2)
        else:
            info = await sidestream.save(state, base / "run" / "plain-2", storage=MARKER)
        acked(Path(info.url).name, 12)

    recording = await record(base, tmp_path / "before", save)
    random, cut, seen = Random(7), tmp_path / "cut", set()
    looks: dict[Tree, dict[str, str]] = {}  # many cuts leave what another one left
    for number, model in recording.moments():
        at_marker = number and recording.events[number - 1].path.endswith(".metadata")
        for keeps in (*get_args(Keeps), *["chance"] * 20) if at_marker else ("nothing", "chance"):
            left = model.write_to(cut, keeps, random)
            if left not in looks:
                looks[left] = await looked(cut / "run")
            found = looks[left]
            acked = recording.acknowledged(number)
            assert [name for name in acked if name not in found.values()] == [], (number, keeps)
            seen.update(found.values())
            if number % 16 == 0:
                age(cut / "run" / "plain-2") if (cut / "run" / "plain-2").exists() else None
                try:
                    await sidestream.save(make_state(13), cut / "run" / "plain-2", storage=MARKER)
                except errors.CheckpointExistsError:
                    assert "plain-2" in found.values()
    assert seen == {"step-1", "step-2" if work == "a step" else "plain-2"}


async def looked(run: Path) -> dict[str, str]:
    """The checkpoints that are there, each of them whole; whatever else is there is none, and no damage."""
    found = {}
    for path in sorted(run.iterdir()):
        if path.name[0] == ".":
            continue
        try:
            checkpoint = await sidestream.open_checkpoint(path)
        except errors.CheckpointNotFoundError:
            continue
        assert (await checkpoint.state_dict())["seed"] in (11, 12)
        assert "seed" in FileSystemReader(path).read_metadata().state_dict_metadata
        found[path.name] = path.name
    async with sidestream.Checkpointer(run) as checkpoints:
        steps = await checkpoints.steps()
        assert steps == sorted(int(name.removeprefix("step-")) for name in found if name.startswith("step-"))
        assert await checkpoints.restore({"seed": 0}, allow_unexpected=True) == max(steps, default=None)
    return found


@pytest.fixture
def rivals() -> Iterator[Trials]:
    with trials() as running:
        yield running


async def test_two_writers_race(tmp_path: Path, children: Trials, rivals: Trials) -> None:
    """Of two saves to one target one commits, and the other one raises ``CheckpointExistsError``."""
    rounds = 30
    work: dict[str, Any] = {"work": "race", "root": "/nonexistent", "run": tmp_path, "rounds": rounds}
    told = await asyncio.gather(
        *(asyncio.to_thread(each.run, me=me, commit="marker", **work) for me, each in enumerate((children, rivals)))
    )
    assert [each.error for each in told] == [None, None]
    acked = [report for each in told for report in each.reports if "acked" in report]
    for number in range(0, rounds, 2):
        won = [report for report in acked if report["round"] == number]
        checkpoint = await sidestream.open_checkpoint(tmp_path / f"plain-{number}")
        assert [report["seed"] for report in won] == [(await checkpoint.state_dict())["seed"]]
    found = await look(tmp_path / "run", marked=True)
    assert found.violations == found.attempts == []
    assert found.seeds == {one["acked"]: one["seed"] for one in acked if one["acked"].startswith("step-")}


@pytest.mark.parametrize("storage", [None, MARKER])
@pytest.mark.parametrize("work", ["open", "restore"])
async def test_readers_beside_a_commit(
    work: str, storage: sidestream.Storage | None, base: Path, tmp_path: Path
) -> None:
    """The marker is begun before one operation of a reader, and completed before a later one: the reader sees a whole
    checkpoint, or none."""
    run = base / "run"
    async with sidestream.Checkpointer(run, storage=MARKER) as checkpoints:
        await checkpoints.save(make_state(12), step=2)
    marker, seen = run / "step-2" / ".metadata", set()
    manifest = next((run / "step-2").glob("manifest-*"))
    whole, told = marker.read_bytes(), manifest.read_bytes()

    async def read() -> int | None:
        if work == "open":
            try:
                checkpoint = await sidestream.open_checkpoint(run / "step-2", storage=storage)
            except errors.CheckpointNotFoundError:
                return None
            return int((await checkpoint.state_dict())["seed"]) - 10
        async with sidestream.Checkpointer(run, storage=storage) as checkpoints:
            return await checkpoints.restore(blank_state())

    operations = 2
    for gap in (0, 1, 2, 5):
        at = 0
        while at <= operations:
            at += 1
            marker.unlink()
            manifest.unlink()

            def hook(operation: Operation, at: int = at, end: int = at + gap) -> Any:
                if operation.index == at:
                    manifest.write_bytes(told)
                    marker.write_bytes(whole[:-3])
                if operation.index == end:
                    marker.write_bytes(whole)
                return operation.call()

            with Intercept(run, hook).installed() as intercept:
                seen.add(await read())
            operations = len(intercept.log)
            manifest.write_bytes(told)
            marker.write_bytes(whole)
    assert seen == ({1, 2} if work == "restore" else {None, 2})
