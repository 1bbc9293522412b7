"""AsyncStager and its arena: the snapshot is right, and memory is reused, bounded, and never under a reader."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from engines import GatedEngine, start_no_threads
from leases import all_returned
from states import assert_same, model_and_optimizer

import sidestream
from sidestream._runtime.threads import Deadline, Stop
from sidestream._staging import AsyncStager, HostEngine
from sidestream._staging.arena import Arena
from sidestream._staging.captured import capture
from sidestream.errors import (
    ArenaExhaustedError,
    ClosedError,
    DeadlineExceededError,
    InvalidOptionError,
    UnsupportedTensorError,
)


def soon() -> Deadline:
    return Deadline.after(60.0)


async def test_the_copy_has_values_structure_strides_and_sharing(stager: AsyncStager) -> None:
    model, optimizer = model_and_optimizer()
    base = torch.randn(40, 50)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer,
        "views": [base.t(), base[3:7], base[10:20, ::2], (base[0], 1)],
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(3, dtype=torch.uint8),
        "bytes": base.view(torch.uint8)[1, 3:9],
        "list": [1, {"a": None}],
    }
    expected = {**state, "optimizer": optimizer.state_dict()}
    staged = await stager.stage(state)
    assert_same(expected, staged)
    views = staged["views"]
    assert views[0].stride() == (1, 50)
    assert views[1].untyped_storage().data_ptr() == views[0].untyped_storage().data_ptr()
    assert staged["model"]["3.weight"].data_ptr() == staged["model"]["0.weight"].data_ptr()
    assert views[0].data_ptr() != base.data_ptr()
    views[1].fill_(7.0)
    assert (views[0].t()[3:7] == 7.0).all()
    assert not (base[3:7] == 7.0).any()
    staged.release()


async def test_only_bytes_that_are_referred_to_are_copied(stager: AsyncStager) -> None:
    base = torch.zeros(8 << 20, dtype=torch.uint8)
    staged = await stager.stage({"head": base[:100], "tail": base[-100:]})
    assert stager.statistics().leased_bytes == 4096
    assert staged["head"].untyped_storage().nbytes() == 100


async def test_sources_may_change_after_synchronize_staging(stager: AsyncStager) -> None:
    tensor = torch.arange(1 << 20)
    futures = []
    for step in range(20):
        futures.append(stager.stage({"t": tensor, "step": step}))
        await stager.synchronize_staging()
        tensor += 1
    for step, future in enumerate(futures):
        staged = await future
        assert staged["step"] == step
        assert int(staged["t"][0]) == step
        assert int(staged["t"][-1]) == step + (1 << 20) - 1


async def test_a_kept_tensor_survives_release_and_a_hundred_stages() -> None:
    async with AsyncStager(budget_bytes=8 << 20) as stager:
        source = torch.full((1 << 18,), 1.0)
        staged = await stager.stage({"t": source, "u": source + 1})
        kept = staged["t"][5:]
        staged.release()
        del staged
        for step in range(100):
            source.fill_(step + 10)
            (await stager.stage({"t": source})).release()
        assert (kept == 1.0).all()
        del kept
        await all_returned(stager)


async def test_memory_comes_back_without_a_release_and_without_the_garbage_collector(stager: AsyncStager) -> None:
    gc.collect()
    gc.disable()
    try:
        await stager.stage({"t": torch.zeros(1 << 20), "u": [torch.zeros(3)]})
        async with asyncio.timeout(60):
            while stager.statistics().leases:
                await asyncio.sleep(0)
    finally:
        gc.enable()


async def test_memory_is_reused_not_mapped_again(stager: AsyncStager) -> None:
    source = {"t": torch.zeros(1 << 20)}
    addresses = set()
    for _ in range(10):
        staged = await stager.stage(source)
        addresses.add(staged["t"].data_ptr())
        staged.release()
    assert len(addresses) == 1
    assert stager.statistics().peak_leased_bytes == source["t"].nbytes


async def test_sources_are_let_go_when_they_are_copied(stager: AsyncStager) -> None:
    tensor = torch.zeros(1000)
    gone = weakref.ref(tensor)
    staged = await stager.stage({"t": tensor})
    await stager.synchronize_staging()
    del tensor
    gc.collect()
    assert gone() is None
    staged.release()


async def test_one_future_for_dcp_threads_tasks_and_loops(stager: AsyncStager) -> None:
    future = stager.stage({"t": torch.ones(3)})
    assert isinstance(future, Future)
    assert future.running() or future.done()
    assert not future.cancel()
    both = await asyncio.gather(future, future)
    assert both[0] is both[1]
    elsewhere = await asyncio.to_thread(lambda: asyncio.run(_await(future)))
    assert elsewhere is both[0]
    assert future.result(1) is both[0]


async def _await(future: sidestream.StagingFuture[sidestream.StagedState]) -> sidestream.StagedState:
    return await future


async def test_a_cancelled_awaiter_cancels_neither_copy_nor_others() -> None:
    engine = GatedEngine()
    async with AsyncStager(engine=engine, budget_bytes=1 << 24) as stager:
        future = stager.stage({"t": torch.arange(1000)})
        first, second = asyncio.create_task(_await(future)), asyncio.create_task(_await(future))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        engine.gate.set()
        assert torch.equal((await second)["t"], torch.arange(1000))


async def test_a_failed_copy_reaches_future_fence_and_synchronize() -> None:
    engine = GatedEngine()
    engine.fail = RuntimeError("the link is down")
    stager = AsyncStager(engine=engine, budget_bytes=1 << 24)
    future = stager.stage({"t": torch.ones(8)})
    synchronized = stager.synchronize_staging()
    engine.gate.set()
    for attempt in (future, synchronized):
        with pytest.raises(RuntimeError, match="link is down"):
            await attempt
    stager.stage({"t": torch.ones(8)})
    with pytest.raises(RuntimeError, match="link is down"):
        await asyncio.to_thread(stager.fence)
    stager.stage({"t": torch.ones(8)})  # nobody awaits this one
    with pytest.raises(RuntimeError, match="link is down"):
        await stager.aclose()
    await all_returned(stager)


async def test_fence_and_guard_hold_the_writer_back() -> None:
    engine = GatedEngine()
    async with AsyncStager(engine=engine, budget_bytes=1 << 24) as stager:
        parameter = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        handle = stager.guard(optimizer)
        parameter.grad = torch.ones(4)
        future = stager.stage({"p": parameter})
        assert await asyncio.to_thread(engine.begun.wait, 60), "it has its memory"
        with pytest.raises(DeadlineExceededError):
            stager.fence(timeout_s=0.01)
        stepping = asyncio.create_task(asyncio.to_thread(optimizer.step))
        await asyncio.sleep(0)
        assert parameter.tolist() == [1.0] * 4
        engine.gate.set()
        await stepping
        assert parameter.tolist() == [0.0] * 4
        assert (await future)["p"].tolist() == [1.0] * 4
        handle.remove()


async def test_snapshot_mode_copies_before_it_returns() -> None:
    async with AsyncStager(mode="eager", budget_bytes=1 << 24) as stager:
        tensor = torch.ones(1000)
        future = stager.stage({"t": tensor})
        tensor.zero_()
        assert (await future)["t"].sum() == 1000


async def test_budget(stager: AsyncStager) -> None:
    async with AsyncStager(budget_bytes=1 << 20, timeout_s=1.0) as small:
        with pytest.raises(ArenaExhaustedError, match="raise budget_bytes"):
            await small.stage({"t": torch.zeros(1 << 20)})
        first = await small.stage({"t": torch.zeros(200_000)})
        with pytest.raises(ArenaExhaustedError, match="are leased"):
            await small.stage({"t": torch.zeros(200_000)})
        first.release()
        (await small.stage({"t": torch.zeros(200_000)})).release()
        assert small.statistics().reserved_bytes <= 1 << 20
    with pytest.raises(InvalidOptionError):
        AsyncStager(budget_bytes=0)
    with pytest.raises(InvalidOptionError):
        AsyncStager(mode="snapshot")  # type: ignore[arg-type]


async def test_a_stage_waits_for_memory_and_then_goes_on() -> None:
    async with AsyncStager(budget_bytes=1 << 20) as stager:
        first = await stager.stage({"t": torch.zeros(200_000)})
        waiting = stager.stage({"t": torch.ones(200_000)})
        while stager.statistics().waiters == 0:
            await asyncio.sleep(0)
        assert not waiting.done()
        first.release()
        assert (await waiting)["t"].sum() == 200_000


async def test_closed_stager(stager: AsyncStager) -> None:
    closed = AsyncStager(budget_bytes=1 << 20)
    staged = await closed.stage({"t": torch.arange(9)})
    await closed.aclose()
    assert staged["t"].tolist() == list(range(9)), "closing takes no memory away from anybody"
    with pytest.raises(ClosedError):
        closed.stage({"t": torch.ones(1)})
    with pytest.raises(ClosedError):
        sidestream.async_save({"t": torch.ones(1)}, "never", stager=closed)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.empty(3, device="meta"), "meta tensor"),
        (torch.nn.UninitializedParameter(), "uninitialized"),
    ],
)
async def test_what_cannot_be_staged_is_refused_by_name(tensor: torch.Tensor, what: str, stager: AsyncStager) -> None:
    with pytest.raises(UnsupportedTensorError, match=rf"a\.b\.0: .*{what}"):
        await stager.stage({"a": {"b": [tensor]}})
    with pytest.raises(UnsupportedTensorError, match=what):
        await sidestream.save({"t": tensor}, "never", stager=stager)


def test_arena_hands_out_disjoint_memory_and_joins_it_again() -> None:
    arena = Arena(1 << 20, segment_bytes=1 << 20)
    leases = [arena.lease(4096 * pages, deadline=soon(), stop=Stop()) for pages in (1, 7, 3, 50, 2)]
    spans = sorted((lease.address, lease.address + lease.nbytes) for lease in leases)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(start % 4096 == 0 for start, _ in spans)
    while leases:
        leases.pop(len(leases) // 2).release()
    everything = arena.lease(1 << 20, deadline=soon(), stop=Stop())
    assert arena.statistics().leased_bytes == 1 << 20
    everything.release()
    assert arena.statistics().leased_bytes == 0


def test_arena_replaces_idle_segments_that_are_too_small() -> None:
    arena = Arena(8 << 20, segment_bytes=1 << 20)
    for lease in [arena.lease(900_000, deadline=soon(), stop=Stop()) for _ in range(5)]:
        lease.release()
    arena.lease(8 << 20, deadline=soon(), stop=Stop()).release()
    assert arena.statistics().reserved_bytes == 8 << 20


def test_memory_is_touched_by_the_threads_that_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by none that outlives the call: the memory could be unmapped under it."""
    start, started = threading.Thread.start, []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    arena = Arena(96 << 20, segment_bytes=96 << 20)  # little memory is touched in the calling thread
    lease = arena.lease(1 << 20, deadline=Deadline.after(60), stop=Stop())
    assert len(started) == 1
    assert not started[0].is_alive()
    lease.release()


