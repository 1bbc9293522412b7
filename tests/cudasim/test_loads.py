"""Loads to two simulated devices: how many copies and waits, their order, and what a failure leaves."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from leases import nothing_kept

import sidestream
from sidestream import errors
from sidestream._staging import AsyncStager, placement, ring
from sidestream._storage.local.read import LocalFiles
from sidestream_cli import machine

cudasim: Any = pytest.importorskip("cudasim", reason="needs the simulated CUDA runtime")
if not getattr(cudasim, "active", bool)():  # without it the name may stand for this folder
    pytest.skip("needs the simulated CUDA runtime", allow_module_level=True)

SEED = int(os.environ.get("CUDASIM_SEED", "0"))
BOUND_S = 120.0  # against a hang
OPTIONS = sidestream.LoadOptions(timeout_s=BOUND_S)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    cudasim.tune(1000, 0.5, seed=SEED)
    torch.manual_seed(SEED)
    yield
    cudasim.hold_sides(False)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert nothing_kept()
    state = cudasim.state()
    assert (state["registrations"], state["violations"], state["queued"]) == ("0", "0", "0")


def small_and_large() -> dict[str, torch.Tensor]:
    found = {f"small{number}": torch.randn(256) for number in range(1000)}
    return found | {f"large{number}": torch.randn(1 << 20) for number in range(4)}


def on_devices(state: dict[str, torch.Tensor], device: str = "cuda:1") -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor, device=device) for name, tensor in state.items()}


def assert_equal(state: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        assert torch.equal(loaded[name].cpu(), tensor.to(loaded[name].dtype)), name


async def queued_more_than(before: str) -> None:
    while int(cudasim.state()["queued"]) <= int(before):
        await asyncio.sleep(0.005)


async def test_one_copy_for_the_small_and_no_wait_for_each(tmp_path: Path) -> None:
    state = small_and_large()
    await sidestream.save(state, tmp_path / "a")
    await sidestream.load(on_devices(state), tmp_path / "a", options=OPTIONS)  # what happens once
    target = on_devices(state)
    torch.cuda.synchronize(1)
    before = cudasim.calls()
    await sidestream.load(target, tmp_path / "a", options=OPTIONS)
    made = {name: count - before.get(name, 0) for name, count in cudasim.calls().items()}
    assert made.get("cudaMemcpyAsync") == 5, "four large ones, and one for all small ones"
    assert made.get("cudaStreamSynchronize", 0) == made.get("cudaMemcpy", 0) == 0, "a pageable copy waits"
    assert made.get("cudaHostRegister", 0) == 0, "the memory of the first load is used again"
    assert_equal(state, target)


@pytest.mark.parametrize("seed", range(6))
async def test_the_right_bytes_whatever_the_target_is_like(seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Casts, strides, lazy conjugates, several dtypes and two devices, through two slots only. What follows on the
    caller's stream sees them without a wait."""
    monkeypatch.setattr(ring, "_SLOTS", 2)
    cudasim.tune(3000, 0.6, seed=seed)
    torch.manual_seed(seed)
    state: dict[str, torch.Tensor] = {f"x{number}": torch.randn(number * 37 % 5000 + 1, 3) for number in range(60)}
    state |= {f"y{number}": torch.randn(700_000) for number in range(8)}
    state |= {"complex": torch.randn(50, 40, dtype=torch.complex64), "scalar": torch.tensor(3.5)}
    state |= {"bool": torch.rand(999) > 0.5, "bytes": torch.randint(0, 255, (333,), dtype=torch.uint8)}
    state |= {"half": torch.randn(1001, dtype=torch.bfloat16), "none": torch.empty(0, 3)}
    await sidestream.save(state, tmp_path / "a")
    target: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(state.items()):
        device, dtype = f"cuda:{number % 2}", tensor.dtype
        if dtype == torch.float32 and number % 5 == 0:
            dtype = torch.float16
        one = torch.full(tensor.shape, 1, dtype=dtype, device=device)
        if number % 3 == 0 and one.dim() == 2:
            one = torch.ones(*reversed(tensor.shape), dtype=dtype, device=device).t()
        target[name] = one.conj() if dtype.is_complex else one
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    sides = [torch.cuda.Stream(device) for device in (0, 1)]
    with torch.cuda.stream(sides[1]), torch.cuda.stream(sides[0]):
        for one in target.values():
            one.zero_() if one.device.index == 0 else None
        await sidestream.load(target, tmp_path / "a", allow_cast=True, options=OPTIONS)
        seen = {name: one.clone() for name, one in target.items() if one.device.index == 0}
    sides[0].synchronize()
    assert_equal(state, target)
    assert_equal({name: state[name] for name in seen}, seen)


