"""A record of the operations that have failed and whose errors have not been retrieved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from .threads import Condition


class _Failing(Protocol):
    """Something that may have failed with an error that no caller has retrieved."""

    @property
    def unretrieved(self) -> BaseException | None:
        """The error that it ended with, until that is retrieved."""

    def mark_retrieved(self) -> None:
        """Count the error as retrieved."""


class _Operation(_Failing, Protocol):
    def done(self) -> bool: ...

    @property
    def settled(self) -> bool:
        """True if it needs no attention: it has ended, and its error, if any, was retrieved."""

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when it is ``done()``, at once if it is. It may be called once more when the error is
        retrieved."""


T = TypeVar("T", bound=_Operation)


class UnretrievedErrors(Generic[T]):
    """The operations in flight, and the failed ones until their errors have been retrieved, for any thread.

    A successful operation is dropped when it ends, because its result may keep memory.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._wakers: list[Callable[[], object]] = []
        self._operations: list[T] = []

    def track(self, operation: T) -> None:
        with self._changed:
            self._operations.append(operation)
        operation.when_done(self._look)
        self._look()  # drops operations whose errors were retrieved since the last one ended

    def forget(self, operation: T) -> None:
        with self._changed:
            self._operations = [one for one in self._operations if one is not operation]

    def operations(self) -> list[T]:
        """Return the operations that are in flight, or have failed with an error that has not been retrieved."""
        with self._changed:
            operations = list(self._operations)
        return [one for one in operations if not one.settled]

    def errors(self) -> list[BaseException]:
        """Return the errors that have not been retrieved."""
        return [error for one in self.operations() if (error := one.unretrieved) is not None]

    def wait(self, timeout_s: float) -> bool:
        """Block until no operation is in flight. Returns False if the time limit passes first.

        This keeps no reference to the operations in flight, because a stage may wait for the memory of their results.
        """
        with self._changed:
            return self._changed.wait_for(self._ended, timeout_s)

    async def ended(self) -> None:
        """Wait on the event loop until no operation is in flight, without a limit."""
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
                    if self._ended():
                        return
                await changed.wait()
        finally:
            with self._changed:
                self._wakers.remove(waker)

    def _ended(self) -> bool:
        return all(one.done() for one in self._operations)

    def _look(self) -> None:
        """Drop what has settled, and wake those that wait."""
        with self._changed:
            operations = list(self._operations)
        settled = {id(one) for one in operations if one.settled}  # without the lock: ``settled`` may run foreign code
        with self._changed:
            self._operations = [one for one in self._operations if id(one) not in settled]
            self._changed.notify_all()
            for waker in self._wakers:
                waker()


def raise_all(operations: Iterable[_Failing]) -> None:
    """Raise the first error that has not been retrieved, with the other ones as its notes. They are retrieved then."""
    failed = [(one, error) for one in operations if (error := one.unretrieved) is not None]
    for one, _ in failed:
        one.mark_retrieved()
    if failed:
        (_, first), *others = failed
        for _, other in others:
            first.add_note(f"another operation failed as well: {type(other).__name__}: {other}")
        raise first