async def test_one_thread_copies_if_the_system_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start_no_threads("sidestream-copy", monkeypatch)
    async with AsyncStager(engine=HostEngine(threads=4)) as stager:
        sources = {f"t{number}": torch.full((6 << 20,), float(number)) for number in range(4)}
        staged = await stager.stage(sources)
        assert_same(staged, sources)


def test_a_stop_ends_the_wait_for_memory() -> None:
    arena = Arena(4096, segment_bytes=4096)
    held = arena.lease(4096, deadline=soon(), stop=Stop())
    stop, outcome = Stop(), Future[object]()

    def wait() -> None:
        try:
            outcome.set_result(arena.lease(4096, deadline=soon(), stop=stop))
        except ClosedError as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=wait)
    thread.start()
    stop.set()
    with pytest.raises(ClosedError):
        outcome.result(60)
    thread.join()
    held.release()


def test_no_collection_looks_at_all_objects_while_a_state_is_captured() -> None:
    """The aliases of 10,000 tensors are objects for the collector. In a program with 100,000 tensors a full collection
    took longer than the rest of the call."""
    state = {"flat": {str(number): torch.zeros(1) for number in range(10_000)}}
    state["nested"] = {number: {"exp_avg": torch.zeros(1), "step": number} for number in range(3_000)}
    collections: list[tuple[str, dict[str, int]]] = []
    during: list[int] = []

    class Last:
        """Captured last."""

        def __deepcopy__(self, _: object) -> Last:
            during.append(len(collections))
            return self

    state["last"] = {"value": Last()}
    thresholds = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(lambda phase, info: collections.append((phase, info)))
    try:
        captured = capture(state)
    finally:
        gc.callbacks.pop()
    assert len(captured.tensors) == 13_000
    assert during == [0]
    assert gc.get_threshold() == thresholds
    assert gc.isenabled()


@pytest.mark.parametrize("how", ["awaited", "in a thread"])
async def test_a_failed_stage_is_in_no_reference_cycle(how: str) -> None:
    """In one, its error would keep the frames of the caller, and these the memory of later stages."""
    async with AsyncStager(budget_bytes=1 << 20, when_full="fail") as stager:
        held = await stager.stage({"t": torch.zeros(200_000)})
        gc.collect()
        gc.disable()
        try:
            future = stager.stage({"t": torch.zeros(200_000)})
            gone = weakref.ref(future)
            with suppress(ArenaExhaustedError):
                if how == "awaited":
                    await future
                else:
                    await asyncio.to_thread(future.exception)
                    future.result(0)
            del future
            async with asyncio.timeout(60):  # the stager's thread drops it soon; a cycle would stay
                while gone() is not None:
                    await asyncio.sleep(0.001)
        finally:
            gc.enable()
        held.release()
