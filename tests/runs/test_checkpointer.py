"""The checkpoints of a run: steps, generations, slots, and errors that are heard of."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _run import until
from held import HeldStager
from phases import warned
from states import assert_same, model_and_optimizer

import sidestream
from sidestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ClosedError,
    CorruptCheckpointError,
    ForkedProcessError,
    InvalidOptionError,
    UnsafeObjectError,
)


async def test_save_and_restore_the_newest(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        assert await checkpoints.restore(state) is None
        assert await checkpoints.steps() == []
        assert await checkpoints.latest() is None
        for step in (5, 100, 20):
            state["step"] = step
            pending = checkpoints.async_save(state, step=step)
            await pending.staged
            info = await pending
            assert (info.step, info.generation) == (step, 1)
            assert await pending is info, "as often as one likes"
            assert pending.outcome == "committed"
        assert await checkpoints.steps() == [5, 20, 100]
        assert await checkpoints.latest() == 100
        fresh = {"model": model_and_optimizer(seed=4)[0], "step": 0}
        assert await checkpoints.restore(fresh) == 100
        assert fresh["step"] == 100
        assert_same(model.state_dict(), fresh["model"].state_dict())
        assert await checkpoints.restore(fresh, step=5) == 5
        with pytest.raises(CheckpointNotFoundError, match="no committed step 6"):
            await checkpoints.restore(fresh, step=6)


async def test_generations_of_a_step(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        first = checkpoints.async_save({"n": 1}, step=7)
        second = checkpoints.async_save({"n": 2}, step=7)
        assert [(await first).generation, (await second).generation] == [1, 2]
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        assert (await checkpoints.save({"n": 3}, step=7)).url.endswith("step-7.g3")
        assert await checkpoints.steps() == [7]
        state = {"n": 0}
        assert await checkpoints.restore(state) == 7
        assert state["n"] == 3
    assert sorted(os.listdir(tmp_path)) == ["step-7", "step-7.g2", "step-7.g3"]


async def test_only_what_is_committed_counts(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save({"n": 1}, step=1)
        (tmp_path / "step-9").mkdir()
        (tmp_path / ".step-8.0123.partial").mkdir()
        assert await checkpoints.steps() == [1]


THREADS = sidestream.SaveOptions(writer="thread")  # a writer process does not write to memory://


async def put_by_save(state: dict[str, Any], url: str, storage: sidestream.Storage) -> None:
    await sidestream.save(state, url, metadata={"n": 5}, storage=storage, options=THREADS)


async def put_by_convert(state: dict[str, Any], url: str, storage: sidestream.Storage) -> None:
    await sidestream.save(state, f"{url}-seed", metadata={"n": 5}, storage=storage, options=THREADS)
    await sidestream.convert(f"{url}-seed", url, storage=storage)
    await sidestream.remove(f"{url}-seed", storage=storage)


async def put_by_copy(state: dict[str, Any], url: str, storage: sidestream.Storage) -> None:
    """A step of another run, in another generation."""
    async with sidestream.Checkpointer(f"{url}-other", storage=storage, save=THREADS) as other:
        for generation in (1, 2):
            info = await other.save(state, step=80, metadata={"n": 5})
            assert info.generation == generation
    await sidestream.copy(info.url, url, storage=storage)


@pytest.mark.parametrize("put", [put_by_save, put_by_convert, put_by_copy])
@pytest.mark.parametrize("on", ["local", "memory"])
async def test_a_checkpoint_belongs_to_a_run_by_its_name(put: Any, on: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run") if on == "local" else f"memory://{tmp_path}/run"
    storage = sidestream.Storage()
    async with sidestream.Checkpointer(run, storage=storage, save=THREADS) as checkpoints:
        await checkpoints.save({"n": 1}, step=1)
    await put({"n": 5}, f"{run}/step-5", storage)
    async with sidestream.Checkpointer(run, keep=sidestream.KeepLast(2), storage=storage, save=THREADS) as checkpoints:
        assert await checkpoints.steps() == [1, 5]
        assert await checkpoints.latest() == 5
        state = {"n": 0}
        assert await checkpoints.restore(state) == 5
        assert state == {"n": 5}
        assert checkpoints.restored is not None
        assert (checkpoints.restored.step, checkpoints.restored.generation) == (5, 1)
        verified = await checkpoints.verify(5)
        assert (verified.ok, verified.step) == (True, 5)
        assert await checkpoints.read_metadata() == ({"n": 5} if put is not put_by_convert else {})
        async with checkpoints.reading() as opened:
            assert opened.step == 5
        watch = checkpoints.watch(after=1)
        assert await anext(watch) == 5
        assert (await checkpoints.save({"n": 6}, step=5)).generation == 2
        await checkpoints.save({"n": 7}, step=6)
        await checkpoints.prune()
        assert await checkpoints.steps() == [5, 6]
        await checkpoints.restore(state, step=5)
        assert state == {"n": 6}, "the second generation is the one that stays"
        await checkpoints.save({"n": 8}, step=7)
        await checkpoints.prune()
        assert await checkpoints.steps() == [6, 7], "retention counts it, too"


async def test_a_directory_that_is_renamed_is_the_step_of_its_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with sidestream.Checkpointer(run) as checkpoints:
        for step in (1, 2):
            await checkpoints.save({"n": step}, step=step)
    (run / "step-1").rename(run / "step-9.g2")
    shutil.copytree(run / "step-2", run / "step-9")
    run.rename(tmp_path / "moved")
    async with sidestream.Checkpointer(tmp_path / "moved") as checkpoints:
        assert await checkpoints.steps() == [2, 9]
        state = {"n": 0}
        assert await checkpoints.restore(state) == 9
        assert state == {"n": 1}
        assert checkpoints.restored is not None
        assert (checkpoints.restored.step, checkpoints.restored.generation) == (9, 2)
        assert (await checkpoints.save(state, step=9)).generation == 3
    report = await sidestream.load(state, tmp_path / "moved" / "step-9")
    assert (report.step, report.generation, state) == (9, 1, {"n": 2})


async def test_a_damaged_newest_step_is_told_not_skipped(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            await checkpoints.save({"t": torch.ones(10)}, step=step)
        newest = tmp_path / "step-2"
        raw = (newest / ".metadata").read_bytes()
        shard = (newest / "__0_1.distcp").read_bytes()
        for damaged in (
            b"",
            raw[:-5],
            raw.replace(b'"step":2', b'"step":3'),
            raw.replace(b"sidestream", b"sidestraem"),
        ):
            (newest / ".metadata").write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError, match="step-2"):
                await checkpoints.restore({"t": torch.zeros(10)})
        (newest / ".metadata").unlink()
        with pytest.raises(CorruptCheckpointError, match="step-2"):
            await checkpoints.restore({"t": torch.zeros(10)})
        (newest / ".metadata").write_bytes(raw)
        (newest / "__0_1.distcp").write_bytes(b"")
        with pytest.raises(CorruptCheckpointError, match="step-2"):
            await checkpoints.restore({"t": torch.zeros(10)})
        (newest / "__0_1.distcp").write_bytes(shard)
        assert await checkpoints.restore({"t": torch.zeros(10)}) == 2
        (newest / ".metadata").write_bytes(b"")
        assert await checkpoints.steps() == [1]
        assert (await checkpoints.save({"t": torch.ones(10)}, step=2)).generation == 2
        assert await checkpoints.steps() == [1, 2]
        assert await checkpoints.restore({"t": torch.zeros(10)}, step=1) == 1


async def test_a_step_that_stock_dcp_wrote(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save({"t": torch.ones(10)}, step=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"t": torch.full((10,), 2.0)}, checkpoint_id=tmp_path / "step-2", no_dist=True)
        target = {"t": torch.zeros(10)}
        assert await checkpoints.restore(target) == 2
        assert target["t"].tolist() == [2.0] * 10
        assert (await checkpoints.save({"t": torch.ones(10)}, step=2)).generation == 2


async def test_values_are_those_at_the_call_while_saves_overlap(tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 18)
    async with sidestream.Checkpointer(tmp_path, slots=3) as checkpoints:
        saves = []
        for step in range(12):
            tensor.fill_(step)
            pending = checkpoints.async_save({"t": tensor, "step": step}, step=step)
            saves.append(pending)
            await pending.staged
        tensor.fill_(-1)
        await asyncio.gather(*saves)
        for step in range(12):
            target = {"t": torch.zeros(1 << 18), "step": None}
            await checkpoints.restore(target, step=step)
            assert target["step"] == step
            assert (target["t"] == step).all()


async def test_a_slot_is_waited_for(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path, slots=1) as checkpoints:
        first = checkpoints.async_save({"t": torch.ones(1 << 20)}, step=1)
        second = checkpoints.async_save({"t": torch.ones(1 << 20)}, step=2)
        await second.staged
        assert first.done()
        await second


async def test_a_failure_nobody_awaited_is_raised_by_the_next_save(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        (tmp_path / "step-1").write_text("in the way")
        pending = checkpoints.async_save({"n": 1}, step=1)
        await pending.ended()
        with pytest.raises(CheckpointExistsError):
            checkpoints.async_save({"n": 2}, step=2)
        (tmp_path / "step-1").unlink()
        assert (await checkpoints.save({"n": 2}, step=2)).step == 2, "it is told once"


async def test_a_failed_save_is_not_kept_for_the_next_one(tmp_path: Path) -> None:
    """Its error, which was retrieved, has frames that refer to the state. The next save needs the memory."""
    held = HeldStager()
    held.holds = False
    async with sidestream.Checkpointer(tmp_path, stager=held) as checkpoints:
        (tmp_path / "step-1").write_text("in the way")
        failed = checkpoints.async_save({"n": 1}, step=1)
        with pytest.raises(CheckpointExistsError):
            await failed
        kept = weakref.ref(failed)
        del failed
        (tmp_path / "step-1").unlink()
        held.holds = True
        following = checkpoints.async_save({"t": torch.ones(1 << 20)}, step=2)

        def gone() -> bool:
            gc.collect()
            return kept() is None

        await until(gone, "the failed save, although the next one is in progress")
        held.let_go()
        await following


async def test_a_failure_nobody_awaited_is_raised_by_aclose(tmp_path: Path) -> None:
    (tmp_path / "step-1").write_text("in the way")
    with pytest.raises(CheckpointExistsError):
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            checkpoints.async_save({"n": 1}, step=1)
    with pytest.raises(ValueError, match="the body's own") as raised:
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            checkpoints.async_save({"n": 1}, step=1)
            raise ValueError("the body's own")
    assert "step-1" in raised.value.__notes__[0]


async def test_a_failure_of_a_bare_save_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c").write_text("in the way")
    pending = sidestream.async_save({"n": 1}, tmp_path / "c")
    await pending.ended()
    assert pending.outcome == "absent"
    with caplog.at_level(logging.ERROR):
        del pending

        def logged() -> bool:
            gc.collect()
            return bool(warned(caplog))

        await until(logged, "the log, when the task of the save has ended too")
    assert len(warned(caplog)) == 1
    assert "the error was not retrieved: CheckpointExistsError" in caplog.text
    with pytest.raises(CheckpointExistsError):
        await sidestream.async_save({"n": 1}, tmp_path / "c")
    assert len(warned(caplog)) == 1


@pytest.mark.parametrize("integer", [np.int64, np.uint8, torch.tensor])
async def test_a_step_may_be_an_integer_of_another_type(integer: Any, tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        info = await checkpoints.save({"a": 1}, step=integer(4))
        assert (info.step, type(info.step)) == (4, int)
        pending = checkpoints.async_save({"a": 2}, step=integer(5))
        assert (await pending).step == 5
        target = {"a": 0}
        assert await checkpoints.restore(target, integer(4)) == 4
        assert target == {"a": 1}
        assert await anext(checkpoints.watch(after=integer(4))) == 5
        assert (await checkpoints.verify(integer(5))).ok
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step")) == ["step-4", "step-5"]


async def test_use_outside_its_life_and_on_other_loops(tmp_path: Path) -> None:
    checkpoints = sidestream.Checkpointer(tmp_path)
    with pytest.raises(ClosedError, match="enter the Checkpointer first"):
        await checkpoints.steps()
    async with checkpoints:
        assert await asyncio.to_thread(lambda: asyncio.run(_steps(checkpoints))) == []
        for step in (-1, 1.5, True, "1", torch.ones(2), torch.tensor(1.5)):
            with pytest.raises(InvalidOptionError, match="step="):
                checkpoints.async_save({}, step=step)  # type: ignore[arg-type]
    with pytest.raises(ClosedError):
        checkpoints.async_save({}, step=1)
    with pytest.raises(InvalidOptionError):
        sidestream.Checkpointer(tmp_path, slots=0)
    with pytest.raises(InvalidOptionError):
        sidestream.Checkpointer("nowhere://bucket/run")


async def _steps(checkpoints: sidestream.Checkpointer) -> list[int]:
    return await checkpoints.steps()


async def test_after_a_fork(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints, sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        staged = await stager.stage({"t": torch.ones(10)})
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for use in (checkpoints._opened.check, lambda: stager.stage({})):
                    try:
                        use()
                    except ForkedProcessError:
                        code = 0
                    else:
                        code = 2
                        break
                staged.release()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert staged["t"].tolist() == [1.0] * 10
        assert stager.statistics().leases == 1
        staged.release()


async def test_prewarm_plans(tmp_path: Path) -> None:
    """What the first save would have to plan is known. What is wrong with a state is for the save to say: one with a
    planner may leave it out."""
    state = {"w": torch.ones(300, 7), "rows": [torch.ones(5), torch.zeros(3)], "lr": 0.1}
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.prewarm(state)
        stager = checkpoints._saves._stager
        assert isinstance(stager, sidestream.AsyncStager)
        assert stager.plans.made == 1
        await checkpoints.save(state, step=1)
        assert stager.plans.made == 1
        await checkpoints.prewarm({"w": object()})
        pending = checkpoints.async_save({"w": object()}, step=2)
        with pytest.raises(UnsafeObjectError):
            await pending
        assert await checkpoints.steps() == [1]