async def test_it_comes_after_what_the_caller_has_enqueued(tmp_path: Path) -> None:
    state = small_and_large()
    await sidestream.save(state, tmp_path / "a")
    target = on_devices(state)
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(1)
    with torch.cuda.stream(side), cudasim.held(side):
        for name in ("small7", "large1", "large3"):
            target[name].fill_(7.0)
        before = cudasim.state()["queued"]
        load = asyncio.create_task(sidestream.load(target, tmp_path / "a", options=OPTIONS))
        await queued_more_than(before)
        cudasim.release(side)
        await load
    assert_equal(state, target)


async def test_a_cancel_waits_for_the_copies_in_flight(tmp_path: Path) -> None:
    state = small_and_large()
    await sidestream.save(state, tmp_path / "a")
    await sidestream.load(on_devices(state), tmp_path / "a", options=OPTIONS)  # makes the stream of loads
    target = on_devices(state)
    torch.cuda.synchronize(1)
    cudasim.hold_sides()
    before = cudasim.state()["queued"]
    load = asyncio.create_task(sidestream.load(target, tmp_path / "a", options=OPTIONS))
    await queued_more_than(before)
    load.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not load.done(), "the device may still write to the targets"
    cudasim.hold_sides(False)
    with pytest.raises(asyncio.CancelledError):
        await load
    torch.cuda.synchronize(1)
    await sidestream.load(target, tmp_path / "a", options=OPTIONS)
    assert_equal(state, target)


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaMalloc"])
async def test_without_registered_memory_or_room_on_the_device(call: str, tmp_path: Path) -> None:
    state = small_and_large()
    await sidestream.save(state, tmp_path / "a")
    target = on_devices(state)
    torch.cuda.synchronize(1)
    torch.cuda.empty_cache()
    cudasim.fail_call(call, times=10_000)
    try:
        await sidestream.load(target, tmp_path / "a", options=OPTIONS)
    finally:
        cudasim.heal()
    assert_equal(state, target)


async def test_what_is_damaged_is_not_copied(tmp_path: Path) -> None:
    state = {"first": torch.randn(1 << 19), "second": torch.randn(1 << 23)}
    await sidestream.save(state, tmp_path / "a")
    (file,) = [path for path in (tmp_path / "a").iterdir() if path.stat().st_size > 8 << 20]
    content = bytearray(file.read_bytes())
    content[-(4 << 20)] ^= 1
    file.write_bytes(content)
    target = on_devices(state)
    with pytest.raises(errors.CorruptCheckpointError) as raised:
        await sidestream.load(target, tmp_path / "a", options=sidestream.LoadOptions(verify="always", timeout_s=60))
    torch.cuda.synchronize(1)
    written = [name for name, one in target.items() if one.any()]
    assert set(written) <= set(raised.value.written)
    damaged = target["second"].cpu()
    assert torch.equal(damaged[-(1 << 20) - 1024 :], torch.zeros((1 << 20) + 1024)), "its last 4 MiB are in one piece"


async def test_a_device_that_fails(tmp_path: Path) -> None:
    state = small_and_large()
    await sidestream.save(state, tmp_path / "a")
    target = on_devices(state)
    torch.cuda.synchronize(1)
    cudasim.fail_copy(3)
    try:
        with pytest.raises(errors.DeviceError):
            await sidestream.load(target, tmp_path / "a", options=OPTIONS)
    finally:
        cudasim.heal()
    nothing_kept()


