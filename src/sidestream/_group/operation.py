"""One thing that all ranks of a group do together, step by step, and how it ends for all of them alike.

In a step every rank gives rank 0 some bytes, rank 0 makes answers of them, and every rank gets its own. A rank that
cannot go on says so; all others are told to stop, say that they have, and rank 0 tells everybody the same verdict, or
to start over.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from .._runtime.gil import wrap_thread_future
from .._runtime.threads import Deadline
from ..errors import RankFailuresError
from .failure import Stopped, pack

__all__ = ["Decide", "Exchange", "Operation"]

Decide: TypeAlias = Callable[[Sequence[bytes]], "bytes | Sequence[bytes]"]
"""On rank 0: from the parts of all ranks, by rank, to one answer for all or one for each."""

T = TypeVar("T")

VERDICT_GRACE_S = 30.0
"""How long past the deadline a rank waits for what rank 0 has to say before it judges for itself."""

_ROUND = 1 << 32
"""Added to the number of an operation each time that all ranks start over. A group begins fewer operations."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One step as one rank takes part in it: what it gives, and where its answer arrives. ``gathered`` is where rank 0
    finds what all gave; the others have None."""

    step: str
    part: bytes
    gathered: Future[Sequence[bytes]] | None
    answered: Future[bytes]


class OperationTransport(Protocol):
    """What an operation needs of its group. ``plans`` is for whoever plans with these ranks."""

    rank: int
    world: int
    plans: Any

    def id_of(self, number: int) -> str: ...

    def step(self, operation: Operation, exchange: Exchange) -> None: ...

    def answer(self, operation: Operation, step: str, answers: Sequence[bytes]) -> None: ...

    def make_irrevocable(self, operation: Operation) -> Future[bool]: ...

    def fail(self, operation: Operation, error: BaseException, *, undone: bool, start_over: bool = False) -> None: ...

    def leave(self, operation: Operation) -> None: ...

    def close(self, operation: Operation) -> None: ...


class Operation:
    """This rank's view of one operation. Safe for any thread."""

    def __init__(
        self, group: OperationTransport, number: int, kind: str, deadline: Deadline, rank_wait_s: float
    ) -> None:
        self.group = group
        self.number = number
        self.kind = kind
        self.deadline = deadline
        self.rank_wait_s = rank_wait_s
        """How long this rank waits for the other ranks to begin the operation."""
        self.began_at = time.monotonic()
        self.step = "start"
        """What this rank is doing, for its errors."""
        self.verdict: Future[RankFailuresError | None] = Future()
        """How it failed, the same on all ranks; None if they start over. Then the next round has a future of its own.
        """
        self.step_completed = False
        """After a cancel: it came too late, the step has been completed."""
        self._lock = threading.Lock()
        self._stopping = False
        self._on_stop: list[Callable[[], None]] = []
        self._waiting: set[Future[bytes] | Future[Sequence[bytes]]] = set()
        self._ended = False
        self._final: dict[str, Any] | None = None
        """Why this rank does not start over with the others, packed. The error itself would keep its frames alive."""
        self._suspended = False

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world(self) -> int:
        return self.group.world

    @property
    def save_id(self) -> str:
        """32 hexadecimal digits that every rank knows, and no other operation has."""
        return self.group.id_of(self.number)

    # --- its time ---

    def suspend(self) -> None:
        """Its deadline does not count, on this rank, until ``resume``."""
        self._suspended = True

    def resume(self, deadline: Deadline) -> None:
        """From now on it has until ``deadline``, which is as long as the first one was."""
        self.deadline = deadline
        self._suspended = False

    @property
    def expires_at(self) -> float:
        """Not before then (``time.monotonic``) has its time run out. Of one that is suspended, a time to look again."""
        return time.monotonic() + self.deadline.timeout_s if self._suspended else self.deadline.at

    # --- steps ---

    def exchange(self, step: str, part: bytes, decide: Decide) -> bytes:
        """Blocking, in a worker thread: this rank's answer. Raises ``Stopped`` if the operation cannot go on, and on
        rank 0 what ``decide`` raises."""
        gathered, answered = self._begin(step, part)
        if gathered is not None:
            self.answer(step, decide(self._result(gathered)))
        return self._result(answered)

    async def aexchange(
        self, step: str, part: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes | Sequence[bytes]]]
    ) -> bytes:
        """As ``exchange``, awaited."""
        gathered, answered = self._begin(step, part)
        if gathered is not None:
            self.answer(step, await decide(await self._await(gathered)))
        return await self._await(answered, final=True)

    async def agree(self, step: str) -> None:
        """Every rank has come to this point."""

        async def nothing(_: Sequence[bytes]) -> bytes:
            return b""

        await self.aexchange(step, b"", nothing)

    def _begin(self, step: str, part: bytes) -> tuple[Future[Sequence[bytes]] | None, Future[bytes]]:
        self.step = step
        gathered: Future[Sequence[bytes]] | None = Future() if self.rank == 0 else None
        answered: Future[bytes] = Future()
        with self._lock:
            if self._stopping:
                raise Stopped
            self._waiting.update(one for one in (gathered, answered) if one is not None)
        self.group.step(self, Exchange(step, part, gathered, answered))
        return gathered, answered

    def answer(self, step: str, answers: bytes | Sequence[bytes]) -> None:
        """On rank 0, where ``decide`` of that step cannot return: one answer for all or one for each."""
        each = [answers] * self.world if isinstance(answers, bytes) else list(answers)
        self.group.answer(self, step, each)

    def _result(self, future: Future[T]) -> T:
        """Rank 0 judges at the deadline, so to wait for longer than that and a grace means that nobody does."""
        try:
            return future.result(self.deadline.remaining_s() + VERDICT_GRACE_S)
        except TimeoutError as error:
            if future.done():
                raise
            raise self.deadline.exceeded(f"waiting for the other ranks ({self.step})") from error

    async def _await(self, future: Future[T], *, final: bool = False) -> T:
        """A cancel is told to the others and raised when it is known whether they heard of it in time."""
        waiter = wrap_thread_future(future)
        cancelled: asyncio.CancelledError | None = None
        while not waiter.done():
            try:
                await asyncio.wait([waiter])
            except asyncio.CancelledError as cancel:
                if cancelled is None and not self._stopping:
                    self._give_up(cancel)
                    self.group.fail(self, cancel, undone=False)
                cancelled = cancelled or cancel
        if cancelled is not None:
            error = waiter.exception()  # looked at in any case, or asyncio would log it
            self.step_completed = final and error is None
            raise cancelled
        return waiter.result()

    # --- the end ---

    async def make_irrevocable(self) -> bool:
        """On rank 0: from now on it will be carried out, whoever fails or dies. False if it is too late for that.
        A rank 0 that fails or is cancelled takes the seal back with ``failed``."""
        return await asyncio.shield(
            wrap_thread_future(self.group.make_irrevocable(self))
        )  # it is set whether awaited or not

    @property
    def ended(self) -> bool:
        """Whether it has ended for this rank, well or with a verdict."""
        return self._ended or self.verdict.done()

    def close(self) -> None:
        """It has ended well for this rank."""
        with self._lock:
            self._ended = True
        self.group.close(self)

    async def failed(self, error: BaseException) -> RankFailuresError:
        """This rank has stopped, because of ``error`` or because others did: the verdict. Waits for it through cancels;
        the caller raises its own."""
        if not self.step_completed:
            self.report(error)
        while True:
            verdict = wrap_thread_future(self.verdict)
            while not verdict.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([verdict])
            found = verdict.result()
            if found is not None:  # the others may have started over: they are told of ``error`` in the next round
                return found

    def report(self, error: BaseException) -> None:
        """As ``failed``, without waiting."""
        self._give_up(error)
        self._stopped(error, start_over=False)

    async def starts_over(self, error: BaseException, *, wanted: bool) -> bool:
        """This rank has stopped, because of ``error`` or because others did. ``wanted``: it could start over. Wait for
        the others, and return whether all ranks start over, which they do if each rank that failed ``wanted`` it; then
        this is a new operation with the same deadline. Otherwise ``failed`` returns the verdict. A cancel is raised
        when the outcome is known."""
        verdict = wrap_thread_future(self.verdict)
        self._stopped(error, start_over=wanted)
        cancelled: asyncio.CancelledError | None = None
        while not verdict.done():
            try:
                await asyncio.wait([verdict])
            except asyncio.CancelledError as cancel:
                cancelled = cancelled or cancel
        if cancelled is not None:
            raise cancelled
        return verdict.result() is None

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            self._final = self._final or pack(self.rank, self.step, error)

    def _stopped(self, error: BaseException, *, start_over: bool) -> None:
        with self._lock:
            ended, self._ended = self._ended, True
        if ended:
            return
        if self._stopping:  # what it fails with now is what comes of stopping
            self.group.leave(self)
        else:
            self.group.fail(self, error, undone=True, start_over=start_over)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, in another thread, when the operation cannot go on; at once if that is known."""
        with self._lock:
            if not self._stopping:
                self._on_stop.append(callback)
                return
        callback()

    @property
    def stopping(self) -> bool:
        return self._stopping

    # --- the owner's thread ---

    def stop(self) -> None:
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            callbacks, self._on_stop = self._on_stop, []
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_exception(Stopped())
        for callback in callbacks:
            callback()

    def start_over(self) -> dict[str, Any] | None:
        """Become the next round, under a number of its own, so that messages of this one are not taken for its. The
        group begins it. Return the failure that this rank has to tell in it."""
        with self._lock:
            self.number += _ROUND
            self.began_at = time.monotonic()
            self.step = "start"
            self._stopping = False
            self._ended = self._final is not None
            judged, self.verdict = self.verdict, Future()
        judged.set_result(None)
        return self._final

    def conclude(self, verdict: RankFailuresError) -> None:
        self.stop()
        if not self.verdict.done():
            self.verdict.set_result(verdict)
