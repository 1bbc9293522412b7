"""States larger than the memory that they pass through, cut into windows that several threads stage and write."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_device import FakeDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from states import assert_same

import sidestream
from sidestream._runtime.threads import Stop
from sidestream._staging import AsyncStager, Copy, DeviceEngine, HostEngine
from sidestream._staging.host import rows_with
from sidestream.errors import InvalidOptionError

MIB = 1 << 20


def large_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    base = torch.randn(2000, 1500)  # 12 MB
    return {
        "plain": base,
        "transposed": base.t(),
        "rows": torch.randn(3, 2_000_000).t(),  # its rows have 12 bytes
        "wide": torch.randn(2_000_000, 2).t(),  # its rows are larger than a window
        "conj": torch.randn(600_000, dtype=torch.complex64).conj(),
        "bf16": torch.randn(3_000_001).to(torch.bfloat16),
        "scalar": torch.tensor(4.0),
        "small": torch.randn(100),
        "last": torch.randn(700_001),
    }


async def test_tensors_larger_than_the_budget_pass_through_it(tmp_path: Path) -> None:
    state = large_state()
    async with AsyncStager(budget_bytes=5 * MIB) as stager:
        await sidestream.save(state, tmp_path / "c", stager=stager)
        assert stager.statistics().peak_leased_bytes <= 5 * MIB
    assert_same(state, await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict())
    blank = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(blank, checkpoint_id=tmp_path / "c", no_dist=True)
    assert_same(state, blank)


async def test_what_is_sent_in_one_request_passes_through_it_too() -> None:
    """A part is larger than the budget: the file is put together beside it."""
    state, url = large_state(), f"memory://{uuid.uuid4().hex}/c"
    policy = sidestream.StorePolicy(part_bytes=512 * MIB)
    storage = sidestream.Storage(policy=policy)
    async with AsyncStager(budget_bytes=5 * MIB) as stager:
        await sidestream.save(
            state, url, stager=stager, storage=storage, options=sidestream.SaveOptions(writer="thread", timeout_s=60)
        )
    assert_same(state, await (await sidestream.open_checkpoint(url)).state_dict())


async def test_tensors_of_a_device_pass_through_it_too(tmp_path: Path) -> None:
    driver = FakeDriver()
    state = {name: driver.put(tensor) for name, tensor in large_state().items()}
    async with AsyncStager(budget_bytes=5 * MIB, engine=DeviceEngine(driver)) as stager:
        pending = sidestream.async_save(state, tmp_path / "c", stager=stager)
        await driver.drive(pending)
        assert stager.statistics().peak_leased_bytes <= 5 * MIB
        assert driver.gaps > 0
    assert_same(state, await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict())


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([torch.float32, torch.int8, torch.complex64]),
)
def test_any_run_of_row_major_bytes_of_any_view(shape: list[int], random, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)
    tensor = tensor.permute(*random.sample(range(len(shape)), len(shape)))
    if random.random() < 0.3:
        tensor = tensor.conj() if dtype.is_complex else tensor.flip(0)
    raw = bytes(tensor.resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist())
    first, last = sorted(random.randrange(tensor.numel() + 1) for _ in range(2))
    if first == last:
        return
    skip, nbytes = first * tensor.itemsize, (last - first) * tensor.itemsize
    rows, inner = rows_with(tensor, skip, nbytes)
    assert rows.nbytes - nbytes <= 2 * tensor[0].nbytes
    assert (
        bytes(rows.resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist())[
            inner : inner + nbytes
        ]
        == (raw[skip : skip + nbytes])
    )
    target = torch.zeros(nbytes, dtype=torch.uint8)
    copy = Copy(tensor, 0, nbytes, skip=skip)
    HostEngine().copy(copy, target.data_ptr(), stop=Stop())
    assert bytes(target.tolist()) == raw[skip : skip + nbytes]


async def test_snapshot_false_has_memory_of_its_own(tmp_path: Path, stager: AsyncStager) -> None:
    with pytest.raises(InvalidOptionError, match="leave out stager="):
        await sidestream.save({}, tmp_path / "c", stager=stager, options=sidestream.SaveOptions(streaming=True))
    await sidestream.save({"t": torch.arange(9)}, tmp_path / "c", options=sidestream.SaveOptions(streaming=True))
    assert (await (await sidestream.open_checkpoint(tmp_path / "c")).tensor("t")).tolist() == list(range(9))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the process's memory from /proc")
def test_streaming_needs_little_memory_whatever_the_state_has(tmp_path: Path) -> None:
    """What the process has in memory besides the windows is bounded loosely: it could not have the state in there."""
    program = """
        import asyncio, sys, torch, weakref, sidestream
        from sidestream._runtime.memory_maps import MemoryMap

        now = most = 0  # bytes that have been mapped for windows and not been unmapped
        make = MemoryMap.__new__

        def changed(nbytes):
            global now, most
            now += nbytes
            most = max(most, now)

        def counted(*args, **keywords):
            memory = make(*args, **keywords)
            changed(len(memory))
            weakref.finalize(memory, changed, -len(memory))
            return memory

        def peak_kib():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

        async def main():
            await sidestream.save({"t": torch.ones(10)}, sys.argv[1] + "/first")  # imports and pools are not counted
            state = {"one": torch.ones(150 << 20), "many": [torch.ones(4 << 20) for _ in range(20)]}
            with open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")
            before = peak_kib()
            MemoryMap.__new__ = counted
            await sidestream.save(state, sys.argv[1] + "/second", options=sidestream.SaveOptions(streaming=True))
            print(most >> 20, (peak_kib() - before) >> 10)

        asyncio.run(main())
"""
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    windows_mib, grown_mib = map(int, done.stdout.split())
    assert 0 < windows_mib <= 256
    assert grown_mib <= 256 + 300, "the state has 920 MiB"


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
async def test_a_file_system_without_direct_io() -> None:
    state = large_state()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        async with AsyncStager(budget_bytes=5 * MIB) as stager:
            await sidestream.save(state, Path(folder) / "c", stager=stager)
        assert_same(state, await (await sidestream.open_checkpoint(Path(folder) / "c")).state_dict())


@pytest.fixture(scope="module")
def rows_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    tensor = torch.arange(1_500_007 * 3, dtype=torch.int32).reshape(1_500_007, 3)
    url = tmp_path_factory.mktemp("rows") / "c"
    sidestream.blocking.save({"t": tensor}, url, options=sidestream.SaveOptions(streaming=True))
    return url, tensor


@settings(max_examples=40)
@given(st.integers(0, 1_500_007), st.integers(0, 600_000))
async def test_any_rows_of_a_tensor_in_many_blocks(
    rows_checkpoint: tuple[Path, torch.Tensor], first: int, count: int
) -> None:
    url, tensor = rows_checkpoint
    checkpoint = await sidestream.open_checkpoint(url)
    assert torch.equal(await checkpoint.tensor("t", rows=slice(first, first + count)), tensor[first : first + count])
