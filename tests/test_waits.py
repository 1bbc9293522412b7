"""How long saves hold up their callers: each kind of wait is produced on purpose, and measured from outside too."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GatedEngine
from phases import watched

import sidestream
from sidestream import events
from sidestream._run.saves import QueueEntry, SaveQueue
from sidestream.events import CallerWaited
from sidestream.observability import Costs

HELD_S = 1.0


def state() -> dict[str, Any]:
    return {f"w{number}": torch.ones(1 << 16) for number in range(8)}


class Outside:
    """The time that callers were held up, by the clock of the test."""

    seconds = 0.0

    @contextmanager
    def waits(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began

    def measure(self, call: Callable[[], object]) -> None:
        with self.waits():
            call()


async def warm(engine: GatedEngine, stager: sidestream.AsyncStager, state: dict[str, Any]) -> None:
    """Map the memory that a stage needs: making it is a wait for memory too, and takes what the machine makes of it."""
    engine.gate.set()
    (await stager.stage(state)).release()
    engine.gate.clear()


def later(action: Callable[[], object]) -> None:
    """Do ``action`` in a thread, so long from now that the wait can be measured."""
    timer = threading.Timer(HELD_S, action)
    timer.daemon = True
    timer.start()


def alike(seen: list[CallerWaited], outside: Outside, **reasons: float) -> None:
    """Compare the sum of the waits with the clock of the test, and their reasons with the ones that were produced.

    The sum is never more than that clock, and may be less by what a busy machine takes around a wait."""
    assert 0.5 * HELD_S <= sum(event.seconds for event in seen) <= outside.seconds
    for event in seen:
        assert sum(event.waited_for.values()) <= event.seconds * 1.001
    for reason, least in reasons.items():
        assert sum(event.waited_for.get(reason, 0.0) for event in seen) >= least  # type: ignore[call-overload]


@pytest.mark.parametrize("how", ["fence", "guard"])
async def test_a_thread_at_the_fence_waits_for_copies(how: str) -> None:
    engine, outside = GatedEngine(), Outside()
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(100)
    async with sidestream.AsyncStager(engine=engine) as stager:
        await warm(engine, stager, {"w": weight})
        optimizer.step()  # the first step imports
        handle = stager.guard(optimizer)
        with watched(CallerWaited) as seen, Costs() as costs:
            staged = stager.stage({"w": weight})
            later(engine.gate.set)
            await asyncio.to_thread(outside.measure, stager.fence if how == "fence" else optimizer.step)
        handle.remove()
        await staged
    assert [(event.cause, event.save) for event in seen] == [("fence", None)]
    alike(seen, outside, copies=0.5 * HELD_S)
    assert costs.report().seconds["fence"] == pytest.approx(sum(event.seconds for event in seen), rel=0.001)


async def test_a_task_waits_for_copies() -> None:
    engine, outside = GatedEngine(), Outside()
    async with sidestream.AsyncStager(engine=engine) as stager:
        await warm(engine, stager, state())
        with watched(CallerWaited) as seen:
            staged = stager.stage(state())
            later(engine.gate.set)
            with outside.waits():
                await stager.synchronize_staging()
        await staged
    assert [event.cause for event in seen] == ["staged"]
    alike(seen, outside, copies=0.5 * HELD_S)


@pytest.mark.parametrize("how", ["fence", "synchronize_staging"])
async def test_a_caller_waits_for_memory(how: str) -> None:
    outside = Outside()
    async with sidestream.AsyncStager(budget_bytes=3 << 20) as stager:
        held = await stager.stage(state())
        with watched(CallerWaited) as seen:
            second = stager.stage(state())
            later(held.release)
            if how == "fence":
                await asyncio.to_thread(outside.measure, stager.fence)
            else:
                with outside.waits():
                    await stager.synchronize_staging()
        (await second).release()
    alike(seen, outside, memory=0.5 * HELD_S)


async def test_a_save_waits_for_a_slot(tmp_path: Path) -> None:
    """The first save keeps its only slot while an observer holds up its commit."""
    goes_on, outside = threading.Event(), Outside()

    def hold(event: events.Event) -> None:
        if isinstance(event, events.SaveWritten) and event.save.step == 1:
            assert goes_on.wait(60)

    async with sidestream.Checkpointer(tmp_path, slots=1) as checkpoints:
        with events.observe(hold), watched(CallerWaited) as seen:
            first = checkpoints.async_save(state(), step=1)
            await first.staged
            del seen[:]
            second = checkpoints.async_save(state(), step=2)
            calls = [event for event in seen if event.cause == "call"]
            later(goes_on.set)
            with outside.waits():
                await second.staged
            await asyncio.gather(first, second)
    (waited,) = [event for event in seen if event.cause == "staged"]
    assert waited.save is not None
    assert (waited.save.step, waited.save.run) == (2, str(tmp_path))
    alike([waited], outside, slot=0.5 * HELD_S)
    assert all("slot" not in event.waited_for for event in calls)


async def test_a_save_of_a_run_waits_for_copies(tmp_path: Path) -> None:
    engine, outside, values = GatedEngine(), Outside(), state()
    async with sidestream.AsyncStager(engine=engine) as stager:
        await warm(engine, stager, values)
        async with sidestream.Checkpointer(tmp_path, stager=stager) as checkpoints:
            with watched(CallerWaited) as seen:
                pending = checkpoints.async_save(values, step=1)
                later(engine.gate.set)
                with outside.waits():
                    await pending.staged
                await pending
    alike([event for event in seen if event.cause == "staged"], outside, copies=0.5 * HELD_S)


async def test_a_free_slot_is_no_reason_to_wait() -> None:
    """What a save with a slot waits for, until the loop begins with it, is no slot."""
    queue = SaveQueue(1)
    first, second = QueueEntry(queue, "wait"), QueueEntry(queue, "wait")
    for one in (first, second):
        one.join()
        one.request_slot()
    assert (first.reasons.now, second.reasons.now) == (None, "slot")
    first.release()
    assert second.reasons.now is None
    second.release()


@pytest.mark.parametrize("in_run", [False, True])
async def test_the_call_of_an_eager_stager_waits_for_copies(in_run: bool, tmp_path: Path) -> None:
    engine, outside, values = GatedEngine(), Outside(), state()
    async with sidestream.AsyncStager(engine=engine, mode="eager") as stager:
        await warm(engine, stager, values)
        async with sidestream.Checkpointer(tmp_path / "run", stager=stager) as checkpoints:
            with watched(CallerWaited) as seen:
                later(engine.gate.set)
                with outside.waits():
                    if in_run:
                        pending = checkpoints.async_save(values, step=1)
                    else:
                        pending = sidestream.async_save(values, tmp_path / "a", stager=stager)
            await pending
    assert [event.cause for event in seen] == ["call"]
    assert seen[0].save is not None
    assert seen[0].save.url == str(tmp_path / ("run/step-1" if in_run else "a"))
    alike(seen, outside, copies=0.5 * HELD_S)


async def test_a_wait_in_a_thread_and_one_that_is_cancelled_count(tmp_path: Path) -> None:
    engine, outside = GatedEngine(), Outside()
    async with sidestream.AsyncStager(engine=engine) as stager:
        await warm(engine, stager, state())
        with watched(CallerWaited) as seen:
            pending = sidestream.async_save(state(), tmp_path / "a", stager=stager)
            del seen[:]
            with outside.waits(), pytest.raises(TimeoutError):
                async with asyncio.timeout(HELD_S):
                    await pending.staged
            later(engine.gate.set)
            await asyncio.to_thread(outside.measure, pending.staged.result)
        await pending
    assert [event.cause for event in seen] == ["staged", "staged"]
    alike(seen, outside, copies=HELD_S)


async def test_what_is_short_is_not_emitted() -> None:
    async with sidestream.AsyncStager() as stager:
        await stager.stage(state())
        with watched(CallerWaited) as seen:
            for _ in range(100):
                stager.fence()
            await stager.synchronize_staging()
    assert all(event.seconds >= 1e-4 for event in seen)
    assert len(seen) < 50  # a thread may lose the processor in the middle


async def test_a_second_in_which_several_callers_wait_counts_once(tmp_path: Path) -> None:
    engine, outside = GatedEngine(), Outside()
    async with sidestream.AsyncStager(engine=engine) as stager:
        with Costs() as costs, watched(CallerWaited) as seen:
            pending = sidestream.async_save(state(), tmp_path / "a", stager=stager)
            tasks = [asyncio.ensure_future(pending.staged) for _ in range(3)]
            later(engine.gate.set)
            with outside.waits():
                await asyncio.gather(*tasks)
            await pending
        report = costs.report()
    assert [event.cause for event in seen].count("staged") == 3
    assert 0.5 * HELD_S <= report.seconds["staged"] <= outside.seconds
    assert sum(report.waited_for.values()) <= report.lost_s * 1.001


async def test_a_pass_of_pruning_is_an_event(tmp_path: Path) -> None:
    with watched(events.RunPruned) as seen:
        async with sidestream.Checkpointer(tmp_path, keep=sidestream.KeepLast(1)) as checkpoints:
            for step in (1, 2):
                await checkpoints.save(state(), step=step)
    assert [(event.run, event.deleted, event.damaged) for event in seen] == [(str(tmp_path), ("step-1",), ())]


async def test_saves_and_restores_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "sidestream"):
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            await checkpoints.save(state(), step=1)
            await checkpoints.restore(state())
            await sidestream.load(state(), tmp_path / "step-1")
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO" and "bytes" in record.msg]
    assert [line.partition(" in ")[0].split()[-1] for line in lines] == ["committed", "restored"]
