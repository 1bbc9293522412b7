"""The limit of the queues and the virtual clock of the simulator, with programs in plain torch."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import cudasim
import pytest
import torch

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def idle() -> Iterator[None]:
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()
    assert cudasim.state()["violations"] == "0"


@pytest.fixture
def host() -> Iterator[torch.Tensor]:
    """Registered memory."""
    memory = mmap.mmap(-1, SIZE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(tensor.data_ptr(), SIZE, 1)) == 0
    yield tensor
    torch.cuda.synchronize()
    assert int(cudart.cudaHostUnregister(tensor.data_ptr())) == 0


def on_device(device: str = "cuda:0") -> torch.Tensor:
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return tensor


def copy(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def times(what: str) -> list[tuple[float, float]]:
    return [(one.start, one.end) for one in cudasim.operations() if one.what == what]


# --- the limit ---


@pytest.mark.parametrize("per_device", [False, True])
def test_a_launch_beyond_the_limit_waits_until_an_operation_was_executed(host: torch.Tensor, per_device: bool) -> None:
    source, side, other = on_device(), torch.cuda.Stream(), torch.cuda.Stream()
    launched: list[int] = []

    def launch() -> None:
        for index in range(4):
            copy(host, source, side)
            launched.append(index)

    with cudasim.queue_limit(3, per_device=per_device):
        thread = threading.Thread(target=launch)
        with cudasim.held(side):
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()
            assert launched == [0, 1, 2]
            if not per_device:  # the queue of another stream has room
                copy(host, source, other)
                other.synchronize()
        thread.join(60)
        assert launched == [0, 1, 2, 3]
        side.synchronize()
        (one,) = cudasim.blocked()
        assert one[:4] == ("cudaMemcpyAsync", thread.native_id, 0, side.cuda_stream)
        assert one.waited > 0.2
        assert one.behind == 0


def test_streams_share_the_queue_of_their_device(host: torch.Tensor) -> None:
    source, side, other = on_device(), torch.cuda.Stream(), torch.cuda.Stream()
    with cudasim.queue_limit(2, per_device=True), cudasim.held(side):
        copy(host, source, side)
        copy(host, source, side)
        thread = threading.Thread(target=copy, args=(host, source, other))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        on_device("cuda:1")  # the other device has its own
        cudasim.release(side)
        thread.join(60)
        assert [one.stream for one in cudasim.blocked()] == [other.cuda_stream]


def test_each_kind_of_launch_waits_for_room(host: torch.Tensor) -> None:
    target, event, late = on_device(), torch.cuda.Event(), torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    launches = {
        "cudaLaunchKernel": lambda: torch.cuda._sleep(1),
        "aten::fill_": lambda: target.fill_(1),
        "cudaMemcpyAsync": lambda: target.copy_(host, non_blocking=True),
        "cudaEventRecord": late.record,
        "cudaStreamWaitEvent": lambda: torch.cuda.current_stream().wait_event(event),
    }
    for name, launch in launches.items():
        with cudasim.queue_limit(1):
            torch.cuda._sleep(4 * 10**8)  # 0.2 s
            assert cudasim.blocked() == []
            launch()
            assert [one.call for one in cudasim.blocked()] == [name]
            torch.cuda.synchronize()


def test_no_launch_waits_within_the_limit_or_without_one(host: torch.Tensor) -> None:
    source, side = on_device(), torch.cuda.Stream()
    with cudasim.queue_limit(50):
        with cudasim.held(side):
            for _ in range(50):
                copy(host, source, side)
        side.synchronize()
        assert cudasim.blocked() == []
    with cudasim.held(side):
        for _ in range(2000):
            copy(host[:1], source[:1], side)
    assert cudasim.blocked() == []


def test_the_limit_of_the_environment() -> None:
    script = """
