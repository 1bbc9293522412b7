"""Running the caller's code in the task or thread that made a call, while it waits for the call.

Operations run on an event loop in a thread of its own. The current device and stream, autograd's modes, the default
device and context variables belong to a thread or a task, so an object of the caller whose method is called there would
not see those of its own. The calling task or thread only waits, so it runs the caller's code.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

import anyio

from ..errors import ClosedError, InvalidOptionError
from .tasks import run_shielded
from .threads import Deadline, ambient_deadline

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE_S = 600.0  # where no deadline is in force, as while a save waits for its turn
_POLL_S = 1.0  # between two checks whether a caller that does not run its code is there at all

_serving = threading.local()


class Interrupted(Exception):
    """Code of the caller ended by ``KeyboardInterrupt`` or ``SystemExit``, which its thread raises."""


class _CallerLeft(Exception):
    """The caller has stopped waiting, or its loop has ended."""


class _Presence:
    """The presence of the thread that waits for a blocking call."""


class _QueuedCode(Generic[T]):
    """Code that the caller shall run, and its result or error. Made on the loop that waits for it.

    Not a ``Future``, because a signal that interrupts one of its methods can leave its lock acquired for ever. For the
    same reason caller and loop agree without a lock on whether the code runs: the caller sets ``begun`` and then looks
    at ``withdrawn``, the loop sets ``withdrawn`` and then looks at ``begun``.
    """

    def __init__(self, code: Callable[[], T]) -> None:
        self._code = code
        self._results: list[T] = []  # the one result, when the code has returned
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.settled = False
        self.begun = False
        self.withdrawn = False
        self.cancels: list[Callable[[], object]] = []

    def run(self) -> None:
        """Run the code, unless it was withdrawn. If a signal interrupts it, the thread has to call ``cancel``."""
        self.begun = True
        if self.withdrawn:
            self.cancel()
            return
        try:
            self._results.append(self._code())
        except Exception as error:
            self._error = error
        except BaseException as error:
            self._error = Interrupted(f"interrupted by {type(error).__name__}")
            raise
        self._end()

    def cancel(self) -> None:
        """End the wait for code that has not run to its end. A result that exists already is still delivered, because
        it may be an operation that has to be cancelled."""
        if not self.settled and not self._results:
            for cancel in self.cancels:
                cancel()
            if self._error is None:
                self._error = Interrupted("interrupted") if self.begun and not self.withdrawn else _CallerLeft()
        self._end()

    def _end(self) -> None:
        self.settled = True
        self._loop.call_soon_threadsafe(self._ended.set)

    async def wait(self, timeout_s: float) -> None:
        """Wait until the code has run, or was given up, for ``timeout_s`` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()

    def result(self) -> T:
        """Return the result of the code, or raise its error. Called once, when it has settled."""
        if self._error is None:
            return self._results.pop()
        error, self._error = self._error, None  # or the error's traceback and this object would refer to each other
        try:
            raise error
        finally:
            del error

    def drop(self) -> None:
        """End what the code has started, because its result is not wanted any more."""
        for result in self._results:
            cancel = getattr(result, "cancel", None)
            for end in self.cancels if cancel is None else [cancel]:
                end()


