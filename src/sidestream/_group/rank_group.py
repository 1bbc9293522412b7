"""Rank 0 and the other ranks of a process group, and their messages. Each rank has one connection, to rank 0."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..errors import DeadlineExceededError, RankFailure, RankFailuresError
from .absence import WARN_AFTER_S, BeginMessage, warn_of_missing
from .connections import Connection, GroupMessage, GroupMessageKind
from .failure import pack, pack_all, rank_died, unpack, unpack_all
from .operation import FOLLOWING, Answers, Decide, Operation, RankGroup, Stopped, remedy

_STOP_S = 10.0
"""How long rank 0 waits for ranks to stop before it sends the verdict without them."""
_LATER_S = 10.0
"""How long past its deadline a rank above 0 waits for the verdict of rank 0."""
_REMEMBERED = 256
_UNKNOWN = "unknown"  # the step of rank 0, in failures that another rank reports


# --- rank 0 --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """The state of an operation on rank 0. ``operation`` is set once rank 0 itself has begun it."""

    number: int
    operation: Operation | None = None
    begun: set[int] = field(default_factory=set)
    """The ranks that have begun the operation."""
    warned: set[int] = field(default_factory=set)
    """The ranks in ``begun`` that have been sent the list of missing ranks."""
    gives_up_at: float = math.inf
    """When the first of the waiting ranks times out (``time.monotonic`` seconds)."""
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    gathered: dict[str, asyncio.Future[Sequence[bytes]]] = field(default_factory=dict)
    steps: dict[int, str] = field(default_factory=dict)  # the last step that each rank has taken part in
    failures: dict[int, RankFailure] = field(default_factory=dict)
    restartable: set[int] = field(default_factory=set)
    """The ranks in ``failures`` that fail only if not all ranks start over."""
    stopped: set[int] = field(default_factory=set)
    stopping: bool = False
    irrevocable: bool = False
    verdict: bytes | None = None
    started_over: bool = False
    """Whether it continues as an operation with another number."""
    closed: bool = False
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def close(self) -> Operation | None:
        """Take the operation out, and drop the parts, because the state itself is kept for longer."""
        operation, self.operation, self.closed = self.operation, None, True
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
        self.parts.clear()
        self.gathered.clear()
        return operation


class Rank0(RankGroup):
    """Rank 0, to which all others are connected."""

    def __init__(self, world: int, token: str) -> None:
        super().__init__(0, world, token)
        self._connections: dict[int, Connection] = {}
        self._dead: set[int] = set()
        self._states: dict[int, _State] = {}
        self.accepting: asyncio.Task[None] | None = None
        """Accepts connections until all ranks are connected."""

    def close(self) -> None:
        if self.accepting is not None:
            self.accepting.cancel()
        for connection in list(self._connections.values()):
            connection.close()

    def connected(self, rank: int, connection: Connection) -> None:
        """Use ``connection``, which has been authenticated, for ``rank``."""
        self._connections[rank] = connection
        self._dead.discard(rank)
        connection.on_message = lambda message: self._on_message(rank, message)
        connection.on_close = lambda: self._on_close(rank, connection)

    def not_connected(self, error: Exception) -> None:
        for state in list(self._states.values()):
            if state.operation is not None:
                state.operation.report(error)

    def _send_all(self, message: GroupMessage) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def _missing(self, there: Iterable[int]) -> list[int]:
        """Return the ranks that are not in ``there``."""
        return sorted(set(range(self.world)).difference(there))

    def _state(self, number: int) -> _State:
        if number not in self._states:
            # States are kept for a while after the end, with the verdict alone: a rank that is late asks about an
            # operation that the others have left, and gets the same verdict. Only the oldest are dropped, and only
            # closed ones.
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
        state.operation = operation
        self._on_begun(state, 0, BeginMessage.of(operation))
        # Another rank may have failed before rank 0 has made the call, or a connection may have ended. Rank 0 then
        # joins an operation that is already stopping.
        if state.stopping:
            operation.stop()
        for rank in self._dead:
            self._record_failure(state, rank_died(rank, "start"))
        state.timers.append(self._call_at(operation.deadline.at, self._expire, state))

    def _on_begun(self, state: _State, rank: int, begun: BeginMessage) -> None:
        """Record that ``rank`` has begun the operation. The first ranks wait for the others, and after a while rank 0
        sends them the list of missing ranks."""
        state.begun.add(rank)
        # Three limits run for an operation. After 5 s of waiting a warning names the missing ranks. After
        # ``rank_wait_s`` of the first rank they have failed. At ``timeout_s`` the ranks that have not come to the
        # current step have.
        if self._is_waiting(state):
            now = time.monotonic()
            state.timers.append(self._call_at(now + max(0.0, WARN_AFTER_S - begun.waited_s), self._warn, state))
            gives_up_at = now + begun.rank_wait_s - begun.waited_s
            if gives_up_at < state.gives_up_at:
                state.gives_up_at = gives_up_at
                state.timers.append(self._call_at(gives_up_at, self._fail_missing, state, begun))

    def _is_waiting(self, state: _State) -> bool:
        return len(state.begun) < self.world and not state.stopping and not state.closed

    def _warn(self, state: _State) -> None:
        if not self._is_waiting(state):
            return
        missing = self._missing(state.begun)
        for rank in sorted(state.begun - state.warned):
            if rank and rank in self._connections:
                message = GroupMessage(GroupMessageKind.MISSING, state.number, payload=json.dumps(missing).encode())
                self._connections[rank].send(message)
            elif state.operation is not None:
                warn_of_missing(state.operation, missing)
        state.warned |= state.begun

    def _fail_missing(self, state: _State, begun: BeginMessage) -> None:
        """Fail the operation, because a rank has waited for its ``rank_wait_s``."""
        if not self._is_waiting(state):
            return
        advice = f"; {remedy(begun.kind)}"
        for rank in self._missing(state.begun):
            connected = "" if rank == 0 or rank in self._connections else ", and never connected"
            text = f"it did not join this {begun.kind} within rank_wait_s={begun.rank_wait_s:g}{connected}{advice}"
            self._record_failure(state, RankFailure(rank, "start", "DeadlineExceededError", text))
            advice = ""

    async def exchange(self, operation: Operation, step: str, part: bytes, decide: Decide) -> bytes:
        state = self._state(operation.number)
        gathered = state.gathered[step] = asyncio.get_running_loop().create_future()
        self._part(state, 0, step, part)
        return self.answer(operation, step, await decide(await operation.wait(gathered)))

    def _part(self, state: _State, rank: int, step: str, part: bytes) -> None:
        parts = state.parts.setdefault(step, {})
        parts[rank] = part
        state.steps[rank] = step
        gathered = state.gathered.get(step)
        if len(parts) == self.world and gathered is not None and not gathered.done():
            gathered.set_result([parts[one] for one in range(self.world)])
            del state.parts[step], state.gathered[step]

    def answer(self, operation: Operation, step: str, answers: Answers) -> bytes:
        state = self._state(operation.number)
        if state.stopping and not state.irrevocable:
            raise Stopped
        each = [answers] * self.world if isinstance(answers, bytes) else answers
        for rank, connection in self._connections.items():
            connection.send(GroupMessage(GroupMessageKind.ANSWER, state.number, step, each[rank]))
        return each[0]

    def _on_message(self, rank: int, message: GroupMessage) -> None:
        state = self._state(message.op)
        if state.started_over:  # a late message
            return
        # A rank has stopped if it says so, and also if it reports a failure of its own while it is asked to stop: then
        # the two messages have crossed.
        if message.kind is GroupMessageKind.STOPPED or (message.kind is GroupMessageKind.FAILED and state.stopping):
            state.stopped.add(rank)
            self._conclude(state)
        if state.verdict is not None:  # a late message
            self._connections[rank].send(GroupMessage(GroupMessageKind.VERDICT, message.op, payload=state.verdict))
        elif message.kind is GroupMessageKind.BEGUN:
            self._on_begun(state, rank, BeginMessage.unpack(message.payload))
        elif message.kind is GroupMessageKind.DATA and not state.stopping:
            self._part(state, rank, message.step, message.payload)
        elif message.kind is GroupMessageKind.FAILED and not state.stopping:
            state.stopped.add(rank)
            self._record_failed_rank(state, json.loads(message.payload))

    def _on_close(self, rank: int, connection: Connection) -> None:
        if self._connections.get(rank) is not connection:
            return
        del self._connections[rank]
        self._dead.add(rank)
        for state in list(self._states.values()):
            if not state.closed and state.verdict is None:
                state.stopped.add(rank)
                self._record_failure(state, rank_died(rank, state.steps.get(rank, "start")))

    def _fail(self, operation: Operation, packed: dict[str, Any], undone: bool) -> None:
        state = self._state(operation.number)
        state.stopped.add(0)
        if undone:  # rank 0 itself does not continue
            state.irrevocable = False
        self._record_failed_rank(state, packed)

    def _record_failed_rank(self, state: _State, packed: dict[str, Any]) -> None:
        """Record the failure of a rank. If its deadline passed while it waited for other ranks in a step, those ranks
        have failed."""
        failure, missing = unpack(packed), set[int]()
        if packed.get("start_over"):
            state.restartable.add(failure.rank)
        # A rank whose deadline passes reports itself, although others are the cause. The parts of the step show who was
        # there: the ranks that are missing are named as failed, and not the one that waited for them.
        for parts in state.parts.values():
            if failure.kind == "DeadlineExceededError" and failure.rank in parts:
                missing.update(self._missing(parts))
        for rank in sorted(missing):
            text = "it did not come to this step in time"
            self._record_failure(state, RankFailure(rank, next(iter(state.parts)), "DeadlineExceededError", text))
        if not missing:
            self._record_failure(state, failure)

    def report_stopped(self, operation: Operation) -> None:
        state = self._state(operation.number)
        state.stopped.add(0)
        self._conclude(state)

    def close_operation(self, operation: Operation) -> None:
        state = self._state(operation.number)
        state.close()
        self._conclude(state)  # other ranks may have failed since, and wait for the verdict

    def make_irrevocable(self, operation: Operation) -> bool:
        state = self._state(operation.number)
        state.irrevocable = state.irrevocable or not state.stopping
        return state.irrevocable

    def _record_failure(self, state: _State, failure: RankFailure) -> None:
        """Record a failure and tell all ranks to stop, unless the operation is irrevocable."""
        # Once rank 0 has decided to commit, a failure of another rank has no consequence. Nor has one after the
        # verdict: all ranks raise the same.
        if state.irrevocable or state.verdict is not None:
            return
        state.failures.setdefault(failure.rank, failure)
        if not state.stopping:
            state.stopping = True
            self._send_all(GroupMessage(GroupMessageKind.STOP, state.number))
            if state.operation is not None:
                state.operation.stop()
            # A rank that hangs in a system call does not stop. The others are not kept for longer than this; the
            # verdict goes out without it.
            self._call_at(time.monotonic() + _STOP_S, partial(self._conclude, state, late=True))
        self._conclude(state)

    def _conclude(self, state: _State, *, late: bool = False) -> None:
        """Send the verdict once every connected rank has stopped, or without them if ``late``."""
        if not state.stopping or state.verdict is not None or state.started_over:
            return
        expected = set(self._connections)
        if state.operation is not None:
            expected.add(0)
        missing = expected - state.stopped
        if missing and not late:
            return
        # All start over if every failure asks for that, every rank has stopped, and every rank has begun. If a rank has
        # failed for another reason, those failures are only consequences, and its failure is the verdict.
        others = [one for rank, one in state.failures.items() if rank not in state.restartable]
        if not others and not missing and len(state.begun) == self.world:
            self._all_start_over(state)
            return
        verdict = RankFailuresError(others or list(state.failures.values()))
        state.verdict = pack_all(verdict.failures)
        self._send_all(GroupMessage(GroupMessageKind.VERDICT, state.number, payload=state.verdict))
        operation = state.close()
        if operation is not None:
            operation.conclude(verdict)

    def _all_start_over(self, state: _State) -> None:
        state.started_over = True
        operation = state.close()
        self._send_all(GroupMessage(GroupMessageKind.START_OVER, state.number))
        if operation is not None:
            self._start_over(operation)

    def _expire(self, state: _State) -> None:
        """Fail the ranks that rank 0 still waits for at its deadline."""
        operation = state.operation
        if operation is None or state.irrevocable or state.stopping:
            return
        expires_at = operation.expires_at
        if expires_at > time.monotonic():  # its deadline was extended
            state.timers.append(self._call_at(expires_at, self._expire, state))
            return
        step, missing = operation.step, self._missing(())
        for waited, parts in state.parts.items():
            step, missing = waited, self._missing(parts)
        limit = operation.deadline.timeout_s
        for rank in missing:
            here = rank == 0 or rank in self._connections
            text = f"it did not come to this step within timeout_s={limit:g}" + (
                "" if here else ", and never connected"
            )
            self._record_failure(state, RankFailure(rank, step, "DeadlineExceededError", text))


# --- the other ranks ------------------------------------------------------------------------------------------------


class OtherRank(RankGroup):
    """A rank above 0, with its connection to rank 0. Messages are kept until it is connected."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world, "")
        self._connection: Connection | None = None
        self._unsent: list[GroupMessage] = []
        self._lost = False
        self._operations: dict[int, Operation] = {}
        self._timers: dict[int, list[asyncio.TimerHandle]] = {}
        self._answered: dict[tuple[int, str], asyncio.Future[bytes]] = {}
        self._begun = 0  # the number of the newest operation
        self._verdicts: dict[int, bytes] = {}  # of operations not begun here yet; rank 0 may have ended by then
        self.why_not_connected = "rank 0 has not begun anything"

    def connected(self, connection: Connection, token: str) -> None:
        """Use ``connection``, and send what was kept for it."""
        self.token = token
        self._connection = connection
        connection.on_message = self._on_message
        connection.on_close = self._on_close
        for operation in self._operations.values():
            self._on_begun(operation)
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            connection.send(message)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @property
    def waiting(self) -> bool:
        """Whether an operation is in progress."""
        return bool(self._operations)

    def not_connected(self, error: Exception) -> None:
        for operation in list(self._operations.values()):
            self._end_unconnected(operation, f"{type(error).__name__}: {error}")

    def _end_unconnected(self, operation: Operation, why: str) -> None:
        """End an operation, because rank 0 was not found in its time. Its failure is the one that this rank has
        reported, if there is one. Rank 0 receives it once connected."""
        number = operation.number
        # Rank 0 was never reached, so this rank has to end the operation by itself. Its own failure, if there is one,
        # is what it raises; without one it is that of the connection. The report is kept for rank 0, which may connect
        # later.
        reported = [one for one in self._unsent if one.op == number and one.kind is GroupMessageKind.FAILED]
        self._unsent = [one for one in self._unsent if one.op != number] + reported
        if reported:
            self._end_alone(operation, unpack(json.loads(reported[0].payload)))
        else:
            self._fail(operation, pack(self.rank, "start", DeadlineExceededError(why)), True)
            self._end_alone(operation, RankFailure(0, "start", "DeadlineExceededError", why))

    def _begin(self, operation: Operation) -> None:
        if operation.number < FOLLOWING:
            self._begun = max(self._begun, operation.number)
        verdict = self._verdicts.pop(operation.number, None)
        if verdict is not None:
            operation.conclude(unpack_all(verdict))
        else:
            self._join(operation)

    def _join(self, operation: Operation) -> None:
        self._operations[operation.number] = operation
        timers = self._timers[operation.number] = []
        if self._lost:
            self._end_alone(operation, rank_died(0, _UNKNOWN))
            return
        self._expire_later(operation)
        if self._connection is not None:
            self._on_begun(operation)
        else:  # rank 0 is found when it has begun its first operation
            _, limit_s = _limit_of(operation)
            timers.append(self._call_at(operation.began_at + WARN_AFTER_S, self._warn, operation))
            timers.append(self._call_at(operation.began_at + limit_s, self._expire_unconnected, operation))

    def _on_begun(self, operation: Operation) -> None:
        self._send(GroupMessage(GroupMessageKind.BEGUN, operation.number, payload=BeginMessage.of(operation).pack()))

    def _warn(self, operation: Operation) -> None:
        if self._connection is None:
            warn_of_missing(operation, [0])

    def _expire_unconnected(self, operation: Operation) -> None:
        if self._connection is None:
            limit, limit_s = _limit_of(operation)
            why = f"{self.why_not_connected} (within {limit}={limit_s:g}); {remedy(operation.kind)}"
            self._end_unconnected(operation, f"SidestreamError: {why}")

    def _expire_later(self, operation: Operation) -> None:
        timer = self._call_at(_verdict_due_at(operation), self._expire, operation)
        self._timers[operation.number].append(timer)

    async def exchange(self, operation: Operation, step: str, part: bytes, decide: Decide) -> bytes:
        answered = self._answered[operation.number, step] = asyncio.get_running_loop().create_future()
        self._send(GroupMessage(GroupMessageKind.DATA, operation.number, step, part))
        return await operation.wait(answered, final=True)

    def _send(self, message: GroupMessage) -> None:
        if self._connection is not None:
            self._connection.send(message)
        elif not self._lost:
            self._unsent.append(message)

    def _fail(self, operation: Operation, packed: dict[str, Any], undone: bool) -> None:
        self._send(GroupMessage(GroupMessageKind.FAILED, operation.number, payload=json.dumps(packed).encode()))

    def report_stopped(self, operation: Operation) -> None:
        self._send(GroupMessage(GroupMessageKind.STOPPED, operation.number))

    def close_operation(self, operation: Operation) -> None:
        if operation.number in self._operations and operation.stopping:
            self.report_stopped(operation)  # it has succeeded here, and rank 0 waits for this rank
        self._forget(operation)

    def _forget(self, operation: Operation) -> None:
        self._operations.pop(operation.number, None)
        for timer in self._timers.pop(operation.number, ()):
            timer.cancel()
        for key in [key for key in self._answered if key[0] == operation.number]:
            del self._answered[key]

    def _on_message(self, message: GroupMessage) -> None:
        operation = self._operations.get(message.op)
        if message.kind is GroupMessageKind.ANSWER:
            answered = self._answered.pop((message.op, message.step), None)
            if answered is not None and not answered.done():
                answered.set_result(message.payload)
        # The operation has ended here, or has not begun. A STOP is answered in both cases, because rank 0 waits for it.
        # A verdict is kept only if the operation may still begin: then it ends at once.
        elif operation is None:
            if message.kind is GroupMessageKind.STOP:  # this rank has nothing to stop; the verdict will reach it
                self._send(GroupMessage(GroupMessageKind.STOPPED, message.op))
            elif message.kind is GroupMessageKind.VERDICT and message.op > self._begun:
                self._verdicts[message.op] = message.payload
                for old in list(self._verdicts)[:-_REMEMBERED]:  # verdicts of operations that had ended here before
                    del self._verdicts[old]
        elif message.kind is GroupMessageKind.STOP:
            operation.stop()
        elif message.kind is GroupMessageKind.MISSING:
            warn_of_missing(operation, json.loads(message.payload))
        elif message.kind is GroupMessageKind.VERDICT:
            self._forget(operation)
            operation.conclude(unpack_all(message.payload))
        elif message.kind is GroupMessageKind.START_OVER:
            self._forget(operation)
            self._start_over(operation)

    def _on_close(self) -> None:
        self._lost, self._connection = True, None
        for operation in list(self._operations.values()):
            self._end_alone(operation, rank_died(0, _UNKNOWN))

    def _expire(self, operation: Operation) -> None:
        """End an operation whose verdict has not come in time."""
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


def _limit_of(operation: Operation) -> tuple[str, float]:
    """Return how long an operation waits for the connection to rank 0, in seconds, after the name of the limit."""
    timeout_s = operation.deadline.timeout_s
    if operation.rank_wait_s < timeout_s:
        return "rank_wait_s", operation.rank_wait_s
    return "timeout_s", timeout_s
