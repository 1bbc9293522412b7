"""Staging from a real GPU. ``tests/test_device_staging.py`` tries the same rules on a fake one, in any order.

No plugin of pytest is needed: each test runs its own loop. Nothing here measures time: ``benchmarks/gpu.py`` does.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from states import SAVED_DTYPES, assert_same, filled

import sidestream
import sidestream.blocking
from sidestream._runtime.memory_maps import wait_unmapped
from sidestream._runtime.threads import Deadline
from sidestream._staging import AsyncStager
from sidestream.errors import GraphCaptureError
from sidestream.options import StageMode

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*ComplexHalf support is experimental.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Sparse CSR tensor support is in beta.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.* may lead to deadlocks.*:DeprecationWarning"),
]

CUDA = "cuda"
BUDGET_BYTES = 8 << 30
LARGE = 1 << 22  # elements: beyond what is coalesced, 16 MiB of float32
MODES: tuple[StageMode, ...] = ("lazy", "eager")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage of ``tensor``, where they are."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The same view of the same bytes elsewhere, for dtypes that torch itself cannot copy too."""
    view = torch.empty(0, dtype=tensor.dtype, device=device)
    return view.set_(raw(tensor).to(device).untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def home(value: Any) -> Any:
    """A state as it should come out of staging: the same in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [home(item) for item in value]
    return value


def staged(state: dict[str, Any], **options: Any) -> Any:
    """What one stage of a stager of its own gives."""

    async def run() -> Any:
        async with AsyncStager(budget_bytes=BUDGET_BYTES, **options) as stager:
            return await stager.stage(state)

    return asyncio.run(run())


def busy(milliseconds: float = 100) -> None:
    """Keep the current stream from getting on for some time."""
    torch.cuda._sleep(int(milliseconds * 2e6))  # cycles, at up to 2 GHz


def large(value: float = 0.0, numel: int = LARGE) -> torch.Tensor:
    return torch.full((numel,), value, device=CUDA)


# --- the caller's code ---


class Where:
    """Notes the device and the stream that are current where it is asked, and fills a tensor there."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, torch.cuda.Stream]] = []
        self.tensor = torch.zeros(LARGE, device=CUDA)

    def note(self) -> None:
        self.seen.append((torch.cuda.current_device(), torch.cuda.current_stream()))

    def state_dict(self) -> dict[str, Any]:
        self.note()
        busy()
        self.tensor.fill_(7.0)
        return {"t": self.tensor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.note()


@pytest.mark.parametrize("device", range(max(1, torch.cuda.device_count())))
def test_code_of_the_caller_has_its_device_and_stream(device: int, tmp_path: Path) -> None:
    """The copies of a blocking save are ordered after the work on the caller's stream."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        where = Where()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            sidestream.blocking.save({"w": where}, tmp_path / "a")
            sidestream.blocking.load({"w": where}, tmp_path / "a")
        where.tensor.zero_()
        torch.cuda.synchronize()
        loaded = {"t": torch.zeros(LARGE)}
        sidestream.blocking.load({"w": loaded}, tmp_path / "a")
    assert where.seen == [(device, side)] * 3
    assert torch.equal(loaded["t"], torch.full((LARGE,), 7.0))


# --- every byte ---


@pytest.mark.parametrize("dtype", SAVED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 4), (257, 8192)], ids=str)
def test_every_dtype_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = filled(shape, dtype)
    copy = staged({"t": moved(source, CUDA)})["t"]
    assert (copy.dtype, copy.shape, copy.device.type) == (source.dtype, source.shape, "cpu")
    assert torch.equal(raw(copy), raw(source))


@pytest.mark.parametrize("side", [12, 1500], ids=["small", "large"])
@pytest.mark.parametrize("mode", MODES)
def test_every_layout(mode: StageMode, side: int) -> None:
    whole = torch.randn(side, side, device=CUDA)
    images = torch.randn(2, 3, side, side, device=CUDA).to(memory_format=torch.channels_last)
    complexes = torch.randn(side, side, device=CUDA, dtype=torch.complex64)
    state = {
        "whole": [whole, whole.t(), whole[3:7], whole[1:9:2, ::3], whole.view(-1)[5:]],
        "channels last": images,
        "expanded": torch.randn(1, side, device=CUDA).expand(side, side),
        "lazy": [complexes.conj(), complexes.conj().imag, complexes.real],
        "scalar": torch.tensor(2.5, device=CUDA, dtype=torch.float64),
        "sparse": torch.eye(side, device=CUDA).to_sparse(),
        "csr": torch.eye(side, device=CUDA).to_sparse_csr(),
        "host": torch.randn(side, side).t(),
        "number": 7,
    }
    expected = home({key: value for key, value in state.items() if key not in ("sparse", "csr")})
    copies = staged(state, mode=mode)
    for key in ("sparse", "csr"):
        assert torch.equal(copies[key].to_dense(), torch.eye(side))
    assert_same(expected, {key: value for key, value in copies.items() if key in expected})
    views = copies["whole"]
    assert [view.stride() for view in views] == [view.stride() for view in state["whole"]]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert copies["channels last"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_memory_again_and_again(mode: StageMode) -> None:
    async def run() -> None:
        source, small = large(), torch.zeros(7, device=CUDA)
        async with AsyncStager(budget_bytes=1 << 28, mode=mode) as stager:
            for number in range(50):
                source.fill_(number)
                small.fill_(number)
                future = stager.stage({"large": source, "small": small})
                stager.fence()
                source.fill_(-1.0)
                small.fill_(-1.0)
                copies = await future
                assert bool((copies["large"] == number).all())
                assert bool((copies["small"] == number).all())
                copies.release()
                del copies, future
            assert stager.statistics().registered_bytes == stager.statistics().reserved_bytes

    asyncio.run(run())


@pytest.mark.parametrize("mode", MODES)
def test_a_save(mode: StageMode, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(900, 900), torch.nn.BatchNorm1d(900)).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 900, device=CUDA)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "t": large(3.0).view(2048, -1).t()}
    expected = home(state)

    async def run() -> dict[str, Any]:
        async with AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode) as stager:
            pending = sidestream.async_save(state, tmp_path / "c", stager=stager)
            await pending.staged
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            await pending
        return await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict()

    assert_same(expected, asyncio.run(run()))


# --- the order ---


@pytest.mark.parametrize("mode", MODES)
def test_work_queued_before_the_call_is_in_it(mode: StageMode) -> None:
    source, small = large(), torch.zeros(7, device=CUDA)
    torch.cuda.synchronize()
    busy()
    source.fill_(7.0)
    small.fill_(7.0)
    copies = staged({"large": source, "small": small}, mode=mode)
    assert bool((copies["large"] == 7).all())
    assert bool((copies["small"] == 7).all())


def test_work_queued_on_a_stream_of_the_users_own() -> None:
    source, small = large(), torch.zeros(7, device=CUDA)
    torch.cuda.synchronize()
    user = torch.cuda.Stream()
    with torch.cuda.stream(user):
        busy()
        source.fill_(7.0)
        small.fill_(7.0)

    async def run() -> Any:
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            return await stager.stage({"large": source, "small": small}, wait_streams=[user])

    copies = asyncio.run(run())
    assert bool((copies["large"] == 7).all())
    assert bool((copies["small"] == 7).all())


def overwritten(fenced: bool, mode: StageMode = "lazy") -> torch.Tensor:
    """What a stage of ones has in it if twos are written after the call.

    The copies are throttled, so that without a fence the writer comes first for certain; the fence ends the throttling.
    """

    async def run() -> torch.Tensor:
        source = large(1.0, 1 << 26)
        torch.cuda.synchronize()
        async with AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode, max_bytes_per_second=1e9) as stager:
            future = stager.stage({"t": source})
            if fenced:
                stager.fence()
            source.fill_(2.0)
            copies = await future
            found: torch.Tensor = copies["t"]
            return found

    return asyncio.run(run())


def test_the_fence_is_what_keeps_the_writer_out() -> None:
    assert bool((overwritten(fenced=True) == 1).all())
    assert not bool((overwritten(fenced=False) == 1).all()), "the writer was not there in time: this proves nothing"


def test_a_snapshot_needs_no_fence() -> None:
    assert bool((overwritten(fenced=False, mode="eager") == 1).all())


def test_a_guarded_optimizer() -> None:
    async def run() -> None:
        parameter = torch.nn.Parameter(large(1.0, 1 << 26))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        async with AsyncStager(budget_bytes=BUDGET_BYTES, max_bytes_per_second=1e9) as stager:
            handle = stager.guard(optimizer)
            for step in range(3):
                parameter.grad = torch.ones_like(parameter)
                future = stager.stage({"p": parameter})
                optimizer.step()
                copies = await future
                assert bool((copies["p"] == 1 - step).all())
                copies.release()
                del copies, future
            handle.remove()

    asyncio.run(run())


def test_memory_of_a_source_is_not_given_to_others_while_it_is_copied() -> None:
    async def run() -> None:
        async with AsyncStager(budget_bytes=BUDGET_BYTES, max_bytes_per_second=2e9) as stager:
            future = stager.stage({"t": large(1.0, 1 << 26)})  # nobody else refers to it
            others = [large(2.0, 1 << 26) for _ in range(4)]
            copies = await future
            assert bool((copies["t"] == 1).all())
            assert len(others) == 4

    asyncio.run(run())


def test_buffers_need_no_fence() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running", large(1.0))

    async def run() -> None:
        model = Model()
        async with AsyncStager(budget_bytes=BUDGET_BYTES, max_bytes_per_second=1e8) as stager:
            future = stager.stage({"model": model})
            model.running.fill_(2.0)
            copies = await future
            assert bool((copies["model"]["running"] == 1).all())

    asyncio.run(run())


def test_several_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")

    async def run() -> None:
        devices = [torch.device(CUDA, index) for index in range(torch.cuda.device_count())]
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            sources = [torch.full((LARGE,), -1.0, device=device) for device in devices]
            for index, source in enumerate(sources):
                with torch.cuda.device(index):
                    busy()
                source.fill_(index)
            future = stager.stage({"all": sources})
            stager.fence()
            for source in sources:
                source.fill_(-2.0)
            copies = await future
            assert all(bool((copy == index).all()) for index, copy in enumerate(copies["all"]))
        assert torch.cuda.current_device() == 0

    asyncio.run(run())


# --- what goes on beside it ---


def test_small_copies_of_the_training_get_through() -> None:
    """The engine that copies to the host serves others between two chunks: no item() waits for the whole stage."""

    async def run() -> int:
        loss, source = torch.ones(1, device=CUDA), large(1.0, 1 << 30)
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            (await stager.stage({"t": source})).release()  # maps, touches and registers the memory
            future = stager.stage({"t": source})
            await asyncio.to_thread(stager.fence)  # all copies are enqueued
            side = torch.cuda.Stream()  # the current one now waits for the copies
            count = 0
            with torch.cuda.stream(side):
                while not future.done():
                    assert loss.item() == 1.0
                    count += 1
            copies = await future
            assert bool((copies["t"][:: 1 << 16] == 1).all())
            return count

    count = asyncio.run(run())
    assert count > 8, f"only {count} calls of item() returned while 4 GiB were staged"


def captured(source: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that doubles ``source``, captured in the mode in which a careless call of any other thread ends the
    capture with an error. Not by way of torch.cuda.graph, which waits for the whole device first."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="global")
        result = source * 2
        graph.capture_end()
    return graph, result


def test_a_graph_is_captured_beside_a_waiting_stager() -> None:
    """The default stream stays idle: from torch 2.13 on a capture waits for it on the host before it begins."""

    async def run() -> None:
        source, ones = large(1.0), torch.ones(1000, device=CUDA)
        user = torch.cuda.Stream()

        def fence() -> None:
            with torch.cuda.stream(user):
                stager.fence()

        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            (await stager.stage({"t": source})).release()
            captured(ones)  # what is loaded late is loaded
            torch.cuda.synchronize()
            with torch.cuda.stream(user):
                busy(2000)
                future = stager.stage({"t": source})
            await asyncio.to_thread(fence)  # enqueued: from here on the device's thread only waits
            graph, result = captured(ones)
            assert not future.done(), "nobody was waiting during the capture: this proves nothing"
            graph.replay()
            copies = await future
            assert bool((copies["t"] == 1).all())
            torch.cuda.synchronize()
            assert bool((result == 2).all())

    asyncio.run(run())


def test_graphs_are_captured_while_memory_is_registered_and_copies_are_enqueued() -> None:
    async def run() -> None:
        ones = torch.ones(1000, device=CUDA)
        sources = [large(float(index)) for index in range(64)]
        captured(ones)
        torch.cuda.synchronize()
        async with AsyncStager(budget_bytes=BUDGET_BYTES, max_bytes_per_second=4e9) as stager:
            future = stager.stage({"t": sources})
            while not future.done():
                graph, result = captured(ones)
                graph.replay()
            copies = await future
            assert all(bool((copy == index).all()) for index, copy in enumerate(copies["t"]))
            torch.cuda.synchronize()
            assert bool((result == 2).all())

    asyncio.run(run())


def test_nothing_is_staged_within_a_capture() -> None:
    async def run() -> None:
        source = large(1.0)
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = source * 2
                with pytest.raises(GraphCaptureError, match="before or after the capture"):
                    stager.stage({"t": source})
            graph.replay()
            torch.cuda.synchronize()
            assert bool((result == 2).all())

    asyncio.run(run())


def test_a_forked_child_does_not_come_between_the_device_and_the_memory() -> None:
    """Pages of a private mapping are shared with a child until somebody writes; a device that goes on writing into the
    old ones while the parent reads new ones would be a silent loss. Data loaders fork."""

    async def run() -> None:
        source, small, host = large(1.0), torch.full((7,), 1.0, device=CUDA), torch.full((LARGE,), 1.0)
        state = {"large": source, "small": [small, source[5:9]], "host": host}
        async with AsyncStager(budget_bytes=1 << 28) as stager:
            (await stager.stage(state)).release()
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(writing)
                os.read(reading, 1)  # until the parent ends or closes
                os._exit(0)
            try:
                for number in range(2, 12):
                    for tensor in (source, small, host):
                        tensor.fill_(number)
                    copies = await stager.stage(state)
                    for copy in (copies["large"], *copies["small"], copies["host"]):
                        assert bool((copy == number).all())
                    copies.release()
                    del copies, copy
            finally:
                os.close(writing)
                os.close(reading)
                os.waitpid(child, 0)

    asyncio.run(run())


def test_a_stream_that_records_a_graph_is_not_waited_for() -> None:
    source, ones = large(1.0), torch.ones(1000, device=CUDA)
    graph, recording, user = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()

    async def run() -> None:
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            with torch.cuda.stream(recording):
                graph.capture_begin(capture_error_mode="thread_local")
                result = ones * 2
                with torch.cuda.stream(user), pytest.raises(GraphCaptureError, match="before or after the capture"):
                    stager.stage({"t": source}, wait_streams=[recording])
                graph.capture_end()
            graph.replay()
            torch.cuda.synchronize()
            assert bool((result == 2).all())
            assert bool(((await stager.stage({"t": source}, wait_streams=[recording]))["t"] == 1).all())

    asyncio.run(run())


def test_a_graph_that_is_recorded_on_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    with torch.cuda.device(1):
        source = torch.ones(LARGE, device=CUDA)
        graph, recording = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()

    async def run() -> None:
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            with torch.cuda.device(1), torch.cuda.stream(recording):
                graph.capture_begin(capture_error_mode="thread_local")
                result = source * 2
                with torch.cuda.device(0), pytest.raises(GraphCaptureError, match="before or after the capture"):
                    stager.stage({"t": source})
                graph.capture_end()
                graph.replay()
            torch.cuda.synchronize(1)
            assert bool((result == 2).all())
            assert bool(((await stager.stage({"t": source}))["t"] == 1).all())

    asyncio.run(run())


ENDS = """
import asyncio, os, sys
import torch
from sidestream._staging import AsyncStager

how = sys.argv[1]
source, host = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 11, 1 << 11)
stager = AsyncStager(budget_bytes=1 << 28)
stager.stage({"t": source, "h": host.t()}).result(60).release()


def begin():
    torch.cuda._sleep(3 * 10**8)  # 150 ms: the copies end while the interpreter does
    return stager.stage({"t": source, "h": host.t()})


async def main():
    begin()


if how == "a loop that ended":
    asyncio.run(main())
else:
    future = begin()
if how == "sys.exit":
    sys.exit(3)
if how == "an exception":
    raise ValueError
if how == "os._exit":
    os._exit(5)
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [("the end", 0), ("a loop that ended", 0), ("sys.exit", 3), ("an exception", 1), ("os._exit", 5)],
)
def test_a_process_ends_with_its_own_status_while_a_stage_is_in_flight(how: str, status: int) -> None:
    for _ in range(2):
        command = [sys.executable, "-c", ENDS, how]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == status, ended.stderr
        assert "terminate" not in ended.stderr


