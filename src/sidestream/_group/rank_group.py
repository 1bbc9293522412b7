"""The ranks of a process group as sidestream sees them: one connection from each of them to rank 0."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .._runtime.threads import Deadline, end_abandoned
from ..errors import ForkedProcessError, RankFailure, RankFailuresError
from ..options import RANK_WAIT_S
from .absence import WARN_AFTER_S, BeginMessage, remedy, warn_of_missing
from .connections import Connection, ConnectionThread, connection_thread
from .failure import Stopped, pack, pack_all, rank_died, unpack, unpack_all
from .messages import GroupMessage, GroupMessageKind
from .operation import VERDICT_GRACE_S, Exchange, Operation

__all__ = ["OtherRank", "Rank0", "RankGroup"]

Gathered: TypeAlias = "Future[Sequence[bytes]]"

_STOP_S = 10.0
"""How long ranks that were told to stop have, before the verdict is given without them."""
_LATER_S = VERDICT_GRACE_S / 3
"""How long past its deadline a rank above 0 leaves the judgement to rank 0."""
_LOOK_S = 1.0
"""How often a rank looks for operations on event loops that have ended."""
_REMEMBERED = 256
_UNKNOWN = "unknown"  # how far rank 0 has come


class RankGroup(ABC):
    """What both sides have in common. Methods of the first half may be called from any thread, the rest run in the
    owner's."""

    def __init__(self, rank: int, world: int, token: str) -> None:
        self.rank = rank
        self.world = world
        self.plans: Any = None
        """What whoever plans for this group remembers."""
        self.token = token
        self._owner: ConnectionThread = connection_thread()
        self._lock = threading.Lock()
        self._number = 0
        self._pid = os.getpid()

    def begin(self, kind: str, deadline: Deadline, rank_wait_s: float = RANK_WAIT_S) -> Operation:
        """The next operation of this group. Every rank has to begin the same ones in the same order; does not block."""
        if os.getpid() != self._pid:
            raise ForkedProcessError("ranks do not save from a forked child; save in the process that joined the group")
        with self._lock:
            self._number += 1
            operation = Operation(self, self._number, kind, deadline, rank_wait_s)
            self._owner.post(lambda: self._begin(operation))
            self._look_later(weakref.ref(operation))
        return operation

    def _look_later(self, operation: weakref.ref[Operation]) -> None:
        self._owner.post_at(time.monotonic() + _LOOK_S, lambda: self._look(operation))

    def _look(self, operation: weakref.ref[Operation]) -> None:
        """End what was in flight on loops that have ended, for as long as the operation goes on: the other ranks wait
        for this one, and no other thread of this process may come to look."""
        one = operation()
        if one is not None and not one.ended:
            self._look_later(operation)  # first: what follows may fail while a loop starts again
            end_abandoned()

    def id_of(self, number: int) -> str:
        """Known once this rank has heard of rank 0, which it has when it was answered once."""
        return hashlib.blake2b(f"{self.token} {number}".encode(), digest_size=16).hexdigest()

    def step(self, operation: Operation, exchange: Exchange) -> None:
        self._owner.post(lambda: self._step(operation, exchange))

    def answer(self, operation: Operation, step: str, answers: Sequence[bytes]) -> None:
        """Only rank 0 has answers."""
        raise NotImplementedError

    def make_irrevocable(self, operation: Operation) -> Future[bool]:
        raise NotImplementedError

    def fail(self, operation: Operation, error: BaseException, *, undone: bool, start_over: bool = False) -> None:
        """``undone``: this rank does nothing more. Otherwise its step goes on, and may still be completed.
        ``start_over``: all ranks start over, if none has failed for another reason."""
        told = {**pack(self.rank, operation.step, error), "start_over": start_over}
        self._owner.post(lambda: self._fail(operation, told, undone))

    def leave(self, operation: Operation) -> None:
        self._owner.post(lambda: self._leave(operation))

    def close(self, operation: Operation) -> None:
        self._owner.post(lambda: self._close(operation))

    @abstractmethod
    def shut(self) -> None:
        """In the owner's thread: close every connection."""

    def _start_over(self, operation: Operation) -> None:
        told = operation.start_over()
        self._look_later(weakref.ref(operation))
        self._join(operation)
        if told is not None:
            self._fail(operation, told, True)

    @abstractmethod
    def _begin(self, operation: Operation) -> None: ...

    @abstractmethod
    def _join(self, operation: Operation) -> None:
        """Take part in an operation of which nobody has sent a verdict."""

    @abstractmethod
    def _step(self, operation: Operation, exchange: Exchange) -> None: ...

    @abstractmethod
    def _fail(self, operation: Operation, told: dict[str, Any], undone: bool) -> None: ...

    @abstractmethod
    def _leave(self, operation: Operation) -> None: ...

    @abstractmethod
    def _close(self, operation: Operation) -> None: ...


