"""Rank 0's side of the connections, with socket pairs in place of other processes."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from _hub import LONG_S, Ranks, in_loop, on_the_loop

from sidestream._engine.calls import call_from_thread, in_operation
from sidestream._group import has_ended, prepare_together, rank_group, this_process
from sidestream._group.connections import GroupMessage, GroupMessageKind
from sidestream._group.operation import Operation, Stopped
from sidestream._group.rank_group import OtherRank, Rank0
from sidestream._group.rendezvous import deadline_of
from sidestream._runtime.threads import Deadline
from sidestream.errors import RankFailuresError


@pytest.fixture
def three() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


async def nothing(_: Sequence[bytes]) -> bytes:
    return b"done"


@on_the_loop
async def test_an_answer_reaches_those_who_live(three: Ranks) -> None:
    """The hub learns that a rank has gone from sending the answer to it."""
    operations = [group.begin("save", Deadline.after(LONG_S), LONG_S) for group in (three.hub, *three.spokes)]
    others = [asyncio.ensure_future(one.aexchange("commit", b"", nothing)) for one in operations[1:]]

    async def decide(_: Sequence[bytes]) -> bytes:
        assert operations[0].make_irrevocable()
        three.ends[0].shutdown(socket.SHUT_WR)
        return b"done"

    async with asyncio.timeout(LONG_S):
        assert await operations[0].aexchange("commit", b"", decide) == b"done"
        assert await others[1] == b"done"
        with pytest.raises(Stopped):
            await others[0]
        assert [one.kind for one in (await operations[1].failed(Stopped())).failures] == ["RankDied"]


@on_the_loop
async def test_a_cancel_before_the_publish_ends_the_save_for_all(three: Ranks) -> None:
    operations = [group.begin("save", Deadline.after(LONG_S), LONG_S) for group in (three.hub, *three.spokes)]
    inside: asyncio.Event = asyncio.Event()

    async def decide(_: Sequence[bytes]) -> bytes:
        assert operations[0].make_irrevocable()
        inside.set()
        await asyncio.sleep(LONG_S)
        return b""

    async def rank(operation: Operation) -> RankFailuresError:
        try:
            await operation.aexchange("commit", b"", decide)
        except (Stopped, asyncio.CancelledError) as error:
            return await operation.failed(error)
        raise AssertionError("it was not carried out")

    tasks = [asyncio.ensure_future(rank(operation)) for operation in operations]
    await inside.wait()
    tasks[0].cancel()
    async with asyncio.timeout(LONG_S / 2):
        for verdict in await asyncio.gather(*tasks):
            assert [(one.rank, one.kind) for one in verdict.failures] == [(0, "CancelledError")]


@on_the_loop
async def test_a_cancel_of_a_step_that_goes_on_leaves_the_seal(three: Ranks) -> None:
    """Rank 1 is cancelled when rank 0 has decided: everybody else goes on, and so would it."""
    operations = [group.begin("save", Deadline.after(LONG_S), LONG_S) for group in (three.hub, *three.spokes)]
    tasks = [asyncio.ensure_future(one.aexchange("commit", b"", nothing)) for one in operations[1:]]

    async def decide(_: Sequence[bytes]) -> bytes:
        assert operations[0].make_irrevocable()
        tasks[0].cancel()
        while operations[1]._final is None:
            await asyncio.sleep(0)
        return b"done"

    async with asyncio.timeout(LONG_S / 2):
        assert await operations[0].aexchange("commit", b"", decide) == b"done"
        assert await tasks[1] == b"done"
        await asyncio.wait([tasks[0]])
    assert tasks[0].cancelled()
    assert operations[1].step_completed


@on_the_loop
async def test_a_cancel_while_a_failed_rank_waits_for_the_verdict(three: Ranks) -> None:
    operations = [group.begin("load", Deadline.after(LONG_S), LONG_S) for group in (three.hub, *three.spokes)]

    async def fails() -> None:
        raise ZeroDivisionError

    failing = asyncio.ensure_future(prepare_together(operations[1], fails))
    async with asyncio.timeout(LONG_S / 2):
        while not (operations[0].stopping and operations[2].stopping):
            await asyncio.sleep(0)
        failing.cancel()
        await asyncio.sleep(0)
        assert not failing.done()
        for one in (operations[0], operations[2]):
            one.report(Stopped())
        await asyncio.wait([failing])
    assert failing.cancelled()
    for one in operations:
        assert [(failed.rank, failed.kind) for failed in (await one.failed(Stopped())).failures] == [
            (1, "ZeroDivisionError")
        ]


@on_the_loop
async def test_what_was_sent_is_forgotten_with_the_verdict(three: Ranks) -> None:
    """Rank 0 makes its answer while another rank fails, and one more comes late: nothing of theirs is kept."""
    operations = [group.begin("load", Deadline.after(LONG_S), LONG_S) for group in (three.hub, *three.spokes)]
    number = operations[0].number

    async def decide(parts: Sequence[bytes]) -> bytes:
        assert [len(part) for part in parts] == [100] * 3
        operations[1].report(ValueError("it cannot go on"))
        stopped = asyncio.Event()
        operations[0].on_stop(stopped.set)
        await stopped.wait()
        return b"late"

    async def rank(operation: Operation) -> RankFailuresError:
        try:
            await operation.aexchange("share", b"x" * 100, decide)
        except Stopped as error:
            return await operation.failed(error)
        raise AssertionError("it was not carried out")

    async with asyncio.timeout(LONG_S):
        for verdict in await asyncio.gather(*map(rank, operations)):
            assert [(one.rank, one.kind) for one in verdict.failures] == [(1, "ValueError")]
    state = three.hub._states[number]
    assert (state.parts, state.gathered) == ({}, {})
    with pytest.raises(Stopped):
        operations[0].answer("share", b"later")
    three.spokes[1]._send(GroupMessage(GroupMessageKind.DATA, number, "share", b"x" * 100))
    with pytest.raises(Stopped):
        await operations[0].agree("share")
    after = [group.begin("load", Deadline.after(LONG_S), LONG_S) for group in (three.hub, *three.spokes)]
    assert await asyncio.gather(*(one.aexchange("next", b"", nothing) for one in after)) == [b"done"] * 3
    assert (state.parts, state.gathered) == ({}, {})


@on_the_loop
async def test_the_parts_of_a_step_go_with_its_answer(three: Ranks) -> None:
    """Plans of many MB do not stay until the operation ends."""
    operations = [group.begin("save", Deadline.after(LONG_S), LONG_S) for group in (three.hub, *three.spokes)]
    part = os.urandom(100)
    held = sys.getrefcount(part)
    await asyncio.gather(*(one.aexchange("plan", part, nothing) for one in operations))
    await asyncio.gather(*(one.aexchange("next", b"", nothing) for one in operations))
    async with asyncio.timeout(LONG_S):
        while sys.getrefcount(part) > held:
            await asyncio.sleep(0.001)
    assert [one._waiting for one in operations] == [set()] * 3


@pytest.mark.parametrize(
    "timeout_s",
    [float("inf"), float("nan"), 10**400, -1, True, "long"],
    ids=["inf", "nan", "huge", "negative", "bool", "text"],
)
def test_a_timeout_that_will_be_refused_makes_a_deadline(timeout_s: object) -> None:
    assert deadline_of(timeout_s).timeout_s == 600


def test_a_deadline_in_many_days_leaves_the_loop_alive() -> None:
    hub = Rank0(2, "token")
    operation = hub.begin("save", deadline_of(10_000_000), LONG_S)
    for _ in range(3):  # it has slept in between
        in_loop(lambda: None)
    in_loop(lambda: hub.close_operation(operation))


@pytest.mark.parametrize("rank", [0, 1])
def test_no_timer_keeps_an_operation_that_has_ended(rank: int) -> None:
    """Its failures refer to the frames of the call, and those to tensors and to shared memory."""
    group = OtherRank(rank, 2) if rank else Rank0(2, "token")
    operation = group.begin("load", Deadline.after(LONG_S), LONG_S)
    in_loop(lambda: None)
    in_loop(partial(group.close_operation, operation))
    ended = weakref.ref(operation)
    del operation
    in_loop(lambda: None)
    gc.collect()
    assert ended() is None


def test_a_forked_child_keeps_no_connection(three: Ranks) -> None:
    """It would hide the end of this process from the other ranks. The connections of this process stay."""
    ends = [end.fileno() for end in three.ends]
    child = os.fork()
    if child == 0:
        gone = 0
        for end in ends:
            try:
                os.fstat(end)
            except OSError:
                gone += 1
        os._exit(gone)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(ends)
    operations = [group.begin("save", Deadline.after(LONG_S), LONG_S) for group in (three.hub, *three.spokes)]
    call_from_thread(partial(meet, operations))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_it_is_certain_that_a_process_has_ended() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        rank = {**this_process(), "pid": process.pid}
        assert not has_ended(rank)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(rank)  # it has not been reaped
        process.wait()
    assert has_ended(rank)
    assert not has_ended({**rank, "scope": "another machine"})


@on_the_loop
async def test_a_rank_that_begins_late_hears_why_although_rank_0_is_gone(three: Ranks) -> None:
    """It was told while it had not begun. It must not take the end of rank 0, which came later, for the reason."""
    first, second = (group.begin("save", Deadline.after(LONG_S), LONG_S) for group in (three.hub, three.spokes[0]))
    async with asyncio.timeout(LONG_S):
        second.report(ValueError("no"))
        with pytest.raises(Stopped):
            await first.aexchange("plan", b"", nothing)
        verdicts = [await first.failed(Stopped()), await second.failed(Stopped())]
        three.hub.close()
        while not three.spokes[1]._lost:
            await asyncio.sleep(0)
        late = three.spokes[1].begin("save", Deadline.after(LONG_S), LONG_S)
        verdicts.append(await late.failed(Stopped()))
        for verdict in verdicts:
            assert [(one.rank, one.kind) for one in verdict.failures] == [(1, "ValueError")]
        after = three.spokes[1].begin("save", Deadline.after(LONG_S), LONG_S)
        assert [one.kind for one in (await after.failed(Stopped())).failures] == ["RankDied"]


# --- ranks that start over --------------------------------------------------------------------------------------------


@pytest.fixture
async def loads(three: Ranks) -> list[Operation]:
    """One operation of three ranks, which all have begun it."""
    operations = [group.begin("load", Deadline.after(LONG_S), LONG_S) for group in (three.hub, *three.spokes)]
    await in_operation(partial(meet, operations), "meet")
    return operations


async def meet(operations: Sequence[Operation]) -> None:
    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*(one.agree("match") for one in operations))


async def read(operation: Operation, may_stop: asyncio.Event | None = None) -> bool:
    """Wait in a step that rank 1 does not reach, and stop when the others do. Return whether all start over."""
    try:
        await operation.agree("read")
    except Stopped as stopped:
        if may_stop is not None:
            await may_stop.wait()
        return await operation.starts_over(stopped, wanted=False)
    raise AssertionError("rank 1 was not there")


async def lose(operation: Operation) -> bool:
    return await operation.starts_over(ValueError("lost"), wanted=True)


async def verdicts(operations: Sequence[Operation]) -> list[list[tuple[int, str]]]:
    async with asyncio.timeout(LONG_S):
        found = await asyncio.gather(*(operation.failed(Stopped()) for operation in operations))
    return [[(one.rank, one.kind) for one in verdict.failures] for verdict in found]


@on_the_loop
async def test_ranks_that_start_over(three: Ranks, loads: list[Operation]) -> None:
    """Several times. The next operation is another one."""
    first, second, third = loads
    async with asyncio.timeout(LONG_S):
        for _ in range(3):
            assert await asyncio.gather(read(first), lose(second), read(third)) == [True] * 3
            await meet(loads)
    for operation in loads:
        operation.close()
    assert all(state.closed for state in three.hub._states.values())
    assert not any(spoke._operations for spoke in three.spokes)
    await meet([group.begin("load", Deadline.after(LONG_S), LONG_S) for group in (three.hub, *three.spokes)])


@on_the_loop
async def test_ranks_that_all_want_to_start_over(loads: list[Operation]) -> None:
    async with asyncio.timeout(LONG_S):
        assert await asyncio.gather(*(lose(one) for one in loads)) == [True] * 3
    await meet(loads)


@on_the_loop
async def test_a_failure_beside_a_rank_that_wants_to_start_over(loads: list[Operation]) -> None:
    """The failure of the rank that would start over is not told."""
    first, second, third = loads
    losing, reading = asyncio.ensure_future(lose(second)), asyncio.ensure_future(read(third))
    await asyncio.sleep(0)
    first._report(KeyError("no"))
    async with asyncio.timeout(LONG_S):
        assert await asyncio.gather(losing, reading) == [False] * 2
    assert await verdicts(loads) == [[(0, "KeyError")]] * 3


@on_the_loop
async def test_a_rank_that_does_not_stop(loads: list[Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others cannot start over without it, and fail for the reason that one of them had."""
    monkeypatch.setattr(rank_group, "_STOP_S", 0.1)
    first, second, third = loads
    goes_on = asyncio.Event()
    late = asyncio.ensure_future(read(third, goes_on))
    async with asyncio.timeout(LONG_S):
        assert await asyncio.gather(read(first), lose(second)) == [False] * 2
        goes_on.set()
        assert not await late
    assert await verdicts(loads) == [[(1, "ValueError")]] * 3


