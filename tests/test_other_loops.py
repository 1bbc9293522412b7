"""Loops other than asyncio's own: trio is refused with advice, uvloop works."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

import sidestream
import sidestream.blocking
from sidestream import signing
from sidestream.errors import WrongLoopError

STATE = {"t": torch.ones(3)}


async def entered(path: Path) -> None:
    async with sidestream.Checkpointer(path):
        pass


async def started(path: Path) -> None:
    sidestream.async_save(STATE, path)


VERBS: dict[str, Callable[[Path], Awaitable[Any]]] = {
    "save": lambda path: sidestream.save(STATE, path),
    "async_save": started,
    "load": lambda path: sidestream.load(STATE, path),
    "open_checkpoint": sidestream.open_checkpoint,
    "verify": sidestream.verify,
    "copy": lambda path: sidestream.copy(path, path / "copy"),
    "convert": lambda path: sidestream.convert(path, path / "m.safetensors"),
    "Checkpointer": entered,
    "signing.verify": lambda path: signing.verify(path, path),
}
BLOCKING: dict[str, Callable[[Path], Any]] = {
    "save": lambda path: sidestream.blocking.save(STATE, path),
    "load": lambda path: sidestream.blocking.load(STATE, path),
    "open_checkpoint": sidestream.blocking.open_checkpoint,
    "verify": sidestream.blocking.verify,
    "Checkpointer": sidestream.blocking.Checkpointer,
}


@pytest.fixture(params=["run", "guest"])
def in_trio(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Run it in trio alone, or in trio as the guest of an asyncio loop in the same thread."""
    return trio.run if request.param == "run" else as_guest


def as_guest(work: Callable[[], Awaitable[None]]) -> None:
    async def host() -> None:
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        trio.lowlevel.start_guest_run(
            work,
            run_sync_soon_threadsafe=asyncio.get_running_loop().call_soon_threadsafe,
            done_callback=ended.set_result,
            host_uses_signal_set_wakeup_fd=True,
        )
        (await ended).unwrap()

    asyncio.run(host())


InTrio = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.mark.parametrize("verb", VERBS)
def test_the_verbs_refuse_trio(verb: str, in_trio: InTrio, tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(WrongLoopError, match=r"runs in trio: call sidestream\.blocking in a thread"):
            await VERBS[verb](tmp_path / "a")

    in_trio(work)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", BLOCKING)
def test_the_blocking_verbs_refuse_to_block_trio(verb: str, in_trio: InTrio, tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(WrongLoopError, match=r"would block the event loop of trio: .* trio\.to_thread\.run_sync"):
            BLOCKING[verb](tmp_path / "a")

    in_trio(work)
    assert list(tmp_path.iterdir()) == []


def test_a_stage_is_not_awaited_in_trio() -> None:
    async def work() -> None:
        stager = sidestream.AsyncStager()
        try:
            staged = stager.stage(STATE)
            with pytest.raises(WrongLoopError, match="runs in trio"):
                await staged
            with pytest.raises(WrongLoopError, match="runs in trio"):
                await stager.aclose()
            with pytest.raises(WrongLoopError, match="runs in trio"):
                await stager.__aenter__()
            assert staged.result(60)["t"].tolist() == [1, 1, 1]
        finally:
            stager.close()

    trio.run(work)


def test_the_advice_works(in_trio: InTrio, tmp_path: Path) -> None:
    async def work() -> None:
        await trio.to_thread.run_sync(sidestream.blocking.save, STATE, tmp_path / "a")
        target = {"t": torch.zeros(3)}
        await trio.to_thread.run_sync(sidestream.blocking.load, target, tmp_path / "a")
        assert target["t"].tolist() == [1, 1, 1]

    in_trio(work)


def test_trio_in_another_thread_is_nobodys_business(tmp_path: Path) -> None:
    """In other threads the verbs work, blocking and on an asyncio loop."""
    running, done = threading.Event(), threading.Event()

    async def work() -> None:
        running.set()
        while not done.is_set():
            await trio.sleep(0.01)

    thread = threading.Thread(target=trio.run, args=(work,))
    thread.start()
    try:
        assert running.wait(60)
        sidestream.blocking.save(STATE, tmp_path / "a")
        asyncio.run(sidestream.save(STATE, tmp_path / "b"))  # type: ignore[arg-type]
    finally:
        done.set()
        thread.join()


def test_uvloop(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def work() -> None:
        with pytest.raises(WrongLoopError, match="await the functions of sidestream"):
            sidestream.blocking.save(STATE, tmp_path / "a")
        async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
            await checkpoints.save({"t": torch.arange(1 << 20)}, step=1)
            target = {"t": torch.zeros(1 << 20, dtype=torch.int64)}
            assert await checkpoints.restore(target) == 1
            assert torch.equal(target["t"], torch.arange(1 << 20))
        pending = sidestream.async_save(STATE, tmp_path / "b")
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending

    uvloop.run(work())
