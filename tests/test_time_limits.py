"""The deadline of a call reaches whatever works for it, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from sidestream._runtime.tasks import supervise
from sidestream._runtime.threads import Deadline, Stop, Threads, current_deadline, paced, time_limit
from sidestream._storage import locate_run
from sidestream.errors import DeadlineExceededError


def test_what_is_private_to_the_standard_library_is_there() -> None:
    """What is replaced in it has no effect in a Python that names it otherwise."""
    assert "_condition" in vars(Future())
    assert hasattr(asyncio.Task, "_log_destroy_pending")


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads("test-limits", 1)
    yield made
    made.close()


def deadline_here() -> Deadline | None:
    try:
        return current_deadline()
    except RuntimeError:
        return None


def until_stopped(stop: Stop) -> None:
    while True:
        stop.check()
        time.sleep(0.001)


async def test_work_that_is_submitted_says_what_it_was(threads: Threads) -> None:
    def endless() -> None:
        for _ in paced(itertools.count()):
            pass

    with time_limit(Deadline.after(0.05)):
        work = threads.submit(endless)
    with pytest.raises(DeadlineExceededError, match=r"^endless\(\)"):
        await asyncio.wrap_future(work)


async def test_it_reaches_threads_and_tasks(threads: Threads) -> None:
    async def look() -> Deadline | None:
        return deadline_here()

    with time_limit(deadline := Deadline.after(60)):
        assert await threads.run(deadline_here) is deadline
        assert threads.submit(deadline_here).result(60) is deadline
        assert await asyncio.create_task(look()) is deadline
    assert deadline_here() is None
    assert await threads.run(deadline_here) is None, "the thread does not keep it"


async def test_the_innermost_counts(threads: Threads) -> None:
    """To clean up takes time, also where the time of the operation is over."""
    with time_limit(Deadline.after(0.0)):
        with time_limit(Deadline.after(60)):
            assert await threads.run(divmod, 7, 2) == (3, 1)
        with time_limit(None):
            assert await threads.run(deadline_here) is None
        with pytest.raises(DeadlineExceededError):
            await threads.run(until_stopped, stop := Stop(), stop=stop)


async def test_what_outlives_the_call_is_not_limited_by_it() -> None:
    found: list[Deadline | None] = []

    async def look() -> None:
        found.append(deadline_here())

    with time_limit(Deadline.after(60)):
        task = supervise(look(), "test")
    await task
    assert found == [None]


def test_a_coroutine_that_is_closed_elsewhere() -> None:
    """A loop that has ended leaves coroutines behind, which the garbage collector closes in any context."""

    async def wait() -> None:
        with time_limit(Deadline.after(60)):
            await asyncio.sleep(3600)

    async def begin() -> None:
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0)
        assert not task.done()
        asyncio.get_running_loop().stop()

    waiting, loop = wait(), asyncio.new_event_loop()
    stopped = loop.create_task(begin())
    loop.run_forever()
    with time_limit(own := Deadline.after(30)):
        waiting.close()
        assert current_deadline() is own
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    del stopped
    loop.close()


async def test_a_store_is_not_asked_without_one(tmp_path: Path) -> None:
    store, _ = locate_run(tmp_path)
    with pytest.raises(RuntimeError, match="every wait on storage needs one"):
        await store.directories()
