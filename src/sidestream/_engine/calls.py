"""Calls that wait for an operation: of a task on any event loop of asyncio, and of a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from functools import partial, wraps
from typing import Any, Generic, ParamSpec, TypeVar

from .._runtime.caller import Caller, TaskCaller, ThreadCaller
from .._runtime.gil import give_turns
from .._runtime.tasks import create_owned_task, running_loop, supervise, wait_out
from .._runtime.threads import Deadline, ThreadFuture, time_limit
from .handle import Pending
from .loop import OperationLoop, operation_loop

P = ParamSpec("P")
T = TypeVar("T")


def as_operation(verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make ``verb`` run ``in_operation``."""

    @wraps(verb)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await in_operation(partial(verb, *args, **kwargs), verb.__name__)

    return call


async def in_operation(work: Callable[[], Coroutine[Any, Any, T]], name: str, *, ends: bool = True) -> T:
    """Run ``work`` on the operation loop, whichever task of whichever loop awaits it. What is called with
    ``run_by_caller`` runs in that task.

    A cancel of the task cancels the work, and is raised when that has ended. If the task is dropped with its loop, the
    work is cancelled too. ``ends``: the work ends by itself, so that the end of the program may wait for it.
    """
    running_loop(name)
    loop = operation_loop()
    if loop.is_here():  # a part of another operation
        return await work()
    caller = TaskCaller()
    call = _Call(work, caller, loop, None, name, supervise if ends else create_owned_task)
    # A busy loop gives turns to the threads of the operation, as long as the call lasts.
    ended: ThreadFuture[None] = ThreadFuture()
    give_turns(ended)
    try:
        cancelled = await caller.wait(call.notify, call.interrupt)
    finally:
        ended.set_result(None)
    if cancelled is not None:
        try:
            call.drop(cancelled)
            raise cancelled
        finally:
            del cancelled
    try:
        result = call.result()
    except CancelledError:
        raise asyncio.CancelledError from None
    if isinstance(result, Pending):  # it goes on
        result.give_turns()
    return result


def call_from_thread(
    work: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline | None = None, name: str = "sidestream.blocking"
) -> T:
    """Run ``work`` on the operation loop, and block until it has ended. What is called with ``run_by_caller`` runs in
    this thread. Ctrl-C cancels the work, and is raised when that has ended. ``deadline`` is that of waits which have
    none of their own."""
    caller = ThreadCaller()
    call = _Call(work, caller, operation_loop(), deadline, name, supervise)
    present = caller.present()
    try:
        try:
            caller.wait(call.notify, call.interrupt)
        except BaseException as interrupt:
            call.drop(interrupt)
            raise
        return call.result()
    finally:
        caller.close()
        del present


class _Call(Generic[T]):
    """One call, and the task on the operation loop that works for it.

    A signal may interrupt the calling thread between any two instructions, so it takes no lock and waits for no
    ``Future``: an interrupt could leave the lock acquired, and the loop would wait for it for ever.
    """

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        caller: Caller,
        loop: OperationLoop,
        deadline: Deadline | None,
        name: str,
        start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        self._caller = caller
        self._work = work
        self._deadline = deadline
        self._loop = loop
        self._name = name
        self._start = start
        self._interrupted = False
        self._started = self._begun = False
        self._task: asyncio.Task[T] | None = None

    def result(self) -> T:
        """Return the result of the work when it has ended."""
        assert self._task is not None
        task, self._task = self._task, None  # or the error's traceback and this object would refer to each other
        try:
            if task.cancelled():
                raise CancelledError
            return task.result()
        finally:
            del task

    def drop(self, cancelled: BaseException) -> None:
        """Drop the result of a call that was cancelled or interrupted: ``cancelled`` gets the notes of its error, and
        what it has started all the same is cancelled."""
        if self._task is None or not self._task.done():  # interrupted again, while the work was being cancelled
            return
        try:
            result = self.result()
        except BaseException as error:
            for note in getattr(error, "__notes__", ()):
                cancelled.add_note(note)
            return
        if isinstance(result, Pending):
            result.cancel()

    def notify(self) -> None:
        self._loop.call(self._advance)

    def interrupt(self) -> None:
        """Cancel the work. Does not wait for the loop."""
        self._interrupted = True
        self.notify()

    def _advance(self) -> None:
        """Start the work, or cancel it if the call was interrupted. Called on the loop, once or several times."""
        if not self._started:
            self._started = True
            self._start(self._run(), self._name)
            self._loop.log_lags()
        elif self._interrupted and self._task is not None and self._begun:
            self._task.cancel()

    async def _run(self) -> None:
        """Run the work in a task of its own, so that its error is delivered and not raised here."""
        self._caller.adopt()
        with time_limit(self._deadline):
            self._task = task = asyncio.create_task(self._awaited(), name=self._name)
        cancelled = await wait_out(task, lambda _: task.cancel())
        if not task.cancelled():
            task.exception()  # retrieved also if the caller was interrupted, or asyncio would log it
        self._caller.end()
        if cancelled is not None:
            raise cancelled

    async def _awaited(self) -> T:
        """Call the work within the task, so that what the call itself raises (a wrong keyword) is delivered too."""
        # A task that is cancelled before its first step never runs. The work has to, because it may have to report the
        # cancel to other ranks. So it begins in any case, and is cancelled where it first waits.
        self._begun = True
        if self._interrupted and (task := asyncio.current_task()) is not None:
            task.cancel()
            del task  # its cancel will refer to this frame
        return await self._work()
