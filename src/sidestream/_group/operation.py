"""An operation of all ranks of a group, step by step, which ends in the same way on all of them.

In a step, every rank sends bytes to rank 0, rank 0 computes answers from them, and every rank receives its answer. When
a rank fails, rank 0 tells the others to stop and waits until they have; then it sends all ranks the same verdict, or
the order to start over. ``RankGroup`` has the operations of a group; its two subclasses exchange their messages.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from .._runtime.gil import wrap_thread_future
from .._runtime.tasks import wait_out
from .._runtime.threads import Deadline
from ..errors import ForkedProcessError, RankFailuresError
from .connections import ConnectionThread, connection_thread
from .failure import pack

__all__ = [
    "FOLLOWING",
    "VERDICT_GRACE_S",
    "Deadline",
    "Exchange",
    "Operation",
    "RankGroup",
    "Stopped",
    "remedy",
]

Decide: TypeAlias = Callable[[Sequence[bytes]], "bytes | Sequence[bytes]"]
"""Called on rank 0 with the parts of all ranks, in the order of ranks. Returns one answer for all, or one for each."""

T = TypeVar("T")

VERDICT_GRACE_S = 30.0
"""How long past the deadline a rank waits for the verdict of rank 0 before it ends the operation by itself."""

_ROUND = 1 << 32
"""Added to the number of an operation each time that all ranks start over. A group begins fewer operations."""


FOLLOWING = 1 << 48
"""Added to the number of an operation for each operation that follows it. No operation starts over so often."""


class Stopped(Exception):
    """Another rank has failed. The verdict of the operation will say which one, and why."""

    written: tuple[str, ...] = ()
    """For a load: as in ``SidestreamError``."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One step on one rank: the ``part`` that it sends, and the future of its answer. ``gathered`` is the future of all
    parts on rank 0, and None on other ranks."""

    step: str
    part: bytes
    gathered: Future[Sequence[bytes]] | None
    answered: Future[bytes]


class Operation:
    """One operation as this rank sees it. Its methods may be called in any thread."""

    def __init__(self, group: RankGroup, number: int, kind: str, deadline: Deadline, rank_wait_s: float) -> None:
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
        self.cancelled: asyncio.CancelledError | None = None
        """A cancel that arrived while ``failed`` waited. The caller raises it in place of the verdict."""
        self.step_completed: bool = False
        """Whether a cancel came too late: the step has been completed on all ranks."""
        self.first: Any = None
        """The process of rank 0, from when the ranks have planned a save."""
        self.membership: object = None
        """What keeps the connections open while this operation exists, although the process group may be destroyed."""
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
        exchange = self._begin(step, part)
        if exchange.gathered is not None:
            # Rank 0 sends its own part like any other rank, and waits for its own answer. So it takes the same way to
            # ``Stopped`` and to the deadline.
            self.answer(step, decide(self._result(exchange.gathered)))
        return self._result(exchange.answered)

    async def aexchange(
        self, step: str, part: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes | Sequence[bytes]]]
    ) -> bytes:
        """Do one step as ``exchange`` does, without blocking the loop."""
        exchange = self._begin(step, part)
        if exchange.gathered is not None:
            self.answer(step, await decide(await self._await(exchange.gathered)))
        return await self._await(exchange.answered, final=True)

    async def agree(self, step: str) -> None:
        """Wait until every rank has reached this point."""

        async def nothing(_: Sequence[bytes]) -> bytes:
            return b""

        await self.aexchange(step, b"", nothing)

    def _begin(self, step: str, part: bytes) -> Exchange:
        self.step = step
        exchange = Exchange(step, part, Future() if self.rank == 0 else None, Future())
        # With the lock: a rank fails at any time, in the connection thread. Either that thread sees these futures in
        # ``_waiting`` and ends them, or this one sees ``_stopping``.
        with self._lock:
            if self._stopping:
                raise Stopped
            for future in (exchange.gathered, exchange.answered):
                if future is not None:
                    self._waiting.add(future)
                    future.add_done_callback(self._waiting.discard)  # with it go the parts or the answer
        self.group.step(self, exchange)
        return exchange

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

        def send_cancel(cancel: asyncio.CancelledError) -> None:
            if self._final is None and not self._stopping:
                # A cancel does not end the wait at once. Rank 0 may have completed the step before it learns of the
                # cancel, and a save that was committed must not be reported as cancelled on one rank only. So the
                # cancel is sent, and the wait continues until the step is completed or stopped.
                self._keep_final(cancel)
                self.group.fail(self, cancel, undone=False)

        cancelled = await wait_out(waiter, send_cancel)
        if cancelled is not None:
            error = waiter.exception()  # retrieved in any case, or asyncio would log it
            # True if the answer came in spite of the cancel: the step was completed on all ranks. Then there is nothing
            # to report, and this rank alone raises.
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
            self._on_stop.clear()  # they refer to the save, which refers to this object
        self.group.close(self)

    async def failed(self, error: BaseException) -> RankFailuresError:
        """Report that this rank has stopped, because of ``error`` or because another rank has failed, and return the
        verdict. Cancels do not interrupt the wait; the caller raises its own cancel, or the one in ``cancelled``."""
        if not self.step_completed:
            self.report(error)
        while True:
            verdict = wrap_thread_future(self.verdict)
            cancelled = await wait_out(verdict)
            self.cancelled = self.cancelled or cancelled
            found = verdict.result()
            if found is not None:  # else the other ranks start over, and ``error`` is sent to them in the next round
                return found

    def report(self, error: BaseException) -> None:
        """Report that this rank has stopped, as ``failed`` does, without waiting for the verdict."""
        self._keep_final(error)
        self._stopped(error, start_over=False)

    async def starts_over(self, error: BaseException, *, wanted: bool) -> bool:
        """Report that this rank has stopped, because of ``error`` or because another rank has failed, and return
        whether all ranks start over. They do if every rank that failed ``wanted`` it. Then this object is a new
        operation with the same deadline; otherwise ``failed`` returns the verdict. A cancel is raised when the outcome
        is known."""
        verdict = wrap_thread_future(self.verdict)
        self._stopped(error, start_over=wanted)
        cancelled = await wait_out(verdict)
        if cancelled is not None:
            raise cancelled
        return verdict.result() is None

    def _keep_final(self, error: BaseException) -> None:
        with self._lock:
            self._final = self._final or pack(self.rank, self.step, error)

    def _stopped(self, error: BaseException, *, start_over: bool) -> None:
        with self._lock:
            ended, self._ended = self._ended, True
        if ended:
            return
        if self._stopping:  # this error is a consequence of the request to stop
            self.group.release(self)
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
            waiting, self._waiting = list(self._waiting), set()
        for future in waiting:
            if not future.done():
                future.set_exception(Stopped())
        for callback in callbacks:
            callback()

    def start_over(self) -> dict[str, Any] | None:
        """Become the next round of the operation, with a number of its own, so that late messages of this round are not
        mixed up with it. The group then begins it. Return the failure that this rank has to report in it, or None."""
        with self._lock:
            # A new number, so that messages of the first round are not taken for messages of the second. A rank that
            # was cancelled meanwhile cannot continue: it takes part in the second round only to report that.
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


def remedy(kind: str) -> str:
    """Return advice for a process that makes a call of all ranks alone."""
    return f'make this call on every rank, or pass process_group="alone" to {kind} in this process only'


class RankGroup(ABC):
    """The base of ``Rank0`` and ``OtherRank``. Public methods may be called in any thread, all others run in the
    connection thread."""

    def __init__(self, rank: int, world: int, token: str) -> None:
        self.rank = rank
        self.world = world
        self.plans: Any = None
        """The state that planning keeps between operations."""
        self.token = token
        self._thread: ConnectionThread = connection_thread()
        self._lock = threading.Lock()
        self._number = 0
        self._pid = os.getpid()

    def begin(self, kind: str, deadline: Deadline, rank_wait_s: float) -> Operation:
        """Begin the next operation of this group. Every rank has to begin the same operations in the same order. Does
        not block."""
        if os.getpid() != self._pid:
            raise ForkedProcessError("ranks do not save from a forked child; save in the process that joined the group")
        with self._lock:
            self._number += 1
            return self._posted(Operation(self, self._number, kind, deadline, rank_wait_s))

    def follow(self, operation: Operation, index: int, kind: str, deadline: Deadline) -> Operation:
        """Begin an operation whose number is computed from that of ``operation``, so that the ranks may begin such
        operations in different orders."""
        number = operation.number + (index + 1) * FOLLOWING
        following = Operation(self, number, kind, deadline, operation.rank_wait_s)
        following.membership = operation.membership
        return self._posted(following)

    def _posted(self, operation: Operation) -> Operation:
        # The order of the posts is the order of the calls, and it is the same on all ranks. The number is taken with
        # the lock for that reason.
        self._thread.post(lambda: self._begin(operation))
        return operation

    def id_of(self, number: int) -> str:
        """Return an id that is the same on all ranks. It is known once the rank has received an answer of rank 0."""
        return hashlib.blake2b(f"{self.token} {number}".encode(), digest_size=16).hexdigest()

    def step(self, operation: Operation, exchange: Exchange) -> None:
        """Send this rank's part of a step, and resolve the futures of ``exchange``."""
        self._thread.post(lambda: self._step(operation, exchange))

    def answer(self, operation: Operation, step: str, answers: Sequence[bytes]) -> None:
        """Send the answers of a step, by rank. Only rank 0 does."""
        raise NotImplementedError

    def make_irrevocable(self, operation: Operation) -> Future[bool]:
        """Make later failures of other ranks have no effect. Resolves to False if a rank has failed already. Only rank
        0 does."""
        raise NotImplementedError

    def fail(self, operation: Operation, error: BaseException, *, undone: bool, start_over: bool = False) -> None:
        """Report that this rank has failed. ``undone``: it has stopped; otherwise its step continues, and may still be
        completed. ``start_over``: all ranks start over if no rank has failed for another reason."""
        packed = {**pack(self.rank, operation.step, error), "start_over": start_over}
        self._thread.post(lambda: self._fail(operation, packed, undone))

    def release(self, operation: Operation) -> None:
        """Report that this rank has stopped because another rank has failed."""
        self._thread.post(lambda: self._release(operation))

    def close(self, operation: Operation) -> None:
        """End an operation that has succeeded on this rank."""
        self._thread.post(lambda: self._close(operation))

    @abstractmethod
    def shut(self) -> None:
        """Close every connection. Runs in the connection thread."""

    def _start_over(self, operation: Operation) -> None:
        packed = operation.start_over()
        self._join(operation)
        if packed is not None:
            self._fail(operation, packed, True)

    @abstractmethod
    def _begin(self, operation: Operation) -> None: ...

    @abstractmethod
    def _join(self, operation: Operation) -> None:
        """Take part in an operation that has no verdict yet."""

    @abstractmethod
    def _step(self, operation: Operation, exchange: Exchange) -> None: ...

    @abstractmethod
    def _fail(self, operation: Operation, packed: dict[str, Any], undone: bool) -> None: ...

    @abstractmethod
    def _release(self, operation: Operation) -> None: ...

    @abstractmethod
    def _close(self, operation: Operation) -> None: ...