import cudasim, torch
torch.cuda._sleep(10**9)
torch.cuda.Event().record()
print(*(one.call for one in cudasim.blocked()))
torch.cuda.synchronize()
"""
    command = ["env", "CUDASIM_QUEUE=1", sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.split() == ["cudaEventRecord"], ended.stderr


# --- the clock ---


def test_a_copy_lasts_its_bytes_and_a_wait_brings_the_host_to_its_end(host: torch.Tensor) -> None:
    device, side = on_device(), torch.cuda.Stream()
    with cudasim.clock(to_host=SIZE / 2, to_device=SIZE, cost=0.25):
        copy(host, device, side)
        assert cudasim.at() == 0
        side.synchronize()
        assert cudasim.at() == 2.25
        copy(device, host, side)
        copy(device[: SIZE // 2], host[: SIZE // 2], side)
        torch.cuda.synchronize()
        assert cudasim.at() == 4.25
    assert times("D2H") == [(0, 2.25)]
    assert times("H2D") == [(2.25, 3.5), (3.5, 4.25)]
    first = cudasim.operations()[0]
    assert (first.thread, first.stream, first.bytes) == (threading.get_native_id(), side.cuda_stream, SIZE)


def test_pageable_memory_has_rates_of_its_own_and_holds_up_the_host() -> None:
    device, pageable = on_device(), torch.zeros(SIZE, dtype=torch.uint8)
    rates = {"pageable_to_device": SIZE / 2, "pageable_to_host": SIZE / 4}
    with cudasim.clock(to_device=SIZE, to_host=SIZE, **rates):
        device.copy_(pageable, non_blocking=True)
        assert cudasim.at() == 2
        pageable.copy_(device, non_blocking=True)
        assert cudasim.at() == 6
        device[: SIZE // 32].copy_(pageable[: SIZE // 32], non_blocking=True)  # staged during the call
        assert cudasim.at() == 6
    assert times("H2D")[-1] == (6, 6 + 1 / 16)


def test_copies_in_two_directions_overlap_and_those_in_one_do_not(host: torch.Tensor) -> None:
    device, second = on_device(), on_device("cuda:1")
    streams = [torch.cuda.Stream() for _ in range(3)]
    with cudasim.clock(to_host=SIZE, to_device=SIZE / 2):
        copy(host, device, streams[0])
        copy(device, host, streams[1])
        copy(host, device, streams[2])
        copy(host, second, torch.cuda.Stream("cuda:1"))
        torch.cuda.synchronize()
        assert cudasim.at() == 2
    assert times("D2H") == [(0, 1), (1, 2), (0, 1)]
    assert times("H2D") == [(0, 2)]


def test_an_operation_starts_after_the_events_that_its_stream_waits_for(host: torch.Tensor) -> None:
    device, reader, writer = on_device(), torch.cuda.Stream(), torch.cuda.Stream()
    with cudasim.clock(to_host=SIZE, to_device=SIZE):
        copy(host, device, reader)
        copied = reader.record_event()
        copy(host, device, reader)
        writer.wait_event(copied)
        copy(device, host, writer)
        copied.synchronize()
        assert cudasim.at() == 1  # not 2: the event has the end of what was before it
        torch.cuda.synchronize()
    assert times("H2D") == [(1, 2)]
    assert times("record") == [(1, 1)]


def test_the_default_stream_is_ordered_with_blocking_streams(host: torch.Tensor) -> None:
    device = on_device()
    with cudasim.clock(to_host=SIZE, to_device=SIZE):
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        cudasim.set_at(0)  # executed, and by the clock not over yet
        device.copy_(host, non_blocking=True)
    assert times("H2D") == [(1, 2)]


def test_kernels_and_operators_have_the_fixed_cost(host: torch.Tensor) -> None:
    device = on_device()
    with cudasim.clock(cost=0.5):
        device.fill_(1)
        torch.cuda._sleep(4 * 10**9)  # 2 s
        torch.cuda.current_stream().record_event()
    assert [(one.what, one.start, one.end) for one in cudasim.operations()] == [
        ("aten::fill_", 0, 0.5),
        ("kernel", 0.5, 3),
        ("record", 3, 3),
    ]


def test_an_event_is_not_over_before_the_time_of_the_thread_that_asks(host: torch.Tensor) -> None:
    device = on_device()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with cudasim.clock(to_host=SIZE):
        begin.record()
        host.copy_(device, non_blocking=True)
        end.record()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.cuda.synchronize).result()
        assert begin.query()
        assert not end.query()
        cudasim.advance(1)
        assert end.query()
        assert begin.elapsed_time(end) == 1000  # of the clock
        assert torch.cuda.current_stream().query()


def test_each_thread_has_a_time(host: torch.Tensor) -> None:
    device, side = on_device(), torch.cuda.Stream()

    def reads() -> float:
        cudasim.advance(3)
        return cudasim.at()

    with cudasim.clock(to_device=SIZE), ThreadPoolExecutor(1) as pool:
        at = pool.submit(reads).result()
        assert (at, cudasim.at()) == (3, 0)
        copy(device, host, side)
        cudasim.set_at(at)
        copy(device, host, side)
        assert pool.submit(reads).result() == 6
    with cudasim.clock(), ThreadPoolExecutor(1) as pool:
        assert cudasim.at() == 0
    assert cudasim.operations() == []


def test_a_copy_uses_the_time_before_one_that_was_enqueued_earlier_and_begins_later(host: torch.Tensor) -> None:
    device, streams = on_device(), [torch.cuda.Stream() for _ in range(4)]
    with cudasim.clock(to_device=SIZE):
        cudasim.advance(2.5)
        copy(device, host, streams[0])
        cudasim.set_at(0)
        for stream in streams[1:]:
            copy(device, host, stream)
    assert times("H2D") == [(2.5, 3.5), (0, 1), (1, 2), (3.5, 4.5)]


def test_reads_of_a_disk_and_copies_overlap(host: torch.Tensor) -> None:
    """A load with two buffers: it takes the time of the disk, and that of the last copy."""
    device, side = on_device(), torch.cuda.Stream()
    half = SIZE // 2
    free = [torch.cuda.Event(), torch.cuda.Event()]
    with cudasim.clock(to_device=SIZE):
        for index in range(6):
            part = slice(index % 2 * half, (index % 2 + 1) * half)
            free[index % 2].synchronize()
            cudasim.advance(2)  # the disk
            copy(device[part], host[part], side)
            free[index % 2].record(side)
        side.synchronize()
        assert cudasim.at() == 12.5


def test_a_full_queue_holds_up_the_host_in_virtual_time(host: torch.Tensor) -> None:
    device, side = on_device(), torch.cuda.Stream()
    with cudasim.queue_limit(2), cudasim.clock(to_device=SIZE):
        for _ in range(4):
            copy(device, host, side)
        behind = [one.behind for one in cudasim.blocked() if one.behind]
        assert behind == [1, 1]
        assert [one.called for one in cudasim.operations()] == [0, 0, 1, 2]
        side.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with cudasim.queue_limit(2, per_device=True), cudasim.clock(to_device=SIZE):
        for index in range(4):
            copy(device, host, streams[index % 2])
        assert [one.called for one in cudasim.operations()] == [0, 0, 1, 2]


def test_the_clock_does_not_depend_on_when_operations_are_executed(host: torch.Tensor) -> None:
    found = []
    for seed in range(3):
        cudasim.tune(3000, 0.9, seed=seed)
        device, streams = on_device(), [torch.cuda.Stream() for _ in range(3)]
        with cudasim.clock(to_device=3e6, to_host=7e6, cost=1e-5):
            for index in range(30):
                stream = streams[index % 3]
                stream.wait_stream(streams[(index + 1) % 3])
                copy(device, host, stream) if index % 2 else copy(host, device, stream)
            torch.cuda.synchronize()
            at = cudasim.at()
        found.append((at, [(one.what, one.start, one.end) for one in cudasim.operations()]))
    cudasim.tune(300)
    assert found[0] == found[1] == found[2]
