"""A busy event loop lets the threads that work for it have the interpreter.

A loop that always has something to do polls its selector between two callbacks. That lets go of the GIL, but for a
microsecond, and a thread that was asleep needs some fifty to wake up: it finds the GIL taken again. Nor does it ever
demand it, as a thread does that has waited for a switch interval, because each such moment begins its wait anew
(``take_gil`` in CPython). Where a core is free for it, a thread that came back from a system call was measured to wait
0.2 s (median) beside a loop whose callbacks take 0.1 ms, and 1.8 s beside one of 1 ms (``benchmarks/turns.py``).
Meanwhile the loop woke it up in vain, thousands of times, and lost up to 15 % of its speed by that.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

__all__ = ["awaited", "give_turns", "no_more_turns"]

T = TypeVar("T")

_has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
_NAP_S = 1e-6  # the system makes some 60 us of it, enough for another thread to wake up and take the GIL
_MOST_INTERVALS = 16


def awaited(work: Future[T]) -> asyncio.Future[T]:
    """``work``, which threads do, for a task of the running loop; meanwhile the loop gives them turns."""
    give_turns(work)
    return asyncio.wrap_future(work)


def give_turns(work: Future[Any]) -> None:
    """Until ``work``, which threads do, has ended, the running loop really lets go of the GIL once in each switch
    interval (``sys.getswitchinterval()``, 5 ms), for some 60 us, if it is busy. Returns at once. Does nothing where no
    loop runs, or there is no GIL."""
    if not _has_gil():
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if loop not in _of_loops:
        _of_loops[loop] = _Turns()
    _of_loops[loop].until_ended(work, loop)


def no_more_turns(work: Future[Any]) -> None:
    """``work`` is given up, though it may never end."""
    with suppress(KeyError):  # it had none
        _of_loops[asyncio.get_running_loop()].give_up(work)


class _Turns:
    """Those of one loop, which nothing in here refers to: a closed one is not kept."""

    def __init__(self) -> None:
        self._works: WeakSet[Future[Any]] = WeakSet()
        self._due = 0.0
        self._planned = False
        self._intervals = 1
        self._seen = _clocks()

    def until_ended(self, work: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._works.add(work)
        if not self._planned:
            self._intervals = 1
            self._seen = _clocks()
            self._plan(loop)

    def give_up(self, work: Future[Any]) -> None:
        self._works.discard(work)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        self._planned = False
        self._works = WeakSet(work for work in self._works if not work.done())
        if not self._works:
            return
        (before, ran_before), self._seen = self._seen, _clocks()
        now, ran = self._seen
        if ran - ran_before > 0.5 * (now - before):  # busy
            time.sleep(_NAP_S)
            self._intervals = 1
        else:  # threads get the GIL while it sleeps, and it is not to be woken up for nothing
            self._intervals = min(2 * self._intervals, _MOST_INTERVALS)
        self._due = loop.time() + self._intervals * sys.getswitchinterval()
        self._plan(loop)

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_at(max(self._due, loop.time()), self._give, loop)
        self._planned = True


def _clocks() -> tuple[float, float]:
    """Seconds, and those of them in which this thread has been running."""
    return time.monotonic(), time.thread_time()


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()