@on_the_loop
async def test_a_rank_that_dies_while_the_others_would_start_over(three: Ranks, loads: list[Operation]) -> None:
    first, second, third = loads
    dying = asyncio.ensure_future(read(third, asyncio.Event()))
    others = asyncio.gather(read(first), lose(second))
    async with asyncio.timeout(LONG_S):
        while not third.stopping:
            await asyncio.sleep(0)
        three.spokes[1].close()
        assert await others == [False] * 2
    assert await verdicts(loads[:2]) == [[(2, "RankDied")]] * 2
    dying.cancel()
    await asyncio.wait([dying])


@pytest.mark.parametrize("how", ["cancelled", "abandoned"])
@on_the_loop
async def test_a_rank_that_ends_while_it_waits_to_start_over(loads: list[Operation], how: str) -> None:
    """The others start over, and are told then."""
    first, second, third = loads
    goes_on = asyncio.Event()
    slow, losing, ending = (asyncio.ensure_future(one) for one in (read(first, goes_on), lose(second), read(third)))
    async with asyncio.timeout(LONG_S):
        while not (third.stopping and third._ended):
            await asyncio.sleep(0)
        if how == "cancelled":
            ending.cancel()
            await asyncio.sleep(0)
        else:
            third.report(asyncio.CancelledError())
        goes_on.set()
        assert await asyncio.gather(slow, losing) == [True] * 2
        if how == "cancelled":
            with pytest.raises(asyncio.CancelledError):
                await ending
            third.report(asyncio.CancelledError())
        else:
            assert await ending
        with pytest.raises(Stopped):
            await first.agree("match")
    assert await verdicts(loads) == [[(2, "CancelledError")]] * 3


@on_the_loop
async def test_a_cancel_at_the_moment_when_another_rank_wants_to_start_over(loads: list[Operation]) -> None:
    """Rank 0 hears of the cancel when all ranks stop anyway."""
    first, second, third = loads
    reading, cancelled = asyncio.ensure_future(read(first)), asyncio.ensure_future(third.agree("read"))
    await asyncio.sleep(0)
    losing = asyncio.ensure_future(lose(second))
    await asyncio.sleep(0)
    cancelled.cancel()
    async with asyncio.timeout(LONG_S):
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        third.report(asyncio.CancelledError())
        if await asyncio.gather(reading, losing) == [True] * 2:
            with pytest.raises(Stopped):
                await first.agree("match")
    assert await verdicts(loads) == [[(2, "CancelledError")]] * 3
