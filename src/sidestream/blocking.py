"""The same verbs for code without an event loop, through one background loop per process.

Each function blocks its caller until the work is done; the work runs on the loop of a portal thread that is started at
first use. Inside a running event loop, of asyncio or trio, they raise ``WrongLoopError``, because they would block it
(``stopping_the_loop`` allows that).
Saves that are in flight when the program ends are finished before the process does.

The caller's code runs in the calling thread while that thread waits: ``state_dict()`` and ``load_state_dict()`` of
objects, stagers, ``progress`` callbacks, and the launch of the copies of a save. So it has that thread's current device
and stream, autograd modes, context variables and locks. It must not call ``sidestream.blocking`` itself. Planners are
called in other threads, with the device, the modes and the variables of the calling thread. Work that remains when a
call has returned, such as a save that waits for a slot, runs in the same way as planners.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from inspect import signature
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from . import checkpointer as _checkpointer
from ._convert import convert as _converting
from ._convert import copy as _copying
from ._load import api as _loading
from ._load import checkpoint as _checkpoint
from ._load import verify as _verifying
from ._run.health import Health
from ._runtime.caller import Caller, is_serving
from ._runtime.tasks import check_no_running_loop, supervise, wait_for_supervised
from ._runtime.threads import Deadline, time_limit
from ._save import api as _saving
from ._storage import Outcome
from .errors import DeadlineExceededError, WrongLoopError

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "PendingSave",
    "async_save",
    "convert",
    "copy",
    "load",
    "open_checkpoint",
    "remove",
    "save",
    "stopping_the_loop",
    "verify",
]

P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H")


class _Portal:
    """The loop and its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop; the first call starts it."""
        with self._lock:
            if self._loop is None:
                stack = ExitStack()
                portal = stack.enter_context(start_blocking_portal())
                # Not atexit, which comes too late to start a thread: the end of the main thread comes first, and the
                # interpreter waits for this thread, so what is in flight is finished before the process ends.
                threading.Thread(target=_close_at_exit, args=(stack, portal), name="sidestream-exit").start()
                self._loop = portal.call(asyncio.get_running_loop)
            return self._loop


def _close_at_exit(stack: ExitStack, portal: BlockingPortal) -> None:
    threading.main_thread().join()
    portal.call(wait_for_supervised)
    stack.close()


_portal = _Portal()


_of_the_parent: list[_Portal] = []  # closing it would wait for a thread that a forked child does not have


def _after_fork() -> None:
    global _portal
    _of_the_parent.append(_portal)
    _portal = _Portal()


os.register_at_fork(after_in_child=_after_fork)


def _run(work: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline | None = None) -> T:
    """Run ``work()`` on the portal's loop and wait for it. Ctrl-C cancels it and waits until it has cleaned up."""
    if not _may_stop_the_loop.get():
        check_no_running_loop("sidestream.blocking")
    return run_anywhere(work, deadline)


_may_stop_the_loop: ContextVar[bool] = ContextVar("sidestream_may_stop_the_loop", default=False)


@contextmanager
def stopping_the_loop() -> Iterator[None]:
    """Allow the calls in the ``with`` block to be made where an event loop runs, which stops until each call returns.

    For synchronous frameworks in a notebook, whose code runs on the thread of the kernel's loop. Elsewhere such a call
    is a mistake, and raises ``WrongLoopError``.
    """
    token = _may_stop_the_loop.set(True)
    try:
        yield
    finally:
        _may_stop_the_loop.reset(token)


def run_anywhere(work: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline | None = None) -> T:
    """As ``_run``, within others' blocking calls: whoever makes those on a loop has decided to block it. ``deadline``
    is that of waits which have none of their own."""
    if is_serving():
        raise WrongLoopError(
            "sidestream.blocking was called by an object or a callback that runs within another call of "
            "sidestream.blocking: make this call before or after the other one"
        )
    call = _Call(work, _portal.loop(), deadline)
    try:
        return call.result()
    finally:
        call.caller.leave()