class Caller(ABC):
    """A task or thread that waits for a call. ``adopt`` and ``run`` are called on the loop of operations, ``end`` and
    ``close`` in any thread.

    A signal may interrupt a thread that waits between any two instructions. So no method takes a lock, and code stays
    in the queue until it has been run or given up.
    """

    def __init__(self) -> None:
        self._queue: deque[_QueuedCode[Any]] = deque()
        self._waits = True
        self._ended = False

    def adopt(self) -> None:
        """Make ``run_by_caller`` use this caller, in the current task and the tasks that it creates from now on."""
        _caller.set(self)

    async def run(self, code: Callable[[], T]) -> T:
        """Wait until the caller has run ``code``, and return its result. If the caller waits no more, because the call
        has returned, the code runs on its loop.

        Code that has begun is not interrupted: a cancel is raised when it has ended."""
        queued = _QueuedCode(code)
        # In this order. If the caller leaves between the two lines, ``close`` finds the code in the queue and gives it
        # up. If it has left before, ``_waits`` is False, and the code is taken back here. One of the two happens,
        # without a lock.
        self._queue.append(queued)
        self._wake()
        try:
            if self._waits or not self._remove(queued):
                await self._until_settled(queued)
                return queued.result()
        except _CallerLeft:
            pass
        finally:
            del queued  # its error refers to this stack frame
        queued = _QueuedCode(code)
        try:
            self._run_later(partial(_run_posted, queued))
            await self._until_settled(queued)
            return queued.result()
        except _CallerLeft:
            raise ClosedError(
                "the event loop or thread of the caller has ended, so its objects cannot be called"
            ) from None
        finally:
            del queued

    async def _until_settled(self, queued: _QueuedCode[Any]) -> None:
        deadline = ambient_deadline() or Deadline.after(_PATIENCE_S)
        try:
            while not queued.settled:
                await queued.wait(_POLL_S)
                self._check_presence(queued)
                if not deadline.remaining_s() and not queued.begun:
                    raise deadline.exceeded("waiting for the caller, whose event loop or thread does not run")
        except BaseException:
            queued.withdrawn = True
            if queued.begun:  # it stays in the queue, where the caller gives it up if a signal has interrupted it
                await run_shielded(self._until_ended, queued)
                queued.drop()
            else:
                self._remove(queued)
            raise

    async def _until_ended(self, queued: _QueuedCode[Any]) -> None:
        while not queued.settled:
            await queued.wait(_POLL_S)
            self._check_presence(queued)

    def _check_presence(self, queued: _QueuedCode[Any]) -> None:
        """Give up code that nothing will run."""
        if self.is_gone() and not queued.settled:
            self.close()
            queued.cancel()

    def _remove(self, queued: _QueuedCode[Any]) -> bool:
        try:
            self._queue.remove(queued)
        except ValueError:
            return False
        return True

    def _first(self) -> _QueuedCode[Any] | None:
        try:
            return self._queue[0]
        except IndexError:  # the loop may withdraw code at any time
            return None

    def end(self) -> None:
        """Make ``wait`` return, because the call has ended."""
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Record that the caller has stopped waiting, or never waited."""
        self._waits = False
        while (queued := self._first()) is not None:
            queued.cancel()
            self._remove(queued)

    def _run_queued(self) -> None:
        """Run what is in the queue, in the caller."""
        while (queued := self._first()) is not None:
            if queued.begun:  # a signal came while it ran
                queued.cancel()
            else:
                _run_queued(queued)
            self._remove(queued)

    @abstractmethod
    def is_gone(self) -> bool:
        """Return whether the caller will never run code again."""

    @abstractmethod
    def _wake(self) -> None:
        """Make the caller look at the queue, and at the end of the call."""

    def _run_later(self, run: Callable[[], None]) -> None:
        """Run code of an operation whose call has returned: a save that captures its state when its turn comes."""
        raise _CallerLeft


class ThreadCaller(Caller):
    """A thread. Call ``wait`` and then ``close`` in it.

    Further signals may interrupt ``close`` as well. Therefore the loop looks now and then whether the result of
    ``present`` still exists, which the frame of the call keeps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._presence: weakref.ref[_Presence] | None = None
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def present(self) -> object:
        """Return an object that the frame of the call keeps until ``close`` has returned."""
        presence = _Presence()
        self._presence = weakref.ref(presence)
        return presence

    def is_gone(self) -> bool:
        return self._presence is not None and self._presence() is None

    def wait(self, begin: Callable[[], None], interrupt: Callable[[], None]) -> None:
        """Call ``begin`` and run queued code until ``end``. An exception that a signal raises meanwhile
        (``KeyboardInterrupt``) calls ``interrupt``, which has to cause a call of ``end`` even if ``begin`` was
        interrupted. The exception is raised at the end, so that the cleanup can still call objects of the caller. A
        second exception is raised at once."""
        try:
            begin()
            self._serve()
        except BaseException:
            # The wait is not over: the operation is cancelled, and its clean-up may need this thread for code of the
            # caller. So the thread serves until the operation has ended, and only then raises.
            interrupt()
            self._serve()
            raise

    def _serve(self) -> None:
        while True:
            self._run_queued()
            if self._ended:
                return
            self._wakeups.get()

    def _wake(self) -> None:
        self._wakeups.put(None)


