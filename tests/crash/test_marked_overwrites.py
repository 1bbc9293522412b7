"""``overwrite=True`` with ``commit="marker"``: kills at every change, modelled power cuts after every change, two
writers of one name, readers beside a writer. Old or new, never neither, never a mixture."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from _disk_model import Keeps, record
from _look import look, seed_and_files, seed_of
from _operations import Intercept, Operation
from _seeded import blank_state, files_of, make_state, same
from _trials import Trials, trials

import sidestream
from sidestream import errors
from sidestream._storage import id_of

MARKER = sidestream.Storage(commit="marker")
NAME = "plain-2"


async def save_over(run: Path, seed: int) -> None:
    await sidestream.save(make_state(seed), run / NAME, storage=MARKER, overwrite=True, files=files_of(seed))


@pytest.fixture
async def base(tmp_path: Path) -> Path:
    """A directory with a checkpoint."""
    await save_over(tmp_path / "base" / "run", 11)
    return tmp_path / "base"


async def cleared(run: Path) -> list[str]:
    """What is wrong when the next save comes an hour later."""
    for path in (run / NAME).iterdir():
        os.utime(path, (1, 1))
    await save_over(run, 13)
    wrong = ["another checkpoint is there"] * (await seed_of(run / NAME) != 13)
    names = [name for name in os.listdir(run / NAME) if name != ".metadata"]
    return wrong + [f"files of several saves are left: {names}"] * (len({id_of(name) for name in names}) != 1)


async def test_killed_at_every_change(base: Path, tmp_path: Path, children: Trials) -> None:
    root = tmp_path / "trial"

    def trial(at: int, when: str) -> Any:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        options = {"root": root, "run": root / "run", "saves": [(2, 12)], "commit": "marker", "budget_bytes": 1 << 20}
        return children.run(work="overwriting", at=at, when=when, **options)

    whole = trial(0, "before")
    operations = whole.get("operations")
    assert whole.acked == {NAME: 12}
    assert operations.count("rename") == 1
    seeds = set()
    points = [(at, "before") for at in range(1, len(operations) + 1)]
    for number, (at, when) in enumerate([*points, (len(operations), "after")]):
        told = trial(at, when)
        assert told.exit in (0, -signal.SIGKILL), told
        found = await look(root / "run", marked=True)
        seeds.add(found.seeds.get(NAME))
        wrong = found.violations + [f"{NAME} is gone"] * (NAME not in found.seeds)
        wrong += ["an acknowledged save is lost"] * (NAME in told.acked and found.seeds.get(NAME) != 12)
        if number % 3 == 0:
            wrong += await cleared(root / "run")
        assert wrong == [], (at, when, told.reports)
    assert seeds == {11, 12}


async def test_the_power_is_cut_after_every_change(base: Path, tmp_path: Path) -> None:
    async def save(acked: Any, journal: Path) -> None:
        await save_over(base / "run", 12)
        acked(NAME, 12)

    recording = await record(base, tmp_path / "before", save)
    random, cut, seen = Random(7), tmp_path / "cut", set()
    for number, model in recording.moments():
        at_marker = number and "metadata" in recording.events[number - 1].path
        for keeps in (*get_args(Keeps), *["chance"] * 10) if at_marker else ("nothing", "everything", "chance"):
            model.write_to(cut, keeps, random)
            seed, files = await seed_and_files(cut / "run" / NAME)
            assert files, (number, keeps)
            assert seed in (11, 12), (number, keeps)
            assert not recording.acknowledged(number) or seed == 12, (number, keeps)
            seen.add(seed)
            if number % 16 == 0:
                assert await cleared(cut / "run") == []
    assert seen == {11, 12}


@pytest.fixture
def rivals() -> Iterator[Trials]:
    with trials() as running:
        yield running


async def test_two_overwrite_one_name(tmp_path: Path, children: Trials, rivals: Trials) -> None:
    """Also where it is removed at the same moment: then there is one of them, or nothing."""
    rounds = 32
    work: dict[str, Any] = {"work": "rival", "root": "/nonexistent", "run": tmp_path, "rounds": rounds}
    told = await asyncio.gather(
        *(asyncio.to_thread(each.run, me=me, commit="marker", **work) for me, each in enumerate((children, rivals)))
    )
    assert [each.error for each in told] == [None, None]
    reports = [report for each in told for report in each.reports]
    for number in range(rounds):
        acked = {report["seed"] for report in reports if report.get("acked") and report["round"] == number}
        removed = any(report.get("removed") == number for report in reports)
        lost = [report["why"] for report in reports if report.get("lost") == number]
        assert removed or not lost, (number, lost)
        try:
            seed = await seed_of(tmp_path / f"plain-{number}")
        except errors.CheckpointNotFoundError:
            assert removed, number
            continue
        assert seed in acked, number
        assert removed or len(acked) == 2, number


async def test_readers_beside_a_writer(tmp_path: Path, children: Trials) -> None:
    stop = tmp_path / "stop"
    work: dict[str, Any] = {"work": "overwrite_on", "root": "/nonexistent", "run": tmp_path / "run", "stop": stop}
    writer = asyncio.create_task(asyncio.to_thread(children.run, commit="marker", **work))
    seen: list[int] = []
    end = time.monotonic() + 60
    try:
        while len(set(seen)) < 12 and time.monotonic() < end:
            try:
                seen.append(await seed_of(tmp_path / "run" / "last"))
            except errors.CheckpointNotFoundError as error:
                if "is not there any more" not in str(error):
                    assert seen == [], "neither old nor new"
    finally:
        stop.touch()
        told = await writer
    assert told.error is None
    assert seen == sorted(seen)
    assert len(set(seen)) >= 12


class Next:
    """A checkpoint that takes the place of another one at a moment of a test's choice, step by step as a save does."""

    def __init__(self, made: Path, target: Path) -> None:
        self._files = {path.name: path.read_bytes() for path in made.iterdir()}
        self._target = target

    def replace(self) -> None:
        old = os.listdir(self._target)
        for name, content in self._files.items():
            (self._target / f"{name}{'.new' * (name == '.metadata')}").write_bytes(content)
        (self._target / ".metadata.new").replace(self._target / ".metadata")
        for name in set(old) - self._files.keys():
            (self._target / name).unlink()


