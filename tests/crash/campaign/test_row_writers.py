"""Several processes on one run: two writers to one step or one name, and readers while steps are written and pruned or
one name is overwritten."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from _judge import Oracle
from _rows import Row, Size
from _seeded import blank_state, files_of, make_state, same
from _trials import Told, Trials, trials
from safetensors.torch import load_file

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
        counts.note(
            "refused with CheckpointExistsError", sum("lost" in report for each in told for report in each.reports)
        )
        shutil.rmtree(folder)
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


# --- one name ---------------------------------------------------------------------------------------------------------

RIVALS = (160, 4_000)
READS = (1_500, 60_000)
QUICK_READS = 150


@pytest.mark.parametrize("saver", [False, True], ids=["threads", "a writer process"])
async def test_two_that_overwrite_one_name(
    saver: bool, place: Path, children: Trials, rivals: Trials, judge: Oracle, row: Callable[..., Row], size: Size
) -> None:
    """Each succeeds and one stays, whether there was a checkpoint before or not; every fourth time one removes."""
    counts = row("two that overwrite one name", "a writer process" if saver else "threads")
    total = size.of(*RIVALS) // 2
    while counts.trials < total:
        folder = place / str(counts.trials)
        folder.mkdir()
        work = {"work": "rival", "root": "/nonexistent", "run": folder, "rounds": ROUNDS, "writer": saver}
        told = await asyncio.gather(
            *(asyncio.to_thread(each.run, me=me, **work) for me, each in enumerate((children, rivals)))
        )
        for name in folder.glob("ready-*"):
            name.unlink()
        found = judge.look(folder)
        for number in range(ROUNDS):
            counts.trial(number, overwritten(number, told, found))
        wrong = [f"a writer ended with {each.error}" for each in told if each.error] + found.violations
        wrong += [f"left behind: {one}" for one in found.attempts]
        counts.trial("the race", wrong, count=0)
        counts.note("won by the first", sum(found.seeds.get(f"plain-{number}", 0) % 2 for number in range(ROUNDS)))
        counts.note("removed in the end", sum(f"plain-{number}" not in found.seeds for number in range(ROUNDS)))
        shutil.rmtree(folder)
    counts.end(at_least=total)


def overwritten(number: int, told: list[Told], found: Any) -> list[str]:
    """All were acknowledged, and one of them is there, or none if it was removed."""
    name = f"plain-{number}"
    acked = [report["seed"] for each in told for report in each.reports if report.get("round") == number]
    removed = any(report.get("removed") == number for each in told for report in each.reports)
    wrong = [] if len(acked) + removed == 2 else [f"{acked} were acknowledged"]
    if name not in found.seeds:
        return wrong if removed else [*wrong, f"{name} is gone"]
    if found.seeds[name] not in acked or name not in found.sidecars:
        wrong.append(f"{name} holds {found.seeds[name]}, and acknowledged are {acked}")
    return wrong


async def load_one(url: Path) -> int:
    state = blank_state()
    await sidestream.load(state, url)
    return whole(state)


async def load_unverified(url: Path) -> int:
    state = blank_state()
    await sidestream.load(state, url, options=sidestream.LoadOptions(verify="manifest", atomic=True))
    return whole(state)


async def open_one(url: Path) -> int:
    """The tensors and the sidecar files are of one save, or the checkpoint says that it was replaced."""
    checkpoint = await sidestream.open_checkpoint(url)
    try:
        seed = whole(await checkpoint.state_dict())
        files = {name: await checkpoint.file(name) for name in checkpoint.files}
    except errors.CheckpointNotFoundError:
        return -1
    assert files == files_of(seed), f"seed {seed}, and files of another save"
    return seed


async def verify_one(url: Path) -> int:
    report = await sidestream.verify(url)
    assert report.ok, report.damaged
    return -1


async def copy_one(url: Path) -> int:
    """A copy is one save as a whole, or is refused and leaves nothing."""
    target = url.with_name("copied")
    try:
        await sidestream.copy(url, target, durability="flush")
    except (errors.CorruptCheckpointError, errors.CheckpointNotFoundError):
        assert not target.exists()
        return -1
    try:
        seed = await open_one(target)
        assert seed >= 0
        return seed
    finally:
        await sidestream.remove(target, durability="flush")


async def convert_one(url: Path) -> int:
    target = url.with_name("converted.safetensors")
    try:
        await sidestream.convert(
            url, target, options=sidestream.ConvertOptions(durability="flush"), select=["model.*", "optimizer.state.*"]
        )
    except (errors.CorruptCheckpointError, errors.CheckpointNotFoundError):
        assert not target.exists()
        return -1
    tensors = load_file(target)
    target.unlink()
    seed = int(tensors["model.scale"])
    weight = make_state(seed)["model"]["weight"]
    assert same(tensors["model.weight"], weight), f"a mixture: {seed}"
    return seed


def stock(url: Path) -> str:
    """What stock DCP reads. It opens each file by its path, so that it may read files of two saves."""
    state = blank_state()
    try:
        dcp.load(state, checkpoint_id=url, no_dist=True)
    except (Exception, dcp.api.CheckpointException):
        return "failed"
    return "whole" if same(state, make_state(state["seed"])) else "mixed"


READERS = (load_one, load_unverified, open_one, verify_one, copy_one, convert_one)


def whole(state: dict[str, Any]) -> int:
    assert same(state, make_state(state["seed"])), f"a mixture: {state['seed']}"
    return int(state["seed"])


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable.*:UserWarning")
@pytest.mark.parametrize("saver", [False, True], ids=["threads", "a writer process"])
async def test_readers_while_one_name_is_overwritten(
    saver: bool, place: Path, children: Trials, row: Callable[..., Row], size: Size
) -> None:
    counts = row("readers beside a writer that overwrites", "a writer process" if saver else "threads")
    total, stop = (QUICK_READS if size.quick else size.of(*READS)) // 2, place / "stop"
    work = asyncio.create_task(
        asyncio.to_thread(
            children.run, work="overwrite_on", root="/nonexistent", run=place / "run", stop=stop, saver=saver
        )
    )
    newest = 0
    try:
        while not (place / "run" / "last").exists() and not work.done():
            await asyncio.sleep(0.01)
        while counts.trials < total and not work.done():
            reader = READERS[counts.trials % len(READERS)]
            wrong: list[str] = []
            try:
                seed = await reader(place / "run" / "last")
                wrong += [f"after {newest} came {seed}"] if 0 <= seed < newest else []
                newest = max(newest, seed)
                counts.note("replaced meanwhile" if seed < 0 and reader is not verify_one else "whole")
            except (Exception, AssertionError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
            counts.trial((reader.__name__, newest), wrong)
            if counts.trials % len(READERS) == 0:
                counts.note(f"{await asyncio.to_thread(stock, place / 'run' / 'last')} by stock DCP")
    finally:
        stop.touch()
        told = await work
    counts.note("saves", told.get("published") or 0)
    counts.trial("the writer", [f"it ended with {told.error}"] if told.error else [], count=0)
    if newest < 10:
        counts.trial("the writer", [f"only {newest} saves were seen"], count=0)
    counts.end(at_least=total)
