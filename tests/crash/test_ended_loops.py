"""Event loops that are closed, dropped, stopped or blocked while operations are in progress: saves go on and commit."""

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
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from _look import attempts_in, descriptors
from _operations import Intercept, Operation, exists
from _seeded import blank_state, make_state, same
from _stepping import OF_THE_PROCESS, in_pools

import sidestream
from sidestream import errors, events
from sidestream._convert import streamed
from sidestream._engine.loop import operation_loop
from sidestream._staging import cached
from sidestream._worker.client import close_all

PATIENCE_S = 60.0


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "still not so"
        time.sleep(0.005)


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


def leases_in(run: Path) -> list[str]:
    try:
        return os.listdir(run / ".leases")
    except FileNotFoundError:
        return []


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    def found() -> list[str]:
        """Warnings and errors. Lines at the level INFO tell of commits, and of a loop that a busy machine holds up."""
        logged = [record for record in caplog.records if record.name == "sidestream"]
        return [record.getMessage() for record in logged if record.levelno >= logging.WARNING]

    return found


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    cached.close_all()  # of earlier tests
    yield
    cached.close_all()

    def ended() -> bool:
        gc.collect()  # what a test has dropped is in cycles, and owns threads
        return not ours()

    until(ended)


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


def loaded(url: Path) -> bool:
    state = blank_state()
    sidestream.blocking.load(state, url)
    return same(state, make_state(2))


@pytest.mark.parametrize("begin", [plain, in_a_task_of_its_own, by_process])
def test_closed_under_saves(
    begin: Callable[[Path], Coroutine[Any, Any, sidestream.PendingSave]],
    tmp_path: Path,
    lines: Callable[[], list[str]],
) -> None:
    pendings = [closed(lambda url=tmp_path / f"step-{number}": begin(url)) for number in range(10)]
    for pending in pendings:
        assert pending.result(PATIENCE_S).url == pending.url
        assert pending.outcome == "committed"
        assert loaded(Path(pending.url))
    assert attempts_in(tmp_path) == []
    cached.close_all()  # its memory is kept for the next save
    until(lambda: not ours())
    assert lines() == []
    assert descriptors(tmp_path) == []
    close_all()


def test_a_handle_for_any_loop_and_any_thread(tmp_path: Path) -> None:
    """Several tasks of several loops await it, threads wait for it, and callbacks come where they were registered."""
    pending = closed(lambda: plain(tmp_path / "a"))
    called: list[tuple[str, object]] = []
    over = threading.Event()

    async def elsewhere() -> tuple[str, str]:
        ended, _ = await asyncio.wait([pending])  # type: ignore[type-var]
        assert ended == {pending}
        told = asyncio.Event()
        here = threading.get_ident()
        pending.add_done_callback(lambda one: (called.append(("loop", threading.get_ident() == here)), told.set()))
        await told.wait()
        await pending.staged
        one, other = await asyncio.gather(pending, pending)
        return one.url, other.url

    with ThreadPoolExecutor(4) as threads:
        loops = [threads.submit(asyncio.run, elsewhere()) for _ in range(2)]
        waits = [threads.submit(pending.result, PATIENCE_S) for _ in range(2)]
        assert {one.result(PATIENCE_S) for one in loops} == {(pending.url, pending.url)}
        assert {one.result(PATIENCE_S).url for one in waits} == {pending.url}
    pending.add_done_callback(lambda one: (called.append(("thread", one)), over.set()))
    assert over.wait(PATIENCE_S)
    assert called == [("loop", True), ("loop", True), ("thread", pending)]

    def never(_: object) -> None:
        raise AssertionError

    late = sidestream.async_save(make_state(2), tmp_path / "b")
    late.add_done_callback(never)
    assert late.remove_done_callback(never) == 1
    late.result(PATIENCE_S)
    assert late.exception() is None
    assert not late.cancelled()


def test_a_cancel_from_another_thread(tmp_path: Path) -> None:
    """Of a save that has not got its memory: it leaves nothing, and each way to wait says that it was cancelled."""
    stager = sidestream.AsyncStager(budget_bytes=1 << 20)
    held = stager.stage({"w": torch.ones(200_000)}).result(PATIENCE_S)
    pending = sidestream.async_save({"w": torch.ones(200_000)}, tmp_path / "a", stager=stager)
    assert pending.cancel()
    with pytest.raises(CancelledError):
        pending.result(PATIENCE_S)

    async def elsewhere() -> None:
        with pytest.raises(asyncio.CancelledError):
            await pending

    asyncio.run(elsewhere())
    assert pending.cancelled()
    assert not pending.cancel()
    assert pending.outcome == "absent"
    assert list(tmp_path.iterdir()) == []
    held.release()
    stager.close()


