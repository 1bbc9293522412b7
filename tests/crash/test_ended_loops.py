"""Event loops that end with operations in flight, in another way than in ``asyncio.run``."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from _look import attempts_in, descriptors
from _operations import Intercept, Operation, exists
from _seeded import blank_state, make_state, same
from _stepping import in_pools

import sidestream
from sidestream import errors
from sidestream._convert import streamed
from sidestream._runtime import abandoned, threads
from sidestream._save import writer
from sidestream._staging import cached
from sidestream._worker.client import close_all, worker_for

PATIENCE_S = 60.0
MIB = 1 << 20


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "still not so"
        time.sleep(0.005)


OF_THE_PROCESS = frozenset(
    f"sidestream-{name}" for name in ("exit", "io", "ranks", "read", "saver", "storage", "unmap", "watch", "write")
)


def ours() -> list[str]:
    """Return the threads that work for one operation: those of its own, and those of a shared pool that are busy."""
    names = [thread.name for thread in threading.enumerate()]
    own = [name for name in names if name.startswith("sidestream") and name not in OF_THE_PROCESS]
    return own + list(in_pools().values())


def closed(begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of ``begin()`` on a loop that is closed right afterwards, with operations in flight."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(begin())
    finally:
        loop.close()


def mapped_bytes() -> int:
    """Anonymous memory of this process, as the kernel counts it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def leases_in(run: Path) -> list[str]:
    try:
        return os.listdir(run / ".leases")
    except FileNotFoundError:
        return []


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="sidestream")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "sidestream"]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    cached.close_all()  # of earlier tests
    yield
    cached.close_all()
    until(lambda: not ours())


async def plain(url: Path) -> sidestream.PendingSave:
    return sidestream.async_save(make_state(2), url)


async def by_process(url: Path) -> sidestream.PendingSave:
    return sidestream.async_save(make_state(2), url, options=sidestream.SaveOptions(writer="process"))


async def in_a_task_of_its_own(url: Path) -> sidestream.PendingSave:
    """Begin a save and return when it has been waiting for a thread for a while."""
    pending = sidestream.async_save(make_state(2), url)
    for _ in range(3):
        await asyncio.sleep(0)
    return pending


@pytest.mark.parametrize("begin", [plain, in_a_task_of_its_own, by_process])
def test_closed_under_saves(
    begin: Callable[[Path], Coroutine[Any, Any, sidestream.PendingSave]],
    tmp_path: Path,
    lines: Callable[[], list[str]],
) -> None:
    saves = 10
    pendings = [closed(lambda url=tmp_path / f"step-{number}": begin(url)) for number in range(saves)]
    until(lambda: all(pending.done() for pending in pendings))
    assert attempts_in(tmp_path) == []
    until(lambda: not ours())
    for pending in pendings:
        assert pending.outcome == "absent"
        assert not Path(pending.url).exists()
        assert sum(pending.url in line for line in lines()) == 1
    assert len(lines()) == saves
    assert all("its event loop was closed" in line and "outcome: absent" in line for line in lines())
    assert descriptors(tmp_path) == []
    close_all()


