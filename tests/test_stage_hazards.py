"""What users and threads do to a stage that is under way: sources resized and freed, stages given up by several threads
at once, closed, forked, failed, and failed again."""

from __future__ import annotations

import asyncio
import collections
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from engines import GatedEngine
from fake_device import FakeDriver
from leases import all_returned
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import sidestream
from sidestream._runtime.rate import RateLimiter
from sidestream._runtime.threads import Stop, Threads
from sidestream._staging import AsyncStager, Copy, DeviceEngine, HostEngine
from sidestream.errors import (
    ArenaExhaustedError,
    ClosedError,
    DeadlineExceededError,
    DeviceError,
    ForkedProcessError,
    SidestreamError,
    SkippedError,
    UnsupportedTensorError,
)
from sidestream.options import StageMode

KIB = 1 << 10


def on_fake(driver: FakeDriver, **options: Any) -> AsyncStager:
    options.setdefault("budget_bytes", 1 << 24)
    return AsyncStager(engine=DeviceEngine(driver, small_bytes=64, chunk_bytes=256), **options)


# --- sources that move ---


@pytest.mark.parametrize(("numel", "mode"), [(1000, "eager"), (4, "lazy")])
@pytest.mark.parametrize("what", ["moved", "freed"])
async def test_what_was_copied_at_the_call_stays_whatever_becomes_of_its_source(
    numel: int, mode: StageMode, what: str
) -> None:
    driver = FakeDriver()
    source = driver.put(torch.full((numel,), 1.0))
    async with on_fake(driver, mode=mode) as stager:
        driver.held.add("side")
        future = stager.stage({"t": source})
        while driver.step():  # the copies on the device
            pass
        source.untyped_storage().resize_(0)  # as FSDP does when it reshards
        if what == "moved":
            source.untyped_storage().resize_(numel * 4)
            source.fill_(7.0)
        driver.held.clear()
        assert ((await driver.drive(future))["t"] == 1.0).all()


async def test_a_device_source_that_was_freed_is_refused_and_not_grown_again() -> None:
    driver = FakeDriver()
    source = driver.put(torch.full((1000,), 1.0))
    async with on_fake(driver, budget_bytes=4 * KIB) as stager:
        first = await driver.drive(stager.stage({"t": driver.put(torch.ones(1000))}))
        waiting = stager.stage({"t": source})
        while stager.statistics().waiters == 0:
            await asyncio.sleep(0)
        source.untyped_storage().resize_(0)
        first.release()
        del first
        with pytest.raises(UnsupportedTensorError, match="freed or shrunk"):
            await driver.drive(waiting)
        assert source.untyped_storage().nbytes() == 0


async def test_two_storages_at_one_address(stager: AsyncStager) -> None:
    memory = np.arange(8, dtype=np.float32)
    state = {"short": torch.from_numpy(memory[:4]), "long": torch.from_numpy(memory)}
    for _ in range(2):
        staged = await stager.stage(state)
        assert staged["short"].tolist() == [0, 1, 2, 3]
        assert staged["long"].tolist() == list(range(8))
        staged.release()
        del staged
        state = dict(reversed(state.items()))
    driver = FakeDriver()
    for tensor in state.values():
        driver.put(tensor)
    async with on_fake(driver) as fake:
        staged = await driver.drive(fake.stage(state))
        assert staged["long"].tolist() == list(range(8))


class ResizingEngine(HostEngine):
    """Shrinks a source after the first piece of it."""

    def __init__(self, source: torch.Tensor, nbytes: int) -> None:
        super().__init__(threads=1)
        self._source = source
        self._nbytes = nbytes

    def copy(self, copy: Copy, address: int, *, stop: Stop) -> None:
        super().copy(copy, address, stop=stop)
        self._source.untyped_storage().resize_(self._nbytes)


async def test_a_host_source_that_is_resized_between_two_chunks_is_refused() -> None:
    source = torch.ones(10 << 20)  # units of 16 MiB
    async with AsyncStager(budget_bytes=1 << 27, engine=ResizingEngine(source, 17 << 20)) as stager:
        with pytest.raises(UnsupportedTensorError, match="freed or shrunk"):
            await stager.stage({"t": source})
    strided = torch.ones(1000).view(10, 100).t()
    strided.untyped_storage().resize_(400)
    with pytest.raises(UnsupportedTensorError, match="freed or shrunk"):
        HostEngine().copy(Copy(strided, 0, 4000), torch.empty(1000).data_ptr(), stop=Stop())


