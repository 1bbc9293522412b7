"""A whole checkpoint in the memory that one asks for: the host's, the files' own pages, a device's."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import SAVED_DTYPES, assert_same, filled

import sidestream
from sidestream import errors

pytestmark = pytest.mark.filterwarnings("ignore:.*ComplexHalf support is experimental.*:UserWarning")


def mixed() -> dict[str, Any]:
    weight = torch.randn(300, 70)
    every = {str(dtype): filled((5, 3), dtype) for dtype in SAVED_DTYPES}
    state = {"w": weight, "tied": weight, "s": torch.tensor(2.5), "none": torch.empty(0, 3), "t": weight.t()}
    return {**state, "large": torch.randn(1 << 19), "every": every, "v": {"n": 1, "e": {}}}


def mappings(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(folder))


def opened(folder: Path) -> list[str]:
    """Files in ``folder`` that are open in this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(str(folder))]


async def unmapped(folder: Path) -> None:
    """Returns when nothing in ``folder`` is mapped any more; threads that have ended their work still let go of it."""
    while mappings(folder):
        gc.collect()
        await asyncio.sleep(0)


async def test_mapped_tensors_are_the_files_pages(tmp_path: Path) -> None:
    state = mixed()
    await sidestream.save(state, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    mapped = await checkpoint.state_dict(memory="mapped")
    assert_same(state, mapped)
    assert mapped["w"] is mapped["tied"]
    (line,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line)
    low, high = (int(end, 16) for end in line.split()[0].split("-"))
    assert low <= mapped["large"].data_ptr() < high
    assert low <= mapped["s"].data_ptr() < high
    del mapped
    await unmapped(tmp_path)
    assert opened(tmp_path) == []


async def test_writing_to_mapped_tensors_changes_no_file(tmp_path: Path) -> None:
    await sidestream.save({"t": torch.ones(100_000)}, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.distcp")
    before = shard.read_bytes()
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    mapped, other = await checkpoint.state_dict(memory="mapped"), await checkpoint.state_dict(memory="mapped")
    mapped["t"].add_(1)
    assert mapped["t"].sum() == 200_000
    assert other["t"].sum() == 100_000
    assert shard.read_bytes() == before


async def test_mapped_bytes_are_verified_unless_asked_otherwise(tmp_path: Path) -> None:
    await sidestream.save({"t": torch.ones(1 << 20), "small": torch.ones(3)}, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.distcp")
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(errors.CorruptCheckpointError, match="t: its bytes"):
        await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict(memory="mapped")
    await unmapped(tmp_path)
    trusting = await sidestream.open_checkpoint(tmp_path / "c", verify="manifest")
    assert ((await trusting.state_dict(memory="mapped"))["t"] != 1).sum() == 1


async def test_files_that_change_after_they_were_opened(tmp_path: Path) -> None:
    await sidestream.save({"t": torch.ones(1 << 18)}, tmp_path / "c")
    for verify in ("manifest", "always"):
        checkpoint = await sidestream.open_checkpoint(tmp_path / "c", verify=verify)
        (shard,) = (tmp_path / "c").glob("*.distcp")
        raw = shard.read_bytes()
        os.truncate(shard, len(raw) // 2)
        with pytest.raises(errors.CorruptCheckpointError, match="is shorter"):
            await checkpoint.state_dict(memory="mapped")
        shard.unlink()
        with pytest.raises(errors.CorruptCheckpointError, match="is missing"):
            await checkpoint.state_dict(memory="mapped")
        shard.write_bytes(raw)


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to save in a single process.*:UserWarning")
async def test_what_cannot_be_mapped_is_read(tmp_path: Path) -> None:
    state = {"a": torch.randn(3000), "b": torch.arange(10), "n": 3}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert_same(state, await checkpoint.state_dict(memory="mapped"))


async def test_a_device(tmp_path: Path) -> None:
    state = mixed()
    await sidestream.save(state, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert_same(state, await checkpoint.state_dict(memory=torch.device("cpu")))
    assert_same(state["w"][3:9], await checkpoint.tensor("w", slice(3, 9), device="cpu"))
    for memory in ("cpu", "disk", None, torch.device("meta")):
        with pytest.raises(errors.InvalidOptionError, match="memory"):
            await checkpoint.state_dict(memory=memory)
    for device in ("meta", "nowhere", 1.5):
        with pytest.raises(errors.InvalidOptionError, match="device="):
            await checkpoint.tensor("w", device=device)
    for absent in ("cuda:99", "xpu", "hpu"):
        with pytest.raises(errors.InvalidOptionError, match=f"'{absent}' is not a device of this machine"):
            await checkpoint.tensor("w", device=absent)
        with pytest.raises(errors.InvalidOptionError, match=f"'{absent}' is not a device of this machine"):
            await checkpoint.state_dict(memory=torch.device(absent))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
async def test_a_gpu(tmp_path: Path) -> None:
    state = mixed()
    await sidestream.save(state, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    on_gpu = await checkpoint.state_dict(memory=torch.device("cuda"))
    assert on_gpu["w"].is_cuda
    assert torch.equal(on_gpu["w"].cpu(), state["w"])
    assert torch.equal((await checkpoint.tensor("w", slice(3, 9), device="cuda")).cpu(), state["w"][3:9])
