"""The same verbs for code without an event loop: call, and wait.

Inside a running event loop, of asyncio or trio, they raise ``WrongLoopError``, because they would block it
(``stopping_the_loop`` allows that). Ctrl-C is what a cancel is for the async verbs: the call cleans up and raises
``KeyboardInterrupt``. Saves that are in flight when the program ends are finished before the process does.

The caller's code runs in the calling thread while that thread waits: ``state_dict()`` and ``load_state_dict()`` of
objects, stagers, ``progress`` callbacks, and the capture of the state of a save. So it has that thread's current device
and stream, autograd modes, context variables and locks, and may call ``sidestream.blocking`` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper, wraps
from inspect import cleandoc
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from . import checkpointer as _checkpointer
from ._convert import convert as _converting
from ._convert import copy as _copying
from ._engine.calls import call_from_thread
from ._load import checkpoint as _checkpoint
from ._load import operation as _loading
from ._load import verify as _verifying
from ._run.health import Health
from ._runtime.tasks import check_no_running_loop
from ._runtime.threads import Deadline
from ._save import api as _saving
from .errors import InvalidOptionError
from .options import Latest, LoadOptions

__all__ = [
    "Checkpoint",
    "Checkpointer",
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
R = TypeVar("R")
H = TypeVar("H")
F = TypeVar("F", bound=Callable[..., Any])


def _run(work: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline | None = None) -> T:
    """Run ``work()`` as an operation, and wait for it. Ctrl-C cancels it and waits until it has cleaned up."""
    if not _may_stop_the_loop.get():
        check_no_running_loop("sidestream.blocking")
    return call_from_thread(work, deadline)


_may_stop_the_loop: ContextVar[bool] = ContextVar("sidestream_may_stop_the_loop", default=False)


@contextmanager
def stopping_the_loop() -> Iterator[None]:
    """Allow the calls in the ``with`` block to be made where an event loop runs, which stops until each call returns.

    This is for synchronous frameworks in a notebook, whose code runs on the thread of the kernel's loop. Elsewhere such
    a call is a mistake, and raises ``WrongLoopError``.
    """
    token = _may_stop_the_loop.set(True)
    try:
        yield
    finally:
        _may_stop_the_loop.reset(token)


run = _run  # for the command line, which has more to ask than there are verbs here


def _twin(verb: Callable[..., Any], call: Callable[..., Any], own: Callable[..., Any]) -> None:
    """Give ``call`` the name, signature and documentation of ``verb``, whose twin it is.

    The docstring of ``own`` stands in the documentation, which is made without imports. Where it does not begin with
    "As", the twin differs from the verb, and the docstring replaces that of the verb, but for the arguments.
    """
    update_wrapper(call, verb)
    call.__module__ = __name__
    call.__qualname__ = own.__qualname__
    if own.__doc__ and not own.__doc__.startswith("As "):
        text, heading, sections = cleandoc(own.__doc__).partition("Returns:\n")
        arguments, _, _ = _sections_of(verb).partition("Returns:\n")
        call.__doc__ = f"{text}{arguments}{heading}{sections}"


def _sections_of(documented: object) -> str:
    """The sections of a docstring, from ``Args:`` on."""
    _, heading, sections = cleandoc(documented.__doc__ or "").partition("Args:\n")
    return heading + sections


def _blocking(verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[[Callable[..., Any]], Callable[P, T]]:
    """Make a function that has the signature of the coroutine function ``verb`` and returns its result."""

    def decorate(own: Callable[..., Any]) -> Callable[P, T]:
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return _run(lambda: verb(*args, **kwargs))

        _twin(verb, call, own)
        return call

    return decorate


def _returning(
    made: Callable[[T], R], verb: Callable[P, Coroutine[Any, Any, T]]
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Make a coroutine function that returns ``made`` of what ``verb`` returns, and is documented as ``verb``."""

    @wraps(verb)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return made(await verb(*args, **kwargs))

    return call


