"""Deadlines, and the threads that work for event loops. All work off the loop goes through ``Threads``.

``asyncio.to_thread`` and ``anyio.to_thread.run_sync`` abandon their thread when the task is cancelled natively. The
thread then continues to write into a buffer or descriptor that other code may use by now. ``Threads.run`` waits for its
thread under ``Task.cancel()``, ``asyncio.timeout`` and anyio scopes alike, and raises the cancel afterwards.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import repeat, starmap
from operator import attrgetter
from typing import Any, ParamSpec, Protocol, TypeVar, TypeVarTuple

import anyio

from ..errors import ClosedError, DeadlineExceededError, ForkedProcessError, allocating, mark_stuck
from ..events import may_wait
from .gil import give_turns, holding_gil, slice_s, stop_turns, yield_gil
from .pauses import by_size, chunked, collected, pace_this_thread, paced, pause_if_due, pause_point

__all__ = [
    "Condition",
    "Deadline",
    "Stop",
    "ThreadFuture",
    "Threads",
    "TorchThreads",
    "ambient_deadline",
    "by_size",
    "chunked",
    "clear_gradually",
    "collected",
    "current_deadline",
    "doing",
    "holding_gil",
    "interpreter_ends",
    "io_threads",
    "paced",
    "pause_if_due",
    "pause_point",
    "read_threads",
    "report",
    "result_of",
    "time_limit",
    "wait_for_change",
    "write_threads",
]

with suppress(ImportError):
    import_module("anyio._backends._asyncio")  # or the first cancel scope imports it on the running loop, for 100 ms

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_GRACE_S = 5.0
"""How long past the deadline ``Threads.wait`` waits for a thread that was signalled to stop, before it leaves the
thread in its system call."""

_DROPPED_AT_ONCE = 32  # objects whose memory is freed between two points for pauses

_TORCH_WORK_S = 3.0
"""How long the interpreter waits at its end for work that calls torch. A process must end within 5 s, also while its
stager is being closed, which takes another second to cancel its stages."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time by which an operation has to end: ``at`` in ``time.monotonic`` seconds, ``timeout_s`` after its
    start."""

    at: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Return the deadline that is ``timeout_s`` from now."""
        return cls(time.monotonic() + timeout_s, timeout_s)

    def remaining_s(self) -> float:
        """Return the seconds until the deadline, or 0."""
        return max(0.0, self.at - time.monotonic())

    def check(self, doing: str) -> None:
        """Raise ``DeadlineExceededError`` if the deadline has passed. ``doing`` names the work in its message."""
        if self.remaining_s() == 0.0:
            raise self.exceeded(doing)

    def result(self, future: Future[T], doing: str, grace_s: float = 0.0) -> T:
        """Block until ``future`` is done, for at most ``grace_s`` past the deadline, and return its result. Raises
        ``DeadlineExceededError`` for ``doing``."""
        try:
            return future.result(self.remaining_s() + grace_s)
        except TimeoutError as error:
            if future.done():
                raise
            raise self.exceeded(doing) from error

    def exceeded(self, doing: str) -> DeadlineExceededError:
        """Return the error to raise for ``doing``."""
        return DeadlineExceededError(f"{doing}: not done within timeout_s={self.timeout_s:g}")


# The deadline is ambient, as in trio: code that waits asks for it, and no function takes it as a parameter. A store
# refuses to work without one (``current_deadline``), so a wait that was forgotten is an error in the first test.
_deadline: ContextVar[Deadline | None] = ContextVar("sidestream_deadline", default=None)


class time_limit:  # not a generator, which takes three times as long
    """Set the deadline of all waits in the ``with`` block: of this task, of the tasks that it creates, and of the
    threads in which ``Threads.run`` works for it. None: these waits have no deadline.

    The innermost limit counts, also where it is later than the one around it, because cleaning up after a deadline has
    passed needs time of its own.
    """

    __slots__ = ("_limit", "_token")

    def __init__(self, limit: Deadline | None) -> None:
        self._limit = limit

    def __enter__(self) -> None:
        self._token = _deadline.set(self._limit)

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # the coroutine is closed outside of its task, because its loop has ended
            _deadline.reset(self._token)


