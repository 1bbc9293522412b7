"""``planner=`` of ``save`` and ``load``, in one process and over ranks, with stock DCP on the other side."""

from __future__ import annotations

import asyncio
import gc
import json
import uuid
import zlib
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _planned import LOAD_STEPS, SAVE_STEPS, Doubling, Dropping, Gated, Halving, Renaming, RenamingBack, failing
from keywords import for_load, for_save
from stock import stock_save
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import sidestream
from sidestream.errors import (
    CorruptCheckpointError,
    DeadlineExceededError,
    DtypeMismatchError,
    InvalidOptionError,
    LoadStateDictError,
    PlannerError,
    UnsafeObjectError,
    UnsupportedTensorError,
)

if TYPE_CHECKING:
    from conftest import Groups


def state_of(plus: float = 0.0) -> dict[str, Any]:
    return {
        "rows": torch.arange(70.0).reshape(10, 7) + plus,
        "deep": {"columns": torch.arange(60).reshape(6, 10), "list": [torch.ones(3) + plus, {"lr": 0.5 + plus}]},
        "step": 7 + plus,
    }


def same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            same(left, right)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


async def everybody_reads(path: Path, expected: dict[str, Any], blank: dict[str, Any]) -> None:
    report = await sidestream.verify(path)
    assert report.ok, report.damaged
    assert not report.unverified
    for reader in ("ours", "planned", "stock"):
        target: dict[str, Any] = blank_like(blank)
        if reader == "stock":
            await asyncio.to_thread(dcp.load, target, checkpoint_id=path, no_dist=True)
        else:
            await sidestream.load(
                target,
                path,
                options=sidestream.LoadOptions(planner=DefaultLoadPlanner() if reader == "planned" else None),
            )
        same(target, expected)