def _method(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[_Holder[Any], P], T]]:
    """Make a method with the signature of ``method``, which it calls on the object that it holds."""

    def decorate(own: Callable[..., Any]) -> Callable[Concatenate[_Holder[Any], P], T]:
        def call(self: _Holder[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
            return _run(lambda: method(self._held, *args, **kwargs))

        _twin(method, call, own)
        return call

    return decorate


def _starting(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[_Holder[Any], P], T]]:
    """As ``_method``, for a method that starts something and returns at once."""

    def decorate(_: Callable[..., Any]) -> Callable[Concatenate[_Holder[Any], P], T]:
        def call(self: _Holder[Any], /, *args: P.args, **kwargs: P.kwargs) -> T:
            return method(self._held, *args, **kwargs)

        update_wrapper(call, method)
        return call

    return decorate


def _documented_as(original: object) -> Callable[[F], F]:
    """Copy the docstring of a property or method."""

    def decorate(own: F) -> F:
        own.__doc__ = original.__doc__
        return own

    return decorate


class _Holder(Generic[H]):
    """A blocking object, which holds the one of the same name in ``sidestream``."""

    _held: H


class Checkpoint(_Holder[_checkpoint.Checkpoint], Mapping[str, "_checkpoint.TensorInfo | None"]):
    """``sidestream.Checkpoint`` for code without an event loop: the same names, and its methods block."""

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
    @_documented_as(_checkpoint.Checkpoint.url)
    def url(self) -> str:
        """As ``sidestream.Checkpoint.url``."""
        return self._held.url

    @property
    @_documented_as(_checkpoint.Checkpoint.save_id)
    def save_id(self) -> str:
        """As ``sidestream.Checkpoint.save_id``."""
        return self._held.save_id

    @property
    @_documented_as(_checkpoint.Checkpoint.step)
    def step(self) -> int | None:
        """As ``sidestream.Checkpoint.step``."""
        return self._held.step

    @property
    @_documented_as(_checkpoint.Checkpoint.metadata)
    def metadata(self) -> dict[str, Any]:
        """As ``sidestream.Checkpoint.metadata``."""
        return self._held.metadata

    @property
    @_documented_as(_checkpoint.Checkpoint.files)
    def files(self) -> dict[str, int]:
        """As ``sidestream.Checkpoint.files``."""
        return self._held.files

    @_documented_as(_checkpoint.Checkpoint.info)
    def info(self, fqn: str) -> _checkpoint.TensorInfo:
        """As ``sidestream.Checkpoint.info``, with the same arguments."""
        return self._held.info(fqn)

    @_method(_checkpoint.Checkpoint.file)
    def file(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpoint.file``, with the same arguments."""

    @_method(_checkpoint.Checkpoint.state_dict)
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpoint.state_dict``, with the same arguments."""

    @_method(_checkpoint.Checkpoint.tensor)
    def tensor(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpoint.tensor``, with the same arguments."""

    @_method(_checkpoint.Checkpoint.value)
    def value(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpoint.value``, with the same arguments."""

    @_method(_checkpoint.Checkpoint.verify)
    def verify(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpoint.verify``, with the same arguments."""


class Checkpointer(_Holder[_checkpointer.Checkpointer]):
    """``sidestream.Checkpointer`` for code without an event loop: the same arguments, and its methods block.

    It is open when it has been made, and ``close()`` or the end of its ``with`` block closes it. ``watch``,
    ``following`` and ``on_preemption`` need an event loop, and are not here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As ``sidestream.Checkpointer``, with the same arguments."""
        if kwargs.get("when_full") == "latest":
            raise InvalidOptionError(
                "when_full='latest' captures the state when the turn of a save comes, on an event loop: "
                "use sidestream.Checkpointer, or another when_full="
            )

        async def enter() -> _checkpointer.Checkpointer:
            return await _checkpointer.Checkpointer(*args, **kwargs).__aenter__()

        self._held = _run(enter)

    @_starting(_checkpointer.Checkpointer.async_save)
    def async_save(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.async_save``, with the same arguments."""

    @_method(_checkpointer.Checkpointer.best)
    def best(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.best``, with the same arguments."""

    @_method(_checkpointer.Checkpointer.latest)
    def latest(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.latest``, with the same arguments."""

    @_method(_checkpointer.Checkpointer.prewarm)
    def prewarm(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.prewarm``, with the same arguments."""

    @_method(_checkpointer.Checkpointer.prune)
    def prune(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.prune``, with the same arguments."""

    @_method(_checkpointer.Checkpointer.read_metadata)
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.read_metadata``, with the same arguments."""

    @_method(_checkpointer.Checkpointer.reserve)
    def reserve(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.reserve``, with the same arguments."""

    @_method(_checkpointer.Checkpointer.restore)
    def restore(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.restore``, with the same arguments."""

    @_method(_checkpointer.Checkpointer.save)
    def save(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.save``, with the same arguments."""

    @_method(_checkpointer.Checkpointer.steps)
    def steps(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.steps``, with the same arguments."""

    @_method(_checkpointer.Checkpointer.verify)
    def verify(self, *args: Any, **kwargs: Any) -> Any:
        """As ``sidestream.Checkpointer.verify``, with the same arguments."""

    @property
    def url(self) -> str:
        """The URL of the run."""
        return self._held.url

    @property
    @_documented_as(_checkpointer.Checkpointer.restored)
    def restored(self) -> _loading.LoadReport | None:
        """As ``sidestream.Checkpointer.restored``."""
        return self._held.restored

    @_documented_as(_checkpointer.Checkpointer.health)
    def health(self) -> Health:
        """As ``sidestream.Checkpointer.health``, with the same arguments."""

        async def health() -> Health:
            return self._held.health()

        return _run(health)

    @contextmanager
    def reading(self, step: int | Latest = "latest", *, options: LoadOptions | None = None) -> Iterator[Checkpoint]:
        """Open a step as a ``Checkpoint``, with a lease on it until the end of the ``with``.

        Args:
            step: A number, or ``"latest"``.
            options: ``verify``, ``safe_globals``, ``trust`` and ``timeout_s`` of the calls on the ``Checkpoint``, in
                place of those of the ``Checkpointer``.

        Yields:
            The checkpoint. Use it inside of the ``with`` only.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, UnsupportedCheckpointError: There is no such step, or it
                cannot be read.
            StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
            ClosedError: The ``Checkpointer`` is closed.
        """
        held = self._held.reading(step, options=options)
        checkpoint = _run(held.__aenter__)
        try:
            yield Checkpoint(checkpoint)
        finally:  # an error in the block is not one of the reading: the lease ends in either case
            _run(lambda: held.__aexit__(None, None, None))

    def close(self) -> None:
        """Wait for the saves in progress, their exports and the pruning after them, and free the staging memory.

        Ctrl-C cancels those saves, and waits until they have cleaned up.

        Raises:
            SidestreamError: A save whose error was not retrieved, or the pruning, failed.
        """
        _run(self._held.aclose)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _run(lambda: self._held.__aexit__(kind, error, trace))


Checkpointer.__doc__ = f"{cleandoc(Checkpointer.__doc__ or '')}\n\n{_sections_of(_checkpointer.Checkpointer)}"
_twin(_checkpointer.Checkpointer.__init__, Checkpointer.__init__, Checkpointer.__init__)


@_blocking(_saving.save)
def save(*args: Any, **kwargs: Any) -> Any:
    """As ``sidestream.save``, with the same arguments."""


@wraps(_saving.async_save)
def async_save(*args: Any, **kwargs: Any) -> _saving.PendingSave:
    """As ``sidestream.async_save``, with the same arguments."""
    return _saving.async_save(*args, **kwargs)


async_save.__module__ = __name__


@_blocking(_loading.load)
def load(*args: Any, **kwargs: Any) -> Any:
    """As ``sidestream.load``, with the same arguments."""


@_blocking(_returning(Checkpoint, _checkpoint.open_checkpoint))
def open_checkpoint(*args: Any, **kwargs: Any) -> Any:
    """As ``sidestream.open_checkpoint``, with the same arguments."""


@_blocking(_verifying.verify)
def verify(*args: Any, **kwargs: Any) -> Any:
    """As ``sidestream.verify``, with the same arguments."""


@_blocking(_copying.remove)
def remove(*args: Any, **kwargs: Any) -> Any:
    """As ``sidestream.remove``, with the same arguments."""


@_blocking(_copying.copy)
def copy(*args: Any, **kwargs: Any) -> Any:
    """As ``sidestream.copy``, with the same arguments."""


@_blocking(_converting.convert)
def convert(*args: Any, **kwargs: Any) -> Any:
    """As ``sidestream.convert``, with the same arguments."""
