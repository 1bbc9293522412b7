"""Cancelling in particular cases; at every await: ``campaign/test_row_cancel.py``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
from _cancelling import Bench, load, made, not_returned
from _look import attempts_in, descriptors
from _operations import Intercept, Operation
from _seeded import make_state, same
from _stepping import busy_threads, stepped

import sidestream


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with made(tmp_path) as bench:
        yield bench


# --- particular cases -------------------------------------------------------------------------------------------------


async def test_cancelled_before_its_first_step(bench: Bench) -> None:
    bench.begin()
    bench.pending = pending = sidestream.async_save(make_state(2), bench.run / "step-2", stager=bench.stager)
    assert pending.cancel() is True
    with pytest.raises(asyncio.CancelledError):
        await pending
    await pending.staged
    await pending.ended()
    assert pending.outcome == "absent"
    assert pending.cancel() is False
    assert await bench.judge() == []


async def test_a_cancelled_awaiter_does_not_cancel_the_save(bench: Bench) -> None:
    async def one(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    bench.begin()
    goes_on = threading.Event()
    options = sidestream.SaveOptions(names=lambda name: name if goes_on.wait(60) else None)
    bench.pending = pending = sidestream.async_save(
        make_state(2), bench.run / "step-2", stager=bench.stager, options=options
    )
    awaiters = [asyncio.create_task(one(what)) for what in (pending, pending.staged, pending)]
    await asyncio.sleep(0)
    for awaiter in awaiters[:2]:
        awaiter.cancel()
    goes_on.set()
    gathered = await asyncio.gather(*awaiters, return_exceptions=True)
    assert [type(each) for each in gathered] == [asyncio.CancelledError, asyncio.CancelledError, sidestream.SaveInfo]
    assert await pending == gathered[2]
    assert pending.outcome == "committed"
    assert await bench.judge() == []


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
@pytest.mark.parametrize("owner", ["caller", "save"])
def test_a_loop_that_ends_with_a_save_in_flight(turns: int, owner: str, tmp_path: Path) -> None:
    told: list[Any] = []

    async def main(stager: sidestream.AsyncStager | None) -> None:
        told.append(sidestream.async_save(make_state(2), tmp_path / "run" / "step-2", stager=stager))
        for _ in range(turns):
            await asyncio.sleep(0)

    stager = sidestream.AsyncStager() if owner == "caller" else None
    asyncio.run(main(stager))
    (pending,) = told
    assert pending.result(60).url == str(tmp_path / "run" / "step-2")
    assert attempts_in(tmp_path) == []
    assert descriptors(tmp_path) == []
    assert busy_threads() == []
    if stager is not None:
        stager.close()
        assert asyncio.run(not_returned(stager)) == []


@pytest.mark.parametrize("at", range(1, 30, 4))
def test_a_loop_that_ends_while_a_thread_writes(at: int, tmp_path: Path) -> None:
    told: list[Any] = []
    reached = threading.Event()

    def hook(operation: Operation) -> Any:
        if operation.index == at:
            reached.set()
        return operation.call()

    async def main(stager: sidestream.AsyncStager) -> None:
        told.append(sidestream.async_save(make_state(2), tmp_path / "run" / "step-2", stager=stager))
        while not reached.is_set():
            await asyncio.sleep(0)

    stager = sidestream.AsyncStager()
    with Intercept(tmp_path, hook).installed() as intercept:
        asyncio.run(main(stager))
        (pending,) = told
        pending.result(60)
        assert intercept.running == 0
    assert attempts_in(tmp_path) == []
    assert pending.outcome == "committed"
    stager.close()
    assert asyncio.run(not_returned(stager)) == []


async def test_a_load_that_was_cancelled_can_be_repeated(bench: Bench) -> None:
    task, _ = await stepped(load(bench), {9}, lambda task: task.cancel())
    assert task.cancelled()
    await load(bench)
    assert same(bench.state, make_state(1))