@pytest.fixture
async def following(base: Path, tmp_path: Path) -> Next:
    await save_over(tmp_path / "following", 12)
    return Next(tmp_path / "following" / NAME, tmp_path / "trial" / "run" / NAME)


@pytest.mark.parametrize("storage", [None, MARKER])
async def test_replaced_between_any_two_operations_of_a_reader(
    storage: sidestream.Storage | None, base: Path, following: Next, tmp_path: Path
) -> None:
    root, seen, at, operations = tmp_path / "trial", set(), 0, 1
    while at <= operations:
        at += 1
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)

        def hook(operation: Operation, at: int = at) -> Any:
            if operation.index == at:
                following.replace()
            return operation.call()

        with Intercept(root, hook).installed() as intercept:
            state = blank_state()
            await sidestream.load(state, root / "run" / NAME, storage=storage)
        operations = len(intercept.log)
        assert same(state, make_state(state["seed"])), at
        seen.add(state["seed"])
    assert seen == {11, 12}


async def test_replaced_between_any_two_operations_of_an_open_checkpoint(
    base: Path, following: Next, tmp_path: Path
) -> None:
    """It reads what it has opened, or says what has happened."""
    root, told, at, operations = tmp_path / "trial", [0, 0], 0, 1
    while at <= operations:
        at += 1
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        opened = await sidestream.open_checkpoint(root / "run" / NAME)

        def hook(operation: Operation, at: int = at) -> Any:
            if operation.index == at:
                following.replace()
            return operation.call()

        with Intercept(root, hook).installed() as intercept:
            try:
                state = await opened.state_dict()
                files = {name: await opened.file(name) for name in opened.files}
            except errors.CheckpointNotFoundError as error:
                if "is not there any more" not in str(error):
                    raise
                told[1] += 1
            else:
                assert same(state, make_state(11))
                assert files == files_of(11)
                told[0] += 1
        operations = len(intercept.log)
    assert min(told) > 0


async def test_replaced_by_another_save_right_after_the_commit(base: Path, following: Next, tmp_path: Path) -> None:
    """The save has committed, and what comes next takes nothing away from that."""
    root = tmp_path / "trial"
    shutil.copytree(base, root)

    def hook(operation: Operation) -> Any:
        done = operation.call()
        if operation.name == "rename":
            following.replace()
        return done

    with Intercept(root, hook).installed():
        await save_over(root / "run", 13)
    assert await seed_of(root / "run" / NAME) == 12
