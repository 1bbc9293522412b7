"""``Pending``: the handle of an operation in progress, for any thread and for any number of tasks on any loops."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

from .._runtime.caller import cancel_if_interrupted
from .._runtime.gil import give_turns
from .._runtime.tasks import check_no_running_loop, running_loop
from .._runtime.threads import ThreadFuture, Wakeup, io_threads
from ..errors import DeadlineExceededError, ForkedProcessError, SkippedError, printable_lines
from .loop import operation_loop

_log = logging.getLogger("sidestream")

T = TypeVar("T")


class Waitable(Generic[T]):
    """Something that a thread resolves. Any number of tasks may await it, any number of times, on any event loops, and
    any thread may wait for its ``result()``. A cancel of one of them has no effect on what they wait for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._future: ThreadFuture[T] = ThreadFuture()
        self._future.set_running_or_notify_cancel()

    def done(self) -> bool:
        """Return True if it has ended, with success or not."""
        return self._future.done()

    def cancelled(self) -> bool:
        """Return True if it was cancelled."""
        return self._future.done() and isinstance(Future.exception(self._future), CancelledError)

    async def ended(self) -> None:
        """Wait until it is ``done()``. Its error is not raised, and not retrieved."""
        self._check()
        running_loop(f"awaiting {self._what}")
        if not self._future.done():
            give_turns(self._future)
            await Wakeup(self._future).wait(None)

    def __await__(self) -> Generator[Any, None, T]:
        yield from self.ended().__await__()
        try:
            return self._outcome()
        except CancelledError:
            raise asyncio.CancelledError from None

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result. It blocks the thread; on an event loop await the object in place of this.

        Ctrl-C ends the wait, and the operation continues.

        Args:
            timeout_s: The limit of the wait, in seconds. None: no limit.

        Returns:
            What awaiting the object returns.

        Raises:
            DeadlineExceededError: It was not done within ``timeout_s``. The operation continues.
            WrongLoopError: An event loop runs in this thread.
            concurrent.futures.CancelledError: The operation was cancelled.
            SidestreamError: What awaiting the object raises.
        """
        self._wait(timeout_s)
        return self._outcome()

    def exception(self) -> BaseException | None:
        """Return the error that it ended with, which counts as retrieved then; None if it has succeeded.

        Raises:
            InvalidStateError: It is not ``done()``.
            asyncio.CancelledError: It was cancelled.
        """
        if not self._future.done():
            raise asyncio.InvalidStateError(f"{self._what} has not ended")
        try:
            self._outcome()
        except CancelledError:
            raise asyncio.CancelledError from None
        except BaseException as error:
            return error
        return None

    def _wait(self, timeout_s: float | None) -> None:
        self._check()
        if not self._future.done():
            check_no_running_loop(f"{self._what}: result()")
        try:
            Future.exception(self._future, timeout_s)
        except TimeoutError:
            raise DeadlineExceededError(f"{self._what}: not done within timeout_s={timeout_s}") from None

    def _outcome(self) -> T:
        return self._future.result(0)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError("this handle was made before os.fork(); make a new one in the child")

    # --- called by the operation ---

    def succeed(self, result: T) -> None:
        with suppress(InvalidStateError):
            self._future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """End it with ``error``, which stands for all cancels if it is one."""
        with suppress(InvalidStateError):
            self._future.set_exception(CancelledError() if isinstance(error, asyncio.CancelledError) else error)


class Pending(Waitable[T]):
    """The handle of an operation, which continues if nothing waits for it. An error that is never retrieved is
    logged."""

    def __init__(self, what: str, failed: str = "") -> None:
        super().__init__(what)
        self._task: asyncio.Task[None] | None = None
        self._cancelling = self._finished = False
        self._lock = threading.Lock()
        self._callbacks: list[_Callback] = []
        self._future.add_done_callback(self._call_all)
        self._unretrieved = _Unretrieved(failed or what)
        # In contrast to __del__, it also runs when the interpreter ends, and before the globals of modules are gone.
        weakref.finalize(self, self._unretrieved.log)

    def cancel(self) -> bool:
        """Ask the operation to stop. Awaiting it raises ``CancelledError`` when it has ended.

        Returns:
            False if it had ended already.
        """
        self._check()
        with self._lock:
            if self._finished or self.done():
                return False
            self._cancelling = True
        operation_loop().call(self._cancel)
        return True

    def add_done_callback(self, fn: Callable[[Self], object], *, context: contextvars.Context | None = None) -> None:
        """Call ``fn`` with this object when it is ``done()``, at once if it is.

        Args:
            fn: Called on the event loop that runs here now, or in a worker thread if none does.
            context: The context variables of the call. None: those of this code.
        """
        try:
            loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        callback = _Callback(fn, loop, context or contextvars.copy_context())
        with self._lock:
            if not self.done():
                self._callbacks.append(callback)
                return
        callback.call(self)

    def remove_done_callback(self, fn: Callable[[Self], object]) -> int:
        """Do not call ``fn`` any more.

        Args:
            fn: A function that was given to ``add_done_callback``.

        Returns:
            How many times it had been added.
        """
        with self._lock:
            before = len(self._callbacks)
            self._callbacks = [one for one in self._callbacks if one.fn != fn]
            return before - len(self._callbacks)

    def _call_all(self, _: object) -> None:
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback.call(self)

    # --- for other rooms ---

    def give_turns(self) -> None:
        """Make the running loop, while it is busy, give turns to the threads of this operation until it has ended."""
        give_turns(self._future)

    @property
    def unretrieved(self) -> BaseException | None:
        """The error that this operation ended with, if it was not retrieved. One that was skipped has none."""
        return Future.exception(self._future) if self._unretrieved.error else None

    @property
    def settled(self) -> bool:
        """True if it is ``done()`` and has no error that was not retrieved."""
        return self.done() and self.unretrieved is None

    def mark_retrieved(self) -> None:
        """Count the error as retrieved."""
        self._unretrieved.error = ""

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when it is ``done()``, in the thread that has ended it."""
        self._future.add_done_callback(lambda _: callback())

    # --- on the operation loop ---

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Run ``work`` on the operation loop. May be called in any thread."""
        cancel_if_interrupted(self.cancel)
        self.give_turns()
        operation_loop().start(partial(self._run, work), self._what)

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._task = asyncio.current_task()
        if self._cancelling and self._task is not None:
            self._task.cancel()  # at the first suspension of the work, which cleans up as after any cancel
        try:
            result = await work()
        except BaseException as error:
            self._finished = True
            self.fail(error)
        else:
            with self._lock:
                self._finished = True
            # What was cancelled raises that, also if the work has ended well all the same.
            self.fail(asyncio.CancelledError()) if self._cancelling else self.succeed(result)
        finally:
            self._task = None

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _outcome(self) -> T:
        try:
            return super()._outcome()
        finally:
            self.mark_retrieved()

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, (SkippedError, asyncio.CancelledError)):
            self._unretrieved.error = printable_lines(f"{type(error).__name__}: {error}")
        super().fail(error)


@dataclass(frozen=True, slots=True)
class _Callback:
    fn: Callable[[Any], object]
    loop: asyncio.AbstractEventLoop | None
    context: contextvars.Context

    def call(self, pending: object) -> None:
        if self.loop is None:
            io_threads().submit(self.context.run, self._call_in_thread, pending)
            return
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.fn, pending, context=self.context)

    def _call_in_thread(self, pending: object) -> None:
        try:
            self.fn(pending)
        except Exception:
            _log.exception("a callback of add_done_callback failed")


@dataclass(slots=True)
class _Unretrieved:
    """The text of the error of an operation until it is retrieved; empty if there is none. It refers to nothing that
    refers to the handle, as the error itself may."""

    what: str
    error: str = ""

    def log(self) -> None:
        if self.error:
            _log.error("%s failed, and the error was not retrieved: %s", self.what, self.error)
