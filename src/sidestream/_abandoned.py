"""Operations whose event loop has ended under them.

``asyncio.run`` cancels every task and waits for it. A loop that is closed in another way, that is dropped, or whose
thread ends, leaves tasks that never take another step: nobody would remove what they have written, stop their threads
or resolve their outcome. So everything that needs its loop is registered here while it is in flight, by loop. Whoever
looks (``take_abandoned``) gets the loops that have ended, and ends their operations from a thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

__all__ = [
    "Abandoned",
    "Noted",
    "Remains",
    "Watched",
    "hop",
    "keep",
    "noted",
    "put_back",
    "supervised_here",
    "take_abandoned",
    "watch",
]

_log = logging.getLogger("sidestream")

Keeping = Literal["supervised", "accompanying"]

_GRACE_S = 5.0
"""How long past its deadline a thread is waited for, as in ``Threads``."""


class Remains(Protocol):
    """What an operation leaves where its loop never runs again."""

    @property
    def what(self) -> str:
        """For the log: what was going on, with the URL."""

    @property
    def expires_at(self) -> float:
        """When its time is over, if its loop runs (``time.monotonic`` seconds)."""

    def abandon(self) -> None:
        """Tell the threads to stop. Does not block, and may be called in any thread and more than once."""

    def leave(self, *, stuck: bool) -> str | None:
        """In a thread: wait until no thread touches anything any more, then release it. Returns what was done, for the
        log; None where that is of no interest. ``stuck``: a thread of the loop still sits in a system call."""


@dataclass(frozen=True, slots=True)
class Noted:
    """An operation that leaves nothing but threads, which its hops stop."""

    what: str
    done: str
    expires_at: float

    def abandon(self) -> None:
        """There is nothing else to stop."""

    def leave(self, *, stuck: bool) -> str:
        return self.done


class Watched:
    """The entry of one operation; ``end()`` removes it."""

    __slots__ = ("_home", "_remains", "holds_loop")

    def __init__(self, home: Abandoned, remains: Remains, holds_loop: bool) -> None:
        self._home: Abandoned | None = home
        self._remains: Remains | None = remains
        self.holds_loop = holds_loop

    @property
    def remains(self) -> Remains:
        """Of one that has not ended."""
        assert self._remains is not None
        return self._remains

    def end(self) -> None:
        """The operation has ended by itself. Does nothing outside of its loop: there, a coroutine that is being
        destroyed comes by, and its operation has not ended."""
        home = self._home
        if home is not None and asyncio._get_running_loop() is home.loop():
            home.watches.discard(self)
            home.tidy()
            self._home = self._remains = None  # which may refer to this entry


class Abandoned:
    """Everything of ours that is in flight on one loop.

    The loop is referred to strongly only while something is in flight that needs it: an idle loop that is dropped is
    collected, and what was to be released with it is found by that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.thread = threading.current_thread()
        self.tasks: dict[asyncio.Task[Any], Keeping] = {}
        self.hops: dict[object, tuple[Future[Any], Callable[[], None], float]] = {}
        self.watches: set[Watched] = set()
        self._held: asyncio.AbstractEventLoop | None = None

    # --- on the loop ---

    def tidy(self) -> None:
        """Hold the loop as long as something needs it, and be forgotten when nothing does."""
        if self.tasks or self.hops or any(one.holds_loop for one in self.watches):
            self._held = self.loop()
        else:
            self._held = None
            if not self.watches:
                with _lock:
                    _all.discard(self)

    # --- anywhere ---

    def reason(self, *, at_exit: bool) -> str | None:
        """Why the loop will not run again; None while it may."""
        loop = self.loop()
        if loop is None:
            return "its event loop was dropped"
        if loop.is_closed():
            return "its event loop was closed"
        if loop.is_running():
            return None
        if not self.thread.is_alive():
            return "the thread of its event loop has ended"
        if at_exit:
            return "the process ends, and its event loop was not closed"
        expiring = [one.remains.expires_at for one in self.watches if one.holds_loop]
        if expiring and time.monotonic() > max(expiring) + _GRACE_S:
            return "its event loop was not run any more, and its deadline has passed"
        return None

    def release(self, reason: str, patience_s: float | None = None) -> None:
        """In a thread without a loop: end everything that was in flight. ``patience_s`` bounds how long threads are
        waited for; by default until their deadlines."""
        hops, watches = list(self.hops.values()), list(self.watches)
        for _, stop, _ in hops:
            stop()
        for one in watches:
            with _logged("stopping", one.remains.what):
                one.remains.abandon()
        stuck = not self._hops_end(hops, patience_s)
        for one in watches:
            with _logged("ending", one.remains.what):
                done = one.remains.leave(stuck=stuck)
                if done is not None:
                    _log.warning("%s: %s before that had ended; %s", one.remains.what, reason, done)
        for task in list(self.tasks):
            _close(task)
        self.tasks.clear()
        self.hops.clear()
        self.watches.clear()
        self._held = None

    def _hops_end(self, hops: list[Any], patience_s: float | None) -> bool:
        until = max((at for _, _, at in hops if at < math.inf), default=0.0) + _GRACE_S
        timeout_s = max(_GRACE_S, until - time.monotonic()) if patience_s is None else patience_s
        return not wait([future for future, _, _ in hops], timeout_s).not_done


