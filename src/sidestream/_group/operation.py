"""An operation of all ranks of a group, step by step, which ends in the same way on all of them.

In a step, every rank sends bytes to rank 0, rank 0 computes answers from them, and every rank receives its answer. When
a rank fails, rank 0 tells the others to stop and waits until they have; then it sends all ranks the same verdict, or
the order to start over.
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

__all__ = ["FOLLOWING", "Deadline", "Decide", "Exchange", "Operation"]

Decide: TypeAlias = Callable[[Sequence[bytes]], "bytes | Sequence[bytes]"]
"""Called on rank 0 with the parts of all ranks, in the order of ranks. Returns one answer for all, or one for each."""

T = TypeVar("T")

VERDICT_GRACE_S = 30.0
"""How long past the deadline a rank waits for the verdict of rank 0 before it ends the operation by itself."""

_ROUND = 1 << 32
"""Added to the number of an operation each time that all ranks start over. A group begins fewer operations."""

FOLLOWING = 1 << 48
"""Added to the number of an operation for each operation that follows it. No operation starts over so often."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One step on one rank: the ``part`` that it sends, and the future of its answer. ``gathered`` is the future of all
    parts on rank 0, and None on other ranks."""

    step: str
    part: bytes
    gathered: Future[Sequence[bytes]] | None
    answered: Future[bytes]


class OperationTransport(Protocol):
    """The methods of a ``RankGroup`` that an operation calls. ``plans`` is where planning keeps its state between
    operations."""

    rank: int
    world: int
    plans: Any

    def id_of(self, number: int) -> str: ...

    def follow(self, operation: Operation, index: int, kind: str, deadline: Deadline) -> Operation: ...

    def step(self, operation: Operation, exchange: Exchange) -> None: ...

    def answer(self, operation: Operation, step: str, answers: Sequence[bytes]) -> None: ...

    def make_irrevocable(self, operation: Operation) -> Future[bool]: ...

    def fail(self, operation: Operation, error: BaseException, *, undone: bool, start_over: bool = False) -> None: ...

    def leave(self, operation: Operation) -> None: ...

    def close(self, operation: Operation) -> None: ...


class Operation:
    """One operation as this rank sees it. Its methods may be called in any thread."""

    def __init__(
        self, group: OperationTransport, number: int, kind: str, deadline: Deadline, rank_wait_s: float
    ) -> None:
        self.group = group
        self.number: int = number
        self.kind = kind
        self.deadline: Deadline = deadline
        self.rank_wait_s = rank_wait_s
        """How long this rank waits for the other ranks to begin the operation."""
        self.began_at: float = time.monotonic()
        self.step: str = "start"
        """The step that this rank is in, for its errors."""
        self.verdict: Future[RankFailuresError | None] = Future()
        """The failures of the operation, the same on all ranks. None if they start over; the next round has a future of
        its own."""
        self.step_completed: bool = False
        """Whether a cancel came too late: the step has been completed on all ranks."""
        self.first: Any = None
        """The process of rank 0, from when the ranks have planned a save."""
        self._lock = threading.Lock()
        self._stopping = False
        self._on_stop: list[Callable[[], None]] = []
        self._waiting: set[Future[bytes] | Future[Sequence[bytes]]] = set()
        self._ended = False
        self._final: dict[str, Any] | None = None
        """The packed error because of which this rank cannot start over. The error itself would keep its frames
        alive."""
        self._suspended = False

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world(self) -> int:
        return self.group.world

    @property
    def save_id(self) -> str:
        """32 hexadecimal digits, the same on all ranks and unique for each operation."""
        return self.group.id_of(self.number)

    def follow(self, index: int, kind: str, deadline: Deadline) -> Operation:
        """Begin the operation ``index`` of those that follow this one, without blocking. Each rank begins it after
        this one has ended there. Other operations may begin in between."""
        return self.group.follow(self, index, kind, deadline)

    # --- its deadline ---

    def suspend(self) -> None:
        """Suspend the deadline on this rank until ``resume``."""
        self._suspended = True

    def resume(self, deadline: Deadline) -> None:
        """Set a new deadline and stop suspending it. It has the same length as the first one."""
        self.deadline = deadline
        self._suspended = False

    @property
    def expires_at(self) -> float:
        """The earliest time at which the deadline can pass (``time.monotonic`` seconds). While it is suspended, the
        time at which to check again."""
        return time.monotonic() + self.deadline.timeout_s if self._suspended else self.deadline.at

    # --- steps ---

    def exchange(self, step: str, part: bytes, decide: Decide) -> bytes:
        """Do one step in a worker thread and return this rank's answer. Raises ``Stopped`` if another rank has failed,
        and on rank 0 the errors of ``decide``."""
        gathered, answered = self._begin(step, part)
        if gathered is not None:
            self.answer(step, decide(self._result(gathered)))
        return self._result(answered)

    async def aexchange(
        self, step: str, part: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes | Sequence[bytes]]]
    ) -> bytes:
        """Do one step as ``exchange`` does, without blocking the loop."""
        gathered, answered = self._begin(step, part)
        if gathered is not None:
            self.answer(step, await decide(await self._await(gathered)))
        return await self._await(answered, final=True)

    async def agree(self, step: str) -> None:
        """Wait until every rank has reached this point."""

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
        """Send the answers of a step, one for all ranks or one for each. For rank 0, where ``decide`` of the step
        cannot return them."""
        each = [answers] * self.world if isinstance(answers, bytes) else list(answers)
        self.group.answer(self, step, each)

    def _result(self, future: Future[T]) -> T:
        """Wait for ``future``. Rank 0 concludes the operation at the deadline, so a longer wait, plus a grace, means
        that rank 0 does not respond."""
        return self.deadline.result(future, f"waiting for the other ranks ({self.step})", VERDICT_GRACE_S)

    async def _await(self, future: Future[T], *, final: bool = False) -> T:
        """Await ``future``. A cancel is sent to the other ranks, and raised when it is known whether the step was
        completed before."""
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
            error = waiter.exception()  # retrieved in any case, or asyncio would log it
            self.step_completed = final and error is None
            raise cancelled
        return waiter.result()

    # --- the end ---

    async def make_irrevocable(self) -> bool:
        """Make the operation continue on rank 0 even if other ranks fail or die. Return False if one has failed
        already. A later failure or cancel of rank 0 itself, reported with ``failed``, undoes this."""
        return await asyncio.shield(
            wrap_thread_future(self.group.make_irrevocable(self))
        )  # it takes effect whether awaited or not

    @property
    def ended(self) -> bool:
        """Whether the operation has ended on this rank, by success or with a verdict."""
        return self._ended or self.verdict.done()

    def close(self) -> None:
        """End the operation on this rank after its success."""
        with self._lock:
            self._ended = True
        self.group.close(self)

    async def failed(self, error: BaseException) -> RankFailuresError:
        """Report that this rank has stopped, because of ``error`` or because another rank has failed, and return the
        verdict. Cancels do not interrupt the wait; the caller raises its own cancel."""
        if not self.step_completed:
            self.report(error)
        while True:
            verdict = wrap_thread_future(self.verdict)
            while not verdict.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([verdict])
            found = verdict.result()
            if found is not None:  # else the other ranks start over, and ``error`` is sent to them in the next round
                return found

    def report(self, error: BaseException) -> None:
        """Report that this rank has stopped, as ``failed`` does, without waiting for the verdict."""
        self._give_up(error)
        self._stopped(error, start_over=False)

    async def starts_over(self, error: BaseException, *, wanted: bool) -> bool:
        """Report that this rank has stopped, because of ``error`` or because another rank has failed, and return
        whether all ranks start over. They do if every rank that failed ``wanted`` it. Then this object is a new
        operation with the same deadline; otherwise ``failed`` returns the verdict. A cancel is raised when the outcome
        is known."""
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
        if self._stopping:  # this error is a consequence of the request to stop
            self.group.leave(self)
        else:
            self.group.fail(self, error, undone=True, start_over=start_over)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in another thread when a rank has failed; at once if one has failed already."""
        with self._lock:
            if not self._stopping:
                self._on_stop.append(callback)
                return
        callback()

    @property
    def stopping(self) -> bool:
        """Whether a rank has failed, so that this rank has to stop."""
        return self._stopping

    # --- the connection thread ---

    def stop(self) -> None:
        """Make all waits of this rank raise ``Stopped``, and call the ``on_stop`` callbacks."""
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
        """Become the next round of the operation, with a number of its own, so that late messages of this round are not
        mixed up with it. The group then begins it. Return the failure that this rank has to report in it, or None."""
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
        """Stop this rank, and set the verdict."""
        self.stop()
        if not self.verdict.done():
            self.verdict.set_result(verdict)
