"""Operations whose event loop ended before they did.

``asyncio.run`` cancels every task and waits for it. A loop that is closed in another way, that is dropped, or whose
thread ends, leaves tasks that never take another step: nothing would remove the files they have written, stop their
threads or resolve their futures. So every operation that needs its loop is registered here, by loop, while it is in
flight. ``take_abandoned`` returns the loops that have ended; its caller ends their operations from a thread.
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
    "LoopOperations",
    "OperationResources",
    "RegisteredOperation",
    "ThreadWork",
    "put_back",
    "register",
    "registered",
    "supervised_tasks",
    "take_abandoned",
    "track_task",
    "waiting_for_thread",
]

_log = logging.getLogger("sidestream")

TaskKind = Literal["supervised", "owned"]

_GRACE_S = 5.0
"""How long a wait for a thread continues past the thread's deadline, as in ``Threads``."""


class OperationResources(Protocol):
    """The resources that an operation leaves behind when its loop never runs again."""

    @property
    def what(self) -> str:
        """A description of the operation for the log, with the URL."""

    @property
    def expires_at(self) -> float:
        """The deadline of the operation if its loop runs (``time.monotonic`` seconds)."""

    def abandon(self) -> None:
        """Signal the threads to stop. Does not block; may be called in any thread and more than once."""

    def leave(self, *, stuck: bool) -> str | None:
        """Wait until no thread uses the resources, then release them. Called in a thread. Returns a description of what
        was done for the log, or None if there is nothing to log. ``stuck``: a thread of the loop is still in a system
        call."""


@dataclass(frozen=True, slots=True)
class ThreadWork:
    """An operation whose only resources are threads, which its waits stop."""

    what: str
    done: str
    expires_at: float

    def abandon(self) -> None:
        """Do nothing: there is nothing else to stop."""

    def leave(self, *, stuck: bool) -> str:
        return self.done


class RegisteredOperation:
    """The entry of one operation in the registry of its loop, until ``end()``."""

    __slots__ = ("_operations", "_resources", "holds_loop")

    def __init__(self, operations: LoopOperations, resources: OperationResources, holds_loop: bool) -> None:
        self._operations: LoopOperations | None = operations
        self._resources: OperationResources | None = resources
        self.holds_loop = holds_loop

    @property
    def resources(self) -> OperationResources:
        """The resources of an operation that has not ended."""
        assert self._resources is not None
        return self._resources

    def end(self) -> None:
        """Remove the entry, because the operation has ended. Does nothing outside of its loop, where the caller is a
        coroutine that is being destroyed before its operation has ended."""
        operations = self._operations
        if operations is not None and asyncio._get_running_loop() is operations.loop():
            operations.registrations.discard(self)
            operations.tidy()
            self._operations = self._resources = None  # which may refer to this entry


