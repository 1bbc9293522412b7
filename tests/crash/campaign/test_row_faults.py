"""An error, or a short transfer, at every file operation of saves and loads, once and from then on."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from _injecting import Bench, dead, forget_frames, late, late_and_dead, once, short, sticky
from _judge import Oracle
from _look import descriptors
from _operations import Intercept, Operation
from _rows import Row, Size, spread
from _seeded import blank_state, make_state, same

import sidestream
from sidestream import errors

SHORT, LONG = 1_500, 30_000

NUMBERS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
WRITING: list[tuple[Callable[[int, int], Any], int]] = [
    *((way, number) for way in (once, sticky) for number in NUMBERS),
    (dead, errno.EIO),
    (late, errno.EIO),
    (late_and_dead, errno.EIO),
    (once, errno.ENOENT),
    (once, errno.ESTALE),
    (short, 0),
    (short, 1),
]
READING: list[tuple[Callable[[int, int], Any], int]] = [
    *((way, number) for way in (once, dead) for number in (errno.EIO, errno.EACCES, errno.ENOENT, errno.ESTALE)),
    (short, 0),
    (short, 1),
]
SAVES = {"the next step": 2, "the same step again": 1}


@pytest.fixture
async def bench(place: Path, judge: Oracle) -> AsyncIterator[Bench]:
    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        bench = Bench(place, stager, judge)
        await bench.prepare()
        yield bench


def points(operations: int, ways: list[Any], total: int, size: Size, name: str) -> list[tuple[Any, int, int]]:
    """(way, number, at): every operation at least once, each way as often as the others, in an order by chance."""
    every = [(way, number, at) for way, number in ways for at in range(1, operations + 1)]
    size.random(name).shuffle(every)
    times = -(-total // len(every))
    return (every * times)[: max(total, operations)]


@pytest.mark.parametrize("name", SAVES)
async def test_a_save_with_a_fault_at_every_operation(
    name: str, bench: Bench, row: Callable[..., Row], size: Size
) -> None:
    step, counts = SAVES[name], row("faults", name)
    error, outcome, whole = await bench.save(Operation.call, step)
    assert (error, outcome) == (None, "committed")
    operations = [operation.name for operation in whole.log]
    assert {"open", "pwrite", "fsync", "rename", "mkdir", "chmod"} <= set(operations)
    total = spread(size.of(SHORT, LONG) * 3 // 5, SAVES)[name]
    for way, number, at in points(len(operations), WRITING, total, size, name):
        error, outcome, intercept = await bench.save(way(at, number), step)
        wrong = await bench.judge(error, outcome, removable=way not in (dead, late_and_dead), step=step)
        hit = intercept.log[at - 1] if len(intercept.log) >= at else None
        # The directory of leases comes and goes with the last of them: that it is missing is no fault. An attempt
        # without its lock is collected by its age.
        harmless = (
            way in (short, late, late_and_dead)
            or hit is None
            or (number == errno.ENOENT and "/.leases" in hit.path)
            or hit.path.endswith("/.writer.partial")
        )
        if error is None and not harmless and hit is not None and hit.changes:
            wrong.append("a fault that nobody was told of")
        if way is short and error is not None:
            wrong.append(f"a short transfer became {error!r}")
        counts.trial((way.__name__, errno.errorcode.get(number, number), at, operations[at - 1]), wrong)
        counts.note("acknowledged" if error is None else type(error).__name__)
    assert descriptors(bench.folder) == []
    counts.end(at_least=total)


# --- loading ----------------------------------------------------------------------------------------------------------


async def load(url: Path, state: dict[str, Any]) -> None:
    await sidestream.load(state, url)


async def load_atomic(url: Path, state: dict[str, Any]) -> None:
    await sidestream.load(state, url, options=sidestream.LoadOptions(atomic=True))


async def restore(url: Path, state: dict[str, Any]) -> None:
    async with sidestream.Checkpointer(url.parent) as checkpoints:
        if await checkpoints.restore(state) is None:
            raise errors.CheckpointNotFoundError("restore found nothing, and step 1 is there")


async def look_into(url: Path, state: dict[str, Any]) -> None:
    checkpoint = await sidestream.open_checkpoint(url)
    state.update(await checkpoint.state_dict())


LOADS: dict[str, Callable[[Path, dict[str, Any]], Coroutine[Any, Any, None]]] = {
    "load": load,
    "load, atomic": load_atomic,
    "restore": restore,
    "open_checkpoint": look_into,
}


@pytest.mark.parametrize("name", LOADS)
async def test_a_load_with_a_fault_at_every_operation(
    name: str, bench: Bench, row: Callable[..., Row], size: Size
) -> None:
    counts, work = row("faults", name), LOADS[name]
    url = bench.folder / "base" / "step-1"
    with Intercept(url.parent, Operation.call).installed() as whole:
        await work(url, blank_state())
    assert len(whole.log) >= 8
    total = spread(size.of(SHORT, LONG) - size.of(SHORT, LONG) * 3 // 5, LOADS)[name]
    for way, number, at in points(len(whole.log), READING, total, size, name):
        state = blank_state()
        error: Exception | None = None
        with Intercept(url.parent, way(at, number)).installed():
            try:
                await work(url, state)
            except Exception as failure:
                error = failure
        where = (way.__name__, errno.errorcode.get(number, number), at, whole.log[at - 1].name)
        counts.trial(where, judged(error, state, name, way))
        counts.note("loaded" if error is None else type(error).__name__)
        forget_frames(error)
    assert descriptors(bench.folder) == []
    counts.end(at_least=total)


def judged(error: Exception | None, state: dict[str, Any], name: str, way: Any) -> list[str]:
    if error is None:
        return [] if same(state, make_state(11)) else ["a silent failure"]
    wrong = [f"a short transfer became {error!r}"] if way is short else []
    if not isinstance(error, errors.SidestreamError):
        return [*wrong, f"untyped: {type(error).__name__}: {error}"]
    if not error.written and not same(state, blank_state()):
        wrong.append("the target was changed, and the error does not say so")
    if name == "load, atomic" and error.written:
        wrong.append(f"atomic, but {error.written} were written")
    return wrong
