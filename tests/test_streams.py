"""Loading into devices: ordered with the stream that the caller computes on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from fake_device import FakeDriver

import sidestream
from sidestream import errors
from sidestream._runtime import threads
from sidestream._staging.streams import Streams

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")


async def test_copies_go_to_the_stream_of_the_caller_and_are_waited_for() -> None:
    driver = FakeDriver()
    computing = driver.stream("computing")
    target, old, source = driver.put(torch.zeros(8)), torch.ones(8), torch.ones(8)
    with driver.on(computing):
        driver.launch(lambda: old.copy_(target))
        streams = Streams([(driver, 0, driver.current_stream(0))])

    def load() -> torch.Tensor:
        with streams.current():
            driver.copy(target.view(torch.uint8), source.view(torch.uint8))
        streams.finish()
        return target.clone()

    assert torch.equal(await driver.drive(asyncio.to_thread(load)), source)
    assert not old.any()  # what was enqueued before found the old content


@pytest.mark.parametrize("where", ["in a copy", "at the end"])
async def test_a_device_that_stands_still_is_named(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_GRACE_S", 0.05)
    driver, goes_on = FakeDriver(), threading.Event()
    streams = Streams([(driver, "cuda:0", driver.current_stream(0))])
    monkeypatch.setattr(driver, "synchronize", lambda event: goes_on.wait(60))

    def copy() -> None:
        with streams.current("model.weight"):
            goes_on.wait(60)

    work, doing = {
        "in a copy": (copy, "copying model.weight to cuda:0"),
        "at the end": (streams.finish, "waiting for the copies to cuda:0"),
    }[where]
    try:
        with (
            pytest.raises(errors.DeadlineExceededError, match=f"^{doing}, which does not return: not done within"),
            threads.time_limit(threads.Deadline.after(0.05)),
        ):
            await threads.io_threads().run(work)
    finally:
        goes_on.set()


@needs_cuda
@pytest.mark.parametrize("atomic", [False, True])
async def test_into_tensors_on_a_gpu(atomic: bool, tmp_path: Path) -> None:
    state = {"w": torch.randn(1 << 20), "t": torch.randn(300, 70), "b": torch.randn(64).bfloat16(), "e": torch.ones(0)}
    await sidestream.save(state, tmp_path / "c")
    computing = torch.cuda.Stream()
    with torch.cuda.stream(computing):
        target = {
            "w": torch.zeros(1 << 20, device="cuda"),
            "t": torch.zeros(70, 300, device="cuda").t(),
            "b": torch.zeros(64, device="cuda"),
            "e": torch.ones(0, device="cuda"),
        }
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)  # half a second or more
        before = {name: tensor.clone() for name, tensor in target.items()}
        await sidestream.load(target, tmp_path / "c", allow_cast=True, options=sidestream.LoadOptions(atomic=atomic))
    for name, tensor in target.items():  # on another stream than the one that was current
        assert torch.equal(tensor.cpu(), state[name].to(tensor.dtype))
        assert not before[name].any()


@needs_cuda
async def test_into_new_tensors_on_a_gpu(tmp_path: Path) -> None:
    state = {"w": torch.randn(1 << 20), "tied": torch.ones(5)}
    await sidestream.save(state, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    with torch.cuda.stream(torch.cuda.Stream()):
        loaded = await checkpoint.state_dict(memory=torch.device("cuda"))
        rows = await checkpoint.tensor("w", slice(5, 700), device="cuda")
    assert torch.equal(loaded["w"].cpu(), state["w"])
    assert torch.equal(rows.cpu(), state["w"][5:700])
