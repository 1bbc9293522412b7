"""Staging from a device, on one whose copies and events run when and in which order the test says.

Each ordering rule is tried with many schedules: take the rule out of ``_staging/device.py`` or ``_staging/stager.py``,
and the seeds below find a schedule that shows it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engines import start_no_threads
from fake_device import FakeDriver
from leases import all_returned
from states import assert_same

import sidestream
from sidestream._runtime.memory_maps import wait_unmapped
from sidestream._runtime.threads import Deadline
from sidestream._save import writer
from sidestream._staging import AsyncStager, DeviceEngine, cached
from sidestream._staging.driver import TorchDriver
from sidestream.errors import (
    ArenaExhaustedError,
    ClosedError,
    DeadlineExceededError,
    DeviceError,
    GraphCaptureError,
    InvalidOptionError,
)
from sidestream.options import StageMode

SEEDS = range(40)


def on_fake(driver: FakeDriver, **options: Any) -> AsyncStager:
    """A stager for ``driver``: 64 bytes are small, chunks have 256, so that a few KiB take many operations."""
    options.setdefault("budget_bytes", 1 << 24)
    return AsyncStager(engine=DeviceEngine(driver, small_bytes=64, chunk_bytes=256), **options)


def put(driver: FakeDriver, value: float, numel: int = 1000, device: int = 0) -> torch.Tensor:
    return driver.put(torch.full((numel,), value), device)


# --- a snapshot is the state at the call, in stream order ---


@pytest.mark.parametrize("seed", SEEDS)
async def test_work_before_the_call_is_in_it_and_work_behind_the_fence_is_not(seed: int) -> None:
    driver = FakeDriver(seed)
    large, small = put(driver, 0.0), put(driver, 0.0, 3)
    async with on_fake(driver) as stager:
        for step in range(1, 4):
            driver.launch(lambda step=step: (large.fill_(step), small.fill_(step)))
            future = stager.stage({"large": large, "small": small})
            await asyncio.to_thread(stager.fence)
            driver.launch(lambda: (large.fill_(-1.0), small.fill_(-1.0)))
            staged = await driver.drive(future)
            assert (staged["large"] == step).all()
            assert (staged["small"] == step).all()
            staged.release()
        del staged, future
        await all_returned(stager)


@pytest.mark.parametrize("order", [["tied", "apart"], ["apart", "tied"]], ids=" then ".join)
async def test_what_was_freed_since_its_copy_is_told_apart(order: list[str], tmp_path: Path) -> None:
    """Storages that were freed have one address: neither layout nor plan cache may take two of them for tied."""
    driver = FakeDriver()
    async with on_fake(driver, mode="eager") as stager:
        for kind in order:
            first = put(driver, 1.0)
            second = first if kind == "tied" else put(driver, 2.0)
            state = {"first": first, "second": second}
            planned = threading.Event()
            stager._threads.submit(planned.wait)  # the plans are made when the sources are gone
            staged, saved = stager.stage(state), sidestream.async_save(state, tmp_path / kind, stager=stager)
            for _ in range(50):
                driver.step()
                await asyncio.sleep(0)
            for source in (first, second):
                source.untyped_storage().resize_(0)
            planned.set()
            found = await driver.drive(staged)
            ending = asyncio.ensure_future(saved)
            while not ending.done():
                driver.step()
                await asyncio.sleep(0)
            await ending
            wanted = {"first": torch.full((1000,), 1.0), "second": torch.full((1000,), 1.0 + (kind == "apart"))}
            assert_same(wanted, dict(found))
            assert_same(wanted, await (await sidestream.open_checkpoint(tmp_path / kind)).state_dict())
            found.release()


def hazards(fenced: bool) -> int:
    """How many of the schedules show a writer in the copy."""

    async def torn(seed: int) -> bool:
        driver = FakeDriver(seed)
        source = put(driver, 1.0)
        async with on_fake(driver) as stager:
            future = stager.stage({"t": source})
            if fenced:
                await asyncio.to_thread(stager.fence)
            driver.launch(lambda: source.fill_(2.0))
            staged = await driver.drive(future, side_first=False)
            return not bool((staged["t"] == 1.0).all())

    return sum(asyncio.run(torn(seed)) for seed in SEEDS)


def test_the_fence_is_what_keeps_the_writer_out() -> None:
    assert hazards(fenced=True) == 0
    assert hazards(fenced=False) > 0, "the device of this test does not reorder, so it proves nothing"


@pytest.mark.parametrize("seed", SEEDS)
async def test_small_tensors_and_buffers_need_no_fence(seed: int) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("running", torch.ones(1000))

    driver = FakeDriver(seed)
    model = Model()
    driver.put(model.weight.data)
    driver.put(model.running)
    async with on_fake(driver) as stager:
        future = stager.stage({"model": model})
        driver.launch(lambda: model.running.fill_(2.0))
        driver.launch(lambda: model.weight.data.fill_(2.0))
        staged = await driver.drive(future, side_first=False)
        assert (staged["model"]["running"] == 1.0).all()
        assert (staged["model"]["weight"] == 1.0).all()


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_snapshot_needs_no_fence_and_frees_the_sources_first(seed: int) -> None:
    driver = FakeDriver(seed)
    source = put(driver, 1.0)
    async with on_fake(driver, mode="eager") as stager:
        future = stager.stage({"t": source})
        driver.launch(lambda: source.fill_(2.0))
        driver.held.add("side")  # the copies to the host
        await driver.drive(stager.synchronize_staging())
        assert not future.done()
        driver.held.clear()
        assert ((await driver.drive(future))["t"] == 1.0).all()


@pytest.mark.parametrize("seed", SEEDS)
async def test_streams_of_the_users_own(seed: int) -> None:
    driver = FakeDriver(seed)
    source, small = put(driver, 0.0), put(driver, 0.0, 2)
    user = driver.stream()
    async with on_fake(driver) as stager:
        with driver.on(user):
            driver.launch(lambda: (source.fill_(1.0), small.fill_(1.0)))
        staged = await driver.drive(stager.stage({"t": source, "s": small}, wait_streams=[user]))
        assert (staged["t"] == 1.0).all()
        assert (staged["s"] == 1.0).all()


async def test_a_guarded_optimizer_waits_on_the_device_not_on_the_host() -> None:
    driver = FakeDriver()
    parameter = torch.nn.Parameter(put(driver, 1.0))
    parameter.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    async with on_fake(driver) as stager:
        handles = [stager.guard(optimizer), stager.guard()]
        future = stager.stage({"p": parameter})
        await asyncio.to_thread(
            optimizer.step
        )  # returns though nothing has been copied; its kernels are not queued here
        assert not future.done()
        waits = [one for one in driver.current_stream(0).queue if not callable(one)]
        assert len(waits) == 2
        await driver.drive(future)
        for handle in handles:
            handle.remove()


async def test_two_devices_and_the_host_in_one_state() -> None:
    driver = FakeDriver()
    first, second, host = put(driver, 1.0, device=0), put(driver, 2.0, device=1), torch.full((1000,), 3.0)
    async with on_fake(driver) as stager:
        driver.launch(lambda: first.fill_(4.0), 0)
        driver.launch(lambda: second.fill_(5.0), 1)
        future = stager.stage({"a": first, "b": [second, {"c": host}]})
        await asyncio.to_thread(stager.fence)
        driver.launch(lambda: first.fill_(-1.0), 0)
        driver.launch(lambda: second.fill_(-1.0), 1)
        staged = await driver.drive(future)
        assert_same({"a": torch.full((1000,), 4.0), "b": [torch.full((1000,), 5.0), {"c": host}]}, staged)


async def test_layouts_survive_the_way_through_the_scratch_and_past_it() -> None:
    driver = FakeDriver()
    large, small = driver.put(torch.randn(40, 50)), driver.put(torch.randn(4, 3))
    half = driver.put(torch.randn(7).to(torch.bfloat16))
    complexes = driver.put(torch.randn(300, dtype=torch.complex64))
    state = {
        "large": [large, large.t(), large[3:7], large[10:20, ::2]],
        "small": [small, small.t(), small[1:, :2]],
        "odd": [half, half[1:], driver.put(torch.arange(3, dtype=torch.uint8)), driver.put(torch.tensor(2.5))],
        "lazy": [complexes.conj(), complexes.conj().imag],
        "sparse": driver.put(torch.eye(30).to_sparse()._values()),
    }
    async with on_fake(driver) as stager:
        staged = await driver.drive(stager.stage(state))
        assert_same(state, staged)
        large_copy = staged["large"]
        assert large_copy[1].untyped_storage().data_ptr() == large_copy[0].untyped_storage().data_ptr()
        assert staged["small"][1].untyped_storage().data_ptr() == staged["small"][0].untyped_storage().data_ptr()
        assert max(driver.copies) <= max(256, 10_000), "large sources go in chunks"
        assert driver.gaps > 0


@pytest.mark.parametrize("mode", ["lazy", "eager"])
async def test_a_save_from_a_device(mode: StageMode, tmp_path: Path) -> None:
    driver = FakeDriver()
    state = {
        "w": driver.put(torch.randn(100, 30)),
        "t": driver.put(torch.randn(30, 20)).t(),
        "b": driver.put(torch.randn(5)),
        "host": torch.randn(100),
        "step": 7,
    }
    expected = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    async with on_fake(driver, mode=mode) as stager:
        pending = sidestream.async_save(state, tmp_path / "c", stager=stager)
        await driver.drive(pending.staged)
        state["w"].zero_()
        await pending
        del pending
        await all_returned(stager)
    loaded = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for key, value in expected.items()}
    await sidestream.load(loaded, tmp_path / "c")
    assert_same(expected, loaded)


# --- memory: never reused under a copy, bounded, registered, and given back ---


async def test_memory_in_flight_is_not_handed_out_again_after_a_cancel(tmp_path: Path) -> None:
    driver = FakeDriver()
    source, other = put(driver, 1.0), torch.full((1000,), 9.0)
    async with on_fake(driver, budget_bytes=8192) as stager:
        pending = sidestream.async_save({"t": source}, tmp_path / "c", stager=stager)
        await asyncio.to_thread(stager.fence)  # enqueued
        pending.cancel()
        waiting = stager.stage({"t": other})
        while stager.statistics().waiters == 0:
            await asyncio.sleep(0)
        assert not waiting.done(), "a copy is still on its way into that memory"
        staged = await driver.drive(waiting)
        driver.run()
        assert (staged["t"] == 9.0).all()
        with pytest.raises(asyncio.CancelledError):
            await pending
        staged.release()
        del staged, waiting
        await all_returned(stager)
    assert list(tmp_path.iterdir()) == []


async def test_device_memory_is_referred_to_until_it_has_been_read_and_no_longer() -> None:
    driver = FakeDriver()
    gone = []

    def source(nbytes: int) -> torch.Tensor:
        memory = (ctypes.c_char * nbytes)()
        gone.append(weakref.ref(memory))
        return driver.put(torch.frombuffer(memory, dtype=torch.uint8))

    async with on_fake(driver) as stager:
        for mode in ("lazy", "eager"):
            stager._mode = mode
            state = {"large": source(4000), "small": source(10), "t": source(4000).view(50, 80).t()}
            future = stager.stage(state)
            state.clear()
            driver.forget()
            await asyncio.to_thread(stager.fence)  # everything is enqueued
            gc.collect()
            assert mode == "eager" or all(ref() for ref in gone[-3:]), "the allocator would hand it out again"
            await driver.drive(stager.synchronize_staging())
            await driver.drive(future)
            async with asyncio.timeout(60):  # the thread that has resolved it may not have returned yet
                while any(ref() is not None for ref in gone):
                    gc.collect()
                    await asyncio.sleep(0.001)


async def test_segments_are_registered_once_and_unregistered_before_they_are_unmapped() -> None:
    driver = FakeDriver()
    stager = on_fake(driver)
    staged = await driver.drive(stager.stage({"t": put(driver, 1.0), "s": put(driver, 1.0, 2)}))
    assert sum(driver.registered.values()) == stager.statistics().registered_bytes == stager.statistics().reserved_bytes
    await stager.aclose()
    assert driver.registered, "a tensor still lies in it"
    kept = staged["t"]
    staged.release()
    del staged
    assert (kept == 1.0).all()
    del kept
    gc.collect()
    assert wait_unmapped(Deadline.after(60))  # a thread of the library does it
    assert not driver.registered


async def test_tensors_without_bytes_on_a_device() -> None:
    driver = FakeDriver()
    async with on_fake(driver) as stager:
        staged = await driver.drive(stager.stage({"t": driver.put(torch.empty(0, 3), 1)}))
        assert staged["t"].shape == (0, 3)
        assert not driver.registered


async def test_scratch_counts_against_the_budget_and_comes_back() -> None:
    driver = FakeDriver()
    async with on_fake(driver, budget_bytes=16384) as stager:
        state = {"large": put(driver, 1.0), "small": [put(driver, 2.0, 10) for _ in range(50)]}
        for _ in range(20):
            staged = await driver.drive(stager.stage(state))
            assert (staged["small"][49] == 2.0).all()
            staged.release()
            del staged
        assert stager.statistics().peak_leased_bytes <= 16384
        await all_returned(stager)


# --- errors ---


async def test_what_the_device_raises_reaches_future_fence_and_synchronize() -> None:
    driver = FakeDriver()
    driver.fail = RuntimeError("an illegal memory access")
    source = put(driver, 1.0)
    stager = on_fake(driver)
    future, synchronized = stager.stage({"t": source}), stager.synchronize_staging()
    for attempt in (synchronized, future):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await driver.drive(attempt)
    failed = stager.stage({"t": source})
    await asyncio.to_thread(stager.fence)  # it stands behind a copy whose error nobody knows yet
    while not failed.done():
        driver.step()
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        stager.fence()
    await stager.aclose()
    del future, failed
    await all_returned(stager)


ILLEGAL = "CUDA error: an illegal memory access was encountered"


def broken(driver: FakeDriver) -> None:
    """An error like those that torch raises for a device: the message of the device, then advice."""
    driver.broken = torch.AcceleratorError(f"{ILLEGAL}\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")


async def test_every_call_says_that_the_device_has_failed_at_what_and_in_its_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = FakeDriver()
    state = {"model": {"w": put(driver, 1.0)}, "s": put(driver, 1.0, 2)}
    stager = on_fake(driver)
    in_flight, synchronized = stager.stage(state), stager.synchronize_staging()
    await asyncio.to_thread(stager.fence)  # it has been issued
    assert await asyncio.to_thread(driver.waited_for.wait, 60)  # so that the fence is the next to notice
    broken(driver)
    seen: list[DeviceError] = []

    async def fails(call: Callable[[], Awaitable[Any]]) -> None:
        with pytest.raises(DeviceError, match=ILLEGAL) as caught:
            await call()
        assert "DEBUG" not in str(caught.value)
        seen.append(caught.value)

    async def staged() -> None:
        stager.stage(state)

    await fails(lambda: asyncio.to_thread(stager.fence))
    driver.run()
    await fails(lambda: in_flight)
    await fails(lambda: synchronized)
    await fails(staged)
    await fails(lambda: sidestream.save(state, tmp_path / "a", stager=stager))
    assert all("model.w" in str(error) for error in seen), [str(error) for error in seen]
    assert [error.call for error in seen] == [
        "at the fence",
        "while waiting for copies from 0",
        "while waiting for copies from 0",
        "at the call",
        "at the call",
    ]
    driver.broken = None
    await driver.drive(stager.aclose())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("mode", ["lazy", "eager"])
async def test_the_key_whose_copy_fails_is_named(mode: StageMode) -> None:
    driver = FakeDriver()
    state = {"model": {"a": put(driver, 1.0), "b": [put(driver, 1.0)]}}
    async with on_fake(driver, mode=mode) as stager:
        driver.fail_copy = torch.AcceleratorError(ILLEGAL)
        future = stager.stage(state)
        words = r"^model\.a: the device failed while enqueueing a copy from 0: "
        with pytest.raises(DeviceError, match=words) as caught:
            await driver.drive(future)
        assert isinstance(caught.value.__cause__, torch.AcceleratorError)
        driver.fail_copy = None
        (await driver.drive(stager.stage(state))).release()  # it works again


@pytest.mark.parametrize(
    "failure", [DeviceError("cudaHostRegister: (cudaError 712)"), ArenaExhaustedError("(cudaError 2)")]
)
async def test_memory_that_is_not_registered(failure: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    driver = FakeDriver()
    state = {"w": put(driver, 1.0)}
    async with on_fake(driver) as stager:
        driver.refuse_to_register = failure
        with pytest.raises(type(failure), match=r"cudaError \d+") as caught:
            await driver.drive(stager.stage(state))
        if isinstance(failure, DeviceError):
            assert "w: the device failed while registering host memory" in str(caught.value)
        driver.refuse_to_register = None
        async with asyncio.timeout(60):
            while stager.statistics().leases:
                await asyncio.sleep(0)
        assert (stager.statistics().registered_bytes, driver.copies) == (0, [])
        (await driver.drive(stager.stage(state))).release()
        assert driver.registered
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("mode", ["lazy", "eager"])
async def test_a_full_device_in_each_mode(mode: StageMode) -> None:
    """``lazy`` needs no memory of the device, apart from what forward changes: that is copied at the call."""
    driver = FakeDriver()
    module = torch.nn.Module()
    module.register_buffer("b", put(driver, 1.0))
    large, small = {"t": put(driver, 1.0)}, {"t": put(driver, 1.0, 2)}
    async with on_fake(driver, mode=mode) as stager:
        driver.full = True
        with pytest.raises(ArenaExhaustedError, match=r"free device memory$"):
            stager.stage({"m": module})
        if mode == "eager":
            for state in (small, large):
                with pytest.raises(ArenaExhaustedError, match=r'free device memory, or stage with mode="lazy"$'):
                    stager.stage(state)
            return
        for state in (small, large, {"t": small["t"], "u": large["t"]}):
            copies = await driver.drive(stager.stage(state))
            assert all(torch.equal(copies[name], source) for name, source in state.items())
            copies.release()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
async def test_what_a_full_device_cannot_lay_out_or_convert_is_made_in_host_memory(
    dtype: torch.dtype | None, tmp_path: Path
) -> None:
    driver = FakeDriver()
    whole = driver.put(torch.arange(4096.0).view(64, 64))
    state = {"strided": whole[3:40, 5:50].t(), "rows": whole[7:50]}
    async with on_fake(driver) as stager:
        driver.full = True
        options = sidestream.SaveOptions() if dtype is None else sidestream.SaveOptions(dtype=dtype)
        await driver.drive(sidestream.async_save(state, tmp_path / "c", stager=stager, options=options))
    found = await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict()
    assert all(torch.equal(found[name], source.to(dtype or source.dtype)) for name, source in state.items())


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
async def test_many_neighbours_are_gathered_on_the_device_and_copied_together(
    seed: int, full: bool, tmp_path: Path
) -> None:
    """Among them lie tensors in host memory, tensors of the other device, and small ones, which are scattered."""
    driver, random = FakeDriver(seed), Random(seed)
    state: dict[str, torch.Tensor] = {}
    for number in range(700):
        tensor = torch.full((random.randrange(17, 60),), float(number))
        where = random.choice((0, 0, 0, 0, 0, 0, 1, None))
        state[f"{number:03}"] = tensor if where is None else driver.put(tensor, where)
        if number % 9 == 0:
            state[f"{number:03}.small"] = driver.put(torch.full((3,), -float(number)), random.choice((0, 1)))
        if number % 50 == 0:
            state[f"{number:03}.strided"] = driver.put(torch.arange(120.0).view(10, 12)).t()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    driver.full = full
    engine = DeviceEngine(driver, small_bytes=64, chunk_bytes=8192)
    async with AsyncStager(engine=engine, budget_bytes=1 << 24) as stager:
        if seed % 2 and not full:  # everything else is in its place before the device copies anything
            driver.held.add("side")
        pending = sidestream.async_save(state, tmp_path / "c", stager=stager)
        if driver.held:
            await stagings_issued(stager)
            driver.held.clear()
        await driver.drive(pending.staged)
        for tensor in state.values():
            tensor.fill_(-1.0)
        await driver.drive(pending)
    found = await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (len(driver.copies) < 450, bool(driver.gathered)) == (not full, not full)


async def stagings_issued(stager: AsyncStager) -> None:
    async with asyncio.timeout(60):
        while not stager._stagings:
            await asyncio.sleep(0.001)
    await asyncio.to_thread(lambda: [one.issued.result(60) for one in stager._stagings])


class TorchMemory(FakeDriver):
    """Copies to host memory that is not registered, as ``TorchDriver``."""

    @property
    def pinner(self) -> None:
        return None


async def test_memory_of_a_device_that_registers_none_is_not_counted_as_registered() -> None:
    driver = TorchMemory()
    async with on_fake(driver) as stager:
        await stager.prewarm({"t": put(driver, 1.0)})
        (await driver.drive(stager.stage({"t": put(driver, 1.0)}))).release()
        statistics = stager.statistics()
        assert (statistics.registered_bytes, driver.registered) == (0, {})
        assert statistics.reserved_bytes > 0
    assert TorchDriver("cuda").pinner is None


async def test_a_capture_on_any_device_or_stream_that_is_needed() -> None:
    driver = FakeDriver()
    state = {"first": put(driver, 1.0), "second": put(driver, 1.0, device=1)}
    user = driver.stream()
    async with on_fake(driver) as stager:
        for stream in (driver.current_stream(0), driver.current_stream(1), user):
            stream.capturing = True
            with pytest.raises(GraphCaptureError, match="before or after the capture"):
                stager.stage(state, wait_streams=[user])
            assert driver.idle()
            stream.capturing = False
        future = stager.stage(state, wait_streams=[user])
        driver.current_stream(1).capturing = True
        before = len(driver.current_stream(0).queue)
        with pytest.raises(GraphCaptureError):
            await asyncio.to_thread(stager.fence)
        assert len(driver.current_stream(0).queue) == before
        driver.current_stream(1).capturing = False
        (await driver.drive(future)).release()


async def test_streams_that_are_none() -> None:
    driver = FakeDriver()
    async with on_fake(driver) as stager:
        with pytest.raises(InvalidOptionError, match="wait_streams"):
            stager.stage({"t": put(driver, 1.0)}, wait_streams=[None])
        assert driver.idle()


async def test_nothing_is_enqueued_while_a_graph_is_captured() -> None:
    driver = FakeDriver()
    source = put(driver, 1.0)
    async with on_fake(driver) as stager:
        driver.capture = True
        with pytest.raises(GraphCaptureError, match="before or after the capture"):
            stager.stage({"t": source})
        assert driver.idle()
        driver.capture = False
        future = stager.stage({"t": source})
        driver.capture = True
        with pytest.raises(GraphCaptureError):
            await asyncio.to_thread(stager.fence)
        driver.capture = False
        await driver.drive(future)


async def test_the_fence_of_a_stage_without_memory() -> None:
    driver = FakeDriver()
    source = put(driver, 1.0)
    async with on_fake(driver, budget_bytes=8192) as stager:
        first = await driver.drive(stager.stage({"t": source}))
        second = await driver.drive(stager.stage({"t": source}))
        third = stager.stage({"t": source})
        while stager.statistics().waiters == 0:
            await asyncio.sleep(0)
        with pytest.raises(ArenaExhaustedError, match="release"):
            stager.fence(timeout_s=0.01)
        first.release()
        del first
        await asyncio.to_thread(stager.fence)
        driver.launch(lambda: source.fill_(2.0))
        assert ((await driver.drive(third))["t"] == 1.0).all()
        second.release()


async def test_a_snapshot_that_waits_for_memory_holds_no_writer_back() -> None:
    driver = FakeDriver()
    source = put(driver, 1.0)
    async with on_fake(driver, budget_bytes=4096, mode="eager") as stager:
        first = await driver.drive(stager.stage({"t": source}))
        second = stager.stage({"t": source})
        stager.fence(timeout_s=60)
        driver.launch(lambda: source.fill_(2.0))
        first.release()
        del first
        assert ((await driver.drive(second))["t"] == 1.0).all()


async def test_closing_while_the_device_is_busy() -> None:
    driver = FakeDriver()
    stager = on_fake(driver)
    future = stager.stage({"t": put(driver, 1.0)})
    closing = asyncio.create_task(stager.aclose())
    await driver.drive(closing)
    assert ((await future)["t"] == 1.0).all()
    with pytest.raises(ClosedError):
        stager.stage({"t": put(driver, 1.0)})


async def test_a_stuck_device_and_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_GRACE_S", 0.5)  # after the deadline, for what still uses the staged memory
    driver = FakeDriver()
    async with on_fake(driver) as stager:
        future = stager.stage({"t": put(driver, 1.0)})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stager.synchronize_staging(), 0.02)  # type: ignore[arg-type]
        with pytest.raises(DeadlineExceededError):
            await sidestream.save(
                {"t": put(driver, 1.0)}, "never", stager=stager, options=sidestream.SaveOptions(timeout_s=0.1)
            )
        await driver.drive(future)
        driver.run()  # what the save has left, for which a thread waits


@pytest.mark.parametrize("mode", ["lazy", "eager"])
async def test_a_stage_ends_without_a_thread_for_its_device(mode: StageMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may start no more threads: that of the stager waits for the device then."""
    start_no_threads("sidestream-0", monkeypatch)
    driver = FakeDriver()
    async with on_fake(driver, mode=mode, timeout_s=60.0) as stager:
        async with asyncio.timeout(60):
            staged = await driver.drive(stager.stage({"t": put(driver, 1.0)}))
        assert (staged["t"] == 1.0).all()


