"""Cancelled at every await: nothing is left, and nothing is visible that is not whole."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from _cancelling import OPERATIONS, WAYS, Bench, cancelled, error_of, made, sweep, thrown
from _operations import Intercept, Operation
from _rows import Row

FEWEST_CANCELLED = {"save": 2, "async_save": 3}
"""Of other operations six trials at least end with a cancel. A save suspends four times or five: its thread does the
rest, and ``test_cancelled_while_a_thread_is_in_every_system_call`` has those points. A thread that ends before the loop
looks spares a suspension, and a cancel at the last one may come too late."""


@pytest.fixture
async def bench(place: Path) -> AsyncIterator[Bench]:
    async with made(place) as bench:
        yield bench


def told(counts: Row, results: Counter[str], violations: list[Any]) -> None:
    counts.trial("", violations, count=results.pop("points") + 1)
    counts.notes.update(results)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_interrupted_at_every_await(name: str, way: str, bench: Bench, row: Callable[..., Row]) -> None:
    counts = row("cancelled at every await", f"{name}, {way}")
    results, violations = await sweep(bench, OPERATIONS[name], WAYS[way], lambda at: {at})
    told(counts, results, violations)
    counts.end(at_least=4 if name in FEWEST_CANCELLED else 6)
    # anyio's scopes do not reach into a hop, and this one is nothing but hops: the cancel comes with the next await.
    fewest = 0 if (name, way) == ("open and metadata", "anyio scope") else FEWEST_CANCELLED.get(name, 6)
    assert results["CancelledError"] >= fewest, results


@pytest.mark.parametrize("name", OPERATIONS)
async def test_cancelled_twice_or_thrice(name: str, bench: Bench, row: Callable[..., Row]) -> None:
    counts = row("cancelled at every await", f"{name}, again and again")
    results, violations = await sweep(bench, OPERATIONS[name], cancelled, lambda at: {at, at + 1, at + 3})
    told(counts, results, violations)
    counts.end(at_least=4 if name in FEWEST_CANCELLED else 6)
    assert results["CancelledError"] >= FEWEST_CANCELLED.get(name, 6), results


@pytest.mark.parametrize("name", ["load", "restore", "open_checkpoint", "verify"])
async def test_a_cancel_thrown_into_the_coroutine(name: str, bench: Bench, row: Callable[..., Row]) -> None:
    """Without tasks of its own in between: a foreign driver (an async generator, another framework) does this."""
    counts = row("cancelled at every await", f"{name}, thrown")
    results, violations = await sweep(bench, OPERATIONS[name], thrown, lambda at: {at})
    told(counts, results, violations)
    counts.end(at_least=5)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "stage" not in name])
async def test_cancelled_while_a_thread_is_in_every_system_call(
    name: str, bench: Bench, row: Callable[..., Row]
) -> None:
    """The thread stays in its call until the cancel has long been delivered; the operation must not end before."""
    counts = row("cancelled in every system call", name)
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
                assert delivered.wait(120)
            return operation.call()

        intercept = Intercept(bench.folder, hook)
        with intercept.installed():
            running.append(asyncio.create_task(work(bench)))
            await asyncio.wait(running)
            going_on = intercept.running
            error = error_of(running[0])
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
    counts.notes.update(results)
    counts.trial("", violations, count=at)
    assert results["CancelledError"] >= (at - 2 if name != "delete" else 8)
    counts.end(at_least=8)
