"""``Threads.run`` never leaves its thread behind, whoever cancels and however."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import anyio
import pytest
from _trials import Trials
from phases import warned

import sidestream
from sidestream import errors
from sidestream._runtime import threads as _threads
from sidestream._runtime.threads import Deadline, Stop, ThreadFuture, Threads, io_threads, time_limit


class Work:
    """Something that stays in its thread until ``release()``, at the latest until the test has ended."""

    made: ClassVar[list[Work]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.entered = threading.Event()
        self.released = threading.Event()
        self.inside = False

    def __call__(self) -> str:
        self.inside = True
        self.entered.set()
        try:
            assert self.released.wait(60)
        finally:
            self.inside = False
        return "done"

    __name__ = "work"

    async def begun(self) -> None:
        while not self.entered.is_set():
            await asyncio.sleep(0)

    async def release(self) -> None:
        """Give a cancel every chance to get past the thread first."""
        for _ in range(50):
            await asyncio.sleep(0)
        assert self.inside
        self.released.set()


@pytest.fixture(autouse=True)
async def _all_let_go() -> AsyncIterator[None]:
    yield
    while Work.made:
        Work.made.pop().released.set()


@pytest.fixture
def threads() -> Any:
    threads = Threads("test-threads", 2)
    yield threads
    threads.close()


async def test_returns_what_the_function_returns(threads: Threads) -> None:
    assert await threads.run(divmod, 7, 2) == (3, 1)


async def test_raises_what_the_function_raises(threads: Threads) -> None:
    with pytest.raises(ZeroDivisionError), time_limit(Deadline.after(30)):
        await threads.run(divmod, 7, 0)


@pytest.mark.parametrize("deadline", [None, 30.0])
@pytest.mark.parametrize("cancels", [1, 3])
async def test_task_cancel_waits_for_the_thread(threads: Threads, cancels: int, deadline: float | None) -> None:
    work, stop = Work(), Stop()
    limit = None if deadline is None else Deadline.after(deadline)
    with time_limit(limit):
        task = asyncio.create_task(threads.run(work, stop=stop))
    await work.begun()
    assert not stop.is_set()
    for _ in range(cancels):
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
    assert stop.is_set()
    assert not task.done()
    await work.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not work.inside


async def test_asyncio_timeout_waits_for_the_thread(threads: Threads) -> None:
    work, stop = Work(), Stop()
    timeout = asyncio.timeout(None)

    async def bounded() -> None:
        async with timeout:
            await threads.run(work, stop=stop)

    task = asyncio.create_task(bounded())
    await work.begun()
    timeout.reschedule(0)
    await work.release()
    with pytest.raises(TimeoutError):
        await task
    assert not work.inside
    assert stop.is_set()


async def test_an_anyio_scope_waits_for_the_thread_and_then_cancels(threads: Threads) -> None:
    work = Work()
    after = []
    scope = anyio.move_on_after(600)

    async def scoped() -> None:
        with scope:
            await threads.run(work)
            await asyncio.sleep(0)
            after.append("still going")

    task = asyncio.create_task(scoped())
    await work.begun()
    scope.cancel()
    await work.release()
    await task
    assert scope.cancelled_caught
    assert after == []
    assert not work.inside


async def test_a_task_group_that_fails_waits_for_the_thread(threads: Threads) -> None:
    work = Work()

    async def failing() -> None:
        await work.begun()
        raise RuntimeError("the other one")

    async def run_both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(threads.run(work))
            group.create_task(failing())

    task = asyncio.create_task(run_both())
    await work.begun()
    await work.release()
    with pytest.raises(ExceptionGroup) as caught:
        await task
    assert [type(error) for error in caught.value.exceptions] == [RuntimeError]
    assert not work.inside


async def test_cancelled_before_a_thread_is_free(threads: Threads) -> None:
    """Work that waits for a thread must not begin after its caller has been told that it was cancelled."""
    blocking = [Work(), Work()]
    others = [asyncio.create_task(threads.run(work)) for work in blocking]
    for work in blocking:
        await work.begun()
    calls: list[int] = []
    task = asyncio.create_task(threads.run(calls.append, 1))
    await asyncio.sleep(0)
    task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    told = task.done()
    for work in blocking:
        work.released.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.gather(*others)
    before = list(calls)
    await threads.run(int)
    await threads.run(int)
    assert calls == before
    assert not told or calls == []


async def test_the_deadline_sets_the_stop_flag(threads: Threads) -> None:
    stop = Stop()

    def watching() -> None:
        while not stop.is_set():
            os.sched_yield()
        stop.check()

    with pytest.raises((errors.ClosedError, errors.DeadlineExceededError)), time_limit(Deadline.after(0.01)):
        await threads.run(watching, stop=stop)


async def test_a_waker_is_called_by_the_stop_flag(threads: Threads) -> None:
    stop, condition, entered = Stop(), threading.Condition(), threading.Event()

    def wake() -> None:
        with condition:
            condition.notify_all()

    def sleeping() -> None:
        with stop.waking(wake), condition:
            entered.set()
            while not stop.is_set():
                assert condition.wait(60)

    task = asyncio.create_task(threads.run(sleeping, stop=stop))
    while not entered.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("cancel", [False, True])
async def test_a_stuck_thread_is_left_behind_after_the_deadline(
    threads: Threads, cancel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_threads, "_GRACE_S", 0.01)
    for timeout_s in (0.2, 0.8, 3.2, 12.8, 51.2):  # a thread has to begin the work before the deadline
        work, stop = Work(), Stop()
        with time_limit(Deadline.after(timeout_s)):
            task = asyncio.create_task(threads.run(work, stop=stop))
        while not work.inside and not task.done():
            await asyncio.sleep(0)
        if work.inside:
            break
    if cancel:
        task.cancel()
    with pytest.raises(asyncio.CancelledError if cancel else errors.DeadlineExceededError) as caught:
        await task
    if not cancel:
        assert isinstance(caught.value, TimeoutError)
        assert f"{timeout_s:g}" in str(caught.value)
    assert stop.is_set()
    assert work.inside
    work.released.set()
    assert await threads.run(int) == 0


async def test_threads_that_hang_are_replaced_after_a_burst_of_work(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that waited for a thread leaves none that counts as idle and is not."""
    monkeypatch.setattr(_threads, "_GRACE_S", 0.01)
    await asyncio.gather(*(threads.run(int) for _ in range(20)))
    for timeout_s in (0.2, 0.8, 3.2, 12.8, 51.2):  # all threads have to hang before the deadline
        hanging = Work(), Work()
        with time_limit(Deadline.after(timeout_s)):
            tasks = [asyncio.create_task(threads.run(work)) for work in hanging]
        while not all(work.inside for work in hanging) and not all(task.done() for task in tasks):
            await asyncio.sleep(0)
        if all(work.inside for work in hanging):
            break
        for work in hanging:
            work.released.set()
        await asyncio.wait(tasks)
    for task in tasks:
        with pytest.raises(errors.DeadlineExceededError):
            await task
    async with asyncio.timeout(60):
        assert await threads.run(int) == 0
    assert all(work.inside for work in hanging)


