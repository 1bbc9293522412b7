"""``OperationLoop``: the event loop on which operations run, in a thread of its own, as long as the process lives.

No code of the caller runs on it (``caller.py``), and nothing that blocks.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from .._runtime.gil import give_no_turns, write_holding_gil
from .._runtime.public import public
from .._runtime.tasks import supervise, supervised_tasks
from .._runtime.threads import ThreadFuture, io_threads, read_threads, write_threads
from ..options import check_seconds

_log = logging.getLogger("sidestream")

_LAG_S = 0.1
"""How late the loop may be before that is logged."""

_WAKEUPS = 4096  # bytes, each from one thread, that are read at once

_SILENT_S = 5.0
"""How long the end of the program waits for operations before it logs what it waits for."""


class OperationLoop:
    """The loop and its thread. Methods may be called in any thread."""

    def __init__(self) -> None:
        # Not the policy of the program: what it chooses for its own loop has been made for its own needs.
        self._loop = asyncio.SelectorEventLoop()
        give_no_turns(self._loop)
        self._watched = False
        self._starts: deque[tuple[contextvars.Context, Callable[[], None]]] = deque()  # not begun by the loop yet
        self._read_end, self._write_end = os.pipe()  # a byte in this pipe wakes up the loop
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        # In an empty context. That of this code refers to what the caller has set, and the loop never ends.
        contextvars.Context().run(self._loop.add_reader, self._read_end, self._begin_all)
        self._thread = threading.Thread(target=self._serve, name="sidestream-operations", daemon=True)
        self._thread.start()
        # Python 3.12 starts no thread once the program ends, and operations that have begun need these until their end.
        for threads in (io_threads(), read_threads(), write_threads()):
            threads.submit(_nothing)
        # Not atexit: the interpreter waits for this thread first, and other threads can still be started then. Without
        # it in a handler of atexit, when the main thread has ended: ``_wait_once_more`` waits.
        self._drain: threading.Thread | None = None
        if threading.main_thread().is_alive():
            self._drain = threading.Thread(target=self._wait_at_exit, name="sidestream-exit", daemon=False)
            self._drain.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except BaseException as error:  # SystemExit of an observer, which ends a task and must not end the loop
                _log.error("an observer raised %s", type(error).__name__)

    def is_here(self) -> bool:
        """Return whether this code runs on the loop."""
        return asyncio._get_running_loop() is self._loop

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Call ``callback`` on the loop, soon. Takes no lock: a signal may interrupt the calling thread anywhere."""
        self._loop.call_soon_threadsafe(callback, *args, context=contextvars.copy_context())

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of the loop."""
        return self._loop.create_future()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run ``work``, which must not raise, in a task, soon. The end of the program waits for it."""
        if self.is_here():
            self._start(work, name)
            return
        # ``call`` is a system call in which this thread would lose the GIL: to the loop, or for 5 ms to a thread that
        # computes.
        try:
            self._starts.append((contextvars.copy_context(), partial(self._start, work, name)))
        finally:  # after an interrupt too: what has been appended holds a slot, which only its end gives back
            write_holding_gil(self._write_end, b"0", 1)

    def _begin_all(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._read_end, _WAKEUPS)
        while self._starts:
            context, start = self._starts.popleft()
            context.run(start)

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        supervise(work(), name)
        self.log_lags()

    def log_lags(self) -> None:
        """Log when the loop is late, as long as there are operations. Called on the loop, when one has begun."""
        if not self._watched:
            self._watch(self._loop.time())

    def _watch(self, due: float) -> None:
        # Code that blocks the loop, or a thread that holds the GIL, holds up all operations.
        late_s = self._loop.time() - due
        if late_s > _LAG_S:
            _log.info("the loop of operations was held up for %.0f ms", late_s * 1e3)
        self._watched = bool(supervised_tasks())
        if self._watched:
            due = self._loop.time() + _LAG_S
            # Not in the context of the operation, which refers to its caller and so to the caller's event loop.
            self._loop.call_at(due, self._watch, due, context=contextvars.Context())

    # --- the end of the program ---

    def _wait_at_exit(self) -> None:
        threading.main_thread().join()
        self.wait_for_operations()

    def wait_for_operations(self) -> None:
        """Block until all operations have ended. Each of them ends by its own deadline."""
        while not self._ended().result():
            time.sleep(0)

    def _ended(self) -> Future[bool]:
        """Return a future that is True if nothing is in progress, and resolves when what is in progress has ended."""
        found: Future[bool] = ThreadFuture()

        async def wait() -> None:
            self._begin_all()  # the loop may have been woken up for this first
            tasks = supervised_tasks()
            if tasks:
                await _wait_or_cancel(tasks)
            found.set_result(not tasks)

        self._loop.call_soon_threadsafe(lambda: _keep(self._loop.create_task(wait())))
        return found

    def drained(self) -> bool:
        """Return whether the end of the program has waited for operations once. False if a second Ctrl-C has ended
        that wait."""
        return self._drain is None or not self._drain.is_alive()


async def _wait_or_cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait until ``tasks`` have ended. Cancel those that have not ended in the time that the end of the program has."""
    limit_s = math.inf if _exit_timeout_s is None else _exit_timeout_s
    _, late = await asyncio.wait(tasks, timeout=min(limit_s, _SILENT_S))
    if late and limit_s > _SILENT_S:
        _log.warning("the program ends when these operations have ended: %s", _names(late))
        _, late = await asyncio.wait(late, timeout=None if limit_s == math.inf else limit_s - _SILENT_S)
    if late:
        _log.warning("the program ends, and these operations are cancelled: %s", _names(late))
        for task in late:
            task.cancel()
        await asyncio.wait(late)


def _names(tasks: Iterable[asyncio.Task[None]]) -> str:
    return ", ".join(sorted(task.get_name() for task in tasks))


_exit_timeout_s: float | None = None


@public
def set_exit_timeout(timeout_s: float | None) -> None:
    """Set how long the end of the program waits for operations in progress, such as saves. Those that have not ended by
    then are cancelled, and clean up.

    Args:
        timeout_s: The limit, in seconds. None, as at the beginning: each operation ends by its own ``timeout_s``.

    Raises:
        InvalidOptionError: It is not a number of seconds.
    """
    global _exit_timeout_s
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s)
    _exit_timeout_s = timeout_s


_waiting: set[asyncio.Task[None]] = set()


def _keep(task: asyncio.Task[None]) -> None:
    _waiting.add(task)
    task.add_done_callback(_waiting.discard)


def _nothing() -> None:
    """Do nothing, so that a pool has a thread."""


_lock = threading.Lock()
_the_loop: OperationLoop | None = None


def operation_loop() -> OperationLoop:
    """Return the loop of this process. The first call starts it."""
    global _the_loop
    if _the_loop is None:
        with _lock:
            if _the_loop is None:
                _the_loop = OperationLoop()
    return _the_loop


@atexit.register
def _wait_once_more() -> None:
    """Wait for operations that handlers of ``atexit`` have started. Called before ``_end_work``."""
    if _the_loop is not None and _the_loop.drained():
        with suppress(KeyboardInterrupt):
            _the_loop.wait_for_operations()


_of_the_parent: list[object] = []  # a forked child must not destroy what threads of its parent use


def _after_fork() -> None:
    global _the_loop, _lock
    _of_the_parent.extend((_the_loop, *_waiting))
    _waiting.clear()
    _the_loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
