"""Weights on a device: each copy has memory of its own, and what is enqueued in a reading sees its version only."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

import sidestream

cudasim: Any = pytest.importorskip("cudasim", reason="needs the simulated CUDA runtime")
if not getattr(cudasim, "active", bool)():  # without it the name may stand for this folder
    pytest.skip("needs the simulated CUDA runtime", allow_module_level=True)

TENSORS, ELEMENTS = 6, 1 << 16
SWAPS = 40


def version(number: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {f"t{one}": torch.full((ELEMENTS,), float(number)).to(device) for one in range(TENSORS)}


async def torture() -> list[str]:
    """Threads enqueue copies of what they read, and wait for them only after the end of the reading."""
    live = sidestream.Live(version(0, "cuda"))
    assert live.health().own_bytes == 3 * TENSORS * ELEMENTS * 4
    await live.install(version(0), stamp="0")
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        stream = torch.cuda.Stream()
        found = torch.empty((TENSORS, ELEMENTS), pin_memory=True)
        while not done.is_set():
            with torch.cuda.stream(stream):
                with live.reading() as reading:
                    for row, tensor in zip(found, reading.tensors.values(), strict=True):
                        row.copy_(tensor, non_blocking=True)
                    stamp = str(reading.stamp)
                stream.synchronize()
            said = {float(one) for one in found[:, [0, -1]].flatten()}
            if said != {float(stamp)}:
                wrong.append(f"{sorted(said)} with the stamp {stamp}")

    threads = [threading.Thread(target=read) for _ in range(2)]
    for one in threads:
        one.start()
    try:
        for number in range(1, SWAPS):
            await live.install(version(number), stamp=str(number))
            with live.reading() as reading:
                assert {float(one.cpu()[0]) for one in reading.tensors.values()} == {float(number)}
                assert all(one.is_cuda for one in reading.tensors.values())
    finally:
        done.set()
        for one in threads:
            await asyncio.to_thread(one.join)
    return wrong


async def test_no_reading_on_a_device_is_mixed_or_mislabelled() -> None:
    assert await torture() == []


@pytest.mark.parametrize("faulty", [False, True])
async def test_a_version_waits_for_work_that_a_reading_has_enqueued(
    faulty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if faulty:
        monkeypatch.setattr("sidestream._weights.shells.Shells.mark_used", lambda *_: None)
    live = sidestream.Live(version(0, "cuda"), max_old=0)
    await live.install(version(1), stamp="1")
    stream, found = torch.cuda.Stream(), torch.empty((TENSORS, ELEMENTS), pin_memory=True)
    with cudasim.held(stream):
        with torch.cuda.stream(stream), live.reading() as reading:
            for row, tensor in zip(found, reading.tensors.values(), strict=True):
                row.copy_(tensor, non_blocking=True)
        await live.install(version(2), stamp="2")
        third = asyncio.create_task(live.install(version(3), stamp="3"))  # into the copy that was read
        await asyncio.wait([third], timeout=300 if faulty else 1)
        assert third.done() is faulty
    stream.synchronize()
    async with asyncio.timeout(300):
        await third
    assert {float(one) for one in found[:, [0, -1]].flatten()} == {3.0 if faulty else 1.0}


async def test_a_run_is_followed_on_a_device(tmp_path: Any) -> None:
    live = sidestream.Live(version(0, "cuda"))
    async with sidestream.Checkpointer(tmp_path) as checkpoints, checkpoints.following(live, poll_s=0.05) as follower:
        for step in (1, 2, 3, 4, 5):
            await checkpoints.save(version(step), step=step)
            await follower.ready()
            async with asyncio.timeout(300), live.reading(min_version=step) as reading:
                assert {float(one.cpu()[0]) for one in reading.tensors.values()} == {float(step)}