async def test_memory_for_a_device_is_bound_to_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging memory and the slots, on a machine with two nodes, in the names that torch gives the devices."""
    sysfs, nodes = tmp_path / "sys", list[int]()
    for number in (0, 1):
        (sysfs / f"devices/system/node/node{number}").mkdir(parents=True)
        device = sysfs / f"bus/pci/devices/0000:{number + 1:02x}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{number}\n")
    monkeypatch.setattr(placement, "_SYSFS", sysfs)
    monkeypatch.setattr(placement, "bind", lambda address, nbytes, node: nodes.append(node))
    state = {"w": torch.randn(1 << 20, device="cuda:1")}
    torch.cuda.synchronize(1)
    async with AsyncStager() as stager:
        await sidestream.save(state, tmp_path / "checkpoint", stager=stager)
    assert set(nodes) == {1}
    nodes.clear()
    await sidestream.load({"w": torch.zeros(1 << 20, device="cuda:0")}, tmp_path / "checkpoint", options=OPTIONS)
    assert set(nodes) == {0}


def test_doctor_registers_host_memory_with_each_device() -> None:
    found = {one.what: one for one in machine._nodes_and_devices(Path("/sys"))}
    for name in ("cuda:0", "cuda:1"):
        assert found[name].here.endswith(", host memory can be registered")


# --- time, by the virtual clock ---


class Disk:
    """A disk of ``bytes_per_s`` by the virtual clock, which reads one range after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def slow_down(self, patch: pytest.MonkeyPatch) -> None:
        read = LocalFiles.read

        def slow(files: Any, name: str, ranges: Any, stop: Any) -> None:
            read(files, name, ranges, stop)
            with self._lock:
                begun = max(cudasim.at(), self._free_at)
                self._free_at = begun + sum(one.into.nbytes for one in ranges) / self._bytes_per_s
                cudasim.set_at(self._free_at)

        patch.setattr(LocalFiles, "read", slow)


@pytest.mark.parametrize("shape", ["large", "small", "mixed"])
@pytest.mark.parametrize(("disk", "link"), [(4e9, 25e9), (25e9, 4e9), (12e9, 12e9)])
async def test_a_load_takes_as_long_as_the_slower_of_disk_and_link(
    disk: float, link: float, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {
        "large": {f"t{number}": torch.randn(12 << 20) for number in range(4)},
        "small": {f"t{number}": torch.randn(8 << 10) for number in range(6_000)},
        "mixed": {f"t{number}": torch.randn((number * 977) % 400_000 + 1) for number in range(600)},
    }[shape]
    await sidestream.save(state, tmp_path / "a")
    target = on_devices(state)
    await sidestream.load(target, tmp_path / "a", options=OPTIONS)
    torch.cuda.synchronize(1)
    cudasim.tune(0, 0.0)
    Disk(disk).slow_down(monkeypatch)
    with cudasim.clock(to_device=link, to_host=link, pageable_to_device=link / 4, cost=2e-6):
        await sidestream.load(target, tmp_path / "a", options=OPTIONS)
        made = cudasim.operations()
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert sum(one.bytes for one in made if one.what == "H2D") >= nbytes
    assert max(one.end for one in made) <= 1.25 * nbytes / min(disk, link)


async def test_no_launch_waits_for_a_full_queue_within_a_call_or_a_fence() -> None:
    """And the fence waits for no copy: the device makes none before it has returned."""
    state = {f"t{number}": torch.ones(18 << 10, device=f"cuda:{number // 5_000}") for number in range(10_000)}
    async with sidestream.AsyncStager(budget_bytes=3 << 30, timeout_s=BOUND_S) as stager:
        (await stager.stage(state)).release()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        with cudasim.queue_limit(1000):
            cudasim.hold_sides()
            future = stager.stage(state)
            await asyncio.to_thread(stager.fence)
            for device in (0, 1):
                torch._foreach_add_([one for one in state.values() if one.device.index == device], 1.0)
            cudasim.hold_sides(False)
            copies = await future
            blocked = cudasim.blocked()
        assert blocked == [], "not even in the stager's thread"
        assert all(bool((copies[name] == 1).all()) for name in state)
        copies.release()