class _Call(Generic[T]):
    """A blocking call: its work runs on the portal's loop, and meanwhile the thread that made the call runs the
    caller's code.

    A signal may interrupt ``result`` between any two instructions, so it takes no lock and waits for no ``Future``: an
    interrupt could leave the lock acquired, and the loop would wait for it for ever.
    """

    def __init__(
        self, work: Callable[[], Coroutine[Any, Any, T]], loop: asyncio.AbstractEventLoop, deadline: Deadline | None
    ) -> None:
        self.caller = Caller()
        self._work = work
        self._deadline = deadline
        self._loop = loop
        self._result: Future[T] = Future()
        self._interrupted = False
        self._started = False
        self._task: asyncio.Task[T] | None = None

    def result(self) -> T:
        """Start the work, and return its result when it has ended."""
        self.caller.wait(self._notify, self._interrupt)
        return self._result.result(0)

    def _notify(self) -> None:
        self._loop.call_soon_threadsafe(self._advance)

    def _interrupt(self) -> None:
        """Cancel the work. Does not wait for the loop, because the loop may wait for this thread."""
        self._interrupted = True
        self._notify()

    def _advance(self) -> None:
        """Start the work, or cancel it if the call was interrupted. Called on the loop, once or several times."""
        if not self._started:
            self._started = True
            supervise(self._run(), "sidestream.blocking")
        elif self._interrupted and self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Run the work in a task of its own, so that its error is delivered and not raised here."""
        self.caller.adopt()
        with time_limit(self._deadline):
            self._task = task = asyncio.create_task(self._awaited())
        if self._interrupted:
            task.cancel()
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            with CancelScope(shield=True):
                await asyncio.wait([task])
            raise
        finally:
            self._settle(task)

    async def _awaited(self) -> T:
        """Call the work within the task, so that what the call itself raises (a wrong keyword) is delivered too."""
        return await self._work()

    def _settle(self, task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self._result.cancel()
        elif error is not None:
            self._result.set_exception(error)
        else:
            self._result.set_result(task.result())
        self.caller.end()


run = _run  # for the command line, which has more to ask than there are verbs here


def _blocking(verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return a function with the signature of the coroutine function ``verb`` that returns its result."""

    @wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return _run(lambda: verb(*args, **kwargs))

    call.__module__ = __name__
    return call


def _starting(verb: Callable[P, _saving.PendingSave]) -> Callable[P, PendingSave]:
    @wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> PendingSave:
        async def start() -> _saving.PendingSave:
            return verb(*args, **kwargs)

        return PendingSave(_run(start))

    call.__module__ = __name__
    return call


def _opening(verb: Callable[P, Coroutine[Any, Any, _checkpoint.Checkpoint]]) -> Callable[P, Checkpoint]:
    @wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> Checkpoint:
        return Checkpoint(_run(lambda: verb(*args, **kwargs)))

    call.__module__ = __name__
    return call


def _method(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[_Holder[Any], P], T]:
    """Return a method with the signature of ``method``, which it calls on the object that it holds."""

    @wraps(method)
    def call(self: _Holder[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _run(lambda: method(self._held, *args, **kwargs))

    call.__module__ = __name__
    return call


def _saving_method(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, _saving.PendingSave]],
) -> Callable[Concatenate[_Holder[Any], P], PendingSave]:
    @wraps(method)
    def call(self: _Holder[Any], /, *args: P.args, **kwargs: P.kwargs) -> PendingSave:
        return PendingSave(_run(lambda: method(self._held, *args, **kwargs)))

    call.__module__ = __name__
    return call


class _Holder(Generic[H]):
    """A blocking object, which holds the one of the same name in ``sidestream``."""

    _held: H


