"""Futures of copies, for DCP, for threads, and for any number of tasks on any loops."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from .._runtime.public import public
from .._runtime.tasks import running_loop
from .._runtime.threads import ThreadFuture, Wakeup
from .._runtime.waits import WaitReasons, caller_waits
from ..errors import SkippedError

T = TypeVar("T")


@public
class StagingFuture(ThreadFuture[T], Generic[T]):
    """A ``concurrent.futures.Future`` that can also be awaited, by any task of any event loop, any number of times.

    It counts as running from the beginning: a cancel of one awaiter cancels neither the copy nor the other awaiters.
    """

    def __init__(self, like: StagingFuture[Any] | None = None) -> None:
        """Make a future that is running.

        Args:
            like: Another future of the same stage. An error that was retrieved from one of the two counts as retrieved
                from both.
        """
        super().__init__()
        self._retrieval: _Retrieval = _Retrieval() if like is None else like._retrieval
        self._succeeded = False
        # From the beginning, so that ``cancel`` of one awaiter, or of ``asyncio.wrap_future``, has no effect: the
        # copies go to a reader that others wait for.
        self.set_running_or_notify_cancel()

    @property
    def retrieved(self) -> bool:
        """True if the error has been retrieved, or does not need to be."""
        return self._retrieval.retrieved

    def mark_retrieved(self) -> None:
        """Count the error as retrieved."""
        self._retrieval.mark_retrieved()

    @property
    def unretrieved(self) -> BaseException | None:
        """The error that the stage ended with, if it was not retrieved. A stage that was skipped has none."""
        error = None if self.retrieved else self.failure()
        return None if isinstance(error, SkippedError) else error

    @property
    def settled(self) -> bool:
        """True if the stage needs no attention: it has ended without an error, or its error was retrieved or will not
        be needed. After ``when_done`` only.

        It takes no lock, because a ``KeyboardInterrupt`` can leave that of a future locked."""
        return self.retrieved or self._succeeded

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when the stage ends, and when its error is retrieved."""
        self._retrieval.callback = callback
        self.add_done_callback(partial(_note_end, callback))
        if self.retrieved:
            callback()

    def failure(self) -> BaseException | None:
        """Return the error that the stage ended with, if it has ended, without retrieving it."""
        return Future.exception(self) if self.done() else None

    def __await__(self) -> Generator[Any, None, T]:
        try:
            yield from ended(self).__await__()
            return self.result(0)
        finally:
            del self  # as in ``result``

    def result(self, timeout: float | None = None) -> T:
        """Wait for the copy, and return it. It blocks the thread; on an event loop await the future in place of this.

        Args:
            timeout: The limit of the wait, in seconds. None: no limit.

        Returns:
            What was staged.

        Raises:
            TimeoutError: The copies are not done within ``timeout``. They continue.
            SidestreamError: The stage has failed.
        """
        try:
            return super().result(timeout)
        except BaseException as error:
            if error is self.failure():
                self.mark_retrieved()
            raise
        finally:
            # The error refers to this frame, and this future to the error. In a reference cycle they would keep the
            # frame of the caller, and with it the staged memory that later futures of the caller hold.
            del self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the stage, and return its error.

        Args:
            timeout: The limit of the wait, in seconds. None: no limit.

        Returns:
            The error, which counts as retrieved then; None if the stage has succeeded.

        Raises:
            TimeoutError: The copies are not done within ``timeout``. They continue.
        """
        error = super().exception(timeout)
        if error is not None:
            self.mark_retrieved()
        return error


def _note_end(callback: Callable[[], object], future: StagingFuture[Any]) -> None:
    error = Future.exception(future)
    future._succeeded = error is None or isinstance(error, SkippedError)
    callback()


class _Retrieval:
    """Whether the error of a stage has been retrieved. All futures of the stage share it."""

    def __init__(self) -> None:
        self.retrieved = False
        self.callback: Callable[[], object] | None = None

    def mark_retrieved(self) -> None:
        self.retrieved = True
        callback, self.callback = self.callback, None
        if callback is not None:
            callback()


class Copied:
    """An awaitable that waits for the end of ``stages`` and raises the first error of one. A stage that was skipped
    has not failed. DCP does not await it, which has no effect. ``reasons`` are those to wait for them."""

    def __init__(self, stages: Sequence[StagingFuture[Any]], reasons: Sequence[WaitReasons]) -> None:
        self._stages = stages
        self._reasons = reasons

    def __await__(self) -> Generator[Any, None, None]:
        with caller_waits("staged", self._reasons):
            for stage in self._stages:
                yield from ended(stage).__await__()
        raise_first(self._stages)


async def ended(stage: StagingFuture[Any]) -> None:
    """Wait for the end of ``stage``, without retrieving its error."""
    running_loop("awaiting a stage")
    await Wakeup(stage).wait(None)


def raise_first(stages: Sequence[StagingFuture[Any]]) -> None:
    """Raise the first error of ``stages`` that have ended. The other errors stay unretrieved. A skipped stage has not
    failed."""
    for stage in stages:
        if stage.failure() is not None and not isinstance(stage.failure(), SkippedError):
            stage.result(0)