def blank_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: blank_like(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank_like(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


# --- one process ----------------------------------------------------------------------------------------------------


async def test_a_planner_that_plans_as_dcp_does(tmp_path: Path) -> None:
    info = await sidestream.save(
        state_of(), tmp_path / "a", metadata={"loss": 0.5}, options=sidestream.SaveOptions(planner=DefaultSavePlanner())
    )
    assert info.nbytes == sum(path.stat().st_size for path in (tmp_path / "a").glob("__*"))
    assert set(info.seconds) == {"staged", "written", "committed"}
    await everybody_reads(tmp_path / "a", state_of(), state_of())
    found = await sidestream.open_checkpoint(tmp_path / "a")
    assert found.metadata == {"loss": 0.5}


async def test_a_planner_that_renames(tmp_path: Path) -> None:
    await sidestream.save(state_of(), tmp_path / "a", options=sidestream.SaveOptions(planner=Renaming()))
    await everybody_reads(tmp_path / "a", {"renamed": state_of()}, {"renamed": state_of()})
    target = state_of(9)
    report = await sidestream.load(target, tmp_path / "a", options=sidestream.LoadOptions(planner=RenamingBack()))
    same(target, state_of())
    assert set(report.loaded) == set(await sidestream.open_checkpoint(tmp_path / "a"))


async def test_a_planner_that_leaves_something_out(tmp_path: Path) -> None:
    await sidestream.save(state_of(), tmp_path / "a", options=sidestream.SaveOptions(planner=Dropping()))
    few = {**state_of(), "deep": {"list": state_of()["deep"]["list"]}}
    await everybody_reads(tmp_path / "a", few, few)
    with pytest.raises(PlannerError, match="create_local_plan"):
        await sidestream.load(state_of(), tmp_path / "a", options=sidestream.LoadOptions(planner=DefaultLoadPlanner()))
    target = state_of(9)
    report = await sidestream.load(
        target, tmp_path / "a", options=sidestream.LoadOptions(planner=DefaultLoadPlanner(allow_partial_load=True))
    )
    assert torch.equal(target["rows"], state_of()["rows"])
    assert "deep.columns" not in report.loaded


async def test_a_planner_that_converts(tmp_path: Path) -> None:
    await sidestream.save(state_of(), tmp_path / "a", options=sidestream.SaveOptions(planner=Halving()))
    half = {"rows": state_of()["rows"].half()}
    await everybody_reads(tmp_path / "a", half, half)
    target = {"rows": torch.zeros(10, 7)}
    report = await sidestream.load(target, tmp_path / "a", options=sidestream.LoadOptions(planner=DefaultLoadPlanner()))
    assert report.cast == ("rows",)
    assert torch.equal(target["rows"], state_of()["rows"])
    with pytest.raises(DtypeMismatchError):
        await sidestream.load(
            {"rows": torch.zeros(10, 7, dtype=torch.int32)},
            tmp_path / "a",
            options=sidestream.LoadOptions(planner=DefaultLoadPlanner()),
        )


async def test_a_load_planner_of_ones_own(tmp_path: Path) -> None:
    """Also for what stock DCP saved; progress counts up to all of it."""
    await asyncio.to_thread(dcp.save, state_of(), checkpoint_id=tmp_path / "stock", no_dist=True)
    await sidestream.save(state_of(), tmp_path / "ours")
    for name in ("stock", "ours"):
        target = state_of(9)
        seen: list[tuple[int, int]] = []

        def tell(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        report = await sidestream.load(
            target, tmp_path / name, options=sidestream.LoadOptions(planner=Doubling(), progress=tell)
        )
        assert torch.equal(target["rows"], state_of()["rows"] * 2)
        assert target["step"] == 7
        assert seen[0][0] == 0
        assert seen[-1][0] == seen[-1][1] == report.nbytes


async def test_objects_and_modules(tmp_path: Path) -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    await sidestream.save(
        {"model": model, "step": 3}, tmp_path / "a", options=sidestream.SaveOptions(planner=DefaultSavePlanner())
    )
    target = {"model": other, "step": 0}
    await sidestream.load(target, tmp_path / "a", options=sidestream.LoadOptions(planner=DefaultLoadPlanner()))
    assert torch.equal(other.weight, model.weight)
    assert target["model"] is other
    assert target["step"] == 3

    class Refusing(nn.Linear):
        def load_state_dict(self, *_: Any, **__: Any) -> Any:
            raise ValueError("no")

    with pytest.raises(LoadStateDictError) as raised:
        await sidestream.load(
            {"model": Refusing(4, 3)}, tmp_path / "a", options=sidestream.LoadOptions(planner=DefaultLoadPlanner())
        )
    assert set(raised.value.written) == {"model.weight", "model.bias"}


@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner()], ids=["native", "planner"])
async def test_a_module_with_inference_tensors(planner: DefaultLoadPlanner | None, tmp_path: Path) -> None:
    saved = nn.Linear(3, 2)
    await sidestream.save({"m": saved}, tmp_path / "c")
    with torch.inference_mode():
        module = nn.Linear(3, 2)
    await sidestream.load({"m": module}, tmp_path / "c", options=sidestream.LoadOptions(planner=planner))
    assert torch.equal(module.weight, saved.weight)
    assert module.weight.is_inference()


@pytest.mark.parametrize("url", ["memory", "local", "process"])
async def test_every_kind_of_storage(url: str, tmp_path: Path) -> None:
    where = f"memory://{uuid.uuid4().hex}/x" if url == "memory" else str(tmp_path / "x")
    planner = DefaultSavePlanner()
    async with sidestream.AsyncStager(budget_bytes=1 << 26) as stager:
        for number in range(2):
            target = state_of(9)
            saver = "process" if url == "process" else "thread"
            await sidestream.save(
                state_of(number),
                f"{where}{number}",
                stager=stager,
                options=sidestream.SaveOptions(planner=planner, writer=saver),
            )
            await sidestream.load(
                target, f"{where}{number}", options=sidestream.LoadOptions(planner=DefaultLoadPlanner())
            )
            same(target, state_of(number))
        del planner


async def test_what_is_planned_is_what_was_staged(tmp_path: Path) -> None:
    """Also while the planner takes its time, the tensors may change."""
    planner, state = Gated(), state_of()
    pending = sidestream.async_save(state, tmp_path / "a", options=sidestream.SaveOptions(planner=planner))
    await pending.staged
    state["rows"].zero_()
    state["step"] = 0
    planner.go_on.set()
    await pending
    await everybody_reads(tmp_path / "a", state_of(), state_of())


async def test_torchs_own_stager(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

    asynchronous = DefaultStager(StagingOptions(False, False, True, False))
    try:
        for number, stager in enumerate([BlockingAsyncStager(), asynchronous]):
            await sidestream.save(
                state_of(),
                tmp_path / f"{number}",
                stager=stager,
                options=sidestream.SaveOptions(planner=DefaultSavePlanner()),
            )
            await everybody_reads(tmp_path / f"{number}", state_of(), state_of())
    finally:
        asynchronous.close()


async def test_a_cancel_while_the_planner_is_at_work(tmp_path: Path) -> None:
    planner = Gated()
    pending = sidestream.async_save(state_of(), tmp_path / "a", options=sidestream.SaveOptions(planner=planner))
    await asyncio.to_thread(planner.began.wait, 60)
    assert pending.cancel()
    planner.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await pending
    await pending.ended()
    assert pending.outcome == "absent"
    assert list(tmp_path.iterdir()) == []


async def test_a_planner_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidestream._runtime.threads._GRACE_S", 0.2)
    planner = Gated()
    pending = sidestream.async_save(
        state_of(), tmp_path / "a", options=sidestream.SaveOptions(planner=planner, timeout_s=0.5)
    )
    with pytest.raises(DeadlineExceededError):
        await pending
    planner.go_on.set()
    await pending.ended()
    assert list(tmp_path.iterdir()) == []


async def waiting_for_memory(stager: sidestream.AsyncStager) -> None:
    async with asyncio.timeout(60):
        while not stager.statistics().waiters:
            await asyncio.sleep(0.01)


async def all_memory_is_back(stager: sidestream.AsyncStager) -> None:
    async with asyncio.timeout(60):
        while stager.statistics().leases:
            gc.collect()
            await asyncio.sleep(0.01)
        (await stager.stage({"next": torch.ones(200_000)})).release()


class Relaying:
    """A stager of somebody else's, which nothing can be said to."""

    def __init__(self, stager: sidestream.AsyncStager) -> None:
        self.stager = stager

    def stage(self, state_dict: dict[str, Any]) -> Any:
        return self.stager.stage(state_dict)


async def test_a_cancel_while_it_waits_for_staging_memory(tmp_path: Path) -> None:
    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        held = await stager.stage({"held": torch.ones(200_000)})
        state, options = {"more": torch.ones(200_000)}, {"planner": DefaultSavePlanner(), "stager": stager}
        pending = sidestream.async_save(state, tmp_path / "a", **for_save(**options))
        await waiting_for_memory(stager)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        await asyncio.wait_for(pending.ended(), 60)
        assert stager.statistics().waiters == 0
        held.release()
        await all_memory_is_back(stager)
    assert list(tmp_path.iterdir()) == []


async def test_what_is_staged_when_nobody_waits_for_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidestream._save.writer._GRACE_S", 0.01)
    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        held = await stager.stage({"held": torch.ones(200_000)})
        pending = sidestream.async_save(
            {"more": torch.ones(200_000)},
            tmp_path / "a",
            stager=Relaying(stager),
            options=sidestream.SaveOptions(planner=DefaultSavePlanner()),
        )
        await waiting_for_memory(stager)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        await asyncio.wait_for(pending.ended(), 60)
        held.release()
        await asyncio.wrap_future(stager.stage({"behind it": torch.ones(200_000)}))
        await all_memory_is_back(stager)


@pytest.mark.parametrize("step", SAVE_STEPS)
async def test_save_planners_that_fail(step: str, tmp_path: Path) -> None:
    pending = sidestream.async_save(
        state_of(), tmp_path / "a", options=sidestream.SaveOptions(planner=failing(DefaultSavePlanner, step))
    )
    await pending.staged  # the copies have ended well
    with pytest.raises(PlannerError, match=f"{step} raised KeyError") as raised:
        await pending
    assert isinstance(raised.value.__cause__, KeyError)
    assert list(tmp_path.iterdir()) == []
    await sidestream.save(state_of(), tmp_path / "a", options=sidestream.SaveOptions(planner=DefaultSavePlanner()))


def silent(base: type, step: str) -> Any:
    """A planner that has forgotten to return something."""
    return type("Silent", (base,), {step: lambda *_, **__: None})()


@pytest.mark.parametrize("step", ["create_local_plan", "create_global_plan", "finish_plan"])
async def test_planners_that_return_nothing(step: str, tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match=f"{step} returned"):
        await sidestream.save(
            state_of(), tmp_path / "a", options=sidestream.SaveOptions(planner=silent(DefaultSavePlanner, step))
        )
    assert list(tmp_path.iterdir()) == []
    await sidestream.save(state_of(), tmp_path / "a")
    for one in (step, "resolve_tensor"):
        with pytest.raises(PlannerError, match=f"{one} returned"):
            await sidestream.load(
                state_of(), tmp_path / "a", options=sidestream.LoadOptions(planner=silent(DefaultLoadPlanner, one))
            )


async def test_an_object_that_is_more_than_data(tmp_path: Path) -> None:
    stock_save({"v": Fraction(1, 2)}, tmp_path / "c")
    with pytest.raises(UnsafeObjectError, match="Fraction") as raised:
        await sidestream.load(
            {"v": Fraction(0)}, tmp_path / "c", options=sidestream.LoadOptions(planner=DefaultLoadPlanner())
        )
    assert any("LoadOptions(safe_globals=[...])" in note for note in raised.value.__notes__)
    assert not any("StorageReader" in note for note in raised.value.__notes__)


async def test_keys_that_have_no_order(tmp_path: Path) -> None:
    await sidestream.save(state_of(), tmp_path / "a")
    target: dict[Any, Any] = {**state_of(), 1: torch.ones(1)}
    with pytest.raises(InvalidOptionError, match="keys"):
        await sidestream.load(
            target, tmp_path / "a", options=sidestream.LoadOptions(planner=DefaultLoadPlanner(allow_partial_load=True))
        )


@pytest.mark.parametrize("step", LOAD_STEPS)
async def test_load_planners_that_fail(step: str, tmp_path: Path) -> None:
    await sidestream.save(state_of(), tmp_path / "a")
    target = state_of(9)
    with pytest.raises(PlannerError, match=f"{step} raised KeyError") as raised:
        await sidestream.load(
            target, tmp_path / "a", options=sidestream.LoadOptions(planner=failing(DefaultLoadPlanner, step))
        )
    assert isinstance(raised.value.__cause__, KeyError)
    read = {"rows", "deep.columns", "deep.list.0"}
    assert set(raised.value.written) == (read if step in ("load_bytes", "commit_tensor") else set())
    if not raised.value.written:
        same(target, state_of(9))


async def test_damage_is_found_and_told_by_its_name(tmp_path: Path) -> None:
    await sidestream.save(state_of(), tmp_path / "a", options=sidestream.SaveOptions(planner=DefaultSavePlanner()))
    for path in (tmp_path / "a").glob("__*"):
        content = bytearray(path.read_bytes())
        at = content.find(state_of()["rows"].numpy().tobytes())
        if at >= 0:
            content[at + 40] ^= 1
            path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as raised:
        await sidestream.load(state_of(), tmp_path / "a", options=sidestream.LoadOptions(planner=DefaultLoadPlanner()))
    assert raised.value.fqn == "rows"
    assert not (await sidestream.verify(tmp_path / "a")).ok


async def test_what_goes_with_no_planner(tmp_path: Path) -> None:
    await sidestream.save(state_of(), tmp_path / "a")
    saves: list[Any] = [
        {"planner": DefaultSavePlanner},
        {"planner": DefaultLoadPlanner()},
        {"planner": DefaultSavePlanner(), "digest": "blake3"},
        {"planner": DefaultSavePlanner(), "streaming": True},
    ]
    loads: list[Any] = [
        {"planner": DefaultSavePlanner()},
        {"planner": DefaultLoadPlanner(), "allow_missing": True},
        {"planner": DefaultLoadPlanner(), "atomic": True},
    ]
    for options in saves:
        with pytest.raises(InvalidOptionError):
            await sidestream.save(state_of(), tmp_path / "b", **for_save(**options))
    for options in loads:
        with pytest.raises(InvalidOptionError):
            await sidestream.load(state_of(), tmp_path / "a", **for_load(**options))
    assert not (tmp_path / "b").exists()


async def test_a_run(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpointer:
        for step in range(2):
            pending = await checkpointer.async_save(
                state_of(step),
                step=step,
                metadata={"loss": step},
                options=sidestream.SaveOptions(planner=DefaultSavePlanner()),
            )
            await pending
        await checkpointer.save(state_of(5), step=1, options=sidestream.SaveOptions(planner=Renaming()))
        target = state_of(9)
        assert await checkpointer.restore(target, options=sidestream.LoadOptions(planner=RenamingBack())) == 1
        same(target, state_of(5))
        assert await checkpointer.restore(target, 0, options=sidestream.LoadOptions(planner=DefaultLoadPlanner())) == 0
        same(target, state_of())
        assert await checkpointer.read_metadata(0) == {"loss": 0}
        assert (await checkpointer.verify()).ok


# --- over ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_planners_over_ranks(world: int, groups: Groups, tmp_path: Path) -> None:
    first, *others = groups.run("planned", world, tmp_path).results
    for told in others:
        assert told == first
    manifests = list(tmp_path.glob("*/manifest-*"))
    assert manifests
    for manifest in manifests:
        head = json.loads(manifest.read_bytes().partition(b"\n")[0])
        assert len(head["files"]) >= world
        crcs = {name: zlib.crc32((manifest.parent / name).read_bytes()) for name in head["files"]}
        assert head["file_crcs"] == crcs


def test_planners_that_fail_over_ranks(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("planners_fail", 2, tmp_path).results
    assert results[0] == results[1]
    for case, failures in results[0].items():
        verb, step = case.split()
        if step in ("one", "other"):
            assert [kind for _, kind, _ in failures] == ["InvalidOptionError"], (case, failures)
            continue
        rank = 0 if step == "create_global_plan" else 1
        assert [[one, kind] for one, kind, _ in failures] == [[rank, "PlannerError"]], (case, failures)
        assert f"{step} raised KeyError" in failures[0][2], verb
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".group")}
    assert left == {"good", "after"}


def test_a_planned_run(groups: Groups, tmp_path: Path) -> None:
    for told in groups.run("a_planned_run", 2, tmp_path).results:
        assert told == [1, {"loss": 1}, [0, 1]]


# --- tensors that say which shards they hold ------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tensors_that_hold_shards(world: int, groups: Groups, tmp_path: Path) -> None:
    groups.run("holders", world, tmp_path)


async def test_shards_without_a_group_are_refused_by_name(tmp_path: Path) -> None:
    from _planned import ROWS, boxes_of, holder

    with pytest.raises(UnsupportedTensorError, match="held"):
        await sidestream.save({"held": holder(ROWS, boxes_of(0, 1))}, tmp_path / "a")
    await sidestream.save({"held": ROWS}, tmp_path / "a")
    target = holder(ROWS, boxes_of(0, 2), fill=False)
    await sidestream.load({"held": target}, tmp_path / "a")
    assert torch.equal(target, holder(ROWS, boxes_of(0, 2)))