_lock = threading.Lock()
_homes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Abandoned] = weakref.WeakKeyDictionary()
_all: set[Abandoned] = set()


def _here() -> Abandoned:
    loop = asyncio.get_running_loop()
    home = _homes.get(loop)
    if home is None:
        with _lock:
            home = _homes.setdefault(loop, Abandoned(loop))
    if home.thread is not threading.current_thread():
        home.thread = threading.current_thread()
    if home not in _all:
        with _lock:
            _all.add(home)
    return home


def watch(remains: Remains, *, holds_loop: bool = True) -> Watched:
    """Until ``end()``, an operation on the running loop that may leave something. With ``holds_loop=False`` the loop is
    not kept alive by it, and ``remains`` must not refer to the loop."""
    home = _here()
    made = Watched(home, remains, holds_loop)
    home.watches.add(made)
    home.tidy()
    return made


@contextmanager
def noted(what: str, done: str, expires_at: float) -> Iterator[None]:
    """Within, on a loop: ``what`` is in flight; where the loop ends, the log says that, and ``done``."""
    watched = watch(Noted(what, done, expires_at))
    try:
        yield
    finally:
        watched.end()


@contextmanager
def hop(future: Future[Any], stop: Callable[[], None], until: float) -> Iterator[None]:
    """Within, a task of the running loop waits for ``future``, which a thread does: where the loop ends, ``stop`` is
    called, and the thread waited for."""
    home, key = _here(), object()
    home.hops[key] = (future, stop, until)
    home.tidy()
    try:
        yield
    finally:
        if asyncio._get_running_loop() is home.loop():
            home.hops.pop(key, None)
            home.tidy()


def keep(task: asyncio.Task[Any], keeping: Keeping) -> None:
    """Refer to ``task``, of the running loop, until it has ended; where the loop ends, close its coroutine."""
    home = _here()
    home.tasks[task] = keeping
    home.tidy()
    task.add_done_callback(_forget_task)


def supervised_here() -> set[asyncio.Task[Any]]:
    """The supervised tasks of the running loop."""
    home = _homes.get(asyncio.get_running_loop())
    return set() if home is None else {task for task, keeping in home.tasks.items() if keeping == "supervised"}


def _forget_task(task: asyncio.Task[Any]) -> None:
    home = _homes.get(task.get_loop())
    if home is not None:
        home.tasks.pop(task, None)
        home.tidy()


def take_abandoned(*, at_exit: bool = False) -> list[tuple[Abandoned, str]]:
    """The loops that have ended with something in flight, and why they are taken for that. Each is handed out once."""
    if not _all:
        return []
    found: list[tuple[Abandoned, str]] = []
    for home in list(_all):
        reason = home.reason(at_exit=at_exit)
        if reason is not None:
            with _lock:
                if home not in _all:
                    continue
                _all.discard(home)
                loop = home.loop()
                if loop is not None:
                    _homes.pop(loop, None)
            found.append((home, reason))
    return found


def put_back(home: Abandoned) -> None:
    """Nobody could end it now; it is handed out again."""
    with _lock:
        _all.add(home)


@contextmanager
def _logged(doing: str, what: str) -> Iterator[None]:
    """What goes wrong with one operation is no reason to leave the others."""
    try:
        yield
    except Exception as error:
        _log.warning(
            "%s: %s it from outside of its event loop failed: %s: %s", what, doing, type(error).__name__, error
        )


def _close(task: asyncio.Task[Any]) -> None:
    """Destroy the coroutine of a task that never takes another step, so that nothing in its frames is kept alive."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # what became of it has been logged
    coroutine: Any = task.get_coro()
    # A cancel scope in it complains that no loop runs, and so does whatever it awaits in its ``finally``.
    with suppress(Exception, asyncio.CancelledError):
        coroutine.close()


def _forget_after_fork() -> None:
    global _all, _homes, _lock
    _of_the_parent.append((_all, _homes))  # in the child none of it is ever run, or destroyed
    _all, _homes, _lock = set(), weakref.WeakKeyDictionary(), threading.Lock()


_of_the_parent: list[Any] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