async def test_a_collective_that_is_still_writing_is_waited_for(
    stager: AsyncStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    pending = AsyncCollectiveTensor(torch.ones(5))
    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", lambda self: waited.append(self) or self.elem)
    staged = await stager.stage({"t": pending})
    assert len(waited) == 1
    assert type(staged["t"]) is torch.Tensor
    staged.release()


Point = collections.namedtuple("Point", ["x", "name"])


async def test_named_tuples_and_buffers_of_any_kind() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sparse", torch.eye(3).to_sparse())

    driver = FakeDriver()
    source = driver.put(torch.full((1000,), 1.0))
    async with on_fake(driver) as stager:
        staged = await driver.drive(stager.stage({"p": Point(source, "n"), "m": Model()}))
        assert type(staged["p"]) is Point
        assert staged["p"].name == "n"
        assert driver.device_of(staged["p"].x) is None
        assert (staged["p"].x == 1.0).all()


# --- threads that fail and stages that end oddly ---


async def test_a_pool_that_closes_while_an_image_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No helper writes any more when ``fill`` raises."""
    engine, gate, inside = HostEngine(threads=3), threading.Event(), threading.Event()
    source, target = torch.ones(20 << 20), torch.zeros(20 << 20)
    submits = []

    def submit(self: Threads, fn: Any, *arguments: Any) -> Future[Any]:
        submits.append(fn)
        if len(submits) == 2:
            inside.wait(60)
            raise ClosedError("these threads take no more work")
        return real(self, fn, *arguments)

    class Slow(HostEngine):
        def copy(self, copy: Copy, address: int, *, stop: Stop) -> None:
            inside.set()
            assert gate.wait(60)
            super().copy(copy, address, stop=stop)

    engine, real = Slow(threads=3), Threads.submit
    monkeypatch.setattr(Threads, "submit", submit)
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(ClosedError):
        engine.fill(
            [Copy(source, 0, source.nbytes)],
            target.data_ptr(),
            advance=lambda _: None,
            pace=RateLimiter(None),
            stop=Stop(),
        )
    before = int(target.sum())
    monkeypatch.undo()
    await asyncio.sleep(0.05)
    assert int(target.sum()) == before
    engine.close()


async def test_closing_while_copies_are_enqueued_ends_every_future() -> None:
    for _ in range(20):
        driver = FakeDriver()
        stager = on_fake(driver, timeout_s=0.05)
        future = stager.stage({f"t{index}": driver.put(torch.full((1000,), 1.0)) for index in range(30)})

        def close(stager: AsyncStager = stager) -> None:
            with suppress(DeadlineExceededError):  # where the stage has not ended in time
                stager.close()

        closing = threading.Thread(target=close)
        closing.start()
        while not future.done():
            driver.step()
            await asyncio.sleep(0)
        closing.join()
        future.mark_retrieved()
        del future
        await driver.drive(
            all_returned(stager)
        )  # an abandoned stage keeps its memory until the device has completed its copies


@pytest.mark.parametrize("form", ["close", "aclose"])
async def test_closing_keeps_no_memory_from_the_stage_that_waits_for_it(form: str) -> None:
    """There is room for one, and nobody but the stager knows of the others."""
    stager = AsyncStager(budget_bytes=2 << 20, max_bytes_per_second=20e6, timeout_s=60)
    for value in range(4):
        stager.stage({"t": torch.full((400_000,), float(value))})
    if form == "aclose":
        await stager.aclose()
    else:
        await asyncio.to_thread(stager.close)
    await all_returned(stager)


@pytest.fixture
def nervous() -> Iterator[None]:
    """Threads are switched all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("nervous")
def test_stages_that_are_given_up_by_several_threads_at_once() -> None:
    stager = AsyncStager(budget_bytes=64 * KIB, when_full="latest")
    wrong: list[BaseException] = []
    stop = threading.Event()
    launched: list[Any] = []

    def launch(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            try:
                future = stager.stage({"t": torch.ones(rng.randrange(1, 12_000))})
                launched.append(weakref.ref(future))
                if rng.random() < 0.3:
                    future.result(60).release()
            except SkippedError:
                continue
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=launch, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    while len(launched) < 500 and not wrong:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    stager.close()
    assert wrong == []
    gc.collect()
    assert stager.statistics().leases == 0


# --- memory that is there, but not in one piece, or never ---


@pytest.mark.parametrize(("policy", "error"), [("skip", SkippedError), ("fail", ArenaExhaustedError)])
async def test_policies_do_not_wait_for_fragments(policy: Any, error: type[SidestreamError]) -> None:
    async with AsyncStager(budget_bytes=16 << 20, when_full=policy, timeout_s=60.0) as stager:
        await stager.reserve(16 << 20)  # one segment
        held = [await stager.stage({"t": torch.ones(700_000)}) for _ in range(4)]
        for index in (0, 2):
            held[index].release()
        gc.collect()
        while stager.statistics().leases > 2:
            await asyncio.sleep(0)
        started = stager.stage({"t": torch.ones(1_400_000)})  # more than what is free behind the last one
        with pytest.raises(error):
            await asyncio.wait_for(_result(started), 60)
        for staged in held:
            staged.release()


async def _result(future: Any) -> Any:
    return await future


async def test_a_scratch_that_never_fits_beside_the_image_is_refused_at_once() -> None:
    driver = FakeDriver()
    async with on_fake(driver, budget_bytes=8 * KIB, timeout_s=60.0) as stager:
        state = {"large": driver.put(torch.ones(2000)), "small": [driver.put(torch.ones(8)) for _ in range(10)]}
        with pytest.raises(ArenaExhaustedError, match="raise budget_bytes"):
            await asyncio.wait_for(driver.drive(stager.stage(state)), 60)


# --- deadlines, forks ---


async def test_closing_has_a_deadline() -> None:
    driver = FakeDriver()
    stager = on_fake(driver, timeout_s=0.2)
    future = stager.stage({"t": driver.put(torch.ones(1000))})
    with pytest.raises(DeadlineExceededError, match="did not end"):
        await stager.aclose()
    driver.run()
    await driver.drive(_ended(future))


async def _ended(future: Any) -> None:
    while not future.done():
        await asyncio.sleep(0)
    future.mark_retrieved()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_at_once_and_closes_nothing() -> None:
    engine = GatedEngine()
    stager = AsyncStager(budget_bytes=1 << 20, engine=engine)
    future = stager.stage({"t": torch.ones(10)})
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        told = 0
        for call in (stager.fence, stager.synchronize_staging, lambda: stager.stage({})):
            try:
                call()
            except ForkedProcessError:
                told += 1
        stager.close()
        asyncio.run(stager.aclose())
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    engine.gate.set()
    assert future.result(60)["t"].sum() == 10
    stager.close()


# --- errors are told once, and keep nothing ---


async def test_an_error_keeps_no_source_alive() -> None:
    async with AsyncStager(budget_bytes=64 * KIB, timeout_s=1.0) as stager:
        held = await stager.stage({"t": torch.ones(12_000)})
        memory = np.ones(12_000, dtype=np.float32)
        gone = weakref.ref(memory)
        failed = stager.stage({"t": torch.from_numpy(memory)})
        del memory
        with pytest.raises(ArenaExhaustedError) as caught:
            await failed
        kept = caught.value
        assert kept is failed.exception()
        del caught
        kept.__traceback__ = None  # what this test adds
        gc.collect()
        assert gone() is None
        held.release()


async def test_each_error_is_told_once() -> None:
    engine = GatedEngine()
    engine.gate.set()
    stager = AsyncStager(budget_bytes=1 << 20, engine=engine)
    for number in (1, 2, 3):
        engine.fail = RuntimeError(f"failure {number}")
        failed = stager.stage({"t": torch.ones(10)})
        while not failed.done():
            await asyncio.sleep(0)
        del failed
    for number in (1, 2):
        with pytest.raises(RuntimeError, match=f"failure {number}"):
            stager.fence()
    engine.fail = RuntimeError("failure 4")
    last = stager.stage({"t": torch.ones(10)})
    while not last.done():
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="failure 3") as caught:
        stager.close()
    assert "another operation failed as well: RuntimeError: failure 4" in caught.value.__notes__
    stager.close()
    await stager.aclose()


async def test_what_a_device_raises_has_a_type() -> None:
    driver = FakeDriver()
    driver.fail = ValueError("the link is down")
    stager = on_fake(driver)
    with pytest.raises(DeviceError, match="ValueError: the link is down"):
        await driver.drive(stager.stage({"t": driver.put(torch.ones(1000))}))
    await stager.aclose()


async def test_callbacks_run_without_locks(stager: AsyncStager) -> None:
    from sidestream._runtime.threads import Deadline
    from sidestream._staging import capture
    from sidestream._staging.tree import plan_stage

    staging: Any = stager.launch(
        capture({"t": torch.ones(1000)}), lambda captured: plan_stage(stager.plans, captured), Deadline.after(60.0)
    )
    called: Future[None] = Future()
    staging.free.add_done_callback(lambda _: (staging.release(), staging.supersede(), called.set_result(None)))
    called.result(60)
    staging.copied.mark_retrieved()


def test_a_timeout_is_not_hearing() -> None:
    future: sidestream.StagingFuture[None] = sidestream.StagingFuture()
    with pytest.raises(TimeoutError):
        future.result(0.001)
    future.set_exception(ValueError("late"))
    assert not future.retrieved
    with pytest.raises(ValueError, match="late"):
        future.result(0)
    assert future.retrieved


LATE_DESTRUCTOR = """
import os, threading, time
from sidestream._runtime.threads import TorchThreads

submitted = threading.Event()


class Tensor:
    def __del__(self):
        time.sleep(1)  # torch's destructors give the GIL up too
        os.write(1, b"destroyed")


def work(tensor):
    submitted.wait()  # from then on only the thread refers to the tensor


threads = TorchThreads("t", 1)
future = threads.submit(work, Tensor())
submitted.set()
future.result(60)
"""


def test_the_interpreter_waits_until_a_thread_has_dropped_what_it_worked_on() -> None:
    """A thread that destroys a tensor or an event while the interpreter ends would make the process abort."""
    ended = subprocess.run(
        [sys.executable, "-c", LATE_DESTRUCTOR], capture_output=True, text=True, timeout=240, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "destroyed"), ended.stderr
