"""Where code of the caller runs: in the thread that made a blocking call, while it waits for it.

``sidestream.blocking`` does its work on a loop in a thread of its own. The current CUDA device and stream, autograd's
modes, the default device and context variables belong to a thread, so an object of the caller that is asked there sees
none of its own. The calling thread waits anyway: it runs what is the caller's.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["Caller", "Surroundings", "by_caller", "call", "is_serving", "surroundings"]

P = ParamSpec("P")
T = TypeVar("T")

_serving = threading.local()


class Interrupted(Exception):
    """Code of the caller ended by ``KeyboardInterrupt`` or ``SystemExit``, which its thread raises."""


class _Left(Exception):
    """The calling thread does not wait any more."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a thread has current: the device of its accelerator, torch's default device, autograd's modes and context
    variables. Streams are not among them: work on another thread's stream would not be ordered with the rest here."""

    context: contextvars.Context
    accelerator: str | None
    device_index: int | None
    default_device: torch.device
    grad: bool
    inference: bool

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this thread. Initializes no accelerator."""
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
        """Run ``code`` in this thread as if it were that one. Threads may do so at the same time."""
        return self.context.copy().run(self._run, code)

    def _run(self, code: Callable[[], T]) -> T:
        _caller.set(None)
        with ExitStack() as stack:
            if self.accelerator is not None:
                stack.enter_context(torch.get_device_module(self.accelerator).device(self.device_index))
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
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


class _Piece:
    """Code for the calling thread, and where its result arrives."""

    def __init__(self, code: Callable[[], Any]) -> None:
        self._code = code
        self.result: Future[Any] = Future()
        self.begun = False

    def run(self) -> None:
        self.begun = True
        try:
            result = self._code()
        except Exception as error:
            self.result.set_exception(error)
        except BaseException as error:
            self.result.set_exception(Interrupted(f"interrupted by {type(error).__name__}"))
            raise
        else:
            self.result.set_result(result)

    def give_up(self) -> None:
        if not self.result.done():
            self.result.set_exception(Interrupted("interrupted") if self.begun else _Left())


class Caller:
    """A thread that waits for a blocking call. ``wait`` and then ``leave`` are called in it, everything else in any.

    A signal may interrupt the waiting between any two instructions. So nothing here takes a lock, and a piece of code
    stays in the queue until it has been run.
    """

    def __init__(self) -> None:
        self.surroundings = Surroundings.here()
        self._pieces: deque[_Piece] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._waits = True
        self._ended = False

    def adopt(self) -> None:
        """From now on the code of the caller that this task and its children come to is run by this thread."""
        _caller.set(self)

    def run(self, code: Callable[[], T]) -> T:
        """Blocks until the calling thread has run ``code``; runs it here, as if it were there, if that has gone on."""
        piece = _Piece(code)
        self._pieces.append(piece)
        self._bell.put(None)
        if not self._waits and self._withdraw(piece):
            return self.surroundings.run(code)
        try:
            result: T = piece.result.result()
            return result
        except _Left:
            pass
        finally:
            del piece  # its error refers to this frame
        return self.surroundings.run(code)

    def _withdraw(self, piece: _Piece) -> bool:
        try:
            self._pieces.remove(piece)
        except ValueError:
            return False
        return True

    def end(self) -> None:
        """The call has ended: ``wait`` returns."""
        self._ended = True
        self._bell.put(None)

    def wait(self, interrupt: Callable[[], None]) -> None:
        """Run what comes until ``end``. What a signal raises meanwhile (``KeyboardInterrupt``) calls ``interrupt``, and
        is raised at the end, so that what cleans up may still ask objects of the caller; a second one is raised at
        once."""
        try:
            self._serve()
        except BaseException:
            interrupt()
            self._serve()
            raise

    def _serve(self) -> None:
        while True:
            while self._pieces:
                piece = self._pieces[0]
                if piece.begun:  # a signal came while it ran
                    piece.give_up()
                else:
                    _run_piece(piece)
                self._pieces.popleft()
            if self._ended:
                return
            self._bell.get()

    def leave(self) -> None:
        """It waits no more, if it ever did."""
        self._waits = False
        while self._pieces:
            self._pieces.popleft().give_up()


def _run_piece(piece: _Piece) -> None:
    outer = is_serving()
    _serving.now = True
    try:
        piece.run()
    finally:
        _serving.now = outer


_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("sidestream_caller", default=None)


def call(code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``code(*args, **kwargs)``, which is the caller's or runs such code: in the thread that waits for this call if
    there is one, otherwise here. Blocks meanwhile, as it would here."""
    caller = _caller.get()
    if caller is None:
        return code(*args, **kwargs)
    return caller.run(partial(code, *args, **kwargs))


def by_caller(code: Callable[P, T]) -> Callable[P, T]:
    """A decorator: calls go through ``call``."""

    @wraps(code)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return call(code, *args, **kwargs)

    return called


def surroundings() -> Surroundings:
    """Of the thread that waits for this call if there is one, otherwise of this one."""
    caller = _caller.get()
    return Surroundings.here() if caller is None else caller.surroundings


def is_serving() -> bool:
    """Whether this thread runs code on behalf of a blocking call that it waits for."""
    return getattr(_serving, "now", False)
