"""Futures of copies: for DCP, for threads, and for any number of tasks on any loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from ..errors import Skipped

__all__ = ["Copied", "StagingFuture"]

T = TypeVar("T")


class StagingFuture(Future[T], Generic[T]):
    """A ``concurrent.futures.Future`` that can be awaited too, from any task of any loop, and any number of times.

    It counts as running from the beginning: cancelling one awaiter cancels neither the copy nor the other awaiters.
    """

    def __init__(self, like: StagingFuture[Any] | None = None) -> None:
        """``like``: another future of the same stage; an error that was heard from one was heard from both."""
        super().__init__()
        self._heard: threading.Event = threading.Event() if like is None else like._heard
        self.set_running_or_notify_cancel()

    @property
    def heard(self) -> bool:
        """Whether somebody has been given the error, or does not want it."""
        return self._heard.is_set()

    def hear(self) -> None:
        """Nobody needs to be told any more how this ended."""
        self._heard.set()

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def resolved(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop was closed, and whoever waited on it is gone
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(resolved)
        yield from waiter.__await__()
        return self.result(0)

    def result(self, timeout: float | None = None) -> T:
        try:
            return super().result(timeout)
        except BaseException:
            if self.done():
                self.hear()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        if error is not None:
            self.hear()
        return error


class Copied:
    """Awaitable (and harmless when it is not awaited, as DCP does): all of ``stages`` have ended, and one that was
    skipped as its policy says has not failed."""

    def __init__(self, stages: Sequence[StagingFuture[Any]]) -> None:
        self._stages = stages

    def __await__(self) -> Generator[Any, None, None]:
        failed: Exception | None = None
        for stage in self._stages:
            try:
                yield from stage.__await__()
            except Skipped:
                continue
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
