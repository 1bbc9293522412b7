"""Cooperative scheduling of the GIL between a busy event loop and the threads that work for it.

A busy loop polls its selector between two callbacks. That releases the GIL for about a microsecond, but a sleeping
thread needs about fifty to wake up, and finds the GIL taken again. The thread never requests the GIL either: it would
do so after waiting for one switch interval, and each of those short releases restarts that interval (``take_gil`` in
CPython). With a free core, a thread that returned from a system call waited 0.2 s (median) beside a loop whose
callbacks take 0.1 ms, and 0.7 s beside callbacks of 1 ms (``benchmarks/turns.py``). Meanwhile the loop woke the thread
thousands of times in vain, which cost the loop a sixth of its speed.

So the loop gives turns. Once in each switch interval (``sys.getswitchinterval()``, 5 ms, here never less) it sleeps
briefly if a thread has been woken up since the last turn. A thread that computes waits for the next turn with
``yield_gil()``. A thread that makes many short calls that release the GIL runs them in ``holding_gil()``, so that the
loop does not take the GIL between them. The loop continues when the threads have released the GIL; each of them may
hold it for a few milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

try:
    from resource import RUSAGE_SELF, RUSAGE_THREAD, getrusage
except ImportError:  # not on Linux

    def _context_switches() -> int | None:
        """Return None: the system does not count context switches."""
        return None
else:

    def _context_switches() -> int | None:
        """Return the number of voluntary context switches of the other threads: a thread that waits for the GIL makes
        one each time that it is woken up in vain. None if the system does not count them (gVisor)."""
        together = getrusage(RUSAGE_SELF).ru_nvcsw
        return together - getrusage(RUSAGE_THREAD).ru_nvcsw if together else None


_has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
# The system adds some 60 us. A thread has to wake up during this time, on a core that may be asleep too: with 60 us
# alone many naps were too short.
_NAP_S = 200e-6
_SLICE_S = 1e-3
_BUSY_SLICE_S = 3e-3  # slices of 1 ms would need three turns, 5 ms apart, for the same work
_HOLD_S = 1e-3
_REST_S = 10e-6
_EARLY_S = 100e-6  # so that the thread is awake when the turn begins
_BUSY = 0.5  # the share of the time in which a busy loop runs
_MOST_INTERVALS = 16
_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 5e-3, 20e-3


def give_turns(work: Future[Any]) -> None:
    """Make the running loop give turns while it is busy, until ``work``, which threads do, has ended.

    Returns at once. Does nothing where no loop runs, and on a Python without a GIL.
    """
    if not _has_gil():
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if loop in _without_turns:
        return
    if loop not in _of_loops:
        _of_loops[loop] = _LoopTurns()
    _of_loops[loop].until_ended(work, loop)


def give_no_turns(loop: asyncio.AbstractEventLoop) -> None:
    """Make ``loop`` give no turns: the loop of the caller gives them as long as it waits."""
    _without_turns.add(loop)


def stop_turns(work: Future[Any]) -> None:
    """Stop giving turns for ``work``, which may never end."""
    with suppress(KeyError):  # this loop has given none
        _of_loops[asyncio.get_running_loop()].stop(work)


def yield_gil() -> None:
    """Release the GIL in a worker thread until the next turn; for 10 us if no loop is busy."""
    wait_s = _next_turn_at - time.monotonic() - _EARLY_S
    time.sleep(min(max(_REST_S, wait_s), _interval_s()))


def slice_s() -> float:
    """Return how many seconds a worker thread may hold the GIL before it calls ``yield_gil``. The time is longer beside
    a busy loop, where the next turn is further away."""
    return _BUSY_SLICE_S if _next_turn_at > time.monotonic() else _SLICE_S


@contextmanager
def holding_gil() -> Iterator[None]:
    """Keep the loop from taking the GIL between the calls of a worker thread in the ``with`` block.

    For many short calls that each release the GIL. The loop waits for at most 1 ms in the next turn; the calls that
    remain continue in the turn after it.
    """
    ended = threading.Lock()
    with ended:
        _gil_holders.add(ended)
        try:
            yield
        finally:
            _gil_holders.discard(ended)


memmove_holding_gil = ctypes.PyDLL(None).memmove
"""``memmove`` that keeps the GIL. To get the GIL back from a busy thread takes up to a switch interval (5 ms), which is
too much for each of 10,000 small tensors."""
memmove_holding_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove_holding_gil.restype = None

write_holding_gil = ctypes.PyDLL(None).write
"""``write`` to a descriptor that keeps the GIL. It must not block."""
write_holding_gil.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
write_holding_gil.restype = ctypes.c_ssize_t


def move_small(sources: Iterable[int], targets: Iterable[int], sizes: Iterable[int]) -> None:
    """Copy memory between addresses. The GIL is held until all of it has been copied."""
    deque(map(memmove_holding_gil, targets, sources, sizes), maxlen=0)


class _LoopTurns:
    """The turns of one loop. Holds no reference to the loop, so that a closed loop is collected."""

    def __init__(self) -> None:
        self._works: WeakSet[Future[Any]] = WeakSet()
        self._due = 0.0
        self._planned = False
        self._intervals = 1
        self._seen = _clocks()
        self._context_switches = _context_switches()

    def until_ended(self, work: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._works.add(work)
        if not self._planned:
            self._intervals = 1
            self._seen = _clocks()
            self._plan(loop)

    def stop(self, work: Future[Any]) -> None:
        self._works.discard(work)

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        global _next_turn_at
        self._planned = False
        self._works = WeakSet(work for work in self._works if not work.done())
        if not self._works:
            return
        (before, ran_before), (now, ran) = self._seen, _clocks()
        share = (ran - ran_before) / max(now - before, 1e-9)
        # There are two cases. A busy loop gives a turn, and the next one is due after one interval. A loop that sleeps
        # in its selector has released the GIL anyway, so it is only asked again later, up to 16 intervals apart. The
        # share is that of the time since the last look, so a loop that becomes busy is found within these.
        if share > _BUSY:
            _next_turn_at = math.inf  # the turn is now
            try:
                self._nap()
            finally:  # a signal may end the nap, and the loop
                _next_turn_at = 0.0
            self._intervals = 1
        else:
            self._intervals = min(2 * self._intervals, _MOST_INTERVALS)
        self._seen = _clocks()
        wait_s = self._intervals * _interval_s()
        self._due = loop.time() + wait_s
        if share > _BUSY:
            _next_turn_at = self._seen[0] + wait_s
        self._plan(loop)

    def _nap(self) -> None:
        # A thread that computes checksums block by block is better waited for than napped beside: a nap would end in
        # the middle of its calls. If no thread was woken up, all of them are in system calls, and a nap would cost the
        # loop time for nothing.
        if _gil_holders:
            _wait_for_holders()
        elif self._thread_was_woken():
            time.sleep(_NAP_S)
            # Counted again: a thread that slept again after this turn does not justify the next one.
            self._context_switches = _context_switches()

    def _thread_was_woken(self) -> bool:
        """Return whether a thread was woken up since the last call. If not, all threads are in system calls or compute
        without the GIL."""
        before, self._context_switches = self._context_switches, _context_switches()
        return self._context_switches is None or self._context_switches != before

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        # A timer and not a task: a loop that is closed drops it, and nothing has to be cancelled.
        loop.call_at(max(self._due, loop.time()), self._give, loop)
        self._planned = True


def _wait_for_holders() -> None:
    end = time.monotonic() + _HOLD_S
    for ended in list(_gil_holders):
        if ended.acquire(timeout=max(0.0, end - time.monotonic())):
            ended.release()


def _interval_s() -> float:
    """Return the seconds between two turns. Bounded from below: a program with a small switch interval wants a short
    latency, not a loop that sleeps all the time."""
    return min(max(sys.getswitchinterval(), _LEAST_INTERVAL_S), _MOST_INTERVAL_S)


def _clocks() -> tuple[float, float]:
    """Return the time in seconds, and the CPU time of this thread in seconds."""
    return time.monotonic(), time.thread_time()


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopTurns] = WeakKeyDictionary()
_without_turns: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
_next_turn_at = 0.0
"""When the busy loop that wrote this last gives its next turn (``time.monotonic`` seconds). In the past if no loop is
busy. Infinite during a turn: a thread that reads it then has just had its slice, and waits for one interval."""
_gil_holders: set[threading.Lock] = set()
"""One lock for each running ``holding_gil`` block, held until the block ends."""


def _forget_after_fork() -> None:
    global _next_turn_at
    _next_turn_at = 0.0
    _gil_holders.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