async def closed(stager: AsyncStager) -> None:
    await asyncio.to_thread(stager.close)


@pytest.mark.parametrize("close", [closed, AsyncStager.aclose], ids=["close", "aclose"])
async def test_closing_waits_until_no_thread_refers_to_a_result(close: Callable[..., Any]) -> None:
    driver = FakeDriver()
    stager = on_fake(driver)

    async def release(future: Any) -> None:
        (await future).release()

    future = stager.stage({"t": put(driver, 1.0)})
    released = asyncio.create_task(release(future))
    await asyncio.sleep(0)  # the task awaits the future: it is resumed before the next callback returns
    never = threading.Event()
    future.add_done_callback(lambda _: never.wait(0.3) and None)  # in the thread that resolves the future
    await driver.drive(released)
    del future, released
    await close(stager)
    assert not driver.registered
    assert stager.statistics().reserved_bytes == 0


@pytest.mark.parametrize("close", [closed, AsyncStager.aclose], ids=["close", "aclose"])
async def test_closing_says_what_becomes_of_a_stage_whose_device_hangs(close: Callable[..., Any]) -> None:
    driver = FakeDriver()
    stager = on_fake(driver, timeout_s=1.0)
    future = stager.stage({"t": put(driver, 1.0)})
    synchronized = stager.synchronize_staging()
    with pytest.raises(DeadlineExceededError, match=r"did not end within timeout_s=1 and were abandoned"):
        await close(stager)
    with pytest.raises(ClosedError, match="before the device completed the copies"):
        await future
    with pytest.raises(DeadlineExceededError, match="do not change the sources before the device responds"):
        await synchronized
    assert driver.registered
    assert stager.statistics().leased_bytes > 0  # the copies may still come
    driver.run()
    await all_returned(stager)
    assert wait_unmapped(Deadline.after(60))
    assert not driver.registered