# --- rank 0 --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """What rank 0 knows of an operation; ``own`` is its own view, once it has begun it."""

    number: int
    own: Operation | None = None
    begun: set[int] = field(default_factory=set)
    """The ranks that have begun the operation."""
    warned: set[int] = field(default_factory=set)
    """The ranks in ``begun`` that have been sent the list of missing ranks."""
    gives_up_at: float = math.inf
    """When the first of the waiting ranks gives up (``time.monotonic`` seconds)."""
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    gathered: dict[str, Gathered] = field(default_factory=dict)
    answered: dict[str, Future[bytes]] = field(default_factory=dict)
    steps: dict[int, str] = field(default_factory=dict)  # the last one that each rank has taken part in
    failures: dict[int, RankFailure] = field(default_factory=dict)
    restartable: set[int] = field(default_factory=set)
    """The ranks in ``failures`` that fail only if not all ranks start over."""
    stopped: set[int] = field(default_factory=set)
    stopping: bool = False
    irrevocable: bool = False
    verdict: bytes | None = None
    started_over: bool = False
    """It goes on as an operation with another number."""
    closed: bool = False

    def forget(self) -> None:
        """What ranks have sent, and were answered, is used no more: an operation is remembered for longer."""
        self.parts.clear()
        self.gathered.clear()
        self.answered.clear()