async def test_work_does_not_wait_for_a_thread_that_hangs_if_one_could_not_be_started_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, first, second = Threads("test-unlimited", sys.maxsize), Work(), Work()
    threads.submit(first)
    await first.begun()
    with monkeypatch.context() as patched:
        patched.setattr(_threads, "_start", refuse)
        threads.submit(second)  # the thread of the first one takes it
    first.released.set()
    await second.begun()
    async with asyncio.timeout(60):
        assert await threads.run(int) == 0
    assert second.inside
    threads.close()


async def test_what_a_stuck_thread_raises_later_is_nobodys(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_threads, "_GRACE_S", 0.01)
    entered, released = threading.Event(), threading.Event()

    def failing() -> None:
        entered.set()
        assert released.wait(60)
        raise OSError("too late")

    with pytest.raises(errors.DeadlineExceededError), time_limit(Deadline.after(0.01)):
        await threads.run(failing)
    released.set()
    await threads.run(int)
    await threads.run(int)
    assert warned(caplog) == []


async def test_a_closed_loop_is_no_trouble_for_a_thread_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threads, "_GRACE_S", 0.01)
    threads, work = Threads("test-threads", 1), Work()

    async def main() -> None:
        with time_limit(Deadline.after(0.01)):
            await threads.run(work)

    def run_it() -> BaseException | None:
        try:
            asyncio.run(main())
        except errors.DeadlineExceededError as error:
            return error
        return None

    assert isinstance(await asyncio.get_running_loop().run_in_executor(None, run_it), errors.DeadlineExceededError)
    work.released.set()
    assert await threads.run(int) == 0
    threads.close()