@pytest.mark.parametrize("own", [False, True], ids=["a stager", "none"])
async def test_a_cancelled_save_does_not_wait_for_a_device_until_its_deadline(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidestream._save.writer._GRACE_S", 0.2)
    driver = FakeDriver()
    source = put(driver, 1.0)
    stager = on_fake(driver)
    if own:  # one that the save makes for itself

        class OnFake(AsyncStager):
            def __init__(self, **options: Any) -> None:
                super().__init__(engine=DeviceEngine(driver, small_bytes=64, chunk_bytes=256), **options)

        cached.close_all()  # none is kept from an earlier save
        monkeypatch.setattr(cached, "AsyncStager", OnFake)
    saving = asyncio.create_task(sidestream.save({"t": source}, tmp_path / "c", stager=None if own else stager))
    while not any(stream.queue for stream in driver._streams):
        await asyncio.sleep(0.001)
    saving.cancel()
    async with asyncio.timeout(60):  # of the 600 s that a save has
        with pytest.raises(asyncio.CancelledError):
            await saving
    assert not (tmp_path / "c").exists()
    driver.run()
    await driver.drive(stager.aclose())


# --- many at once ---


@pytest.mark.parametrize("seed", range(10))
async def test_overlapping_stages_hold_what_was_live_at_their_own_call(seed: int) -> None:
    driver = FakeDriver(seed)
    source, small = put(driver, 0.0, 300), put(driver, 0.0, 4)
    wrong = 0
    async with on_fake(driver, budget_bytes=1 << 16) as stager:
        futures = []
        for step in range(100):
            driver.launch(lambda step=step: (source.fill_(step), small.fill_(step)))
            futures.append(stager.stage({"t": source, "s": small}))
            fencing = asyncio.create_task(asyncio.to_thread(stager.fence))
            while len(futures) > 6 or (not fencing.done() and futures):
                staged = await driver.drive(futures.pop(0))
                expected = step - len(futures)
                wrong += int((staged["t"] != expected).sum() + (staged["s"] != expected).sum())
                staged.release()
                del staged
            await driver.drive(fencing)
            for _ in range(seed):
                driver.step()
        for back, future in enumerate(reversed(futures)):
            staged = await driver.drive(future)
            wrong += int((staged["t"] != 99 - back).sum() + (staged["s"] != 99 - back).sum())
            staged.release()
    assert wrong == 0
