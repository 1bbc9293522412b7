"""A busy event loop lets the threads that work for it have the interpreter.

A loop that always has something to do polls its selector between two callbacks. That lets go of the GIL, but for a
microsecond, and a thread that was asleep needs some fifty to wake up: it finds the GIL taken again. Nor does it ever
demand it, as a thread does that has waited for a switch interval, because each such moment begins its wait anew
(``take_gil`` in CPython). Where a core is free for it, a thread that came back from a system call was measured to wait
0.2 s (median) beside a loop whose callbacks take 0.1 ms, and 0.7 s beside one of 1 ms (``benchmarks/turns.py``).
Meanwhile the loop woke it up in vain, thousands of times, and lost a sixth of its speed by that.

So the loop gives turns: once in each switch interval (``sys.getswitchinterval()``, 5 ms, here never less) it sleeps, if
somebody has been woken up since the last time. A thread that can choose comes when it is its turn (``yield_gil()``), and one
that wants the GIL back for a moment only, many times, says so (``holding_gil()``). The GIL is back when those who have come
have let go of it: each of them may have it for a few milliseconds.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

try:
    from resource import RUSAGE_SELF, RUSAGE_THREAD, getrusage
except ImportError:  # Linux has it

    def _wakings() -> int | None:
        return None
else:

    def _wakings() -> int | None:
        """How often other threads have gone to sleep by themselves: waiting for the GIL, they do so each time that they
        are woken up in vain. None if nobody counts that (gVisor)."""
        together = getrusage(RUSAGE_SELF).ru_nvcsw
        return together - getrusage(RUSAGE_THREAD).ru_nvcsw if together else None


__all__ = ["give_turns", "holding_gil", "slice_s", "stop_turns", "wrap_thread_future", "yield_gil"]

T = TypeVar("T")

_has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
# The system adds some 60 us. A thread has to wake up meanwhile, on a core that may be asleep too: with 60 us alone
# many naps were in vain.
_NAP_S = 200e-6
_SLICE_S = 1e-3
_BUSY_SLICE_S = 3e-3  # slices of 1 ms need three turns, 5 ms apart, for what is done in one of these
_HOLD_S = 1e-3
_REST_S = 10e-6
_EARLY_S = 100e-6  # so that whoever rests is there when the turn comes
_BUSY = 0.5  # of the time
_MOST_INTERVALS = 16
_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 5e-3, 20e-3


def wrap_thread_future(work: Future[T]) -> asyncio.Future[T]:
    """``work``, which threads do, for a task of the running loop; meanwhile the loop gives them turns."""
    give_turns(work)
    return asyncio.wrap_future(work)


def give_turns(work: Future[Any]) -> None:
    """Until ``work``, which threads do, has ended, the running loop gives turns while it is busy. Returns at once. Does
    nothing where no loop runs, or there is no GIL."""
    if not _has_gil():
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if loop not in _of_loops:
        _of_loops[loop] = _LoopTurns()
    _of_loops[loop].until_ended(work, loop)


def stop_turns(work: Future[Any]) -> None:
    """``work`` is given up, though it may never end."""
    with suppress(KeyError):  # it had none
        _of_loops[asyncio.get_running_loop()].give_up(work)


def yield_gil() -> None:
    """In a thread: let go of the GIL, if only for a moment, and do not want it back before the next turn."""
    wait_s = _next_turn_at - time.monotonic() - _EARLY_S
    time.sleep(min(max(_REST_S, wait_s), _interval_s()))


def slice_s() -> float:
    """How long a thread may keep the GIL until it rests: beside a busy loop longer, as the next turn is far away."""
    return _BUSY_SLICE_S if _next_turn_at > time.monotonic() else _SLICE_S


@contextmanager
def holding_gil() -> Iterator[None]:
    """In a thread, around many short calls that each let go of the GIL: the loop does not take it back in between.

    For 1 ms at most, in the next turn; what takes longer goes on in the one after it.
    """
    ended = threading.Lock()
    with ended:
        _gil_holders.add(ended)
        try:
            yield
        finally:
            _gil_holders.discard(ended)


class _LoopTurns:
    """Those of one loop, which nothing in here refers to: a closed one is not kept."""

    def __init__(self) -> None:
        self._works: WeakSet[Future[Any]] = WeakSet()
        self._due = 0.0
        self._planned = False
        self._intervals = 1
        self._seen = _clocks()
        self._wakings = _wakings()

    def until_ended(self, work: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._works.add(work)
        if not self._planned:
            self._intervals = 1
            self._seen = _clocks()
            self._plan(loop)

    def give_up(self, work: Future[Any]) -> None:
        self._works.discard(work)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        global _next_turn_at
        self._planned = False
        self._works = WeakSet(work for work in self._works if not work.done())
        if not self._works:
            return
        (before, ran_before), (now, ran) = self._seen, _clocks()
        share = (ran - ran_before) / max(now - before, 1e-9)
        if share > _BUSY:
            _next_turn_at = math.inf  # it is now
            try:
                self._nap()
            finally:  # a signal may end it, and the loop
                _next_turn_at = 0.0
            self._intervals = 1
        else:  # threads get the GIL while it sleeps, and it is not to be woken up for nothing
            self._intervals = min(2 * self._intervals, _MOST_INTERVALS)
        self._seen = _clocks()
        wait_s = self._intervals * _interval_s()
        self._due = loop.time() + wait_s
        if share > _BUSY:
            _next_turn_at = self._seen[0] + wait_s
        self._plan(loop)

    def _nap(self) -> None:
        if _gil_holders:
            _let_them_end()
        elif self._somebody_was_woken():
            time.sleep(_NAP_S)
            self._wakings = _wakings()  # who came, and has gone to sleep again, is no reason for the next one

    def _somebody_was_woken(self) -> bool:
        """Since the last time. If not, all are in system calls, or compute without the GIL."""
        before, self._wakings = self._wakings, _wakings()
        return self._wakings is None or self._wakings != before

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_at(max(self._due, loop.time()), self._give, loop)
        self._planned = True


def _let_them_end() -> None:
    end = time.monotonic() + _HOLD_S
    for ended in list(_gil_holders):
        if ended.acquire(timeout=max(0.0, end - time.monotonic())):
            ended.release()


def _interval_s() -> float:
    """Programs that make the switch interval small want latency, not a loop that sleeps all the time."""
    return min(max(sys.getswitchinterval(), _LEAST_INTERVAL_S), _MOST_INTERVAL_S)


def _clocks() -> tuple[float, float]:
    """Seconds, and those of them in which this thread has been running."""
    return time.monotonic(), time.thread_time()


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopTurns] = WeakKeyDictionary()
_next_turn_at = 0.0
"""Of whichever busy loop said so last; in the past when none is busy any more, infinite during a turn: who looks then
has just done his bit, and the next one is an interval away."""
_gil_holders: set[threading.Lock] = set()
"""Each is held while it lasts."""


def _forget_after_fork() -> None:
    global _next_turn_at
    _next_turn_at = 0.0
    _gil_holders.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
