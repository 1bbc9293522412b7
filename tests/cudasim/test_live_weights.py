"""Weights on a device: each copy has memory of its own, and what is enqueued in a reading sees its version only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
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


async def test_a_version_that_does_not_wait_for_enqueued_work_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    monkeypatch.setattr("sidestream._weights.shells.Shells.mark_used", nothing)
    for _ in range(20):
        if await torture():
            return
    raise AssertionError("it was not found")


async def test_a_run_is_followed_on_a_device(tmp_path: Any) -> None:
    live = sidestream.Live(version(0, "cuda"))
    async with sidestream.Checkpointer(tmp_path) as checkpoints, checkpoints.following(live, poll_s=0.05) as follower:
        for step in (1, 2, 3, 4, 5):
            await checkpoints.save(version(step), step=step)
            await follower.ready()
            async with asyncio.timeout(300), live.reading(min_version=step) as reading:
                assert {float(one.cpu()[0]) for one in reading.tensors.values()} == {float(step)}