def test_the_last_reference_dies_in_a_thread_that_has_no_device() -> None:
    async def run() -> None:
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            copies = await stager.stage({"t": large(1.0)})
        kept = [copies["t"]]
        copies.release()
        del copies
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
        assert wait_unmapped(Deadline.after(60))
        assert stager.statistics().registered_bytes == stager.statistics().reserved_bytes == 0
        copies = await AsyncStager(budget_bytes=BUDGET_BYTES).stage({"t": large(2.0)})  # perhaps at the same address
        assert bool((copies["t"] == 2).all())

    asyncio.run(run())


def test_from_any_thread() -> None:
    found: list[torch.Tensor] = []

    async def run() -> None:
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:

            def work() -> None:
                with torch.cuda.stream(torch.cuda.Stream()):
                    source = large()
                    busy()
                    source.fill_(5.0)
                    future = stager.stage({"t": source})
                    stager.fence()
                    source.fill_(-1.0)
                    found.append(future.result(60)["t"])

            thread = threading.Thread(target=work)
            thread.start()
            await asyncio.to_thread(thread.join)

    asyncio.run(run())
    assert bool((found[0] == 5).all())


def test_device_memory_comes_back() -> None:
    async def run(mode: StageMode) -> None:
        gc.collect()
        before = torch.cuda.memory_allocated()
        async with AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode) as stager:
            for _ in range(4):
                (await stager.stage({"t": large(1.0), "s": torch.ones(3, device=CUDA)})).release()
            async with asyncio.timeout(30):  # the device's thread may not have left the call that resolved the future
                while torch.cuda.memory_allocated() != before:
                    await asyncio.sleep(0)

    for mode in MODES:
        asyncio.run(run(mode))