def test_a_deadline() -> None:
    deadline = Deadline.after(600)
    assert 0 < deadline.remaining_s() <= 600
    deadline.check("waiting")
    over = Deadline(time.monotonic() - 1, 7)
    assert over.remaining_s() == 0
    with pytest.raises(errors.DeadlineExceededError, match=r"waiting.*timeout_s=7"):
        over.check("waiting")


# --- fork -------------------------------------------------------------------------------------------------------------


def test_handles_refuse_a_forked_child_and_its_own_pool_works(children: Trials) -> None:
    told = children.run(root="/nonexistent", run="/nonexistent", work="forked")
    assert told.exit == 0
    assert told.error is None
    assert told.get("refused") == [
        "ForkedProcessError",
        "ForkedProcessError",
        "ForkedProcessError",
        "ForkedProcessError",
    ]
    assert told.get("worked") == [5, True]


async def test_many_at_once_all_end() -> None:
    async def one(number: int) -> int:
        return await io_threads().run(pow, number, 2)

    assert await asyncio.gather(*map(one, range(200))) == [number**2 for number in range(200)]


async def test_cancelled_at_once_many_times(threads: Threads) -> None:
    """Each is cancelled after another number of turns of the loop; every call that began has ended with its task."""
    running, wrong = [0], []
    lock = threading.Lock()

    def tracked() -> None:
        with lock:
            running[0] += 1
        os.sched_yield()
        with lock:
            running[0] -= 1

    async def turns(number: int, then: Callable[[], Any]) -> None:
        for _ in range(number):
            await asyncio.sleep(0)
        then()

    for number in range(60):
        task = asyncio.create_task(threads.run(tracked))
        await turns(number % 12, task.cancel)
        await asyncio.wait([task])
        with lock:
            if running[0]:
                wrong.append(number)
    assert wrong == []


def interrupted(at: int, call: Callable[[], object]) -> None:
    """Call ``call``, and interrupt it when a function of the module ``threading`` returns for the time ``at``."""
    returns = itertools.count(1)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename == threading.__file__ and event == "return" and next(returns) == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def test_an_interrupt_in_code_of_the_standard_library_leaves_the_threads_usable() -> None:
    """Ctrl-C reaches the thread of a loop wherever it is: no lock that all work needs may be held by Python code."""
    for at in range(1, 20):
        threads = Threads("interrupted", 1)
        threads.submit(int).result(60)
        interrupted(at, lambda threads=threads: threads.submit(int))
        done = threading.Event()
        threading.Thread(target=lambda t=threads, d=done: t.submit(d.set), daemon=True).start()
        assert done.wait(60), f"interrupted at return {at}"
        threads.close()


def _resolve(future: ThreadFuture[int], resolved: threading.Event) -> None:
    future.set_result(1)
    resolved.set()


@pytest.mark.parametrize("kind", [ThreadFuture, sidestream.StagingFuture])
def test_an_interrupt_leaves_no_future_locked(kind: type[ThreadFuture[int]]) -> None:
    """A future of ``concurrent.futures`` stays locked after an interrupt in ``Condition.__enter__``. The thread that
    resolves it waits for ever then."""
    for at in range(1, 6):
        future, resolved = kind(), threading.Event()
        interrupted(at, lambda future=future: future.add_done_callback(lambda _: None))
        threading.Thread(target=_resolve, args=(future, resolved), daemon=True).start()
        assert resolved.wait(60), f"interrupted at return {at}"


def test_an_interrupt_while_a_thread_starts() -> None:
    """``Thread.start()`` raises ``RuntimeError`` if the interrupt comes before the wait in it has its lock again."""
    thread = threading.Thread(target=int)

    def start() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    thread.start = start  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        _threads._start(thread)


async def test_a_pool_without_a_limit_has_as_many_threads_as_it_had_work_at_once() -> None:
    """A thread that ends its work may take what was meant for one that waits, which then waits for other work."""
    pool = Threads("test", sys.maxsize)
    try:
        for number in range(1500):
            await asyncio.gather(*(pool.run(pow, number, 2) for _ in range(3)))
        assert pool._count <= 30
    finally:
        pool.close()
