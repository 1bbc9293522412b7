"""A busy loop really sleeps now and then while threads work for it and want the GIL, and only then.

Told by the system's count of voluntary switches: polling a selector with something to do does not give up the core.
"""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import sidestream
from sidestream._format.checksum import block_crcs
from sidestream._format.records import BLOCK_BYTES
from sidestream._runtime import gil as _turns
from sidestream._runtime import pauses as _pauses
from sidestream._runtime import threads as _threads
from sidestream._runtime.pauses import pause_point
from sidestream._runtime.threads import Deadline, Threads, time_limit
from sidestream.errors import DeadlineExceededError

PATIENCE_S = 60.0
CLOCKS = _turns._clocks


@pytest.fixture(autouse=True)
def core_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is taken for busy, although other processes of the machine may have its core for half of the time."""
    monkeypatch.setattr(_turns, "_clocks", lambda: (time.monotonic(),) * 2)


def test_the_clocks_tell_a_loop_that_runs_from_one_that_sleeps() -> None:
    (start, ran_before), clocks = CLOCKS(), CLOCKS()
    while clocks[1] - ran_before < 0.02:  # as long as that takes
        clocks = CLOCKS()
    assert clocks[0] - start >= 0.01
    time.sleep(0.2)
    now, ran = CLOCKS()
    assert now - clocks[0] >= 0.19
    assert ran - clocks[1] < 0.1


def naps() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


async def busy_until(naps_wanted: int) -> bool:
    """Whether the thread of the loop has slept so often, before the patience was over. The loop never has to wait."""
    end, before = time.monotonic() + PATIENCE_S, naps()
    while naps() - before < naps_wanted:
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0)
    return True


async def busy_until_set(event: threading.Event) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not event.is_set() and time.monotonic() < end:
        sum(range(100))
        await asyncio.sleep(0)
    return event.is_set()


def planned() -> bool:
    turns = _turns._of_loops.get(asyncio.get_running_loop())
    return turns is not None and turns._planned


async def until_none_is_planned() -> None:
    async with asyncio.timeout(PATIENCE_S):
        while planned():
            await asyncio.sleep(0)


def come_back_often(ended: threading.Event) -> None:
    """As a thread does that reads, writes or copies: again and again it wants the GIL back."""
    while not ended.is_set():
        time.sleep(1e-4)


@contextmanager
def somebody_who_comes_back_often() -> Iterator[None]:
    ended = threading.Event()
    thread = threading.Thread(target=come_back_often, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def test_a_busy_loop_naps_while_a_thread_works_for_it_and_not_afterwards() -> None:
    threads, ended = Threads("test-turns", 1), threading.Event()
    try:
        task = asyncio.ensure_future(threads.run(come_back_often, ended))
        assert await busy_until(10)
        ended.set()
        await task
        await until_none_is_planned()
    finally:
        ended.set()
        threads.close()


async def test_a_thread_that_is_left_behind_is_given_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threads, "_GRACE_S", 0.01)
    threads, ended = Threads("test-turns", 1), threading.Event()
    try:
        with pytest.raises(DeadlineExceededError), time_limit(Deadline.after(0.01)):
            await threads.run(ended.wait)
        await until_none_is_planned()
    finally:
        ended.set()
        threads.close()


async def test_a_loop_that_sleeps_by_itself_is_woken_up_ever_less(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = _turns._clocks
    monkeypatch.setattr(_turns, "_clocks", CLOCKS)
    work: Future[None] = Future()
    _turns.give_turns(work)
    turns = _turns._of_loops[asyncio.get_running_loop()]
    async with asyncio.timeout(PATIENCE_S):
        while turns._intervals < _turns._MOST_INTERVALS:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(_turns, "_clocks", busy)
        turns._seen = busy()
        with somebody_who_comes_back_often():
            assert await busy_until(1)
        while turns._intervals > 1:
            await asyncio.sleep(0)
    work.set_result(None)
    await until_none_is_planned()


async def test_works_that_overlap_share_the_turns() -> None:
    works: list[Future[None]] = [Future(), Future()]
    for work in works:
        _turns.give_turns(work)
    with somebody_who_comes_back_often():
        assert await busy_until(3)
        works[0].set_result(None)
        assert await busy_until(3)
    works[1].cancel()
    await until_none_is_planned()


async def test_a_stage_is_given_turns() -> None:
    async with sidestream.AsyncStager(max_bytes_per_second=1 << 20) as stager:
        future = stager.stage({"w": torch.zeros(1 << 22)})
        with somebody_who_comes_back_often():
            assert await busy_until(3)
        await stager.synchronize_staging()  # hurries
        (await future).release()


def test_no_loop_is_needed_and_none_is_kept() -> None:
    _turns.give_turns(Future())

    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        _turns.give_turns(Future())  # never ends
        await asyncio.sleep(0.05)
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(main())
    gc.collect()
    assert loop() is None


async def test_a_save_beside_a_busy_loop_ends(tmp_path: Path) -> None:
    state = {f"w{number}": torch.full((1 << 20,), float(number)) for number in range(8)}
    task = asyncio.ensure_future(sidestream.save(state, tmp_path / "c"))
    while not task.done():
        sum(range(2000))
        await asyncio.sleep(0)
    found = {name: torch.zeros(1 << 20) for name in state}
    await sidestream.load(found, tmp_path / "c")
    assert all(torch.equal(found[name], state[name]) for name in state)
    await until_none_is_planned()


def one_turn_is_being_given() -> bool:
    """Without a nap no other thread could see that."""
    return _turns._next_turn_at == math.inf


async def happens_beside_a_busy_loop(look: Callable[[threading.Event], bool]) -> bool:
    """What ``look`` says, in a thread that the loop gives turns."""
    work: Future[bool] = Future()
    _turns.give_turns(work)
    said, ended = threading.Event(), threading.Event()

    def thread() -> None:
        try:
            happened.append(look(ended))
        finally:
            said.set()

    happened: list[bool] = []
    looking = threading.Thread(target=thread)
    looking.start()
    try:
        await busy_until_set(said)
    finally:
        ended.set()
        looking.join()
        work.cancel()
    await until_none_is_planned()
    return happened == [True]


async def test_a_turn_is_seen_by_others() -> None:
    def look(ended: threading.Event) -> bool:
        while not one_turn_is_being_given():
            if ended.is_set():
                return False
            time.sleep(1e-4)
        return True

    assert await happens_beside_a_busy_loop(look)


async def test_the_loop_waits_for_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_turns, "_HOLD_S", 0.1)

    def look(ended: threading.Event) -> bool:
        with _turns.holding_gil():
            long, given = 0, set()
            while not ended.is_set() and long < 3 and len(given) < 300:
                time.sleep(1e-4)
                before = turns._seen
                given.add(before)
                if one_turn_is_being_given():
                    time.sleep(100 * _turns._NAP_S)  # an ordinary turn is over by then
                    long += one_turn_is_being_given() and turns._seen is before
        return long == 3

    turns = _turns._of_loops.setdefault(asyncio.get_running_loop(), _turns._LoopTurns())
    assert await happens_beside_a_busy_loop(look)


def test_there_is_no_nap_while_all_sleep() -> None:
    turns, end = _turns._LoopTurns(), time.monotonic() + PATIENCE_S
    before = naps()
    turns._nap()
    while naps() > before:  # threads of others have been woken up in between
        assert time.monotonic() < end
        before = naps()
        turns._nap()


def test_who_came_in_a_nap_is_no_reason_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_turns, "_NAP_S", 0.02)
    come = threading.Semaphore(0)

    def comes() -> None:
        while come.acquire() and not ended.is_set():
            time.sleep(1e-4)

    ended, thread = threading.Event(), threading.Thread(target=comes)
    thread.start()
    try:
        for _ in range(100):  # threads of others may come just then
            turns = _turns._LoopTurns()
            come.release()
            while _turns._context_switches() == turns._context_switches:
                time.sleep(0.001)  # until it has been woken up
            come.release()
            before = naps()
            turns._nap()
            assert naps() > before
            turns._nap()
            if naps() == before + 1:
                return
        pytest.fail("each nap was followed by another one")
    finally:
        ended.set()
        come.release()
        thread.join()


def test_a_thread_keeps_the_interpreter_for_longer_beside_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_s = []
    for next_turn_at in (0.0, time.monotonic() - 1.0, time.monotonic() + 1000.0, math.inf):
        monkeypatch.setattr(_turns, "_next_turn_at", next_turn_at)
        kept_s.append(_turns.slice_s())
    assert kept_s == [_turns._SLICE_S, _turns._SLICE_S, _turns._BUSY_SLICE_S, _turns._BUSY_SLICE_S]


@pytest.mark.parametrize(("slice_s", "rests"), [(0.0, 4), (1e9, 0)])
def test_a_thread_rests_after_each_slice(slice_s: float, rests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threads, "slice_s", lambda: slice_s)
    rested: list[int] = []
    done: list[int] = []
    monkeypatch.setattr(_threads, "yield_gil", lambda: rested.append(len(done)))
    monkeypatch.setattr(_pauses._thread, "pause", _threads._pause)
    monkeypatch.setattr(_pauses, "_left", 7)
    done.extend(_threads.paced(range(130), 32))
    assert done == list(range(130))
    assert len(rested) == rests


@pytest.mark.parametrize(("slice_s", "rests"), [(0.0, [8, 16]), (1e9, [])])
def test_a_thread_rests_between_steps(slice_s: float, rests: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[int] = []
    done: list[int] = []
    monkeypatch.setattr(_threads, "slice_s", lambda: slice_s)
    monkeypatch.setattr(_threads, "yield_gil", lambda: rested.append(len(done)))
    monkeypatch.setattr(_pauses._thread, "pause", _threads._pause)
    monkeypatch.setattr(_pauses, "_left", 7)

    def work() -> str:
        for number in range(20):
            done.append(number)
            pause_point()
        return "the result"

    assert work() == "the result"
    assert rested == rests


async def test_turns_on_a_loop_with_another_clock() -> None:
    loop, start = asyncio.get_running_loop(), time.monotonic()
    before = loop.time
    loop.time = lambda: time.monotonic() - start  # type: ignore[method-assign]
    try:
        _turns.give_turns(work := Future[None]())
        with somebody_who_comes_back_often():
            turns = _turns._of_loops[loop]
            for _ in range(3):
                seen, end = turns._seen, time.monotonic() + PATIENCE_S
                while turns._seen is seen:
                    assert time.monotonic() < end
                    await asyncio.sleep(0)
        work.cancel()
        await until_none_is_planned()
    finally:
        loop.time = before  # type: ignore[method-assign]


def test_a_signal_in_a_turn_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    work: Future[None] = Future()

    def interrupt() -> int:
        assert one_turn_is_being_given()
        raise KeyboardInterrupt

    async def main() -> None:
        _turns.give_turns(work)
        monkeypatch.setattr(_turns, "_context_switches", interrupt)
        await busy_until_set(threading.Event())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert not one_turn_is_being_given()


@pytest.mark.parametrize("seconds", [1e-6, 5e-3, 1.0], ids=["short", "usual", "long"])
def test_any_switch_interval(seconds: float) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        assert _turns._LEAST_INTERVAL_S <= _turns._interval_s() <= _turns._MOST_INTERVAL_S
    finally:
        sys.setswitchinterval(before)


def test_who_rests_comes_back_when_it_is_his_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    monkeypatch.setattr(_turns, "_next_turn_at", start + 0.004)
    _turns.yield_gil()
    assert time.monotonic() - start >= 0.0035
    monkeypatch.setattr(_turns, "_next_turn_at", float("inf"))  # a turn that is being given
    _turns.yield_gil()


def test_a_burst_is_waited_for_but_not_for_ever() -> None:
    begun, ended, waited = threading.Event(), threading.Event(), threading.Event()

    def calls() -> None:
        with pytest.raises(ZeroDivisionError), _turns.holding_gil():
            begun.set()
            ended.wait()
            raise ZeroDivisionError

    def waits() -> None:
        while not ended.is_set():
            _turns._wait_for_holders()  # returns, though it has not ended
            waited.set()

    threads = [threading.Thread(target=calls), threading.Thread(target=waits)]
    for thread in threads:
        thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        assert waited.wait(PATIENCE_S)
        assert len(_turns._gil_holders) == 1
        before = time.monotonic()
        _turns._wait_for_holders()
        assert time.monotonic() - before >= _turns._HOLD_S / 2
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not _turns._gil_holders


def test_bursts_within_bursts() -> None:
    with _turns.holding_gil(), _turns.holding_gil():
        assert len(_turns._gil_holders) == 2
    assert not _turns._gil_holders


async def test_checksums_of_blocks_beside_a_busy_loop() -> None:
    content = bytes(range(256)) * (11 * BLOCK_BYTES // 512)  # five and a half
    expected = [zlib.crc32(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES)]
    assert len(expected) == 6
    threads = Threads("test-turns", 2)
    try:
        tasks = [asyncio.ensure_future(threads.run(block_crcs, memoryview(content))) for _ in range(8)]
        while not all(task.done() for task in tasks):
            sum(range(2000))
            await asyncio.sleep(0)
        assert [await task for task in tasks] == [expected] * 8
        await until_none_is_planned()
    finally:
        threads.close()
    assert not _turns._gil_holders
    assert block_crcs(memoryview(b"")) == []
