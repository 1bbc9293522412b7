"""Measure the memory that repeated operations leave while garbage collection is disabled."""

from __future__ import annotations

import asyncio
import gc
import shutil
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from keywords import for_save

import sidestream
from sidestream._runtime.threads import io_threads, read_threads, write_threads

KINDS = ("save", "save with a stager", "save by a process", "save of a run", "load", "restore", "stage", "verify")
WARM_UP = 30
STRETCHES = 3
MOST_OBJECTS = 2
"""For each operation."""


def small_state() -> dict[str, Any]:
    return {"w": torch.ones(100, 30), "b": torch.zeros(7), "lr": 0.1, "o": {"m": torch.zeros(50)}}


@asynccontextmanager
async def operation(kind: str, folder: Path) -> AsyncIterator[Callable[[int], Awaitable[Any]]]:
    """Return a function that repeats the operation ``kind`` for given numbers."""
    state = small_state()
    url = folder / "one"
    await sidestream.save(state, url, options=sidestream.SaveOptions(durability="flush"))
    async with (
        sidestream.AsyncStager() as stager,
        sidestream.Checkpointer(
            folder / "run", keep=sidestream.KeepLast(2), save=sidestream.SaveOptions(durability="flush")
        ) as checkpoints,
    ):
        await checkpoints.save(state, step=0)

        async def save(**options: Any) -> None:
            await sidestream.save(state, folder / "new", **for_save(durability="flush", **options))
            shutil.rmtree(folder / "new")

        async def save_in_run(number: int) -> None:
            await checkpoints.save(state, step=number + 1)

        async def stage() -> None:
            (await stager.stage(state)).release()

        operations: dict[str, Callable[[int], Awaitable[Any]]] = {
            "save": lambda _: save(),
            "save with a stager": lambda _: save(stager=stager),
            "save by a process": lambda _: save(stager=stager, options=sidestream.SaveOptions(writer="process")),
            "save of a run": save_in_run,
            "load": lambda _: sidestream.load(state, url),
            "restore": lambda _: checkpoints.restore(state),
            "stage": lambda _: stage(),
            "verify": lambda _: sidestream.verify(url),
        }
        yield operations[kind]


def objects() -> Counter[str]:
    return Counter(type(one).__name__ for one in gc.get_objects())


async def growth(kind: str, folder: Path, rounds: int) -> tuple[float, float, dict[str, int]]:
    """Return the growth of containers and of the interpreter's memory blocks per operation, and the types that have
    grown: those of the stretch of ``rounds`` with the least. A leak is in each stretch, while the cancelled timers that
    a loop keeps, up to 100, are in the first ones."""
    await _start_threads()
    async with operation(kind, folder) as once:
        for number in range(WARM_UP):
            await once(number)
        each = rounds // STRETCHES
        firsts = range(WARM_UP, WARM_UP + STRETCHES * each, each)
        return min([await _growth_of_stretch(once, first, each) for first in firsts], key=lambda found: max(found[:2]))


async def _start_threads() -> None:
    """Start those of the pools. On a busy machine hops happen to meet, and a pool starts a thread, in any stretch."""
    for pool in (io_threads(), read_threads(), write_threads()):
        count = min(pool._size, 16)
        everyone = threading.Barrier(count)
        await asyncio.gather(*(pool.run(everyone.wait) for _ in range(count)))


async def _growth_of_stretch(
    once: Callable[[int], Awaitable[Any]], first: int, rounds: int
) -> tuple[float, float, dict[str, int]]:
    gc.collect()
    gc.disable()
    try:
        before, after = objects(), objects()  # both, so that the blocks of a count are in each of the two sums
        blocks = sys.getallocatedblocks()
        for number in range(first, first + rounds):
            await once(number)
        after = objects()
    finally:
        gc.enable()
    gc.collect()  # it empties the interpreter's lists of spare tuples, which would be counted
    blocks = sys.getallocatedblocks() - blocks
    more = {name: count - before[name] for name, count in after.items() if count > before[name]}
    return (after.total() - before.total()) / rounds, blocks / rounds, more
