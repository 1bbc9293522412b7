"""What a stage does when memory is short, and what nobody has to wait for: policies, fences, pace, plans."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GatedEngine
from leases import all_returned
from states import assert_same

import sidestream
from sidestream._layout import save_layout as save_plan
from sidestream._runtime.rate import RateLimiter
from sidestream._runtime.threads import Deadline, Stop
from sidestream._staging import AsyncStager, Copy, HostEngine
from sidestream._staging.arena import Arena
from sidestream.errors import ArenaExhaustedError, DeadlineExceededError, InvalidOptionError, SkippedError

KIB = 1 << 10


def filled(value: float, nbytes: int = 200 * KIB) -> dict[str, torch.Tensor]:
    return {"t": torch.full((nbytes // 4,), value)}


async def test_an_eager_stage_that_is_late_fails() -> None:
    """``stage()`` waits until the deadline. The caller changes the sources then."""
    engine = GatedEngine()
    source = torch.ones(200 * KIB)
    async with AsyncStager(mode="eager", timeout_s=0.05, engine=engine) as stager:
        stage = stager.stage({"t": source})
        source.zero_()
        engine.gate.set()
        with pytest.raises(DeadlineExceededError):
            await stage
        await all_returned(stager)


# --- when_full ---


async def test_skip_and_fail_do_not_wait(tmp_path: Path) -> None:
    async with (
        AsyncStager(budget_bytes=256 * KIB, when_full="skip") as skipping,
        AsyncStager(budget_bytes=256 * KIB, when_full="fail") as failing,
    ):
        first = await skipping.stage(filled(1.0)), await failing.stage(filled(1.0))
        with pytest.raises(SkippedError, match="when_full is 'skip'"):
            await skipping.stage(filled(2.0))
        with pytest.raises(ArenaExhaustedError, match="choose another when_full="):
            await failing.stage(filled(2.0))
        pending = sidestream.async_save(filled(2.0), tmp_path / "c", stager=skipping)
        await pending.staged
        with pytest.raises(SkippedError):
            await pending
        assert pending.outcome == "absent"
        skipping.fence()
        await skipping.synchronize_staging()
        for staged in first:
            staged.release()
        del first, staged
        assert ((await skipping.stage(filled(3.0)))["t"] == 3.0).all()
        assert ((await failing.stage(filled(3.0)))["t"] == 3.0).all()
    assert list(tmp_path.iterdir()) == []


async def test_latest_gives_way_to_newer_stages() -> None:
    async with AsyncStager(budget_bytes=256 * KIB, when_full="latest") as stager:
        first = await stager.stage(filled(1.0))
        waiting = [stager.stage(filled(float(step))) for step in range(2, 6)]
        for superseded in waiting[:-1]:
            with pytest.raises(SkippedError, match="a newer stage"):
                await superseded
        assert not waiting[-1].done()
        first.release()
        del first
        newest = await waiting[-1]
        assert (newest["t"] == 5.0).all()
        newest.release()
        del newest, waiting
        await all_returned(stager)


async def test_a_stage_that_has_begun_is_not_superseded() -> None:
    engine = GatedEngine()
    async with AsyncStager(budget_bytes=1 << 20, when_full="latest", engine=engine) as stager:
        first = stager.stage(filled(1.0))
        while stager.statistics().leases == 0:
            await asyncio.sleep(0)
        second = stager.stage(filled(2.0))
        engine.gate.set()
        assert ((await first)["t"] == 1.0).all()
        assert ((await second)["t"] == 2.0).all()


@pytest.mark.parametrize("options", [{"when_full": "drop"}, {"mode": "snapshot"}, {"max_bytes_per_second": 0}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        AsyncStager(**options)


# --- nothing that frees memory needs the loop ---


async def test_the_fence_may_block_the_loop_while_a_save_larger_than_the_budget_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_plan, "SHARD_BYTES", 256 * KIB)
    state = {f"t{index}": torch.full((50 * KIB,), float(index)) for index in range(20)}
    async with AsyncStager(budget_bytes=1 << 20, timeout_s=60.0) as stager:
        first = sidestream.async_save(state, tmp_path / "a", stager=stager)
        second = sidestream.async_save(state, tmp_path / "b", stager=stager)
        stager.fence()  # on the loop, which has not had a turn since
        for tensor in state.values():
            tensor.zero_()
        await first
        await second
        assert stager.statistics().peak_leased_bytes <= 1 << 20
    for name in ("a", "b"):
        loaded = await (await sidestream.open_checkpoint(tmp_path / name)).state_dict()
        assert all((loaded[f"t{index}"] == index).all() for index in range(20))


async def test_a_snapshot_larger_than_the_budget_streams_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_plan, "SHARD_BYTES", 256 * KIB)
    state = {f"t{index}": torch.full((50 * KIB,), float(index)) for index in range(20)}
    async with AsyncStager(budget_bytes=1 << 20, mode="eager", timeout_s=60.0) as stager:
        pending = sidestream.async_save(state, tmp_path / "a", stager=stager)
        for tensor in state.values():
            tensor.zero_()
        await pending
    loaded = await (await sidestream.open_checkpoint(tmp_path / "a")).state_dict()
    assert all((loaded[f"t{index}"] == index).all() for index in range(20))


# --- many saves at once ---


@pytest.mark.parametrize("saves", [150, pytest.param(1000, marks=pytest.mark.long)])
async def test_overlapping_saves_hold_what_was_live_at_their_own_call(saves: int, tmp_path: Path) -> None:
    state = {"w": torch.zeros(3000), "m": {"n": torch.zeros(40, dtype=torch.int64)}, "step": 0}
    wrong = 0

    async def check(step: int, pending: sidestream.PendingSave) -> None:
        nonlocal wrong
        await pending
        held = await (await sidestream.open_checkpoint(tmp_path / str(step))).state_dict()
        wrong += int((held["w"] != step).sum() + (held["m"]["n"] != step).sum() + (held["step"] != step))

    async with AsyncStager(budget_bytes=1 << 20) as stager, asyncio.TaskGroup() as checks:
        for step in range(saves):
            state["w"].fill_(step)  # type: ignore[attr-defined]
            state["m"]["n"].fill_(step)  # type: ignore[index]
            state["step"] = step
            pending = sidestream.async_save(
                state, tmp_path / str(step), stager=stager, options=sidestream.SaveOptions(durability="flush")
            )
            checks.create_task(check(step, pending))
            await pending.staged
    assert wrong == 0


# --- pace ---


async def test_a_writer_at_the_fence_ends_the_pace() -> None:
    async with AsyncStager(budget_bytes=1 << 24, max_bytes_per_second=1.0) as stager:
        source = torch.ones(1 << 20)
        future = stager.stage({"a": source, "b": source + 1})
        await asyncio.to_thread(stager.fence)  # at one byte per second it would take 97 days
        source.zero_()
        assert ((await future)["a"] == 1.0).all()
        last = stager.stage({"a": source})
        await stager.synchronize_staging()
        assert not (await last)["a"].any()


async def test_closing_does_not_wait_for_the_pace() -> None:
    stager = AsyncStager(budget_bytes=1 << 24, max_bytes_per_second=1.0)
    future = stager.stage({"a": torch.ones(1 << 20)})
    closing = asyncio.create_task(stager.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(sidestream.errors.ClosedError):
        await future


# --- plans ---


async def test_plans_are_used_again_and_never_for_another_state(stager: AsyncStager, tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.randn(30, 40), "b": torch.randn(7), "n": 1}

    async def both(number: int) -> None:
        staged = await stager.stage(state)
        assert_same(state, staged)
        staged.release()
        await sidestream.save(state, tmp_path / str(number), stager=stager)
        loaded = await (await sidestream.open_checkpoint(tmp_path / str(number))).state_dict()
        assert_same(state, loaded)

    await both(0)
    assert stager.plans.made == 2
    state["a"].add_(1.0)
    state["n"] = 2
    await both(1)
    assert stager.plans.made == 2, "values are not part of a plan"
    changes: list[Any] = [
        lambda: state.update(a=state["a"].clone()),  # replaced: the same name, shape and dtype at another address
        lambda: state["b"].untyped_storage().resize_(200),  # moved, perhaps
        lambda: state["b"].resize_(9).fill_(3.0),
        lambda: state.update(a=state["a"].t()),
        lambda: state.update(a=state["a"].double()),
        lambda: state.update(c=torch.ones(2)),
        lambda: state.update(c=state["b"]),  # tied
        lambda: state.update(c=state["b"] + 1.0),  # and untied again
        lambda: state.pop("c"),
        lambda: setattr(state["a"], "data", torch.randn(3, 3, dtype=torch.float64)),
    ]
    for number, change in enumerate(changes, 2):
        change()
        await both(number)


async def test_a_plan_keeps_no_tensor(stager: AsyncStager) -> None:
    gone = []
    for _ in range(3):
        tensor = torch.ones(10)
        gone.append(tensor)
        (await stager.stage({"t": tensor})).release()
    kinds = [type(one) for one in gc.get_referrers(*gone)]
    assert kinds == [list], "only this test refers to them"


# --- threads, memory, optimizers ---


async def test_several_threads_fill_an_image_without_a_hole() -> None:
    sizes = [3, 70_000, 5_000_000, 17, 9_000_000, 1, 4_500_000, 2_000]
    state = {str(index): torch.randn(size) for index, size in enumerate(sizes)} | {"t": torch.randn(900, 800).t()}
    async with AsyncStager(budget_bytes=1 << 28, engine=HostEngine(threads=4)) as stager:
        for _ in range(5):
            staged = await stager.stage(state)
            assert_same(state, staged)
            staged.release()
            del staged
        await all_returned(stager)


class OutOfOrder(HostEngine):
    """Holds the first unit back until the test opens the gate."""

    def __init__(self) -> None:
        super().__init__(threads=3)
        self.gate = threading.Event()
        self.others = threading.Semaphore(0)

    def copy(self, copy: Copy, address: int, *, stop: Stop) -> None:
        if copy.offset == 0:
            assert self.gate.wait(60)
        super().copy(copy, address, stop=stop)
        self.others.release()


def test_a_reader_sees_no_byte_behind_a_hole() -> None:
    source = torch.arange(20 << 20, dtype=torch.int32)  # 80 MiB: five units
    target = torch.zeros_like(source)
    engine, filled, done = OutOfOrder(), [0], Future[None]()

    def fill() -> None:
        copies = [Copy(source, 0, source.nbytes)]
        engine.fill(copies, target.data_ptr(), advance=filled.append, pace=RateLimiter(None), stop=Stop())
        done.set_result(None)

    threading.Thread(target=fill).start()
    for _ in range(4):
        assert engine.others.acquire(timeout=60)
    assert filled == [0], "four units are in place, but not the first one"
    engine.gate.set()
    done.result(60)
    assert filled == sorted(filled)
    assert filled[-1] == source.nbytes
    assert torch.equal(source, target)
    engine.close()


class PartlyBroken(HostEngine):
    """Fails on the copies of 40 bytes, and notes which threads copy."""

    def __init__(self) -> None:
        super().__init__(threads=3)
        self.threads: set[int] = set()

    def copy(self, copy: Copy, address: int, *, stop: Stop) -> None:
        self.threads.add(threading.get_ident())
        if copy.nbytes == 40:
            raise RuntimeError("this memory cannot be read")
        super().copy(copy, address, stop=stop)


async def test_a_failing_thread_among_several_fails_the_stage() -> None:
    async with AsyncStager(budget_bytes=1 << 28, engine=PartlyBroken()) as stager:
        large = torch.ones(9_000_000)
        future = stager.stage({"a": large, "b": torch.ones(10), "c": large + 1})
        with pytest.raises(RuntimeError, match="cannot be read"):
            await future
        del future
        await all_returned(stager)


def test_shared_backing_can_be_handed_to_another_process() -> None:
    arena = Arena(1 << 20, backing="shared")
    lease = arena.lease(4096, deadline=Deadline.after(9), stop=Stop())
    lease.view[:5] = b"hello"
    (segment,) = arena._segments
    assert segment.memory.descriptor is not None
    assert os.pread(segment.memory.descriptor, 5, lease.address - arena_base(segment.memory)) == b"hello"


def arena_base(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


async def test_prewarm_maps_what_a_state_will_need(tmp_path: Path) -> None:
    state = {"a": torch.ones(1 << 20), "b": [torch.ones(100) for _ in range(30)], "n": 3}
    async with AsyncStager(budget_bytes=1 << 26) as stager:
        await stager.prewarm(state)
        reserved = stager.statistics().reserved_bytes
        assert reserved >= 4 << 20
        (await stager.stage(state)).release()
        await sidestream.save(state, tmp_path / "c", stager=stager)
        assert stager.statistics().reserved_bytes == reserved
        with pytest.raises(InvalidOptionError):
            await stager.reserve(0)
