"""Running the caller's code in the thread that made a blocking call, while that thread waits for the call.

``sidestream.blocking`` does its work on a loop in a thread of its own. The current CUDA device and stream, autograd's
modes, the default device and context variables belong to a thread, so an object of the caller whose method is called
there would not see those of its own thread. The calling thread only waits, so it runs the caller's code.
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

import torch

__all__ = [
    "Caller",
    "ThreadState",
    "is_serving",
    "run_in_calling_thread",
    "withdraw_if_interrupted",
]

P = ParamSpec("P")
T = TypeVar("T")

_POLL_S = 1.0  # between two checks whether a calling thread that does not run its code is there at all

_serving = threading.local()


class Interrupted(Exception):
    """Code of the caller ended by ``KeyboardInterrupt`` or ``SystemExit``, which its thread raises."""


class _CallerLeft(Exception):
    """The calling thread has stopped waiting."""


@dataclass(frozen=True, slots=True)
class ThreadState:
    """The state of a thread: the device of its accelerator, torch's default device, autograd's modes and context
    variables. Streams are not included, because work on another thread's stream would not be ordered with the other
    work of this thread."""

    context: contextvars.Context
    accelerator: str | None
    device_index: int | None
    default_device: torch.device
    grad: bool
    inference: bool

    @classmethod
    def here(cls) -> ThreadState:
        """Return the state of this thread. Does not initialize an accelerator."""
        accelerator, index = _current_device()
        return cls(
            contextvars.copy_context(),
            accelerator,
            index,
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )

    def run(self, code: Callable[[], T]) -> T:
        """Run ``code`` in this thread with this state. Several threads may do so at the same time."""
        return self.context.copy().run(self._run, code)

    def _run(self, code: Callable[[], T]) -> T:
        # The context that was copied has the caller in it. The code must not ask for a thread that has left.
        _caller.set(None)
        with ExitStack() as stack:
            if self.accelerator is not None:
                stack.enter_context(torch.get_device_module(self.accelerator).device(self.device_index))
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            # Inference mode before the mode of gradients: entering it changes both.
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            return code()


def _current_device() -> tuple[str | None, int | None]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None, None
    module = torch.get_device_module(accelerator)
    if not hasattr(module, "device") or not getattr(module, "is_initialized", lambda: False)():
        return None, None
    return accelerator.type, torch.accelerator.current_device_index()


class _Presence:
    """The presence of the thread that waits for a blocking call."""


class _QueuedCode(Generic[T]):
    """Code that the calling thread shall run, and its result or error.

    Not a ``Future``, because a signal that interrupts one of its methods can leave its lock acquired for ever.
    """

    def __init__(self, code: Callable[[], T]) -> None:
        self._code = code
        self._results: list[T] = []  # the one result, when the code has returned
        self._error: BaseException | None = None
        self._settled = False
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self.begun = False
        self.withdrawals: list[Callable[[], None]] = []

    def run(self) -> None:
        """Run the code. If a signal interrupts it, the thread has to call ``give_up``."""
        self.begun = True
        try:
            self._results.append(self._code())
        except Exception as error:
            self._error = error
        except BaseException as error:
            self._error = Interrupted(f"interrupted by {type(error).__name__}")
            raise
        self._settled = True
        self._wakeups.put(None)

    def give_up(self) -> None:
        """End the wait for code that has not run to its end. A result that exists already is still delivered, because
        it may be an operation that has to be cancelled."""
        if not self._settled and not self._results:
            for withdraw in self.withdrawals:
                withdraw()
            if self._error is None:
                self._error = Interrupted("interrupted") if self.begun else _CallerLeft()
        self._settled = True
        self._wakeups.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Block until the code has run, or was given up. Return whether that is so."""
        try:
            self._wakeups.get(timeout=timeout_s)
        except Empty:
            return False
        return True

    def result(self) -> T:
        """Return the result of the code, or raise its error. Called once, after ``wait`` has returned True."""
        if self._error is None:
            return self._results.pop()
        error, self._error = self._error, None  # or the error's traceback and this object would refer to each other
        try:
            raise error
        finally:
            del error


