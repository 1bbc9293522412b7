"""Cancelled at every await: nothing is left, and nothing is visible that is not whole."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from _faults import Intercept, Operation, attempts_in, blank_state, descriptors, look, make_state, same, seed_of
from _stepping import busy_threads, owned_threads, stepped

import sidestream
from sidestream import errors

Work = Callable[["Bench"], Coroutine[Any, Any, Any]]


class Bench:
    """A run with step 1, where an operation is interrupted, and what has to hold afterwards."""

    def __init__(self, folder: Path, stager: sidestream.AsyncStager) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.stager = stager
        self.pending: sidestream.PendingSave | None = None
        self.state: dict[str, Any] = blank_state()
        self.number = 1
        self.before: set[asyncio.Task[Any]] = set()
        self.complaints: list[str] = []  # what asyncio would only log
        asyncio.get_running_loop().set_exception_handler(lambda _, what: self.complaints.append(str(what)))

    def begin(self) -> None:
        self.number += 1
        self.pending = None
        self.state = blank_state()
        self.before = asyncio.all_tasks()

    async def judge(self) -> list[str]:
        """What is wrong. The operation has ended, and nobody has waited for anything since."""
        wrong = [f"a task is left: {task}" for task in asyncio.all_tasks() - self.before]
        wrong += [f"a thread goes on: {where}" for where in busy_threads()]
        wrong += [f"a thread is left: {name}" for name in owned_threads(besides=["sidestream-stage"])]
        wrong += [f"open: {path}" for path in descriptors(self.folder)]
        wrong += [f"left behind: {path}" for path in attempts_in(self.folder)]
        wrong += await not_returned(self.stager)
        wrong += self.complaints
        self.complaints.clear()
        target = self.run / f"step-{self.number}"
        if self.pending is not None and not self.pending.done():
            wrong.append("the save has not ended")
        outcome = self.pending.outcome if self.pending is not None else None
        if target.exists():
            if outcome not in ("committed", None):
                wrong.append(f"visible, but the outcome is {outcome}")
            if await seed_of(target) != self.number:
                wrong.append("visible, and not what was saved")
        elif outcome == "committed":
            wrong.append("committed, and not visible")
        return wrong


async def not_returned(stager: sidestream.AsyncStager) -> list[str]:
    """What is leased once a stage that nobody awaits has ended and reference cycles have been collected."""
    gc.collect()
    end = time.monotonic() + 5.0
    while (leased := stager.statistics().leased_bytes) and time.monotonic() < end:
        await asyncio.sleep(0.0005)
    return [f"{leased} bytes are still leased"] if leased else []


@pytest.fixture
async def bench(tmp_path: Path) -> Any:
    async with sidestream.AsyncStager(budget_bytes=64 << 20) as stager:
        bench = Bench(tmp_path, stager)
        async with sidestream.Checkpointer(bench.run, stager=stager) as checkpoints:
            await (await checkpoints.save(make_state(1), step=1))
        yield bench


# --- what is interrupted ----------------------------------------------------------------------------------------------


async def save(bench: Bench) -> None:
    await sidestream.save(make_state(bench.number), bench.run / f"step-{bench.number}", stager=bench.stager)


async def async_save(bench: Bench) -> None:
    """Whoever is cancelled here cancels the save, and waits for its end."""
    url = bench.run / f"step-{bench.number}"
    bench.pending = pending = sidestream.async_save(make_state(bench.number), url, stager=bench.stager)
    try:
        await pending.staged
        await pending
    finally:
        pending.cancel()
        while not pending.done():
            with contextlib.suppress(asyncio.CancelledError), anyio.CancelScope(shield=True):
                await pending.ended()


async def checkpointer_save(bench: Bench) -> None:
    """``aclose`` waits for the save, cancelled or not."""
    async with sidestream.Checkpointer(bench.run, stager=bench.stager) as checkpoints:
        bench.pending = await checkpoints.save(make_state(bench.number), step=bench.number)


async def stage(bench: Bench) -> None:
    """Who is cancelled here cancels no copy; its memory comes back with the last reference."""
    for _ in range(8):
        future = bench.stager.stage(make_state(bench.number))
        try:
            await bench.stager.synchronize_staging()
            (await future).release()
        finally:
            del future  # whoever keeps the error keeps this frame


async def own_stager(bench: Bench) -> None:
    for _ in range(3):
        async with sidestream.AsyncStager(budget_bytes=64 << 20) as stager:
            await stager.prewarm(make_state(bench.number))
            waiting = stager.stage(make_state(bench.number))
            (await stager.stage(make_state(bench.number))).release()
        (await waiting).release()


async def load(bench: Bench) -> None:
    await sidestream.load(bench.state, bench.run / "step-1")


async def load_atomic(bench: Bench) -> None:
    await sidestream.load(bench.state, bench.run / "step-1", atomic=True)


async def restore(bench: Bench) -> None:
    async with sidestream.Checkpointer(bench.run, stager=bench.stager) as checkpoints:
        await checkpoints.restore(bench.state, 1)


async def look_into(bench: Bench) -> None:
    checkpoint = await sidestream.open_checkpoint(bench.run / "step-1")
    await checkpoint.tensor("model.weight")
    await checkpoint.tensor("model.weight", slice(3, 9))
    await checkpoint.value("optimizer.lr")
    await checkpoint.state_dict()


OPERATIONS: dict[str, Work] = {
    "save": save,
    "async_save": async_save,
    "Checkpointer.save and aclose": checkpointer_save,
    "stage": stage,
    "a stager of its own, and aclose": own_stager,
    "load": load,
    "load, atomic": load_atomic,
    "restore": restore,
    "open_checkpoint": look_into,
}

# --- how --------------------------------------------------------------------------------------------------------------


async def cancelled(bench: Bench, work: Work, at: set[int]) -> tuple[BaseException | None, int]:
    task, steps = await stepped(work(bench), at, lambda task: task.cancel())
    return _error(task), steps.fired


async def thrown(bench: Bench, work: Work, at: set[int]) -> tuple[BaseException | None, int]:
    """Thrown in by whoever drives the coroutine, as a task does, but without a ``Task.cancel()`` that could be seen."""
    task, steps = await stepped(work(bench), at, None)
    return _error(task), steps.fired


async def timed_out(bench: Bench, work: Work, at: set[int]) -> tuple[BaseException | None, int]:
    timeout = asyncio.timeout(None)

    async def bounded() -> None:
        async with timeout:
            await work(bench)

    task, steps = await stepped(bounded(), at, lambda _: timeout.expired() or _expire(timeout))
    error = _error(task)
    assert not isinstance(error, asyncio.CancelledError)
    return (asyncio.CancelledError() if type(error) is TimeoutError else error), steps.fired


def _expire(timeout: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # it has not been entered yet, or has been left
        timeout.reschedule(0)


async def left_scope(bench: Bench, work: Work, at: set[int]) -> tuple[BaseException | None, int]:
    """anyio cancels again and again, at every await in the scope, until it is left."""
    scope = anyio.move_on_after(600)

    async def scoped() -> None:
        with scope:
            await work(bench)

    task, steps = await stepped(scoped(), at, lambda _: scope.cancel())
    error = _error(task)
    return (asyncio.CancelledError() if error is None and scope.cancelled_caught else error), steps.fired


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


WAYS = {"cancel": cancelled, "timeout": timed_out, "anyio scope": left_scope}


async def sweep(bench: Bench, work: Work, way: Any, points: Callable[[int], set[int]]) -> Counter[str]:
    results: Counter[str] = Counter()
    violations: list[Any] = []
    at = 0
    while True:
        at += 1
        bench.begin()
        error, fired = await way(bench, work, points(at))
        results[type(error).__name__ if error else "ended"] += 1
        violations += [(at, one) for one in await bench.judge()]
        if error is not None and not isinstance(error, asyncio.CancelledError):
            violations.append((at, repr(error)))
        del error
        if not fired:
            break
    bench.begin()
    await work(bench)
    violations += [("afterwards", one) for one in await bench.judge()]
    found = await look(bench.run)
    assert violations + found.violations == []
    assert found.seeds["step-1"] == 1
    results["points"] = at - 1
    return results


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_interrupted_at_every_await(name: str, way: str, bench: Bench) -> None:
    results = await sweep(bench, OPERATIONS[name], WAYS[way], lambda at: {at})
    print(f"{name}, {way}: {dict(results)}")
    assert results["points"] >= 8
    assert results["CancelledError"] >= 6


@pytest.mark.parametrize("name", OPERATIONS)
async def test_cancelled_twice_or_thrice(name: str, bench: Bench) -> None:
    results = await sweep(bench, OPERATIONS[name], cancelled, lambda at: {at, at + 1, at + 3})
    print(f"{name}, again and again: {dict(results)}")
    assert results["CancelledError"] >= 6


@pytest.mark.parametrize("name", ["load", "restore", "open_checkpoint"])
async def test_a_cancel_thrown_into_the_coroutine(name: str, bench: Bench) -> None:
    """Without tasks of its own in between: a foreign driver (an async generator, another framework) does this."""
    results = await sweep(bench, OPERATIONS[name], thrown, lambda at: {at})
    print(f"{name}, thrown: {dict(results)}")
    assert results["points"] >= 5


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "stage" not in name])
async def test_cancelled_while_a_thread_is_in_every_system_call(name: str, bench: Bench) -> None:
    """The thread stays in its call until the cancel has long been delivered; the operation must not end before."""
    work = OPERATIONS[name]
    loop = asyncio.get_running_loop()
    results: Counter[str] = Counter()
    violations: list[Any] = []
    at = 0
    while True:
        at += 1
        bench.begin()
        delivered = threading.Event()
        reached: list[str] = []
        running: list[asyncio.Task[Any]] = []

        async def cancel_and_wait(task: asyncio.Task[Any], delivered: threading.Event = delivered) -> None:
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            delivered.set()

        def hook(
            operation: Operation,
            at: int = at,
            reached: list[str] = reached,
            delivered: threading.Event = delivered,
            running: list[asyncio.Task[Any]] = running,
        ) -> Any:
            if operation.index == at:
                reached.append(operation.name)
                asyncio.run_coroutine_threadsafe(cancel_and_wait(running[0]), loop)
                assert delivered.wait(30)
            return operation.call()

        intercept = Intercept(bench.run, hook)
        with intercept.installed():
            running.append(asyncio.create_task(work(bench)))
            await asyncio.wait(running)
            going_on = intercept.running
            error = _error(running[0])
            running.clear()
            if reached and not delivered.is_set():
                violations.append((at, reached, "ended before the cancel was delivered"))
                while not delivered.is_set():
                    await asyncio.sleep(0)
        if going_on:
            violations.append((at, reached, f"{going_on} system calls go on"))
        if error is not None and not isinstance(error, asyncio.CancelledError):
            violations.append((at, reached, repr(error)))
        results[type(error).__name__ if error else "ended"] += 1
        violations += [(at, reached, one) for one in await bench.judge()]
        if not reached:
            break
    print(f"{name}: {at - 1} system calls, {dict(results)}")
    assert violations == []
    assert at > 8
    assert results["CancelledError"] >= at - 2


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
    bench.pending = pending = sidestream.async_save(make_state(2), bench.run / "step-2", stager=bench.stager)
    awaiters = [asyncio.create_task(one(what)) for what in (pending, pending.staged, pending)]
    await asyncio.sleep(0)
    for awaiter in awaiters[:2]:
        awaiter.cancel()
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
    assert pending.done()
    assert pending.outcome == "absent"
    assert isinstance(pending.unheard, errors.Aborted)
    assert not (tmp_path / "run" / "step-2").exists()
    assert attempts_in(tmp_path) == []
    assert descriptors(tmp_path) == []
    assert busy_threads() == []
    if stager is not None:
        stager.close()
        assert asyncio.run(not_returned(stager)) == []
    pending.hear()


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
        assert intercept.running == 0
    (pending,) = told
    assert pending.done()
    assert isinstance(pending.unheard, errors.Aborted)
    assert attempts_in(tmp_path) == []
    assert (pending.outcome == "committed") == (tmp_path / "run" / "step-2").exists()
    assert pending.outcome in ("committed", "absent")
    assert str(pending.outcome) in str(pending.unheard)
    stager.close()
    assert asyncio.run(not_returned(stager)) == []
    pending.hear()


async def test_a_load_that_was_cancelled_can_be_repeated(bench: Bench) -> None:
    task, _ = await stepped(load(bench), {9}, lambda task: task.cancel())
    assert task.cancelled()
    await load(bench)
    assert same(bench.state, make_state(1))