def test_closed_under_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    """The checkpoint is committed, and what the export has written is removed."""
    going, over = threading.Event(), threading.Event()
    take = streamed._StreamedFile.take

    def slow(self: Any, number: int, stop: Any) -> Any:
        going.set()
        assert over.wait(PATIENCE_S)
        return take(self, number, stop)

    monkeypatch.setattr(streamed._StreamedFile, "take", slow)

    async def begin() -> sidestream.PendingSave:
        pending = sidestream.async_save(make_state(2), tmp_path / "step-1", export=sidestream.HF(tmp_path / "hf"))
        await pending
        assert await asyncio.to_thread(going.wait, PATIENCE_S)
        return pending

    pending = closed(begin)
    over.set()
    until(lambda: pending.exports[0].done() and "sidestream-export" not in ours())
    cached.close_all()
    until(lambda: not ours())
    assert isinstance(pending.exports[0].report_or_error(), errors.SaveAbortedError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"]
    assert sum("hf" in line for line in lines()) == 1


def test_its_error_says_so(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    pending = closed(lambda: plain(tmp_path / "step-1"))
    until(pending.done)
    assert pending.cancel() is False

    async def hear() -> None:
        await pending.ended()
        with pytest.raises(errors.SaveAbortedError, match=r"event loop was closed .*outcome: absent"):
            await pending
        await pending.staged

    asyncio.run(hear())


def test_memory_comes_back(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    state = {"w": torch.ones(4 * MIB)}  # 16 MiB

    async def begin(url: Path) -> sidestream.PendingSave:
        pending = sidestream.async_save(state, url)
        await pending.staged
        return pending

    pendings = []
    before = 0
    for number in range(40):
        pendings.append(closed(lambda url=tmp_path / f"step-{number}": begin(url)))
        until(pendings[-1].done)
        if number == 5:
            before = mapped_bytes()
    until(lambda: not ours())
    assert mapped_bytes() - before < 10 * 16 * MIB, "34 saves had 16 MiB each"
    assert attempts_in(tmp_path) == []
    assert len(lines()) == len([one for one in pendings if one.outcome == "absent"])


def test_a_stager_of_the_callers_can_be_used_again(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    stager = sidestream.AsyncStager(budget_bytes=1 << 22)

    async def begin(url: Path) -> sidestream.PendingSave:
        return sidestream.async_save(make_state(2), url, stager=stager)

    pendings = [closed(lambda url=tmp_path / f"step-{number}": begin(url)) for number in range(10)]
    until(lambda: all(pending.done() for pending in pendings))
    asyncio.run(sidestream.save(make_state(3), tmp_path / "good", stager=stager))
    stager.close()
    assert attempts_in(tmp_path) == []
    until(lambda: not ours())  # what is logged is logged after the pending save is done
    assert len(lines()) == 10


@pytest.mark.parametrize("overlap", ["wait", "latest"])
@pytest.mark.parametrize("saver", ["thread", "process"])
def test_closed_under_a_checkpointer(saver: Any, overlap: Any, tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    """Which is never exited."""
    told = []
    options = sidestream.WriterProcess(idle_s=0.1) if saver == "process" else saver

    async def begin() -> None:
        checkpoints = await sidestream.Checkpointer(
            tmp_path, when_full=overlap, slots=1, lease_s=60, save=sidestream.SaveOptions(writer=options)
        ).__aenter__()
        for step in (1, 2) if overlap == "latest" else (1,):
            told.append(await checkpoints.async_save(make_state(step), step=step))

    loops = 5
    for _ in range(loops):
        closed(begin)
    until(lambda: all(pending.done() for pending in told))
    until(lambda: len(lines()) == len(told) + loops)
    assert attempts_in(tmp_path) == []
    assert sum("Checkpointer" in line for line in lines()) == loops
    assert all(sum(pending.url in line for line in lines()) >= 1 for pending in told)
    if saver == "process":
        until(lambda: worker_for(options).pid is None)

    async def go_on() -> None:
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            assert await checkpoints.save(make_state(9), step=9)
            assert 9 in await checkpoints.steps()

    asyncio.run(go_on())
    assert leases_in(tmp_path) == []


def test_closed_under_a_load(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    asyncio.run(sidestream.save(make_state(2), tmp_path / "step-2"))
    reading, go_on = threading.Event(), threading.Event()

    def hook(operation: Operation) -> Any:
        if operation.name.startswith("pread"):
            reading.set()
            go_on.wait(PATIENCE_S)
        return operation.call()

    async def begin() -> None:
        task = asyncio.create_task(sidestream.load(blank_state(), tmp_path / "step-2"))
        while not reading.is_set():
            await asyncio.sleep(0.001)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # of the test's own task

    with Intercept(tmp_path, hook).installed() as intercept:
        closed(begin)
        go_on.set()
        until(lambda: intercept.running == 0)
    until(lambda: [line for line in lines() if "loading" in line])
    assert len(lines()) == 1
    assert "its threads have stopped" in lines()[0]
    state = blank_state()
    asyncio.run(sidestream.load(state, tmp_path / "step-2"))
    assert same(state, make_state(2))
    assert len(lines()) == 1


def test_a_lease_of_a_reader_is_given_back(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    async def save() -> None:
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            await checkpoints.save(make_state(1), step=1)

    opened = []

    async def begin() -> None:
        checkpoints = await sidestream.Checkpointer(tmp_path).__aenter__()
        opened.append(checkpoints.reading())
        await opened[0].__aenter__()
        assert len(leases_in(tmp_path)) == 1

    asyncio.run(save())
    closed(begin)
    asyncio.run(sidestream.verify(tmp_path / "step-1"))  # the next call
    until(lambda: not leases_in(tmp_path))
    until(lambda: len(lines()) == 1)


def test_closed_under_a_commit(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    """A thread still executes a commit that was sent: its outcome is reported, and nothing is removed."""
    reached, go_on = threading.Event(), threading.Event()
    target = str(tmp_path / "run" / "step-1")

    def hook(operation: Operation) -> Any:
        if exists(target) and not reached.is_set():
            reached.set()
            go_on.wait(PATIENCE_S)
        return operation.call()

    async def begin() -> sidestream.PendingSave:
        pending = sidestream.async_save(make_state(1), tmp_path / "run" / "step-1")
        while not reached.is_set() and not pending.done():
            await asyncio.sleep(0.001)
        return pending

    with Intercept(tmp_path, hook).installed():
        pending = closed(begin)
        assert not pending.done()
        assert pending.outcome is None
        go_on.set()
        until(pending.done)
    assert pending.outcome == "committed"
    until(lambda: not ours())
    assert len(lines()) == 1
    assert "outcome: committed" in lines()[0]
    state = blank_state()
    asyncio.run(sidestream.load(state, tmp_path / "run" / "step-1"))
    assert same(state, make_state(1))
    assert attempts_in(tmp_path) == []


def test_closed_one_turn_after_everything_was_cancelled(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    pendings = []
    for number in range(20):
        loop = asyncio.new_event_loop()

        async def begin(turns: int, url: Path) -> sidestream.PendingSave:
            pending = sidestream.async_save(make_state(2), url)
            for _ in range(turns):
                await asyncio.sleep(0)
            return pending

        pendings.append(loop.run_until_complete(begin(number % 4, tmp_path / f"step-{number}")))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    until(lambda: all(pending.done() for pending in pendings))
    assert attempts_in(tmp_path) == []
    assert all(pending.outcome == "absent" for pending in pendings)
    for pending in pendings:
        pending.mark_retrieved()
    gc.collect()


def test_a_closing_loop_waits_for_a_moment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of a save that was never begun is blocked in a system call."""
    for module in (abandoned, threads, writer):  # the time that a thread has otherwise
        monkeypatch.setattr(module, "_GRACE_S", 2 * PATIENCE_S)
    reached, go_on = threading.Event(), threading.Event()
    released: list[bool] = []

    def hook(operation: Operation) -> Any:
        reached.set()
        released.append(go_on.wait(0 if released else PATIENCE_S))
        return operation.call()

    async def begin() -> sidestream.PendingSave:
        pending = sidestream.async_save(make_state(2), tmp_path / "step-1")
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # before its first step
        reached.wait(PATIENCE_S)
        return pending

    with Intercept(tmp_path, hook).installed() as intercept:
        pending = asyncio.run(begin())
        assert not released, "the loop has waited for the thread"
        assert not pending.done()
        go_on.set()
        until(pending.done)
        until(lambda: intercept.running == 0)
    assert pending.outcome == "absent"
    assert attempts_in(tmp_path) == []
    pending.mark_retrieved()


def test_the_thread_of_the_loop_has_ended(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    """The loop is dropped without being closed."""
    told: list[Any] = []

    def run() -> None:
        loop = asyncio.new_event_loop()
        told.append(loop)
        told.append(loop.run_until_complete(plain(tmp_path / "step-1")))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    loop, pending = told
    until(pending.done)
    assert pending.outcome == "absent"
    assert attempts_in(tmp_path) == []
    until(lambda: not ours())
    assert len(lines()) == 1
    assert "the thread of its event loop has ended" in lines()[0]
    loop.close()


def test_a_loop_that_stops_and_goes_on_is_none_of_these(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    loop = asyncio.new_event_loop()
    pending = loop.run_until_complete(plain(tmp_path / "step-1"))
    asyncio.run(sidestream.save(make_state(3), tmp_path / "step-3"))  # meanwhile, on another one

    async def go_on() -> sidestream.SaveInfo:
        return await pending

    assert loop.run_until_complete(go_on()).url == str(tmp_path / "step-1")
    loop.close()
    assert lines() == []


def test_a_loop_that_is_not_run_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    """The loop is not closed and its thread lives: the save ends at its deadline."""
    monkeypatch.setattr(abandoned, "_GRACE_S", 0.2)
    loop = asyncio.new_event_loop()

    async def begin() -> sidestream.PendingSave:
        return sidestream.async_save(make_state(2), tmp_path / "step-1", options=sidestream.SaveOptions(timeout_s=0.5))

    pending = loop.run_until_complete(begin())
    until(pending.done)
    assert pending.outcome == "absent"
    assert attempts_in(tmp_path) == []
    until(lambda: not ours())
    assert "its deadline has passed" in lines()[0]
    loop.close()


def test_an_idle_loop_is_not_kept(tmp_path: Path) -> None:
    """An open ``Checkpointer`` does not keep its loop alive."""

    async def begin() -> None:
        checkpoints = await sidestream.Checkpointer(tmp_path).__aenter__()
        await checkpoints.save(make_state(1), step=1)
        while len(asyncio.all_tasks()) > 1:  # the deleting after it
            await asyncio.sleep(0.001)

    class Loop(asyncio.SelectorEventLoop):
        """A loop whose collection can be observed."""

    def alive() -> bool:
        gc.collect()
        return any(isinstance(each, Loop) for each in gc.get_objects())

    loop: Any = Loop()
    loop.run_until_complete(begin())
    loop.close()
    del loop
    asyncio.run(sidestream.verify(tmp_path / "step-1"))
    until(lambda: not alive())


AT_EXIT = """
import asyncio, sys, threading
import torch, sidestream
from sidestream._storage.local import transaction as local

held, real = threading.Event(), local.os.fsync
def slowly(descriptor):
    while not (loop.is_closed() or threading._SHUTTING_DOWN):  # however long the main thread takes to its end
        held.wait(0.01)
    held.wait(0.3)
    real(descriptor)
local.os.fsync = slowly

async def begin():
    return sidestream.async_save({"w": torch.ones(int(sys.argv[2]))}, sys.argv[1] + "/step-1")

loop = asyncio.new_event_loop()
pending = loop.run_until_complete(begin())
held.wait(0.1)
"""


@pytest.mark.parametrize("elements", [1000, 32 << 20])
@pytest.mark.parametrize("end", ["", "loop.close()", "loop.close(); pending.done()", "raise SystemExit(3)"])
def test_at_exit(end: str, elements: int, tmp_path: Path) -> None:
    program = textwrap.dedent(AT_EXIT) + end
    ended = warm.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path), str(elements)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == (3 if "3" in end else 0), ended.stderr
    assert os.listdir(tmp_path) == []
    assert ended.stderr.count("outcome: absent") == 1, ended.stderr
    assert "Traceback" not in ended.stderr
