"""Operations that are interrupted at every await, and what has to hold afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import torch
from _look import attempts_in, descriptors, look, seed_of
from _seeded import blank_state, make_state
from _stepping import busy_threads, owned_threads, stepped

import sidestream
from sidestream._engine.loop import operation_loop

MOST_POINTS = 2_000
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
        self.judging = False
        self.target = self.run / "step-1"
        self.before: set[asyncio.Task[Any]] = set()
        self.threads = frozenset(threading.enumerate())
        self.complaints: list[str] = []  # what asyncio would only log
        asyncio.get_running_loop().set_exception_handler(lambda _, what: self.complaints.append(str(what)))

    def begin(self) -> None:
        self.number += 1
        self.pending = None
        self.state = blank_state()
        self.before = asyncio.all_tasks() | set(asyncio.all_tasks(operation_loop()._loop))
        self.target = self.run / f"step-{self.number}"

    async def judge(self) -> list[str]:
        """What is wrong. The operation has ended, and nobody has waited for anything since."""
        self.judging = True
        # The task that has resolved the handle ends in the same step of its loop, which this one may be ahead of.
        loop = operation_loop()._loop
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
        left = asyncio.all_tasks() | set(asyncio.all_tasks(loop))
        wrong = [f"a task is left: {task}" for task in left - self.before]
        wrong += [f"a thread goes on: {where}" for where in busy_threads()]
        wrong += [f"a thread is left: {name}" for name in owned_threads(["sidestream-stage"], self.threads)]
        wrong += [f"open: {path}" for path in descriptors(self.folder)]
        wrong += [f"left behind: {path}" for path in (*attempts_in(self.folder), *self.run.glob(".leases/*"))]
        wrong += await not_returned(self.stager)
        wrong += self.complaints
        self.complaints.clear()
        self.judging = False  # what follows reads
        target = self.target
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
    end = time.monotonic() + 60.0
    while (leased := stager.statistics().leased_bytes) and time.monotonic() < end:
        await asyncio.sleep(0.0005)
    return [f"{leased} bytes are still leased"] if leased else []


@asynccontextmanager
async def made(folder: Path) -> AsyncIterator[Bench]:
    """A bench whose run has step 1."""
    async with sidestream.AsyncStager(budget_bytes=64 << 20) as stager:
        bench = Bench(folder, stager)
        async with sidestream.Checkpointer(bench.run, stager=stager) as checkpoints:
            await checkpoints.save(make_state(1), step=1)
        yield bench


# --- what is interrupted ----------------------------------------------------------------------------------------------


async def save(bench: Bench) -> None:
    bench.target = bench.folder / "plain" / str(bench.number)
    await sidestream.save(make_state(bench.number), bench.target, stager=bench.stager)


async def async_save(bench: Bench) -> None:
    """Whoever is cancelled here cancels the save, and waits for its end."""
    bench.target = bench.folder / "plain" / str(bench.number)
    bench.pending = pending = sidestream.async_save(make_state(bench.number), bench.target, stager=bench.stager)
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
        bench.pending = checkpoints.async_save(make_state(bench.number), step=bench.number)


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
    await sidestream.load(bench.state, bench.run / "step-1", options=sidestream.LoadOptions(atomic=True))


async def restore(bench: Bench) -> None:
    async with sidestream.Checkpointer(bench.run, stager=bench.stager) as checkpoints:
        await checkpoints.restore(bench.state, 1)


async def verify(bench: Bench) -> None:
    report = await sidestream.verify(bench.run / "step-1")
    assert report.ok


async def verify_step(bench: Bench) -> None:
    async with sidestream.Checkpointer(bench.run, stager=bench.stager) as checkpoints:
        assert (await checkpoints.verify(1)).ok


async def delete(bench: Bench) -> None:
    """Saves after which an older step goes, and a pass of its own."""
    run, keep = bench.folder / "pruned" / str(bench.number), sidestream.KeepLast(1)
    async with sidestream.Checkpointer(
        run, stager=bench.stager, keep=keep, save=sidestream.SaveOptions(durability="flush")
    ) as checkpoints:
        for step in (1, 2):
            await checkpoints.save({"weight": torch.zeros(8)}, step=step)
        await checkpoints.prune()


async def leased(bench: Bench) -> None:
    async with sidestream.Checkpointer(bench.run, stager=bench.stager) as checkpoints:
        async with checkpoints.reading(1) as checkpoint:
            await checkpoint.value("optimizer.lr")
        await checkpoints.read_metadata(1)
        await checkpoints.steps()


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
    "verify": verify,
    "Checkpointer.verify": verify_step,
    "delete": delete,
    "open and metadata": leased,
}

# --- how --------------------------------------------------------------------------------------------------------------


async def cancelled(bench: Bench, work: Work, at: set[int]) -> tuple[BaseException | None, int]:
    task, steps = await stepped(work(bench), at, lambda task: task.cancel())
    return error_of(task), steps.fired


async def thrown(bench: Bench, work: Work, at: set[int]) -> tuple[BaseException | None, int]:
    """Thrown in by whoever drives the coroutine, as a task does, but without a ``Task.cancel()`` that could be seen."""
    task, steps = await stepped(work(bench), at, None)
    return error_of(task), steps.fired


async def timed_out(bench: Bench, work: Work, at: set[int]) -> tuple[BaseException | None, int]:
    timeout = asyncio.timeout(None)

    async def bounded() -> None:
        async with timeout:
            await work(bench)

    task, steps = await stepped(bounded(), at, lambda _: timeout.expired() or _expire(timeout))
    error = error_of(task)
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
    error = error_of(task)
    return (asyncio.CancelledError() if error is None and scope.cancelled_caught else error), steps.fired


def error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


WAYS = {"cancel": cancelled, "timeout": timed_out, "anyio scope": left_scope}


async def sweep(
    bench: Bench, work: Work, way: Any, points: Callable[[int], set[int]]
) -> tuple[Counter[str], list[Any]]:
    """``work`` again and again, interrupted at one await after the other: how each ended, and what was wrong."""
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
        if at > MOST_POINTS:
            violations.append(f"it does not end after {at} awaits")
            break
    bench.begin()
    await work(bench)
    violations += [("afterwards", one) for one in await bench.judge()]
    found = await look(bench.run)
    violations += found.violations
    violations += [] if found.seeds.get("step-1") == 1 else ["step-1 is gone"]
    results["points"] = at - 1
    return results, violations
