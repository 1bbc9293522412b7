"""A busy loop really sleeps now and then while threads work for it, and only then.

Told by the system's count of voluntary switches: polling a selector with something to do does not give up the core.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import sidestream
from sidestream import _turns
from sidestream._threads import Deadline, Threads
from sidestream.errors import DeadlineExceeded

PATIENCE_S = 60.0


def naps() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


async def busy_until(naps_wanted: int) -> bool:
    """Whether the thread of the loop has slept so often, before the patience was over. The loop never has to wait."""
    end, before = time.monotonic() + PATIENCE_S, naps()
    while naps() - before < naps_wanted:
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0)
    return True


def planned() -> bool:
    turns = _turns._of_loops.get(asyncio.get_running_loop())
    return turns is not None and turns._planned


async def until_none_is_planned() -> None:
    async with asyncio.timeout(PATIENCE_S):
        while planned():
            await asyncio.sleep(0)


async def test_a_busy_loop_naps_while_a_thread_works_for_it_and_not_afterwards() -> None:
    threads, ended = Threads("test-turns", 1), threading.Event()
    try:
        task = asyncio.ensure_future(threads.run(ended.wait))
        assert await busy_until(10)
        ended.set()
        assert await task
        await until_none_is_planned()
    finally:
        ended.set()
        threads.close()


async def test_what_only_sleeps_is_given_no_turns() -> None:
    threads, ended = Threads("test-turns", 1), threading.Event()
    try:
        await until_none_is_planned()
        task = asyncio.ensure_future(threads.run(ended.wait, idle=True))
        for _ in range(100):
            await asyncio.sleep(0)
            assert not planned()
        ended.set()
        assert await task
    finally:
        ended.set()
        threads.close()


async def test_a_thread_that_is_left_behind_is_given_no_more() -> None:
    threads, ended = Threads("test-turns", 1), threading.Event()
    try:
        with pytest.raises(DeadlineExceeded):
            await threads.run(ended.wait, deadline=Deadline.after(0.01))
        await until_none_is_planned()
    finally:
        ended.set()
        threads.close()


async def test_a_loop_that_sleeps_by_itself_is_woken_up_ever_less() -> None:
    work: Future[None] = Future()
    _turns.give_turns(work)
    turns = _turns._of_loops[asyncio.get_running_loop()]
    async with asyncio.timeout(PATIENCE_S):
        while turns._intervals < _turns._MOST_INTERVALS:
            await asyncio.sleep(0.001)
        assert await busy_until(1)
        while turns._intervals > 1:
            await asyncio.sleep(0)
    work.set_result(None)
    await until_none_is_planned()


async def test_works_that_overlap_share_the_turns() -> None:
    works: list[Future[None]] = [Future(), Future()]
    for work in works:
        _turns.give_turns(work)
    assert await busy_until(3)
    works[0].set_result(None)
    assert await busy_until(3)
    works[1].cancel()
    await until_none_is_planned()


async def test_a_stage_is_given_turns() -> None:
    async with sidestream.AsyncStager(max_bytes_per_second=1 << 20) as stager:
        future = stager.stage({"w": torch.zeros(1 << 22)})
        assert await busy_until(3)
        await stager.synchronize_staging()  # hurries
        (await future).release()


def test_no_loop_is_needed_and_none_is_kept() -> None:
    _turns.give_turns(Future())

    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        _turns.give_turns(Future())  # never ends
        await asyncio.sleep(0.05)
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None


async def test_a_save_beside_a_busy_loop_ends(tmp_path: Path) -> None:
    state = {f"w{number}": torch.full((1 << 20,), float(number)) for number in range(8)}
    task = asyncio.ensure_future(sidestream.save(state, tmp_path / "c"))
    while not task.done():
        sum(range(2000))
        await asyncio.sleep(0)
    found = {name: torch.zeros(1 << 20) for name in state}
    await sidestream.load(found, tmp_path / "c")
    assert all(torch.equal(found[name], state[name]) for name in state)
    await until_none_is_planned()