class Rank0(RankGroup):
    """Rank 0, to which all others are connected."""

    def __init__(self, world: int, token: str) -> None:
        super().__init__(0, world, token)
        self._links: dict[int, Connection] = {}
        self._dead: dict[int, str] = {}
        self._states: dict[int, _State] = {}
        self.is_shut = False
        self.stop_listening: Callable[[], None] | None = None
        """Whoever lets ranks in sets it, in the owner's thread."""

    def answer(self, operation: Operation, step: str, answers: Sequence[bytes]) -> None:
        self._owner.post(lambda: self._answer(operation.number, step, answers))

    def make_irrevocable(self, operation: Operation) -> Future[bool]:
        sealed: Future[bool] = Future()
        self._owner.post(lambda: sealed.set_result(self._make_irrevocable(self._state(operation.number))))
        return sealed

    # --- the owner's thread ---

    def shut(self) -> None:
        self.is_shut = True
        if self.stop_listening is not None:
            self.stop_listening()
        for link in list(self._links.values()):
            link.close("the process group was destroyed")

    def connected(self, rank: int, link: Connection) -> None:
        """``rank`` has said who it is."""
        self._links[rank] = link
        self._dead.pop(rank, None)
        link.on_message = lambda frame: self._on_message(rank, frame)
        link.on_close = lambda why: self._on_close(rank, link, why)

    def _state(self, number: int) -> _State:
        if number not in self._states:
            self._states[number] = _State(number)
            for old in list(self._states)[: max(0, len(self._states) - _REMEMBERED)]:
                if self._states[old].closed:
                    del self._states[old]
        return self._states[number]

    def _begin(self, operation: Operation) -> None:
        state = self._state(operation.number)
        if state.verdict is not None:
            operation.conclude(unpack_all(state.verdict))
        else:
            self._join(operation)

    def _join(self, operation: Operation) -> None:
        state = self._state(operation.number)
        state.own = operation
        self._on_begun(state, 0, BeginMessage.of(operation))
        if state.stopping:
            operation.stop()
        for rank in self._dead:
            self._record_failure(state, rank_died(rank, "start"))
        self._owner.post_at(operation.deadline.at, lambda: self._expire(state))  # which lets go of what has ended

    def _on_begun(self, state: _State, rank: int, coming: BeginMessage) -> None:
        """Record that ``rank`` has begun the operation. The first ranks wait for the others, and after a while rank 0
        sends them the list of missing ranks."""
        state.begun.add(rank)
        if self._is_waiting(state):
            now = time.monotonic()
            self._owner.post_at(now + max(0.0, WARN_AFTER_S - coming.waited_s), lambda: self._warn(state, coming.kind))
            gives_up_at = now + coming.rank_wait_s - coming.waited_s
            if gives_up_at < state.gives_up_at:
                state.gives_up_at = gives_up_at
                self._owner.post_at(gives_up_at, lambda: self._fail_missing(state, coming))

    def _is_waiting(self, state: _State) -> bool:
        return len(state.begun) < self.world and not state.stopping and not state.closed

    def _warn(self, state: _State, kind: str) -> None:
        if not self._is_waiting(state):
            return
        missing = sorted(set(range(self.world)) - state.begun)
        for rank in sorted(state.begun - state.warned):
            if rank and rank in self._links:
                self._links[rank].send(
                    GroupMessage(GroupMessageKind.MISSING, state.number, "", json.dumps(missing).encode())
                )
            elif state.own is not None:
                warn_of_missing(state.own, missing)
        state.warned |= state.begun

    def _fail_missing(self, state: _State, coming: BeginMessage) -> None:
        """Fail the operation, because a rank has waited for its ``rank_wait_s``."""
        if not self._is_waiting(state):
            return
        advice = f"; {remedy(coming.kind)}"
        for rank in sorted(set(range(self.world)) - state.begun):
            connected = "" if rank == 0 or rank in self._links else ", and never connected"
            text = f"it did not join this {coming.kind} within rank_wait_s={coming.rank_wait_s:g}{connected}{advice}"
            self._record_failure(state, RankFailure(rank, "start", "DeadlineExceededError", text))
            advice = ""

    def _step(self, operation: Operation, exchange: Exchange) -> None:
        state = self._state(operation.number)
        if state.stopping:
            for future in (exchange.gathered, exchange.answered):
                if future is not None and not future.done():
                    future.set_exception(Stopped())
            return
        assert exchange.gathered is not None
        step = exchange.step
        state.gathered[step], state.answered[step] = exchange.gathered, exchange.answered
        self._part(state, 0, step, exchange.part)

    def _part(self, state: _State, rank: int, step: str, part: bytes) -> None:
        parts = state.parts.setdefault(step, {})
        parts[rank] = part
        state.steps[rank] = step
        gathered = state.gathered.get(step)
        if len(parts) == self.world and gathered is not None and not gathered.done():
            gathered.set_result([parts[one] for one in range(self.world)])
            del state.parts[step]

    def _answer(self, number: int, step: str, answers: Sequence[bytes]) -> None:
        state = self._state(number)
        if state.stopping and not state.irrevocable:
            return
        try:
            for rank, link in list(self._links.items()):  # one that turns out to be closed is taken out
                link.send(GroupMessage(GroupMessageKind.ANSWER, number, step, answers[rank]))
        finally:
            answered = state.answered.get(step)
            if answered is not None and not answered.done():
                answered.set_result(answers[0])

    def _on_message(self, rank: int, frame: GroupMessage) -> None:
        state = self._state(frame.op)
        if state.started_over:  # it comes late
            return
        if frame.kind is GroupMessageKind.STOPPED or (frame.kind is GroupMessageKind.FAILED and state.stopping):
            state.stopped.add(rank)
            self._conclude(state)
        if state.verdict is not None:  # it comes late
            self._links[rank].send(GroupMessage(GroupMessageKind.VERDICT, frame.op, "", state.verdict))
        elif frame.kind is GroupMessageKind.BEGUN:
            self._on_begun(state, rank, BeginMessage.unpack(frame.payload))
        elif frame.kind is GroupMessageKind.DATA and not state.stopping:
            self._part(state, rank, frame.step, frame.payload)
        elif frame.kind is GroupMessageKind.FAILED and not state.stopping:
            state.stopped.add(rank)
            self._record_failed_rank(state, json.loads(frame.payload))

    def _on_close(self, rank: int, link: Connection, why: str) -> None:
        if self._links.get(rank) is not link:
            return
        del self._links[rank]
        self._dead[rank] = why
        for state in list(self._states.values()):
            if not state.closed and state.verdict is None:
                state.stopped.add(rank)
                self._record_failure(state, rank_died(rank, state.steps.get(rank, "start")))

    def _fail(self, operation: Operation, told: dict[str, Any], undone: bool) -> None:
        state = self._state(operation.number)
        state.stopped.add(0)
        if undone:  # what was sealed is not carried out
            state.irrevocable = False
        self._record_failed_rank(state, told)

    def _record_failed_rank(self, state: _State, told: dict[str, Any]) -> None:
        """A rank whose time is over while it waits for others has not failed itself: those have."""
        failure, missing = unpack(told), set[int]()
        if told.get("start_over"):
            state.restartable.add(failure.rank)
        for parts in state.parts.values():
            if failure.kind == "DeadlineExceededError" and failure.rank in parts:
                missing |= set(range(self.world)) - set(parts)
        for rank in sorted(missing):
            text = "it did not come to this step in time"
            self._record_failure(state, RankFailure(rank, next(iter(state.parts)), "DeadlineExceededError", text))
        if not missing:
            self._record_failure(state, failure)

    def _leave(self, operation: Operation) -> None:
        state = self._state(operation.number)
        state.stopped.add(0)
        self._conclude(state)

    def _close(self, operation: Operation) -> None:
        state = self._state(operation.number)
        state.closed = True
        state.own = None
        state.forget()
        self._conclude(state)  # others may have failed meanwhile, and wait for everybody

    def _make_irrevocable(self, state: _State) -> bool:
        state.irrevocable = state.irrevocable or not state.stopping
        return state.irrevocable

    def _record_failure(self, state: _State, failure: RankFailure) -> None:
        """Somebody cannot go on. What has been sealed is carried out for those who live."""
        if state.irrevocable or state.verdict is not None:
            return
        state.failures.setdefault(failure.rank, failure)
        if not state.stopping:
            state.stopping = True
            for link in list(self._links.values()):
                link.send(GroupMessage(GroupMessageKind.STOP, state.number, "", b""))
            if state.own is not None:
                state.own.stop()
            self._owner.post_at(time.monotonic() + _STOP_S, lambda: self._conclude(state, late=True))
        self._conclude(state)

    def _conclude(self, state: _State, *, late: bool = False) -> None:
        """The verdict, once every rank that lives has stopped."""
        if not state.stopping or state.verdict is not None or state.started_over:
            return
        expected = set(self._links)
        if state.own is not None:
            expected.add(0)
        missing = expected - state.stopped
        if missing and not late:
            return
        others = [one for rank, one in state.failures.items() if rank not in state.restartable]
        if not others and not missing and len(state.begun) == self.world:
            self._all_start_over(state)
            return
        verdict = RankFailuresError(others or list(state.failures.values()))
        state.verdict = pack_all(verdict.failures)
        for link in list(self._links.values()):
            link.send(GroupMessage(GroupMessageKind.VERDICT, state.number, "", state.verdict))
        state.closed = True
        if state.own is not None:
            state.own.conclude(verdict)
            state.own = None
        state.forget()

    def _all_start_over(self, state: _State) -> None:
        state.started_over = state.closed = True
        for link in list(self._links.values()):
            link.send(GroupMessage(GroupMessageKind.START_OVER, state.number, "", b""))
        own, state.own = state.own, None
        state.forget()
        if own is not None:
            self._start_over(own)

    def _expire(self, state: _State) -> None:
        """At rank 0's deadline: the ranks that it still waits for have failed."""
        operation = state.own
        if operation is None or state.closed or state.irrevocable or state.stopping:
            return
        expires_at = operation.expires_at
        if expires_at > time.monotonic():  # its deadline was extended
            self._owner.post_at(expires_at, lambda: self._expire(state))
            return
        step, missing = operation.step, set(range(self.world))
        for waited, parts in state.parts.items():
            step, missing = waited, set(range(self.world)) - set(parts)
        limit = operation.deadline.timeout_s
        for rank in sorted(missing):
            here = rank == 0 or rank in self._links
            text = f"it did not come to this step within timeout_s={limit:g}" + (
                "" if here else ", and never connected"
            )
            self._record_failure(state, RankFailure(rank, step, "DeadlineExceededError", text))


