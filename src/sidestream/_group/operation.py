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
from contextvars import Context
from typing import Any, TypeAlias, TypeVar

from .._engine.calls import call_from_thread
from .._engine.loop import operation_loop
from .._runtime.caller import run_by_caller
from .._runtime.tasks import wait_out
from .._runtime.threads import Deadline
from ..errors import ForkedProcessError, RankFailuresError
from .failure import pack

Answers: TypeAlias = "bytes | Sequence[bytes]"
"""One answer for all ranks, or one for each."""

Decide: TypeAlias = Callable[[Sequence[bytes]], Awaitable[Answers]]
"""Called on rank 0 with the parts of all ranks, in the order of ranks. Returns the answers."""

T = TypeVar("T")

_ROUND = 1 << 32
"""Added to the number of an operation each time that all ranks start over. A group begins fewer operations."""


FOLLOWING = 1 << 48
"""Added to the number of an operation for each operation that follows it. No operation starts over so often."""


class Stopped(Exception):
    """Another rank has failed. The verdict of the operation will say which one, and why."""

    written: tuple[str, ...] = ()
    """For a load: as in ``SidestreamError``."""


class Operation:
    """One operation as this rank sees it. Its methods are called on the operation loop, unless they say otherwise."""

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
        self.verdict: asyncio.Future[RankFailuresError | None] = group.loop.create_future()
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
        self.stopping = False
        """Whether a rank has failed, so that this rank has to stop."""
        self._on_stop: list[Callable[[], object]] = []
        self._waiting: set[asyncio.Future[Any]] = set()
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
        """Suspend the deadline on this rank until ``resume``. May be called in any thread."""
        self._suspended = True

    def resume(self, deadline: Deadline) -> None:
        """Set a new deadline and stop suspending it. It has the same length as the first one. May be called in any
        thread."""
        self.deadline = deadline
        self._suspended = False

    @property
    def expires_at(self) -> float:
        """The earliest time at which the deadline can pass (``time.monotonic`` seconds). While it is suspended, the
        time at which to check again."""
        return time.monotonic() + self.deadline.timeout_s if self._suspended else self.deadline.at

    # --- steps ---

    def exchange(self, step: str, part: bytes, decide: Callable[[Sequence[bytes]], Answers]) -> bytes:
        """Do one step as ``aexchange`` does, in a worker thread that blocks meanwhile and calls ``decide``."""

        async def decided(parts: Sequence[bytes]) -> Answers:
            return await run_by_caller(decide, parts)

        return call_from_thread(lambda: self.aexchange(step, part, decided), name=f"sidestream {self.kind}: {step}")

    async def aexchange(self, step: str, part: bytes, decide: Decide) -> bytes:
        """Do one step and return this rank's answer. Raises ``Stopped`` if another rank has failed, and on rank 0 the
        errors of ``decide``."""
        self.step = step
        if self.stopping:
            raise Stopped
        return await self.group.exchange(self, step, part, decide)

    async def agree(self, step: str) -> None:
        """Wait until every rank has reached this point."""

        async def nothing(_: Sequence[bytes]) -> bytes:
            return b""

        await self.aexchange(step, b"", nothing)

    def answer(self, step: str, answers: Answers) -> None:
        """Send the answers of a step. For rank 0, where ``decide`` of the step cannot return them."""
        self.group.answer(self, step, answers)

    async def wait(self, received: asyncio.Future[T], *, final: bool = False) -> T:
        """Wait for what other ranks send in a step. A cancel is sent to the other ranks, and raised when it is known
        whether the step was completed before."""

        def send_cancel(cancel: asyncio.CancelledError) -> None:
            if self._final is None and not self.stopping:
                # A cancel does not end the wait at once. Rank 0 may have completed the step before it learns of the
                # cancel, and a save that was committed must not be reported as cancelled on one rank only. So the
                # cancel is sent, and the wait continues until the step is completed or stopped.
                self._keep_final(cancel)
                self.group.fail(self, cancel, undone=False)

        self._waiting.add(received)
        cancelled = await wait_out(received, send_cancel)
        self._waiting.discard(received)
        if cancelled is not None:
            # True if the answer came in spite of the cancel: the step was completed on all ranks. Then there is nothing
            # to report, and this rank alone raises.
            self.step_completed = final and not received.cancelled()
            raise cancelled
        if received.cancelled():
            raise Stopped
        return received.result()

    # --- the end ---

    def make_irrevocable(self) -> bool:
        """Make the operation continue on rank 0 even if other ranks fail or die. Return False if one has failed
        already. A later failure or cancel of rank 0 itself, reported with ``failed``, undoes this."""
        return self.group.make_irrevocable(self)

    def close(self) -> None:
        """End the operation on this rank after its success."""
        self._ended = True
        self._on_stop.clear()  # they refer to the save, which refers to this object
        self.group.close_operation(self)

    async def failed(self, error: BaseException) -> RankFailuresError:
        """Report that this rank has stopped, because of ``error`` or because another rank has failed, and return the
        verdict. Cancels do not interrupt the wait; the caller raises its own cancel, or the one in ``cancelled``."""
        if not self.step_completed:
            self._report(error)
        while True:
            verdict = self.verdict
            cancelled = await wait_out(verdict)
            self.cancelled = self.cancelled or cancelled
            found = verdict.result()
            if found is not None:  # else the other ranks start over, and ``error`` is sent to them in the next round
                return found

    def report(self, error: BaseException) -> None:
        """Report that this rank has stopped, as ``failed`` does, without waiting for the verdict. May be called in any
        thread."""
        self.group.loop.call(self._report, error)

    def _report(self, error: BaseException) -> None:
        self._keep_final(error)
        self._stopped(error, start_over=False)

    async def starts_over(self, error: BaseException, *, wanted: bool) -> bool:
        """Report that this rank has stopped, because of ``error`` or because another rank has failed, and return
        whether all ranks start over. They do if every rank that failed ``wanted`` it. Then this object is a new
        operation with the same deadline; otherwise ``failed`` returns the verdict. A cancel is raised when the outcome
        is known."""
        verdict = self.verdict
        self._stopped(error, start_over=wanted)
        cancelled = await wait_out(verdict)
        if cancelled is not None:
            raise cancelled
        return verdict.result() is None

    def _keep_final(self, error: BaseException) -> None:
        self._final = self._final or pack(self.rank, self.step, error)

    def _stopped(self, error: BaseException, *, start_over: bool) -> None:
        if self._ended:
            return
        self._ended = True
        if self.stopping:  # this error is a consequence of the request to stop
            self.group.report_stopped(self)
        else:
            self.group.fail(self, error, undone=True, start_over=start_over)

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when a rank has failed; at once if one has failed already."""
        if self.stopping:
            callback()
        else:
            self._on_stop.append(callback)

    # --- called by the group ---

    def stop(self) -> None:
        """Make all waits of this rank raise ``Stopped``, and call the ``on_stop`` callbacks."""
        self.stopping = True
        callbacks, self._on_stop = self._on_stop, []
        for received in self._waiting:
            received.cancel()
        for callback in callbacks:
            callback()

    def start_over(self) -> dict[str, Any] | None:
        """Become the next round of the operation, with a number of its own, so that late messages of this round are not
        mixed up with it. The group then begins it. Return the failure that this rank has to report in it, or None."""
        # A rank that was cancelled meanwhile cannot continue: it takes part in the next round only to report that.
        self.number += _ROUND
        self.began_at = time.monotonic()
        self.step = "start"
        self.stopping = False
        self._ended = self._final is not None
        judged, self.verdict = self.verdict, self.group.loop.create_future()
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
    """The base of ``Rank0`` and ``OtherRank``. Except for ``begin``, its methods are called on the operation loop."""

    def __init__(self, rank: int, world: int, token: str) -> None:
        self.rank = rank
        self.world = world
        self.plans: Any = None
        """The state that planning keeps between operations."""
        self.token = token
        self.pid = os.getpid()
        self.loop = operation_loop()
        self._lock = threading.Lock()
        self._number = 0

    def begin(self, kind: str, deadline: Deadline, rank_wait_s: float) -> Operation:
        """Begin the next operation of this group. Every rank has to begin the same operations in the same order. Does
        not block, and may be called in any thread."""
        if os.getpid() != self.pid:
            raise ForkedProcessError("ranks do not save from a forked child; save in the process that joined the group")
        with self._lock:
            self._number += 1
            operation = Operation(self, self._number, kind, deadline, rank_wait_s)
        if self.loop.is_here():
            self._begin(operation)
        else:
            self.loop.call(self._begin, operation)  # before anything that the caller starts with it
        return operation

    def follow(self, operation: Operation, index: int, kind: str, deadline: Deadline) -> Operation:
        """Begin an operation whose number is computed from that of ``operation``, so that the ranks may begin such
        operations in different orders."""
        number = operation.number + (index + 1) * FOLLOWING
        following = Operation(self, number, kind, deadline, operation.rank_wait_s)
        following.membership = operation.membership
        self._begin(following)
        return following

    def id_of(self, number: int) -> str:
        """Return an id that is the same on all ranks. It is known once the rank has received an answer of rank 0."""
        return hashlib.blake2b(f"{self.token} {number}".encode(), digest_size=16).hexdigest()

    @abstractmethod
    async def exchange(self, operation: Operation, step: str, part: bytes, decide: Decide) -> bytes:
        """Do one step on this rank, and return its answer."""

    def answer(self, operation: Operation, step: str, answers: Answers) -> bytes:
        """Send the answers of a step, and return that of this rank. Only rank 0 does."""
        raise NotImplementedError

    def make_irrevocable(self, operation: Operation) -> bool:
        """Make later failures of other ranks have no effect. Return False if a rank has failed already. Only rank 0
        does."""
        raise NotImplementedError

    def fail(self, operation: Operation, error: BaseException, *, undone: bool, start_over: bool = False) -> None:
        """Report that this rank has failed. ``undone``: it has stopped; otherwise its step continues, and may still be
        completed. ``start_over``: all ranks start over if no rank has failed for another reason."""
        self._fail(operation, {**pack(self.rank, operation.step, error), "start_over": start_over}, undone)

    @abstractmethod
    def report_stopped(self, operation: Operation) -> None:
        """Report that this rank has stopped because another rank has failed."""

    @abstractmethod
    def close_operation(self, operation: Operation) -> None:
        """End an operation that has succeeded on this rank."""

    @abstractmethod
    def not_connected(self, error: Exception) -> None:
        """End the operations in progress, because the ranks could not be connected."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection."""

    def _call_at(self, when: float, callback: Callable[..., None], *args: object) -> asyncio.TimerHandle:
        # In a context of its own: the timer would keep the variables of the caller, and what they refer to.
        return asyncio.get_running_loop().call_at(when, callback, *args, context=Context())

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
    def _fail(self, operation: Operation, packed: dict[str, Any], undone: bool) -> None: ...