def ambient_deadline() -> Deadline | None:
    """Return the deadline of the innermost ``time_limit`` around the caller, if there is one."""
    return _deadline.get()


def current_deadline() -> Deadline:
    """Return the deadline of the innermost ``time_limit`` around the caller. Raises ``RuntimeError`` if there is
    none."""
    deadline = _deadline.get()
    if deadline is None:
        raise RuntimeError("no time_limit() is in force here: every wait on storage needs one")
    return deadline


class Condition(threading.Condition):
    """A condition that a ``KeyboardInterrupt`` does not leave locked.

    ``with`` calls these methods of the lock itself. Those of ``threading.Condition`` are Python code: an interrupt may
    come in them after the lock was acquired, and then no other thread ever acquires it.
    """

    __enter__ = property(attrgetter("own_lock.__enter__"))
    __exit__ = property(attrgetter("own_lock.__exit__"))

    def __init__(self) -> None:
        self.own_lock = threading.RLock()
        super().__init__(self.own_lock)


class ThreadFuture(Future[T]):
    """A future that a thread resolves. A ``KeyboardInterrupt`` in a method of it does not leave it locked.

    The attributes are private to ``Future``. In a Python that names them otherwise this is an ordinary future; a test
    notices that."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()

    def _invoke_callbacks(self) -> None:
        super()._invoke_callbacks()  # type: ignore[misc]
        self._done_callbacks: list[Any] = []  # which refer to what waited, and to its event loop


class Stop:
    """A flag that asks threads to stop. Long loops check it between two chunks of work.

    A thread that waits for something else (a condition, a queue) waits inside ``waking``.
    """

    __slots__ = ("__weakref__", "_is_set", "_lock", "_wakers")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        _stops.add(self)

    @contextmanager
    def waking(self, waker: Callable[[], None]) -> Iterator[None]:
        """Make ``set()`` call ``waker`` during the ``with`` block, in the thread that calls ``set()``. ``waker`` must
        not block."""
        with self._lock:
            self._wakers.append(waker)
        try:
            yield
        finally:
            with self._lock:
                self._wakers.remove(waker)

    def set(self) -> None:
        self._is_set = True  # first, and not an Event: an interrupt could leave the lock of that acquired
        with self._lock:
            wakers = list(self._wakers)
        for waker in wakers:
            waker()

    def is_set(self) -> bool:
        return self._is_set

    def check(self) -> None:
        """Raise ``ClosedError`` if the flag is set. A task that waits for the thread raises its own ``CancelledError``
        instead."""
        if self._is_set:
            raise ClosedError("stopped before the work was done")


class IdleWork(Protocol):
    """Work that a thread of a pool does while nothing is submitted."""

    def due_s(self) -> float | None:
        """Return in how many seconds ``run`` is to be called; None: not before the next work has been done."""

    def run(self, busy: Callable[[], bool]) -> None:
        """Do work that does not call torch, and return soon after ``busy()`` is true. Must not raise."""


class Wakeup:
    """What wakes up a task when a thread has resolved ``future``.

    In one iteration of the loop less than ``asyncio.wait`` of ``wrap_future`` takes: each iteration polls, and so hands
    the GIL to any thread that computes, which keeps it for 5 ms.
    """

    def __init__(self, future: Future[Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        future.add_done_callback(self._on_done)

    async def wait(self, patience_s: float | None) -> None:
        """Wait until the future has been resolved, or for ``patience_s``. Call it while the future is not done, or
        after that at most once."""
        self._waiter = self._loop.create_future()
        timer = None if patience_s is None else self._loop.call_later(patience_s, self._wake)
        try:
            await self._waiter
        finally:
            if timer is not None:
                timer.cancel()

    def _on_done(self, future: Future[Any]) -> None:
        """Wake the task up, in the thread that has resolved ``future``."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Threads(Executor):
    """A pool of at most ``size`` daemon threads, started when they are needed.

    Not a ``ThreadPoolExecutor``, which accepts no work once the interpreter has begun to end, although a save in flight
    must be finished or cleaned up then. Code that needs the result of a thread has to wait for it, because daemon
    threads do not keep the process alive.
    """

    def __init__(self, name: str, size: int, idle_work: IdleWork | None = None) -> None:
        self._pid = os.getpid()
        self._name = name
        self._idle_work = idle_work
        self._size = size
        self._lock = threading.Lock()
        self._count = 0
        self._started: list[threading.Thread] = []
        self._closed = False
        self._idle = _Idle()
        self._work: queue.SimpleQueue[_WorkItem | None] = queue.SimpleQueue()
        # The threads hold no reference to the pool, so a pool that is dropped is freed, and this ends its threads.
        weakref.finalize(self, self._work.put, None).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` in a thread, under the deadline of the caller. Raises ``ClosedError`` after ``close()``, and
        ``ForkedProcessError`` in a forked child of the process that made the pool."""
        if os.getpid() != self._pid:
            raise ForkedProcessError("this handle was made before os.fork(); make a new one in the child")
        future: Future[T] = ThreadFuture()
        deadline = _deadline.get()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                _current.work = _Work(f"{getattr(fn, '__name__', 'work').strip('_')}()")
                with time_limit(deadline):
                    result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise ClosedError("these threads take no more work: their owner was closed")
            # A thread that is idle now takes this work. It is counted out here and not by the thread itself, because
            # the thread may wake up late, and a second submit would count on it as well.
            if self._idle.threads <= 0 and self._count < self._size:
                self._start_thread()
            self._idle.threads -= 1
            self._work.put(_WorkItem(work, self._on_dropped()))  # last: after an interrupt no work waits for a thread
        return future

    def _on_dropped(self) -> Callable[[], object]:
        """Return the function that the thread calls when it has dropped all references to the work."""
        return _nothing

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=_serve, args=(self._work, self._lock, self._idle, self._idle_work), name=self._name, daemon=True
        )
        try:
            _start(thread)
        except RuntimeError:  # the system cannot start another thread
            if self._count == 0:
                raise
        finally:
            if thread.ident is not None:  # it runs, also if an interrupt ended the wait for it
                self._count += 1
                self._idle.threads += 1
                self._started = [one for one in self._started if one.is_alive()] + [thread]

    async def run(
        self,
        fn: Callable[[*Ts], T],
        *args: *Ts,
        stop: Stop | None = None,
    ) -> T:
        """Run ``fn`` in a thread and return its result. When this returns or raises, the thread has left ``fn``.

        A cancel sets ``stop`` and is raised after the thread has ended. When the deadline passes, ``stop`` is set too,
        and ``DeadlineExceededError`` is raised if ``fn`` ends without a result then. Work that no thread has begun by
        then is never begun.

        There is one exception: a thread that stays in a system call for 5 s after the deadline is left behind, and the
        error is marked (``mark_stuck``). So that this is safe, ``fn`` must own what it uses: it opens and closes its
        own descriptors and holds its own references.

        While it waits, a busy loop gives turns to the thread (``gil.py``).
        """
        work = _Work(f"{fn.__name__.strip('_')}()")
        future = self.submit(lambda: _within(work, fn, *args))
        return await self.wait(future, work, stop=stop)

    async def wait(
        self,
        future: Future[T],
        work: object,
        *,
        stop: Stop | None = None,
    ) -> T:
        """Wait for work that was submitted before, as ``run`` does. ``str(work)`` names it in errors."""
        give_turns(future)
        wakeup = Wakeup(future)
        cancelled: asyncio.CancelledError | None = None
        expired = False
        deadline = _deadline.get()
        # The shield is for scopes of anyio, which cancel a task again and again; native cancels arrive below.
        with anyio.CancelScope(shield=True):
            # There are three ways out of this loop. The thread has ended: the usual one, also after a cancel, which is
            # kept and raised below. The deadline passes: the thread is signalled, and has 5 s to leave its system call.
            # These pass too: the thread is left behind, its place in the pool is given to a new one, and the error says
            # that it may still act.
            while not future.done():
                patience = None if deadline is None else _GRACE_S if expired else deadline.remaining_s()
                try:
                    await wakeup.wait(patience)
                except asyncio.CancelledError as cancel:
                    cancelled = cancelled or cancel
                    _stop_work(future, stop)
                    continue
                if future.done() or deadline is None:
                    continue
                if expired:
                    with self._lock:
                        self._count -= 1  # a new thread may take the place of the one that hangs
                    stop_turns(future)
                    raise mark_stuck(cancelled or deadline.exceeded(f"{work}, which does not return"))
                expired = True
                _stop_work(future, stop)
        # The cancel comes before the result and before every error. A caller that was cancelled must see that, or
        # ``asyncio.timeout`` and task groups would lose their place.
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                del cancelled  # it refers to this frame
        expired = expired or (deadline is not None and deadline.remaining_s() == 0)  # other work has set ``stop``
        if expired and deadline is not None and (future.cancelled() or isinstance(future.exception(), ClosedError)):
            raise deadline.exceeded(str(work))
        if future.cancelled():
            raise asyncio.CancelledError
        return future.result()

    def close(self) -> None:
        """Accept no more work. The threads end after the work that was submitted. Does not wait for them."""
        with self._lock:
            self._closed = True
            self._work.put(None)

    def join(self, deadline: Deadline) -> bool:
        """Block until the threads have ended, after ``close()``. Returns False if ``deadline`` passes first. The
        calling thread may be one of them. A thread holds a reference to the result of its work until it has ended."""
        with self._lock:
            others = [one for one in self._started if one is not threading.current_thread()]
        for thread in others:
            thread.join(deadline.remaining_s())
        return not any(thread.is_alive() for thread in others)


def result_of(future: Future[T], stop: Stop, name: str) -> T:
    """Wait in a thread for the result of ``future``, which ``name`` describes in errors. Raises ``ClosedError`` when
    ``stop`` is set, and ``DeadlineExceededError``."""
    # A second future that a stop resolves, because ``concurrent.futures.wait`` waits for futures only.
    woken: Future[Any] = Future()
    deadline = current_deadline()
    try:
        with stop.waking(partial(_resolve, woken)):
            stop.check()
            wait_for([future, woken], deadline.remaining_s(), FIRST_COMPLETED)
        if not future.done() and deadline.remaining_s() == 0:  # first: the deadline may also have set ``stop``
            raise deadline.exceeded(name)
        stop.check()
        if not future.done():
            raise deadline.exceeded(name)
        return future.result(0)
    finally:
        del future  # an error refers to this stack frame, and the result to staged memory


def wait_for_change(changed: threading.Condition, stop: Stop, name: str) -> None:
    """Wait in a thread until ``changed``, whose lock the thread holds, is notified. Raises what ``result_of``
    raises."""

    def wake() -> None:
        with changed:
            changed.notify_all()

    deadline = current_deadline()
    with stop.waking(wake):
        stop.check()
        if not changed.wait(deadline.remaining_s()):
            raise deadline.exceeded(name)


class _Work:
    """The work of a thread. ``str()`` says what it does at the moment. ``slice_began_at`` is when the work or its last
    pause ended its wait for the GIL, in ``time.perf_counter`` seconds."""

    def __init__(self, name: str) -> None:
        self.doing = name
        self.slice_began_at = time.perf_counter()

    def __str__(self) -> str:
        return self.doing


class _Current(threading.local):
    """The work that the current thread does for ``Threads.run``."""

    def __init__(self) -> None:
        self.work = _Work("")


_current = _Current()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Name what the current thread does in the ``with`` block in the error of a deadline that passes meanwhile."""
    work = _current.work
    before, work.doing = work.doing, what
    try:
        yield
    finally:
        work.doing = before


def _within(work: _Work, fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call ``fn`` in a thread. A failed allocation raises a typed error."""
    # The deadline of a thread is looked at in ``pause_point``, and the name of its work stands in that error.
    _current.work = work
    work.slice_began_at = time.perf_counter()
    with allocating(str(work)):
        return fn(*args)


class TorchThreads(Threads):
    """Threads whose work calls torch and is stopped before the interpreter ends.

    Up to Python 3.13 a daemon thread that comes back from a call while the interpreter ends is ended by
    ``pthread_exit``. Its unwinding meets C++ frames of torch that must not throw, and the process aborts (PyTorch
    issue 38228). So when the interpreter is about to end, after the last non-daemon thread, all work is signalled to
    stop and waited for, for at most 3 s. Work that may block for longer, on a device that does not respond, must block
    in a call without C++ frames around it.
    """

    def _on_dropped(self) -> Callable[[], object]:
        # Not the future of the work: it is done before the thread drops the arguments and the result, and destroying
        # a tensor or an event is a call of torch too.
        left: Future[None] = Future()
        _torch_work.add(left)
        left.add_done_callback(_torch_work.discard)
        return partial(_resolve, left)


def _pause() -> None:
    """Release the GIL in a worker thread if its slice of time (``slice_s()``) is over. Raises ``DeadlineExceededError``
    inside of ``Threads.run`` when the deadline of that call has passed, because an event loop can stop waiting for a
    thread but cannot stop it.

    Without slices, pure Python holds the GIL for one switch interval (5 ms) after the other, and the loop waits for
    each. ``sleep(0)`` releases the GIL for too short a time for another thread to acquire it.
    """
    work = _current.work
    if time.perf_counter() - work.slice_began_at > slice_s():
        if (deadline := _deadline.get()) is not None:
            deadline.check(str(work))
        yield_gil()
        work.slice_began_at = time.perf_counter()


class _Emptied(Protocol):
    def __len__(self) -> int: ...

    def popitem(self) -> object: ...


def clear_gradually(*containers: _Emptied | list[Any]) -> None:
    """Empty containers, with pauses. Freeing 10,000 records at once would hold the GIL for
    milliseconds."""
    for container in containers:
        drop = container.pop if isinstance(container, list) else container.popitem
        while len(container):
            deque(starmap(drop, repeat((), min(_DROPPED_AT_ONCE, len(container)))), maxlen=0)
            pause_point()


@dataclass(slots=True)
class _WorkItem:
    """Work for a thread. ``dropped`` is called by the thread when it has dropped ``work`` and all that it refers to."""

    work: Callable[[], None] | None
    dropped: Callable[[], object]


@dataclass(slots=True)
class _Idle:
    """The number of threads of a pool that wait, less the work that waits for a thread. Read and changed with the lock
    of the pool."""

    threads: int = 0


def _start(thread: threading.Thread) -> None:
    """Start ``thread``. ``Thread.start()`` waits for it, and raises ``RuntimeError`` for a ``KeyboardInterrupt`` that
    comes before the wait has its lock again."""
    try:
        thread.start()
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


def _nothing() -> None:
    """Do nothing, because the interpreter does not wait for threads that do not call torch."""


def _resolve(future: Future[None]) -> None:
    """Mark ``future`` as done, once. ``Future.cancel`` would not wake ``concurrent.futures.wait``."""
    with suppress(InvalidStateError):
        future.set_result(None)


def _serve(
    work: queue.SimpleQueue[_WorkItem | None], lock: threading.Lock, idle: _Idle, idle_work: IdleWork | None
) -> None:
    """Do the work of a pool. A thread keeps no reference to the pool, which ends its threads when it is freed."""
    pace_this_thread(_pause)
    while True:
        try:
            item = work.get(timeout=None if idle_work is None else idle_work.due_s())
        except queue.Empty:
            assert idle_work is not None
            idle_work.run(lambda: not work.empty())
            continue
        while item is not None:
            if item.work is not None:
                item.work()
            item.work = None
            item.dropped()
            del item  # an idle thread keeps nothing alive
            with lock:  # work that it takes may have been meant for a thread that waits, which stays idle
                idle.threads += 1
                try:
                    item = work.get_nowait()
                except queue.Empty:
                    break
        else:
            work.put(None)  # for the next thread
            return


def _stop_work(future: Future[T], stop: Stop | None) -> None:
    """Cancel work that no thread has begun, or signal it to stop."""
    if not future.cancel() and stop is not None:
        stop.set()


_stops: weakref.WeakSet[Stop] = weakref.WeakSet()
_torch_work: set[Future[Any]] = set()
_ending = False


def interpreter_ends() -> bool:
    """Return whether the interpreter is about to end, so that no work that calls torch may be started."""
    return _ending


@atexit.register
def _end_work() -> None:
    """Stop the work that calls torch.

    Runs in the main thread after the last non-daemon thread, when operations have ended. Existing threads still run.
    """
    global _ending
    _ending = True
    # All work is signalled first, so that it ends at the same time. Then the work that calls torch is awaited, because
    # the interpreter would abort in it.
    for stop in _all_stops():
        stop.set()
    end = time.monotonic() + _TORCH_WORK_S
    while (left := list(_torch_work)) and time.monotonic() < end:
        wait_for(left, end - time.monotonic())


def _all_stops() -> list[Stop]:
    while True:
        try:
            return list(_stops)
        except RuntimeError:  # another thread has created one meanwhile
            continue


_pools: dict[str, Threads] = {}
_pools_lock = threading.Lock()
_IO_THREADS = min(32, (os.cpu_count() or 1) + 8)
_READ_THREADS = 16


def io_threads() -> Threads:
    """Return the pool for storage and planning that all saves and loads of this process share."""
    return _shared_threads("io", _IO_THREADS)


async def report(call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Make a ``call`` that emits events, and wait for it. Observers are code of the user, which may wait for another
    operation, so they are called in a thread, and not on the loop of operations. A cancel is raised after that."""
    if not may_wait():
        call(*args, **kwargs)
        return

    context = copy_context()  # of the call: it may tell an observer what the program was doing
    called: Future[None] = ThreadFuture()
    called.set_running_or_notify_cancel()  # a cancel takes back no event, also if no thread has begun to report it
    with time_limit(None):
        work = io_threads().submit(context.run, partial(call, *args, **kwargs))
        work.add_done_callback(lambda _: called.set_result(None))
        await io_threads().wait(called, "the call of observers")
    work.result()


def read_threads() -> Threads:
    """Return the pool of threads that read checkpoints, which all loads of this process share. It is separate from
    ``io_threads`` so that loads whose files do not respond take no thread from saves."""
    return _shared_threads("read", _READ_THREADS)


def write_threads() -> Threads:
    """Return the pool of threads that write attempts, which all saves of this process share. It has no limit: files
    that do not respond take no thread from another save. Idle threads are kept, because starting one holds up the
    loop."""
    return _shared_threads("write", sys.maxsize, Threads)


def _shared_threads(name: str, size: int, kind: type[Threads] = TorchThreads) -> Threads:
    """Return the pool ``name`` of this process. The first call makes it."""
    with _pools_lock:
        if name not in _pools:
            _pools[name] = kind(f"sidestream-{name}", size)
        return _pools[name]


def _forget_after_fork() -> None:
    global _pools, _pools_lock, _stops
    _pools, _pools_lock = {}, threading.Lock()
    _stops = weakref.WeakSet()  # the locks of the parent's may be held, by threads that the child does not have
    _torch_work.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