class LoopOperations:
    """All operations of sidestream that are in flight on one loop.

    The loop is referred to strongly only while something is in flight that needs it: an idle loop that is dropped is
    collected, and its collection shows that its resources have to be released.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.thread = threading.current_thread()
        self.tasks: dict[asyncio.Task[Any], TaskKind] = {}
        self.thread_waits: dict[object, tuple[Future[Any], Callable[[], None], float]] = {}
        self.registrations: set[RegisteredOperation] = set()
        self._held: asyncio.AbstractEventLoop | None = None

    # --- on the loop ---

    def tidy(self) -> None:
        """Keep the loop alive while an operation needs it; remove this object from the registry when none does."""
        # The reference to the loop is a decision. With it, a loop that the program drops while work is in flight is
        # kept, and its tasks are ended in order. Without it, an idle loop is collected like any other object.
        # Registrations that do not hold the loop are those of handles that are only open, such as a ``Checkpointer``.
        if self.tasks or self.thread_waits or any(one.holds_loop for one in self.registrations):
            self._held = self.loop()
        else:
            self._held = None
            if not self.registrations:
                with _lock:
                    _all.discard(self)

    # --- in any thread ---

    def reason(self, *, at_exit: bool) -> str | None:
        """Return the reason why the loop will not run again, or None if it may."""
        loop = self.loop()
        if loop is None:
            return "its event loop was dropped"
        if loop.is_closed():
            return "its event loop was closed"
        # The order of the questions matters. A loop that runs is fine, whatever thread it was seen in last. A thread
        # that has ended cannot run its loop any more. A loop that stands still may be run again, as in a notebook, so
        # only its deadline decides, with a grace.
        if loop.is_running():
            return None
        if not self.thread.is_alive():
            return "the thread of its event loop has ended"
        if at_exit:
            return "the process ends, and its event loop was not closed"
        expiring = [one.resources.expires_at for one in self.registrations if one.holds_loop]
        if expiring and time.monotonic() > max(expiring) + _GRACE_S:
            return "its event loop has stopped running, and its deadline has passed"
        return None

    def release(self, reason: str, patience_s: float | None = None) -> None:
        """End all operations that are in flight. Call it in a thread without a loop. ``patience_s`` bounds the wait for
        threads; by default their deadlines do."""
        # All are signalled before any is waited for, so that the waits overlap. The threads are waited for before the
        # resources are released, because ``leave`` deletes files that they may be writing. The coroutines are closed
        # last: their ``finally`` clauses find no running loop, and do nothing.
        waits, registrations = list(self.thread_waits.values()), list(self.registrations)
        for _, stop, _ in waits:
            stop()
        for one in registrations:
            with _logged("stopping", one.resources.what):
                one.resources.abandon()
        stuck = not self._wait_for_threads(waits, patience_s)
        for one in registrations:
            with _logged("ending", one.resources.what):
                done = one.resources.leave(stuck=stuck)
                if done is not None:
                    _log.warning("%s: %s before that had ended; %s", one.resources.what, reason, done)
        for task in list(self.tasks):
            _close(task)
        self.tasks.clear()
        self.thread_waits.clear()
        self.registrations.clear()
        self._held = None

    def _wait_for_threads(self, waits: list[Any], patience_s: float | None) -> bool:
        until = max((at for _, _, at in waits if at < math.inf), default=0.0) + _GRACE_S
        timeout_s = max(_GRACE_S, until - time.monotonic()) if patience_s is None else patience_s
        return not wait([future for future, _, _ in waits], timeout_s).not_done


_lock = threading.Lock()
_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopOperations] = weakref.WeakKeyDictionary()
_all: set[LoopOperations] = set()


def _of_running_loop() -> LoopOperations:
    loop = asyncio.get_running_loop()
    operations = _by_loop.get(loop)
    if operations is None:
        with _lock:
            operations = _by_loop.setdefault(loop, LoopOperations(loop))
    # A loop may be run in one thread after the other. The last one counts, because its end is what ends the loop.
    if operations.thread is not threading.current_thread():
        operations.thread = threading.current_thread()
    if operations not in _all:
        with _lock:
            _all.add(operations)
    return operations


def register(resources: OperationResources, *, holds_loop: bool = True) -> RegisteredOperation:
    """Register an operation of the running loop until ``end()``. With ``holds_loop=False`` the entry does not keep the
    loop alive, and ``resources`` must not refer to the loop."""
    operations = _of_running_loop()
    registration = RegisteredOperation(operations, resources, holds_loop)
    operations.registrations.add(registration)
    operations.tidy()
    return registration


@contextmanager
def registered(what: str, done: str, expires_at: float) -> Iterator[None]:
    """Register the operation ``what`` for the time of the ``with`` block. If the loop ends during this time, a warning
    names the operation, and ``done`` as its outcome."""
    registration = register(ThreadWork(what, done, expires_at))
    try:
        yield
    finally:
        registration.end()


@contextmanager
def waiting_for_thread(future: Future[Any], stop: Callable[[], None], until: float) -> Iterator[None]:
    """Register that a task of the running loop waits for a thread, which resolves ``future``. If the loop ends during
    the ``with`` block, its cleanup calls ``stop`` and waits for the thread."""
    operations, key = _of_running_loop(), object()
    operations.thread_waits[key] = (future, stop, until)
    operations.tidy()
    try:
        yield
    finally:
        if asyncio._get_running_loop() is operations.loop():
            operations.thread_waits.pop(key, None)
            operations.tidy()


def track_task(task: asyncio.Task[Any], kind: TaskKind) -> None:
    """Keep a reference to ``task`` of the running loop until it has ended. If the loop ends first, close its
    coroutine."""
    operations = _of_running_loop()
    operations.tasks[task] = kind
    operations.tidy()
    task.add_done_callback(_forget_task)


def supervised_tasks() -> set[asyncio.Task[Any]]:
    """Return the supervised tasks of the running loop."""
    operations = _by_loop.get(asyncio.get_running_loop())
    return set() if operations is None else {task for task, kind in operations.tasks.items() if kind == "supervised"}


def _forget_task(task: asyncio.Task[Any]) -> None:
    operations = _by_loop.get(task.get_loop())
    if operations is not None:
        operations.tasks.pop(task, None)
        operations.tidy()


def take_abandoned(*, at_exit: bool = False) -> list[tuple[LoopOperations, str]]:
    """Return the loops that have ended with operations in flight, each with the reason. Each loop is returned once."""
    if not _all:
        return []
    found: list[tuple[LoopOperations, str]] = []
    for operations in list(_all):
        reason = operations.reason(at_exit=at_exit)
        if reason is not None:
            with _lock:
                if operations not in _all:
                    continue
                _all.discard(operations)
                loop = operations.loop()
                if loop is not None:
                    _by_loop.pop(loop, None)
            found.append((operations, reason))
    return found


def put_back(operations: LoopOperations) -> None:
    """Put ``operations`` back into the registry, because they could not be ended now."""
    with _lock:
        _all.add(operations)


@contextmanager
def _logged(doing: str, what: str) -> Iterator[None]:
    """Log an error of one operation and suppress it, so that the others are still ended."""
    try:
        yield
    except Exception as error:
        _log.warning(
            "%s: %s it from outside of its event loop failed: %s: %s", what, doing, type(error).__name__, error
        )


def _close(task: asyncio.Task[Any]) -> None:
    """Destroy the coroutine of a task that never takes another step, so that nothing in its frames is kept alive."""
    with suppress(AttributeError):  # private to asyncio: a Python without it logs the task once more
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # its outcome has been logged
    coroutine: Any = task.get_coro()
    # A cancel scope in it raises because no loop runs, and so does each await in its ``finally``.
    with suppress(Exception, asyncio.CancelledError):
        coroutine.close()


def _forget_after_fork() -> None:
    global _all, _by_loop, _lock
    _of_the_parent.append((_all, _by_loop))  # in the child none of these operations is run or destroyed
    _all, _by_loop, _lock = set(), weakref.WeakKeyDictionary(), threading.Lock()


_of_the_parent: list[Any] = []
os.register_at_fork(after_in_child=_forget_after_fork)