class _Waiting(Generic[T]):
    """Something to wait for with ``result(timeout_s)``."""

    def __init__(self, wait: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._wait = wait

    def result(self, timeout_s: float | None = None) -> T:
        """What it gives, or raises. ``DeadlineExceededError`` after ``timeout_s``; the work goes on."""

        async def bounded() -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._wait()
            except TimeoutError as error:
                if isinstance(error, DeadlineExceededError):
                    raise
                raise DeadlineExceededError(f"not done within timeout_s={timeout_s}") from None

        return _run(bounded)


class PendingSave(_Waiting[_saving.SaveInfo]):
    """A save in progress: ``result()`` returns its ``SaveInfo``; the tensors may change after ``staged.result()``."""

    def __init__(self, pending: _saving.PendingSave) -> None:
        super().__init__(partial(_awaited, pending))
        self.staged: _Waiting[None] = _Waiting(partial(_awaited_staged, pending))
        self.exports = tuple(_Waiting(partial(_awaited, export)) for export in pending.exports)
        self._pending = pending

    @property
    def url(self) -> str:
        """As ``sidestream.PendingSave.url``."""
        return self._pending.url

    @property
    def outcome(self) -> Outcome | None:
        """As ``sidestream.PendingSave.outcome``."""
        return self._pending.outcome

    @property
    def progress(self) -> _saving.SaveProgress:
        """As ``sidestream.PendingSave.progress``."""
        return self._pending.progress

    def done(self) -> bool:
        """Return whether the save has ended."""
        return self._pending.done()

    def cancel(self) -> bool:
        """Ask the save to stop, and wait until it has ended. ``result()`` then raises ``CancelledError``.

        Returns:
            False if the save had ended already.
        """

        async def cancel() -> bool:
            asked = self._pending.cancel()
            await self._pending.ended()
            return asked

        return _run(cancel)


async def _awaited(pending: Awaitable[T]) -> T:
    return await pending


async def _awaited_staged(pending: _saving.PendingSave) -> None:
    await pending.staged


class Checkpoint(_Holder[_checkpoint.Checkpoint], Mapping[str, "_checkpoint.TensorInfo | None"]):
    """``sidestream.Checkpoint``, blocking."""

    def __init__(self, checkpoint: _checkpoint.Checkpoint) -> None:
        self._held = checkpoint

    def __getitem__(self, fqn: str) -> _checkpoint.TensorInfo | None:
        return self._held[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return repr(self._held)

    @property
    def url(self) -> str:
        """As ``sidestream.Checkpoint.url``."""
        return self._held.url

    @property
    def save_id(self) -> str:
        """As ``sidestream.Checkpoint.save_id``."""
        return self._held.save_id

    @property
    def step(self) -> int | None:
        """As ``sidestream.Checkpoint.step``."""
        return self._held.step

    @property
    def metadata(self) -> dict[str, Any]:
        """As ``sidestream.Checkpoint.metadata``."""
        return self._held.metadata

    @property
    def files(self) -> dict[str, int]:
        """As ``sidestream.Checkpoint.files``."""
        return self._held.files

    def info(self, fqn: str) -> _checkpoint.TensorInfo:
        """As ``sidestream.Checkpoint.info``."""
        return self._held.info(fqn)

    file = _method(_checkpoint.Checkpoint.file)
    state_dict = _method(_checkpoint.Checkpoint.state_dict)
    tensor = _method(_checkpoint.Checkpoint.tensor)
    value = _method(_checkpoint.Checkpoint.value)
    verify = _method(_checkpoint.Checkpoint.verify)


class Checkpointer(_Holder[_checkpointer.Checkpointer]):
    """``sidestream.Checkpointer``, blocking: it is open from the call on, and ``close()`` or ``with`` closes it."""

    def __init__(self, url: str | os.PathLike[str], **options: Any) -> None:
        async def enter() -> _checkpointer.Checkpointer:
            return await _checkpointer.Checkpointer(url, **options).__aenter__()

        self._held = _run(enter)

    __init__.__signature__ = signature(_checkpointer.Checkpointer.__init__)  # type: ignore[attr-defined]
    __init__.__doc__ = _checkpointer.Checkpointer.__init__.__doc__

    async_save = _saving_method(_checkpointer.Checkpointer.async_save)
    latest = _method(_checkpointer.Checkpointer.latest)
    prewarm = _method(_checkpointer.Checkpointer.prewarm)
    prune = _method(_checkpointer.Checkpointer.prune)
    read_metadata = _method(_checkpointer.Checkpointer.read_metadata)
    reserve = _method(_checkpointer.Checkpointer.reserve)
    restore = _method(_checkpointer.Checkpointer.restore)
    save = _method(_checkpointer.Checkpointer.save)
    steps = _method(_checkpointer.Checkpointer.steps)
    verify = _method(_checkpointer.Checkpointer.verify)

    @property
    def url(self) -> str:
        """As ``sidestream.Checkpointer.url``."""
        return self._held.url

    @property
    def restored(self) -> _loading.LoadReport | None:
        """As ``sidestream.Checkpointer.restored``."""
        return self._held.restored

    def health(self) -> Health:
        """As ``sidestream.Checkpointer.health``."""

        async def health() -> Health:
            return self._held.health()

        return _run(health)

    def close(self) -> None:
        """As ``sidestream.Checkpointer.aclose``."""
        _run(self._held.aclose)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _run(lambda: self._held.__aexit__(kind, error, trace))


save = _blocking(_saving.save)
async_save = _starting(_saving.async_save)
load = _blocking(_loading.load)
open_checkpoint = _opening(_checkpoint.open_checkpoint)
verify = _blocking(_verifying.verify)
remove = _blocking(_copying.remove)
copy = _blocking(_copying.copy)
convert = _blocking(_converting.convert)