class TaskCaller(Caller):
    """A task of any event loop of asyncio. Call ``wait`` in it."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._context = contextvars.copy_context()
        self._waiter: asyncio.Future[None] | None = None

    def is_gone(self) -> bool:
        return self._loop.is_closed() or not (self._loop.is_running() or self._thread.is_alive())

    async def wait(self, begin: Callable[[], None], interrupt: Callable[[], None]) -> asyncio.CancelledError | None:
        """Call ``begin`` and run queued code until ``end``. A cancel of this task calls ``interrupt``, and is returned
        when the operation has ended."""
        cancelled: asyncio.CancelledError | None = None
        begin()
        try:
            await self._serve()
        except asyncio.CancelledError as cancel:
            cancelled = cancel
        except BaseException:  # the loop was closed or dropped, or code of the caller ended the program
            interrupt()
            self.close()
            raise
        if cancelled is not None:
            interrupt()
            # Shielded from scopes of anyio, which cancel a task again and again. Native cancels arrive in the loop.
            with anyio.CancelScope(shield=True):
                while not self._ended:
                    with suppress(asyncio.CancelledError):
                        await self._serve()
        self.close()
        try:
            return cancelled
        finally:
            del cancelled  # it refers to this frame

    async def _serve(self) -> None:
        while True:
            self._run_queued()
            if self._ended:
                return
            self._waiter = self._loop.create_future()
            if not self._queue and not self._ended:  # since the look
                await self._waiter

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, which ``is_gone`` finds out
            self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _run_later(self, run: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, which ``is_gone`` finds out
            self._loop.call_soon_threadsafe(run, context=self._context)


def _run_queued(queued: _QueuedCode[Any]) -> None:
    # Restored at the end, because a call may be nested: code of the caller that runs here may make another call.
    outer = getattr(_serving, "queued", None)
    _serving.queued = queued
    try:
        queued.run()
    finally:
        _serving.queued = outer


def _run_posted(queued: _QueuedCode[Any]) -> None:
    try:
        _run_queued(queued)
    finally:
        if not queued.settled:
            queued.cancel()


def cancel_if_interrupted(cancel: Callable[[], object]) -> None:
    """Arrange that ``cancel`` is called if an interrupt of the blocking call whose code runs in this thread drops the
    result of that code. It has to end what the code has started, without waiting. It may be called several times."""
    queued = getattr(_serving, "queued", None)
    if queued is not None:
        queued.cancels.append(cancel)


_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("sidestream_caller", default=None)


async def run_by_caller(code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``code``, which is the caller's code or runs it, in the task or thread that waits for this operation. Where
    none waits, because this is the caller's task itself, call it here."""
    caller = _caller.get()
    if caller is None:
        return code(*args, **kwargs)
    return await caller.run(partial(code, *args, **kwargs))


def context_of_caller(what: str) -> contextvars.Context:
    """Return a context in which ``run_by_caller`` calls code on the event loop that runs here, also when this call has
    returned. Raises ``InvalidOptionError``, which names ``what``, where no loop of asyncio runs."""
    context = contextvars.copy_context()
    if _caller.get() is None:
        try:
            caller = TaskCaller()
        except RuntimeError:
            raise InvalidOptionError(
                f"{what} needs an event loop of asyncio, which captures the state when the turn of the save comes"
            ) from None
        caller.close()
        context.run(_caller.set, caller)
    return context


def loop_of_caller_ended() -> bool:
    """Return whether the event loop whose task has called this operation has ended."""
    caller = _caller.get()
    return isinstance(caller, TaskCaller) and caller.is_gone()