class Caller:
    """A thread that waits for a blocking call. Call ``wait`` and then ``leave`` in that thread; the other methods may
    be called in any thread.

    A signal may interrupt the wait between any two instructions. So no method takes a lock, and code stays in the queue
    until it has been run or given up. Further signals may interrupt ``leave`` as well. Therefore the other thread looks
    now and then whether the result of ``present`` still exists, which the frame of the call keeps.
    """

    def __init__(self) -> None:
        self._presence: weakref.ref[_Presence] | None = None
        self.state = ThreadState.here()
        self._queue: deque[_QueuedCode[Any]] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._waits = True
        self._ended = False

    def present(self) -> object:
        """Return an object that the frame of the call keeps until ``leave`` has returned."""
        presence = _Presence()
        self._presence = weakref.ref(presence)
        return presence

    def adopt(self) -> None:
        """Make ``run_in_calling_thread`` use this thread, in the current task and the tasks that it creates from now
        on."""
        _caller.set(self)

    def run(self, code: Callable[[], T]) -> T:
        """Block until the calling thread has run ``code``. If that thread has stopped waiting, run ``code`` here with
        its state."""
        queued = _QueuedCode(code)
        # In this order. If the calling thread leaves between the two lines, ``leave`` finds the code in the queue and
        # gives it up. If it has left before, ``_waits`` is False, and the code is taken back here. One of the two
        # happens, without a lock.
        self._queue.append(queued)
        self._wakeups.put(None)
        if not self._waits and self._withdraw(queued):
            return self.state.run(code)
        try:
            while not queued.wait(_POLL_S):
                if self._presence is not None and self._presence() is None:
                    self.leave()
            return queued.result()
        except _CallerLeft:
            pass
        finally:
            del queued  # its error refers to this stack frame
        return self.state.run(code)

    def _withdraw(self, queued: _QueuedCode[Any]) -> bool:
        try:
            self._queue.remove(queued)
        except ValueError:
            return False
        return True

    def end(self) -> None:
        """Make ``wait`` return, because the call has ended."""
        self._ended = True
        self._wakeups.put(None)

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
            while self._queue:
                queued = self._queue[0]
                if queued.begun:  # a signal came while it ran
                    queued.give_up()
                else:
                    _run_queued(queued)
                self._queue.popleft()
            if self._ended:
                return
            self._wakeups.get()

    def leave(self) -> None:
        """Record that the calling thread has stopped waiting, or never waited."""
        self._waits = False
        while self._queue:
            self._queue[0].give_up()
            self._queue.popleft()


def _run_queued(queued: _QueuedCode[Any]) -> None:
    # Restored at the end, because a call may be nested: code of the caller that runs here may return into another call
    # of this thread.
    outer = is_serving()
    _serving.now, _serving.queued = True, queued
    try:
        queued.run()
    finally:
        _serving.now, _serving.queued = outer, None


def withdraw_if_interrupted(withdraw: Callable[[], None]) -> None:
    """Arrange that ``withdraw`` is called if an interrupt of the blocking call whose code runs in this thread drops the
    result of that code. It has to end what the code has started, without waiting. It may be called several times."""
    queued = getattr(_serving, "queued", None)
    if queued is not None:
        queued.withdrawals.append(withdraw)


_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("sidestream_caller", default=None)


def run_in_calling_thread(code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``code``, which is the caller's code or runs it, in the thread that waits for this blocking call. If there
    is no such thread, call it in this thread. Blocks until it has returned."""
    caller = _caller.get()
    if caller is None:
        return code(*args, **kwargs)
    return caller.run(partial(code, *args, **kwargs))


def is_serving() -> bool:
    """Return whether this thread runs code on behalf of a blocking call that it waits for."""
    return getattr(_serving, "now", False)
