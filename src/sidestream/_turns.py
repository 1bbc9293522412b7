"""A busy event loop lets the threads that work for it have the interpreter.

A loop that always has something to do polls its selector between two callbacks. That lets go of the GIL, but for a
microsecond, and a thread that was asleep needs some fifty to wake up: it finds the GIL taken again. Nor does it ever
demand it, as a thread does that has waited for a switch interval, because each such moment begins its wait anew
(``take_gil`` in CPython). Where a core is free for it, a thread that came back from a system call was measured to wait
0.4 s (median) beside a loop whose callbacks take 0.1 ms, and seconds beside one of 1 ms (``benchmarks/turns.py``).
Meanwhile the loop woke it up in vain, thousands of times, and lost 15 % of its speed by that.
"""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

__all__ = ["give_turns", "no_more_turns"]

_HAS_GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
_NAP_S = 1e-6  # the system makes some 60 us of it, enough for another thread to wake up and take the GIL
_MOST_INTERVALS = 16


def give_turns(work: Future[Any]) -> None:
    """Until ``work``, which threads do, has ended, the running loop really lets go of the GIL once in each switch
    interval (``sys.getswitchinterval()``, 5 ms), for some 60 us, if it is busy. Returns at once. Does nothing where no
    loop runs, or there is no GIL."""
    if not _HAS_GIL:
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
    with suppress(RuntimeError, KeyError):
        _of_loops[asyncio.get_running_loop()].give_up(work)


class _Turns:
    """Those of one loop, which nothing in here refers to: a closed one is not kept."""

    def __init__(self) -> None:
        self._works: WeakSet[Future[Any]] = WeakSet()
        self._due = 0.0
        self._planned = False
        self._intervals = 1
        self._seen = (0.0, 0.0)

    def until_ended(self, work: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._works.add(work)
        if not self._planned:
            self._intervals = 1
            self._is_busy()  # from now on
            self._plan(loop)

    def give_up(self, work: Future[Any]) -> None:
        self._works.discard(work)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        self._planned = False
        self._works = WeakSet(work for work in self._works if not work.done())
        if not self._works:
            return
        if self._is_busy():
            time.sleep(_NAP_S)
            self._intervals = 1
        else:  # threads get the GIL while it sleeps, and it is not to be woken up for nothing
            self._intervals = min(2 * self._intervals, _MOST_INTERVALS)
        self._due = loop.time() + self._intervals * sys.getswitchinterval()
        self._plan(loop)

    def _is_busy(self) -> bool:
        """Whether this thread has been running for most of the time since it was asked last."""
        seen, self._seen = self._seen, (time.monotonic(), time.thread_time())
        return self._seen[1] - seen[1] > 0.5 * (self._seen[0] - seen[0])

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_at(max(self._due, loop.time()), self._give, loop)
        self._planned = True


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()
