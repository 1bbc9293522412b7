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
from concurrent.futures import Future

import pytest
from _hub import LONG_S, Ranks, in_owner

from sidestream._group import has_ended, this_process
from sidestream._group.failure import Stopped
from sidestream._group.frames import Frame, Kind
from sidestream._group.hub import Hub, Spoke
from sidestream._group.operation import Exchange, Operation
from sidestream._group.rendezvous import deadline_of
from sidestream._runtime.threads import Deadline
from sidestream.errors import RankFailures


@pytest.fixture
def three() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


async def nothing(_: Sequence[bytes]) -> bytes:
    return b"done"


async def test_an_answer_reaches_those_who_live(three: Ranks) -> None:
    """The hub learns that a rank has gone from sending the answer to it."""
    operations = [group.begin("save", Deadline.after(LONG_S)) for group in (three.hub, *three.spokes)]
    others = [asyncio.ensure_future(one.aexchange("commit", b"", nothing)) for one in operations[1:]]

    def answer() -> None:
        three.ends[0].shutdown(socket.SHUT_WR)
        three.hub._answer(operations[0].number, "commit", [b"done"] * 3)

    async def decide(_: Sequence[bytes]) -> bytes:
        assert await operations[0].seal()
        in_owner(answer)
        return b"done"

    async with asyncio.timeout(LONG_S):
        assert await operations[0].aexchange("commit", b"", decide) == b"done"
        assert await others[1] == b"done"
        with pytest.raises(Stopped):
            await others[0]
        assert [one.kind for one in (await operations[1].failed(Stopped())).failures] == ["RankDied"]


@pytest.mark.parametrize("where", ["in_the_seal", "after_the_seal"])
async def test_a_cancel_before_the_publish_ends_the_save_for_all(three: Ranks, where: str) -> None:
    operations = [group.begin("save", Deadline.after(LONG_S)) for group in (three.hub, *three.spokes)]
    inside: asyncio.Event = asyncio.Event()

    async def decide(_: Sequence[bytes]) -> bytes:
        if where == "in_the_seal":
            asyncio.get_running_loop().call_soon(inside.set)
        assert await operations[0].seal()
        inside.set()
        await asyncio.sleep(LONG_S)
        return b""

    async def rank(operation: Operation) -> RankFailures:
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


async def test_a_cancel_of_a_step_that_goes_on_leaves_the_seal(three: Ranks) -> None:
    """Rank 0 is cancelled while its answer is on the way: everybody, itself included, goes on."""
    operations = [group.begin("save", Deadline.after(LONG_S)) for group in (three.hub, *three.spokes)]
    others = [asyncio.ensure_future(one.aexchange("commit", b"", nothing)) for one in operations[1:]]

    async def decide(_: Sequence[bytes]) -> bytes:
        assert await operations[0].seal()
        asyncio.get_running_loop().call_soon(task.cancel)
        return b"done"

    task = asyncio.ensure_future(operations[0].aexchange("commit", b"", decide))
    async with asyncio.timeout(LONG_S / 2):
        assert await asyncio.gather(*others) == [b"done", b"done"]
        await asyncio.wait([task])
    assert task.cancelled()
    assert operations[0].went_on


async def test_what_was_sent_is_forgotten_with_the_verdict(three: Ranks) -> None:
    """Rank 0 makes its answer while another rank fails, and one more comes late: nothing of theirs is kept."""
    operations = [group.begin("load", Deadline.after(LONG_S)) for group in (three.hub, *three.spokes)]
    number = operations[0].number

    async def decide(parts: Sequence[bytes]) -> bytes:
        assert [len(part) for part in parts] == [100] * 3
        operations[1].report(ValueError("it cannot go on"))
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        operations[0].on_stop(lambda: loop.call_soon_threadsafe(stopped.set))
        await stopped.wait()
        return b"late"

    async def rank(operation: Operation) -> RankFailures:
        try:
            await operation.aexchange("share", b"x" * 100, decide)
        except Stopped as error:
            return await operation.failed(error)
        raise AssertionError("it was not carried out")

    async with asyncio.timeout(LONG_S):
        for verdict in await asyncio.gather(*map(rank, operations)):
            assert [(one.rank, one.kind) for one in verdict.failures] == [(1, "ValueError")]
    state = three.hub._states[number]
    in_owner(lambda: None)
    assert (state.parts, state.gathered, state.answered) == ({}, {}, {})
    operations[0].answer("share", b"later")
    in_owner(lambda: three.spokes[1]._send(Frame(Kind.DATA, number, "share", b"x" * 100)))
    again = Operation(three.hub, number, "load", Deadline.after(LONG_S), LONG_S)
    three.hub.step(again, Exchange("share", b"x" * 100, Future(), late := Future()))
    with pytest.raises(Stopped):
        await asyncio.wait_for(asyncio.wrap_future(late), LONG_S)
    after = [group.begin("load", Deadline.after(LONG_S)) for group in (three.hub, *three.spokes)]
    assert await asyncio.gather(*(one.aexchange("next", b"", nothing) for one in after)) == [b"done"] * 3
    assert (state.parts, state.gathered, state.answered) == ({}, {}, {})


@pytest.mark.parametrize(
    "timeout_s",
    [float("inf"), float("nan"), 10**400, -1, True, "long"],
    ids=["inf", "nan", "huge", "negative", "bool", "text"],
)
def test_a_timeout_that_will_be_refused_makes_a_deadline(timeout_s: object) -> None:
    assert deadline_of(timeout_s).timeout_s == 600


def test_a_deadline_in_many_days_leaves_the_thread_alive() -> None:
    hub = Hub(2, "token")
    operation = hub.begin("save", deadline_of(10_000_000))
    for _ in range(3):  # it has slept in between
        in_owner(lambda: None)
    hub.close(operation)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_timer_keeps_an_operation_that_has_ended(rank: int) -> None:
    """Its failures refer to the frames of the call, and those to tensors and to shared memory."""
    group = Spoke(rank, 2) if rank else Hub(2, "token")
    operation = group.begin("load", Deadline.after(LONG_S))
    in_owner(lambda: None)
    group.close(operation)
    ended = weakref.ref(operation)
    del operation
    in_owner(lambda: None)
    gc.collect()
    assert ended() is None


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


async def test_a_rank_that_begins_late_hears_why_although_rank_0_is_gone(three: Ranks) -> None:
    """It was told while it had not begun. It must not take the end of rank 0, which came later, for the reason."""
    first, second = (group.begin("save", Deadline.after(LONG_S)) for group in (three.hub, three.spokes[0]))
    async with asyncio.timeout(LONG_S):
        second.report(ValueError("no"))
        with pytest.raises(Stopped):
            await first.aexchange("plan", b"", nothing)
        verdicts = [await first.failed(Stopped()), await second.failed(Stopped())]
        in_owner(three.hub.shut)
        while three.spokes[1]._lost is None:
            await asyncio.sleep(0)
        late = three.spokes[1].begin("save", Deadline.after(LONG_S))
        verdicts.append(await late.failed(Stopped()))
        for verdict in verdicts:
            assert [(one.rank, one.kind) for one in verdict.failures] == [(1, "ValueError")]
        after = three.spokes[1].begin("save", Deadline.after(LONG_S))
        assert [one.kind for one in (await after.failed(Stopped())).failures] == ["RankDied"]