# --- everybody else ------------------------------------------------------------------------------------------------


class OtherRank(RankGroup):
    """A rank above 0, with its connection to rank 0. Until it has one, what it has to say is kept."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world, "")
        self._link: Connection | None = None
        self._unsent: list[GroupMessage] = []
        self._lost: str | None = None
        self._operations: dict[int, Operation] = {}
        self._answered: dict[tuple[int, str], Future[bytes]] = {}
        self._begun = 0  # the number of the newest
        self._verdicts: dict[int, bytes] = {}  # of operations that have not begun here: rank 0 may be gone by then

    # --- the owner's thread ---

    def connected(self, link: Connection, token: str) -> None:
        self.token = token
        self._link = link
        link.on_message = self._on_message
        link.on_close = self._on_close
        for operation in list(self._operations.values()):
            self._on_begun(operation)
        unsent, self._unsent = self._unsent, []
        for frame in unsent:
            link.send(frame)

    def shut(self) -> None:
        if self._link is not None:
            self._link.close("the process group was destroyed")

    def not_connected(self, why: str) -> None:
        """Rank 0 was not found. The next operation looks again."""
        self._unsent.clear()
        for operation in list(self._operations.values()):
            self._end_alone(operation, RankFailure(0, "start", "DeadlineExceededError", why))

    def _begin(self, operation: Operation) -> None:
        self._begun = operation.number
        verdict = self._verdicts.pop(operation.number, None)
        if verdict is not None:
            operation.conclude(unpack_all(verdict))
        else:
            self._join(operation)

    def _join(self, operation: Operation) -> None:
        self._operations[operation.number] = operation
        if self._lost is not None:
            self._end_alone(operation, rank_died(0, _UNKNOWN))
            return
        self._expire_later(operation)
        if self._link is not None:
            self._on_begun(operation)
        else:  # rank 0 is found when it has begun its first operation
            number = operation.number  # a timer that refers to the operation keeps all that failed in it alive
            self._owner.post_at(operation.began_at + WARN_AFTER_S, lambda: self._warn(number))

    def _on_begun(self, operation: Operation) -> None:
        self._send(GroupMessage(GroupMessageKind.BEGUN, operation.number, "", BeginMessage.of(operation).pack()))

    def _warn(self, number: int) -> None:
        operation = self._operations.get(number)
        if operation is not None and self._link is None:
            warn_of_missing(operation, [0])

    def _expire_later(self, operation: Operation) -> None:
        number = operation.number
        self._owner.post_at(_verdict_due_at(operation), lambda: self._expire(number))

    def _step(self, operation: Operation, exchange: Exchange) -> None:
        if operation.stopping:
            if not exchange.answered.done():
                exchange.answered.set_exception(Stopped())
            return
        self._answered[operation.number, exchange.step] = exchange.answered
        self._send(GroupMessage(GroupMessageKind.DATA, operation.number, exchange.step, exchange.part))

    def _send(self, frame: GroupMessage) -> None:
        if self._link is not None:
            self._link.send(frame)
        elif self._lost is None:
            self._unsent.append(frame)

    def _fail(self, operation: Operation, told: dict[str, Any], undone: bool) -> None:
        self._send(GroupMessage(GroupMessageKind.FAILED, operation.number, "", json.dumps(told).encode()))

    def _leave(self, operation: Operation) -> None:
        self._send(GroupMessage(GroupMessageKind.STOPPED, operation.number, "", b""))

    def _close(self, operation: Operation) -> None:
        if operation.number in self._operations and operation.stopping:  # it went well here, and rank 0 waits for it
            self._leave(operation)
        self._forget(operation)

    def _forget(self, operation: Operation) -> None:
        self._operations.pop(operation.number, None)
        for key in [key for key in self._answered if key[0] == operation.number]:
            del self._answered[key]

    def _on_message(self, frame: GroupMessage) -> None:
        operation = self._operations.get(frame.op)
        if frame.kind is GroupMessageKind.ANSWER:
            answered = self._answered.pop((frame.op, frame.step), None)
            if answered is not None and not answered.done():
                answered.set_result(frame.payload)
        elif operation is None:
            if (
                frame.kind is GroupMessageKind.STOP
            ):  # it has not begun here, and has nothing to stop; the verdict will meet it
                self._send(GroupMessage(GroupMessageKind.STOPPED, frame.op, "", b""))
            elif frame.kind is GroupMessageKind.VERDICT and frame.op > self._begun:
                self._verdicts[frame.op] = frame.payload
        elif frame.kind is GroupMessageKind.STOP:
            operation.stop()
        elif frame.kind is GroupMessageKind.MISSING:
            warn_of_missing(operation, json.loads(frame.payload))
        elif frame.kind is GroupMessageKind.VERDICT:
            self._forget(operation)
            operation.conclude(unpack_all(frame.payload))
        elif frame.kind is GroupMessageKind.START_OVER:
            self._forget(operation)
            self._start_over(operation)

    def _on_close(self, why: str) -> None:
        self._lost, self._link = why, None
        for operation in list(self._operations.values()):
            self._end_alone(operation, rank_died(0, _UNKNOWN))

    def _expire(self, number: int) -> None:
        """Rank 0 should have judged by now."""
        operation = self._operations.get(number)
        if operation is None:
            return
        if _verdict_due_at(operation) > time.monotonic():  # its deadline was extended
            self._expire_later(operation)
            return
        limit = operation.deadline.timeout_s
        text = f"it did not answer within timeout_s={limit:g}"
        self._end_alone(operation, RankFailure(0, _UNKNOWN, "DeadlineExceededError", text))

    def _end_alone(self, operation: Operation, failure: RankFailure) -> None:
        self._forget(operation)
        operation.conclude(RankFailuresError([failure]))


def _verdict_due_at(operation: Operation) -> float:
    """Return when a rank above 0 stops waiting for the verdict. A rank that has received the signal to stop knows that
    rank 0 is alive, and waits for the ranks that have not stopped."""
    return operation.expires_at + _LATER_S + (_STOP_S if operation.stopping else 0.0)
