"""Ranks that save without a word to each other: parts in place, and readers that take the whole or nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _planned import Gated, Halving, Renaming, failing
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import sidestream
from sidestream._run import restore as restoring
from sidestream._storage import Transaction
from sidestream.dcp import IndependentPart, async_save_part
from sidestream.errors import (
    AccessDeniedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    InvalidOptionError,
    PlannerError,
    StorageError,
)

if TYPE_CHECKING:
    from conftest import Groups

WORLD = 3


def part_of(rank: int, plus: float = 0.0) -> dict[str, Any]:
    return {
        f"layer{rank}": torch.arange(600.0).reshape(60, 10) + rank + plus,
        "common": {"weight": torch.arange(7) + int(plus), "lr": 0.25},
        "rng": {f"rank{rank}": rank},
    }


def whole_of(plus: float = 0.0) -> dict[str, Any]:
    state: dict[str, Any] = {"common": part_of(0, plus)["common"], "rng": {}}
    for rank in range(WORLD):
        state[f"layer{rank}"] = part_of(rank, plus)[f"layer{rank}"]
        state["rng"][f"rank{rank}"] = rank
    return state


def same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert set(one) == set(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


async def save_part(rank: int, path: Any, save_id: str = "step 5", **options: Any) -> sidestream.SaveInfo:
    return await async_save_part(
        part_of(rank), path, IndependentPart(rank=rank, world_size=WORLD, save_id=save_id), **options
    )


async def save_all(path: Any, **options: Any) -> None:
    await asyncio.gather(*(save_part(rank, path, **options) for rank in range(WORLD)))


def stock_load(path: Path, rank: int) -> dict[str, Any]:
    """What stock DCP makes of the part of one rank, in that rank."""
    reader = dcp.FileSystemReader(path)
    target = {**part_of(rank, 9), "rng": {f"rank{rank}": None}}
    planner = DefaultLoadPlanner()
    metadata = reader.read_metadata(rank=rank)
    planner.set_up_planner(target, metadata, False)
    reader.set_up_storage_reader(metadata, False, rank=rank, use_collectives=False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return target


@pytest.mark.parametrize("where", ["local", "memory"])
async def test_parts_make_a_whole(where: str, tmp_path: Path) -> None:
    path = tmp_path / "a" if where == "local" else f"memory://{uuid.uuid4().hex}/whole"
    for rank in range(WORLD):
        info = await save_part(rank, path, metadata={"loss": 0.5})
        assert info.save_id == "step 5"
        missing = tuple(range(rank + 1, WORLD))
        if missing:
            for read in (sidestream.load(whole_of(9), path), sidestream.verify(path), sidestream.open_checkpoint(path)):
                with pytest.raises(IncompleteCheckpointError, match="step 5") as raised:
                    await read
                assert (raised.value.missing, raised.value.others) == (missing, {})
    target = whole_of(9)
    report = await sidestream.load(target, path)
    same(target, whole_of())
    assert report.save_id == "step 5"
    assert not report.unverified
    verified = await sidestream.verify(path)
    assert verified.ok, verified.damaged
    assert not verified.unverified
    target = whole_of(9)
    await sidestream.load(target, path, options=sidestream.LoadOptions(planner=DefaultLoadPlanner()))
    same(target, whole_of())
    found = await sidestream.open_checkpoint(path)
    assert found.metadata == {"loss": 0.5}
    same(await found.state_dict(), whole_of())


async def test_stock_reads_the_part_of_each_rank(tmp_path: Path) -> None:
    await save_all(tmp_path / "a")
    for rank in range(WORLD):
        same(await asyncio.to_thread(stock_load, tmp_path / "a", rank), part_of(rank))
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {f"__{rank}.metadata" for rank in range(WORLD)} < names
    assert ".metadata" not in names


async def test_parts_of_two_saves(tmp_path: Path) -> None:
    """As they come about when a save is retried where the ranks of the first have not all ended."""
    await save_all(tmp_path / "a", save_id="first try")
    await save_all(tmp_path / "b", save_id="second try")
    shutil.copytree(tmp_path / "a", tmp_path / "mixed")
    (tmp_path / "mixed" / "__1.metadata").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"'first try' of 3 ranks.*the parts of rank 1 are missing"):
        await sidestream.load(whole_of(), tmp_path / "mixed")
    for path in (tmp_path / "b").glob("__1*"):
        shutil.copy(path, tmp_path / "mixed" / path.name)
    with pytest.raises(IncompleteCheckpointError, match=r"rank 1: a part of the save 'second try'") as raised:
        await sidestream.load(whole_of(), tmp_path / "mixed")
    assert raised.value.save_id == "first try"
    assert raised.value.others == {1: "second try"}
    with pytest.raises(IncompleteCheckpointError):
        await sidestream.verify(tmp_path / "mixed")
    (tmp_path / "mixed" / "__1.metadata").unlink()
    await asyncio.to_thread(dcp.save, part_of(1), checkpoint_id=tmp_path / "stock", no_dist=True)
    shutil.copy(tmp_path / "stock" / ".metadata", tmp_path / "mixed" / "__1.metadata")
    with pytest.raises(IncompleteCheckpointError, match="another writer"):
        await sidestream.load(whole_of(), tmp_path / "mixed")


async def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    await save_part(0, tmp_path / "a")
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    with pytest.raises(CheckpointExistsError, match=r"__0\.metadata"):
        await save_part(0, tmp_path / "a")
    with pytest.raises(CheckpointExistsError, match="part of another save: rank 0 of 'step 5'"):
        await save_part(1, tmp_path / "a", save_id="step 6")
    with pytest.raises(CheckpointExistsError):
        await sidestream.save(part_of(0), tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before
    await sidestream.save(part_of(0), tmp_path / "b")
    with pytest.raises(CheckpointExistsError, match="already"):
        await save_part(0, tmp_path / "b")
    with pytest.raises(CheckpointNotFoundError):
        await sidestream.load(part_of(0), tmp_path / "c")


@pytest.mark.parametrize("where", ["local", "memory"])
async def test_another_save_that_commits_meanwhile(where: str, tmp_path: Path) -> None:
    path = tmp_path / "a" if where == "local" else f"memory://{uuid.uuid4().hex}/meanwhile"
    planner = Gated()
    part = IndependentPart(rank=0, world_size=WORLD, save_id="step 5")
    pending = async_save_part(part_of(0), path, part, planner=planner)
    await asyncio.to_thread(planner.began.wait, 60)
    await sidestream.save(whole_of(), path)
    planner.go_on.set()
    with pytest.raises(CheckpointExistsError, match="already"):
        await pending
    await pending.ended()
    assert pending.outcome == "absent"
    target = whole_of(9)
    await sidestream.load(target, path)
    same(target, whole_of())


async def test_a_part_of_another_save_that_comes_with_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save_part(1, tmp_path / "other", save_id="step 6")
    commit = Transaction.commit

    async def with_another(*args: Any, **options: Any) -> None:
        await commit(*args, **options)
        for path in (tmp_path / "other").iterdir():
            shutil.copy(path, tmp_path / "a" / path.name)

    monkeypatch.setattr(Transaction, "commit", with_another)
    pending = async_save_part(part_of(0), tmp_path / "a", IndependentPart(rank=0, world_size=WORLD, save_id="step 5"))
    with pytest.raises(CheckpointExistsError, match="rank 1 of 'step 6'"):
        await pending
    assert pending.outcome == "committed"
    assert (tmp_path / "a" / "__0.metadata").exists()


class Noting(DefaultSavePlanner):
    """Notes that it was asked for data."""

    asked = False

    def resolve_data(self, write_item: Any) -> Any:
        self.asked = True
        return super().resolve_data(write_item)


async def test_nothing_is_written_before_the_target_was_looked_at(tmp_path: Path) -> None:
    await sidestream.save(part_of(0), tmp_path / "a")
    planner = Noting()
    with pytest.raises(CheckpointExistsError):
        await save_part(0, tmp_path / "a", planner=planner)
    assert not planner.asked


async def test_a_link_that_worked_and_was_told_of_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over NFS, when the answer to the first request was lost."""
    link = os.link

    def twice(source: Any, target: Any) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr("os.link", twice)
    await save_all(tmp_path / "a")
    same(await (await sidestream.open_checkpoint(tmp_path / "a")).state_dict(), whole_of())
    await sidestream.convert(tmp_path / "a", tmp_path / "a.safetensors", select="layer*")
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    with pytest.raises(CheckpointExistsError):
        await save_part(0, tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before


async def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(StorageError, match="makes no hard links") as raised:
        await save_part(0, tmp_path / "a")
    assert not isinstance(raised.value, AccessDeniedError)
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("where", ["local", "memory"])
async def test_two_that_save_one_part_at_once(where: str, tmp_path: Path) -> None:
    path = tmp_path / "a" if where == "local" else f"memory://{uuid.uuid4().hex}/twice"
    planners = [Gated(), Gated()]
    saves = [asyncio.ensure_future(save_part(0, path, planner=planner)) for planner in planners]
    for planner in planners:
        await asyncio.to_thread(planner.began.wait, 60)
    for planner in planners:
        planner.go_on.set()
    ended = await asyncio.gather(*saves, return_exceptions=True)
    assert sorted(type(one).__name__ for one in ended) == ["CheckpointExistsError", "SaveInfo"], ended
    for rank in range(1, WORLD):
        await save_part(rank, path)
    assert (await sidestream.verify(path)).ok


async def test_a_part_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    await save_part(1, tmp_path / "a")
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    with pytest.raises(PlannerError):
        await save_part(0, tmp_path / "a", planner=failing(DefaultSavePlanner, "resolve_data"))
    planner = Gated()
    part = IndependentPart(rank=0, world_size=WORLD, save_id="step 5")
    pending = async_save_part(part_of(0), tmp_path / "a", part, planner=planner)
    await asyncio.to_thread(planner.began.wait, 60)
    pending.cancel()
    planner.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await pending
    await pending.ended()
    assert pending.outcome == "absent"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before
    (tmp_path / "a" / "__0_0-0123456789abcdef.distcp").write_bytes(b"left by a rank that was killed")
    await save_part(0, tmp_path / "a")
    await save_part(2, tmp_path / "a")
    same((await (await sidestream.open_checkpoint(tmp_path / "a")).state_dict()), whole_of())


async def test_replicas_have_to_be_equal(tmp_path: Path) -> None:
    for name, tensor in (("tensor", torch.ones(3)), ("value", 4.0)):
        for rank in range(2):
            part = IndependentPart(rank=rank, world_size=2, save_id="x")
            await async_save_part({"mine": tensor + rank, f"own{rank}": 1}, tmp_path / name, part)
        with pytest.raises(CorruptCheckpointError, match="mine: the ranks saved different values"):
            await sidestream.load({"own0": 0}, tmp_path / name)


async def test_damage(tmp_path: Path) -> None:
    await save_all(tmp_path / "good")
    for pattern in ("__1.metadata", "__1-*.manifest", "__1_*.distcp"):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        for path in (tmp_path / "bad").glob(pattern):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 0x40
            path.write_bytes(content)
        report = await sidestream.verify(tmp_path / "bad")
        assert not report.ok, pattern
        if not pattern.startswith("__1.m"):  # that is what stock DCP reads, and nobody else
            with pytest.raises(CorruptCheckpointError):
                await sidestream.load(whole_of(), tmp_path / "bad")
        shutil.rmtree(tmp_path / "bad")
    for pattern in ("__1-*.manifest", "__1_*.distcp"):
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        for path in (tmp_path / "bad").glob(pattern):
            path.unlink()
        with pytest.raises(CorruptCheckpointError):
            await sidestream.load(whole_of(), tmp_path / "bad")
        shutil.rmtree(tmp_path / "bad")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    shutil.copy(tmp_path / "good" / "__1.metadata", tmp_path / "bad" / "__2.metadata")
    with pytest.raises(CorruptCheckpointError, match="was it renamed"):
        await sidestream.load(whole_of(), tmp_path / "bad")


async def test_steps_that_were_saved_apart_are_listed_when_they_are_whole(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpointer:
        for rank in range(WORLD):
            assert await checkpointer.steps() == []
            await save_part(rank, tmp_path / "step-5", metadata={"loss": 0.5})
        assert await checkpointer.steps() == [5]
        assert await checkpointer.latest() == 5
        assert await checkpointer.read_metadata() == {"loss": 0.5}
        target = whole_of(9)
        assert await checkpointer.restore(target) == 5
        same(target, whole_of())
        assert (await checkpointer.verify()).ok
        await checkpointer.save({"x": 1}, step=6)
        (tmp_path / "step-5" / "__2.metadata").unlink()
        assert await checkpointer.steps() == [6]


async def test_a_step_that_loses_a_part_while_it_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when somebody deletes it file by file, behind the back of every lease."""
    load_from = restoring.load_from

    async def late(location: Any, *rest: Any) -> Any:
        if location.name == "step-5":
            (tmp_path / "step-5" / "__1.metadata").unlink()
        return await load_from(location, *rest)

    monkeypatch.setattr(restoring, "load_from", late)
    async with sidestream.Checkpointer(tmp_path) as checkpointer:
        await checkpointer.save({"common": part_of(0)["common"]}, step=1)
        await save_all(tmp_path / "step-5")
        assert await checkpointer.restore({"common": part_of(0, 9)["common"]}) == 1


async def test_copied_and_converted(tmp_path: Path) -> None:
    await save_all(tmp_path / "a")
    await sidestream.copy(tmp_path / "a", tmp_path / "copy")
    await sidestream.convert(tmp_path / "a", tmp_path / "converted")
    for name in ("copy", "converted"):
        assert (await sidestream.verify(tmp_path / name)).ok
        same((await (await sidestream.open_checkpoint(tmp_path / name)).state_dict()), whole_of())


async def test_planners_and_stagers(tmp_path: Path) -> None:
    async with sidestream.AsyncStager(budget_bytes=1 << 26) as stager:
        for rank in range(WORLD):
            await save_part(rank, tmp_path / "a", planner=Renaming(), stager=stager)
            await save_part(rank, tmp_path / "b", planner=Halving(), stager=stager)
    target = {"renamed": whole_of(9)}
    await sidestream.load(target, tmp_path / "a")
    same(target, {"renamed": whole_of()})
    info = (await sidestream.open_checkpoint(tmp_path / "b")).info("layer0")
    assert info is not None
    assert info.dtype == torch.float16


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 3, "world_size": 3, "save_id": "x"},
        {"rank": -1, "world_size": 3, "save_id": "x"},
        {"rank": 0, "world_size": 0, "save_id": "x"},
        {"rank": 0, "world_size": 1, "save_id": ""},
        {"rank": 0, "world_size": 1, "save_id": "a\nb"},
        {"rank": 0, "world_size": 1, "save_id": "x" * 129},
        {"rank": 0, "world_size": 1, "save_id": 5},
    ],
    ids=["rank", "negative", "world", "empty", "lines", "long", "number"],
)
def test_what_is_no_part(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        IndependentPart(**wrong)


async def test_options_that_are_wrong(tmp_path: Path) -> None:
    for options in ({"durability": "none"}, {"timeout_s": -1}, {"planner": 3}, {"metadata": {"f": open}}):
        with pytest.raises(InvalidOptionError):
            await save_part(0, tmp_path / "a", **options)
    with pytest.raises(InvalidOptionError, match=r"part=3 has to be a sidestream\.dcp\.IndependentPart"):
        async_save_part({}, tmp_path / "a", 3)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_sharded_parts_over_ranks(groups: Groups, tmp_path: Path) -> None:
    groups.run("parts", 3, tmp_path)
    groups.run("parts_read_by_others", 2, tmp_path)
