"""Saves without a stager keep their memory for the next one, within a bound, and never wait for each other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from states import assert_same

import sidestream
from sidestream import blocking
from sidestream._staging import AsyncStager, cached
from sidestream._staging import idle as idle_module
from sidestream.errors import InvalidOptionError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    cached.close_all()
    yield
    cached.close_all()
    cached._cache.cache_bytes = None


def state_of(value: float, mib: int = 12) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.full((MIB // 4,), value + number) for number in range(mib)}


def idle() -> list[AsyncStager]:
    return [one.stager for one in cached._cache._idle]


def reserved() -> int:
    return sum(stager.statistics().reserved_bytes for stager in idle())


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def back(url: Path) -> Any:
    return await (await sidestream.open_checkpoint(url)).state_dict()


@pytest.mark.parametrize("saver", ["thread", "process"])
async def test_the_next_save_uses_the_memory_again(saver: Any, tmp_path: Path) -> None:
    for turn in range(4):
        await sidestream.save(state_of(turn), tmp_path / str(turn), options=sidestream.SaveOptions(writer=saver))
        assert_same(state_of(turn), await back(tmp_path / str(turn)))
        (stager,) = idle()
        if turn == 0:
            first, memory = stager, stager.statistics().reserved_bytes
            assert memory >= 12 * MIB
        assert stager is first
    await asyncio.to_thread(blocking.save, state_of(5), tmp_path / "5", options=sidestream.SaveOptions(writer=saver))
    assert idle() == [first]


async def test_saves_at_the_same_time_have_memory_of_their_own(tmp_path: Path) -> None:
    """Also those of several loops."""
    pending = [sidestream.async_save(state_of(turn), tmp_path / str(turn)) for turn in range(3)]
    assert idle() == []
    threads = [
        threading.Thread(target=lambda n=number: asyncio.run(sidestream.save(state_of(n), tmp_path / f"loop {n}")))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    await asyncio.gather(*pending)
    for thread in threads:
        await asyncio.to_thread(thread.join, 60)
    assert 1 <= len(idle()) == len(set(idle())) <= 6
    for number in range(3):
        for name in (str(number), f"loop {number}"):
            assert_same(state_of(number), await back(tmp_path / name))


async def test_no_more_is_kept_than_was_said(tmp_path: Path) -> None:
    sidestream.set_cache_bytes(10 * MIB)
    await sidestream.save(state_of(1, 40), tmp_path / "large")
    await reached(lambda: reserved() <= 10 * MIB)
    await sidestream.save(state_of(1, 4), tmp_path / "small")
    await reached(lambda: reserved() <= 10 * MIB)
    assert len(idle()) == 1
    sidestream.set_cache_bytes(0)
    assert idle() == []
    await sidestream.save(state_of(1), tmp_path / "none")
    assert idle() == []
    sidestream.set_cache_bytes(64 * MIB)
    await asyncio.gather(*(sidestream.save(state_of(n, 24), tmp_path / f"at once {n}") for n in range(5)))
    await reached(lambda: reserved() <= 64 * MIB)
    assert sum(one.nbytes for one in cached._cache._idle) <= 64 * MIB


async def test_a_new_bound_while_a_save_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_aside, threads = AsyncStager.set_aside, []

    def beside_a_new_bound(stager: AsyncStager, nbytes: int) -> None:
        threads.append(threading.Thread(target=sidestream.set_cache_bytes, args=(0,)))
        threads[-1].start()
        threads[-1].join(0.2)
        set_aside(stager, nbytes)

    monkeypatch.setattr(AsyncStager, "set_aside", beside_a_new_bound)
    await sidestream.save(state_of(1), tmp_path / "s")
    assert len(threads) == 1
    await asyncio.to_thread(threads[0].join, 60)
    assert idle() == []
    assert_same(state_of(1), await back(tmp_path / "s"))


@pytest.mark.parametrize("wrong", [-1, 1.5, "1 GB", None, True])
def test_a_bound_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidOptionError, match="cache_bytes"):
        sidestream.set_cache_bytes(wrong)
    assert cached._cache.cache_bytes != wrong or wrong is None


async def test_what_a_failed_or_cancelled_save_used_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("x")
    with pytest.raises(sidestream.errors.CheckpointExistsError):
        await sidestream.save(state_of(1), tmp_path / "there")
    with pytest.raises(sidestream.errors.UnsupportedTensorError):
        await sidestream.save({"t": torch.empty(3, device="meta")}, tmp_path / "meta")
    pending = sidestream.async_save(state_of(1, 64), tmp_path / "c")
    await pending.staged
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    for stager in idle():  # of a save that ended before it was cancelled
        assert stager.statistics().leases == 0


async def test_it_is_unmapped_after_some_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_module, "_TRIM_S", 0.2)
    for saver in ("thread", "process"):
        await sidestream.save(state_of(1), tmp_path / saver, options=sidestream.SaveOptions(writer=saver))  # type: ignore[arg-type]
        assert idle()
        await reached(lambda: reserved() == 0)
        await sidestream.save(state_of(2), tmp_path / f"{saver} again", options=sidestream.SaveOptions(writer=saver))  # type: ignore[arg-type]
        assert_same(state_of(2), await back(tmp_path / f"{saver} again"))


async def test_a_forked_child_has_none(tmp_path: Path) -> None:
    await sidestream.save(state_of(1), tmp_path / "c")
    assert idle()
    pid = os.fork()
    if pid == 0:
        os._exit(10 + len(idle()))
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 10
    assert idle()


def test_a_program_ends_with_idle_memory(tmp_path: Path) -> None:
    program = """
        import atexit, sys, torch
        from sidestream import blocking
        from sidestream._staging import cached
        atexit.register(lambda: print("before", len(cached._cache._idle)))  # it runs before that of the cache
        blocking.save({"t": torch.ones(1 << 20)}, sys.argv[1])
        print("saved", len(cached._cache._idle))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "c")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split("\n")[:2], done.stderr) == (0, ["saved 1", "before 1"], "")