def test_an_unretrieved_error_is_logged_once(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    (tmp_path / "a").write_text("in the way")
    pending = closed(lambda: plain(tmp_path / "a"))
    until(pending.done)
    del pending
    gc.collect()
    until(lambda: len(lines()) == 1)
    assert "the error was not retrieved" in lines()[0]


def test_closed_under_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert pending.exports[0].result(PATIENCE_S).url == str(tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "step-1"]


def test_a_stager_of_the_callers_can_be_used_again(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    stager = sidestream.AsyncStager(budget_bytes=1 << 22)

    async def begin(url: Path) -> sidestream.PendingSave:
        return sidestream.async_save(make_state(2), url, stager=stager)

    pendings = [closed(lambda url=tmp_path / f"step-{number}": begin(url)) for number in range(10)]
    asyncio.run(sidestream.save(make_state(3), tmp_path / "good", stager=stager))
    for pending in pendings:
        pending.result(PATIENCE_S)
    stager.close()
    assert attempts_in(tmp_path) == []
    assert lines() == []


@pytest.mark.parametrize("overlap", ["wait", "latest"])
@pytest.mark.parametrize("saver", ["thread", "process"])
def test_closed_under_a_checkpointer(saver: Any, overlap: Any, tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    """Which is never exited. A save that waits for its turn cannot call the objects of a loop that is closed."""
    begun: list[sidestream.PendingSave] = []
    waiting: list[sidestream.PendingSave] = []
    options = sidestream.WriterProcess(idle_s=0.1) if saver == "process" else saver

    async def begin() -> None:
        checkpoints = await sidestream.Checkpointer(
            tmp_path, when_full=overlap, slots=1, lease_s=60, save=sidestream.SaveOptions(writer=options)
        ).__aenter__()
        begun.append(checkpoints.async_save(make_state(2), step=1))
        if overlap == "latest":
            waiting.append(checkpoints.async_save(make_state(2), step=2))

    closed(begin)
    for pending in begun:
        assert loaded(Path(pending.result(PATIENCE_S).url))
    for pending in waiting:
        until(pending.done)
        pending.mark_retrieved()
    assert attempts_in(tmp_path) == []
    if saver == "process":
        close_all()

    async def go_on() -> None:
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            assert await checkpoints.save(make_state(9), step=9)
            assert 9 in await checkpoints.steps()

    asyncio.run(go_on())
    until(lambda: leases_in(tmp_path) == [])


def test_closed_under_a_load(tmp_path: Path) -> None:
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
    assert loaded(tmp_path / "step-2")


def test_a_lease_of_a_reader_is_given_back(tmp_path: Path) -> None:
    async def save() -> None:
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            await checkpoints.save(make_state(1), step=1)

    opened = []

    async def begin() -> None:
        checkpoints = await sidestream.Checkpointer(tmp_path, lease_s=1).__aenter__()
        opened.append(checkpoints.reading())
        await opened[0].__aenter__()
        assert len(leases_in(tmp_path)) == 1

    asyncio.run(save())
    closed(begin)
    until(lambda: not leases_in(tmp_path))


def test_closed_under_a_commit(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    """A thread still executes a commit that was sent."""
    reached, go_on = threading.Event(), threading.Event()
    target = str(tmp_path / "run" / "step-1")

    def hook(operation: Operation) -> Any:
        if exists(target) and not reached.is_set():
            reached.set()
            go_on.wait(PATIENCE_S)
        return operation.call()

    async def begin() -> sidestream.PendingSave:
        pending = sidestream.async_save(make_state(2), tmp_path / "run" / "step-1")
        while not reached.is_set() and not pending.done():
            await asyncio.sleep(0.001)
        return pending

    with Intercept(tmp_path, hook).installed():
        pending = closed(begin)
        assert not pending.done()
        assert pending.outcome is None
        go_on.set()
        pending.result(PATIENCE_S)
    assert pending.outcome == "committed"
    assert lines() == []
    assert loaded(tmp_path / "run" / "step-1")
    assert attempts_in(tmp_path) == []


def test_a_blocked_loop_holds_up_no_save(tmp_path: Path) -> None:
    async def begin() -> sidestream.PendingSave:
        pending = sidestream.async_save(make_state(2), tmp_path / "a")
        until(pending.done)  # without an await
        return pending

    assert asyncio.run(begin()).outcome == "committed"


def test_a_cancelled_program_ends_no_save(tmp_path: Path) -> None:
    """All tasks are cancelled, as ``asyncio.run`` does at its end, and the loop is closed one turn later."""
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
    for pending in pendings:
        pending.result(PATIENCE_S)
    assert attempts_in(tmp_path) == []


def test_a_loop_that_stops_and_goes_on(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    loop = asyncio.new_event_loop()
    pending = loop.run_until_complete(plain(tmp_path / "step-1"))
    asyncio.run(sidestream.save(make_state(3), tmp_path / "step-3"))  # meanwhile, on another one

    async def go_on() -> sidestream.SaveInfo:
        return await pending

    assert loop.run_until_complete(go_on()).url == str(tmp_path / "step-1")
    loop.close()
    assert lines() == []


class Slow:
    """An object whose state a load hands over on a loop that stands still."""

    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.zeros(3)}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing runs on a loop that stands still")


@contextmanager
def failures_of(target: Path) -> Iterator[list[events.LoadFailed]]:
    failed: list[events.LoadFailed] = []

    def noted(event: object) -> None:
        if isinstance(event, events.LoadFailed) and event.load.url == str(target):
            failed.append(event)

    with events.observe(noted):
        yield failed


def test_a_load_does_not_wait_for_ever_for_a_loop_that_stands_still(tmp_path: Path) -> None:
    sidestream.blocking.save({"o": Slow()}, tmp_path / "a")
    loop = asyncio.new_event_loop()
    options = sidestream.LoadOptions(timeout_s=0.5)
    with failures_of(tmp_path / "a") as failed:
        # The loop stands still after its first iteration: the load has begun, and its objects cannot have been asked.
        task = loop.create_task(sidestream.load({"o": Slow()}, tmp_path / "a", options=options))
        loop.call_soon(loop.stop)
        loop.run_forever()
        until(lambda: failed)
    assert failed[0].error_type == "DeadlineExceededError"
    assert "whose event loop" in failed[0].reason
    with pytest.raises(errors.DeadlineExceededError):
        loop.run_until_complete(task)
    loop.close()


class Stopping(Slow):
    """Stops the loop when it receives its state. Until ``stopped`` the operation does not continue: the last iteration
    of the loop could hand over the next object as well."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def load_state_dict(self, state: Any) -> None:
        operation_loop().call(self.stopped.wait, 60.0)
        asyncio.get_running_loop().stop()


def test_a_loop_that_stands_still_between_two_objects(tmp_path: Path) -> None:
    """What was handed over by then is in ``error.written``, because the load has changed the state."""
    sidestream.blocking.save({"a": Slow(), "b": Slow(), "t": torch.ones(3)}, tmp_path / "a")
    loop = asyncio.new_event_loop()
    options = sidestream.LoadOptions(timeout_s=0.5)
    with failures_of(tmp_path / "a") as failed:
        stopping = Stopping()
        state = {"a": stopping, "b": Slow(), "t": torch.zeros(3)}
        task = loop.create_task(sidestream.load(state, tmp_path / "a", options=options))
        loop.run_forever()
        stopping.stopped.set()
        until(lambda: failed)
    assert failed[0].error_type == "DeadlineExceededError"
    with pytest.raises(errors.DeadlineExceededError, match="whose event loop") as raised:
        loop.run_until_complete(task)
    assert "t" in raised.value.written
    loop.close()


def test_an_idle_loop_is_not_kept(tmp_path: Path) -> None:
    """An open ``Checkpointer`` does not keep a loop alive."""

    async def begin() -> None:
        checkpoints = await sidestream.Checkpointer(tmp_path).__aenter__()
        await checkpoints.save(make_state(1), step=1)

    class Loop(asyncio.SelectorEventLoop):
        """A loop whose collection can be observed."""

    def alive() -> bool:
        gc.collect()
        return any(isinstance(each, Loop) for each in gc.get_objects())

    loop: Any = Loop()
    loop.run_until_complete(begin())
    loop.close()
    del loop
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
    """The end of the program waits for the save."""
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
    assert os.listdir(tmp_path) == ["step-1"]
    assert ended.stderr == ""
    assert sidestream.blocking.verify(tmp_path / "step-1").ok


IN_A_HANDLER = """
import atexit, sys
import torch, sidestream
from sidestream import blocking

pending = []

@atexit.register
def last():
    info = blocking.save({"w": torch.ones(1000)}, sys.argv[1] + "/last")
    print(info.nbytes)
    pending.append(sidestream.async_save({"w": torch.ones(1000)}, sys.argv[1] + "/left"))  # nobody waits for it

blocking.save({"w": torch.ones(10)}, sys.argv[1] + "/first")
"""


def test_in_a_handler_of_atexit(tmp_path: Path) -> None:
    ended = warm.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_HANDLER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert int(ended.stdout) > 4000
    assert sorted(os.listdir(tmp_path)) == ["first", "last", "left"]
