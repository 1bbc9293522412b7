"""A record of the stages that have failed and whose errors have not been retrieved."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import SkippedError
from .future import StagingFuture

__all__ = ["UnretrievedErrors", "raise_all"]


class UnretrievedErrors:
    """The stages in flight, and the failed ones until their errors have been retrieved. May be used from any thread.

    A successful stage is dropped when it ends, because its result would keep its memory. A stage that was skipped has
    not failed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], object]] = []
        self._futures: list[StagingFuture[Any]] = []

    def track(self, future: StagingFuture[Any]) -> None:
        with self._changed:
            self._futures.append(future)
        future.on_retrieved(partial(self._drop, weakref.ref(future)))  # weak, because a cycle would keep its result
        future.add_done_callback(self._forget)
        if future.retrieved:
            self._drop(weakref.ref(future))

    def unretrieved(self) -> list[StagingFuture[Any]]:
        """Return the stages that are in flight, or have failed with an error that has not been retrieved."""
        with self._changed:
            return [one for one in self._futures if not one.retrieved]

    def wait(self, timeout_s: float) -> bool:
        """Block until no stage is in flight. Returns False if the time limit passes first.

        This keeps no reference to the futures in flight, because another stage may wait for the memory of their
        results.
        """
        with self._changed:
            return self._changed.wait_for(self._settled, timeout_s)

    async def settled(self) -> None:
        """Wait on the event loop until no stage is in flight, without a limit."""
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def waker() -> None:
            with suppress(RuntimeError):  # the loop is closed, and the waiting task ended before that
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._wakers.append(waker)
        try:
            while True:
                changed.clear()
                with self._changed:
                    if self._settled():
                        return
                await changed.wait()
        finally:
            with self._changed:
                self._wakers.remove(waker)

    def _settled(self) -> bool:
        return all(one.done() for one in self._futures)

    def _forget(self, future: Future[Any]) -> None:
        error = Future.exception(future)
        if error is None or isinstance(error, SkippedError):
            self._drop(weakref.ref(future))
        with self._changed:
            self._notify()

    def _drop(self, gone: weakref.ref[Any]) -> None:
        with self._changed:
            self._futures = [one for one in self._futures if one is not gone()]
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for waker in self._wakers:
            waker()


def raise_all(stages: Sequence[StagingFuture[Any]]) -> None:
    """Raise the first error that has not been retrieved, with the other ones as notes, because this is the last chance
    to report them."""
    failed = [one for one in stages if not one.retrieved and one.failure() is not None]
    failed = [one for one in failed if not isinstance(one.failure(), SkippedError)]
    if not failed:
        return
    first, *others = [one.exception(0) for one in failed]
    assert first is not None
    for other in others:
        first.add_note(f"another stage failed as well: {type(other).__name__}: {other}")
    raise first
