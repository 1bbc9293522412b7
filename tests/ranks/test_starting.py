"""Three ranks in one process call saves at random speeds; and the time of one that waits."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from _hub import LONG_S, Ranks, in_loop, on_the_loop

from sidestream._engine.loop import operation_loop
from sidestream._group import Operation, Stopped, prepare_together
from sidestream._group.connections import GroupMessage, GroupMessageKind
from sidestream._group.operation import RankGroup
from sidestream._run.saves import GroupQueueEntry, QueuedSave, QueueEntry, SaveQueue
from sidestream._runtime.threads import Deadline
from sidestream._save.pending import PendingSave, SaveInfo, SaveProgress
from sidestream.errors import RankFailuresError, SkippedError
from sidestream.options import Outcome

WORLD = 3
SAVES = 8


@pytest.fixture
def three() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


# --- which of them go -----------------------------------------------------------------------------------------------


class Work:
    """What a save has to do with others: it plans with them while no other of this rank can, and ends with them."""

    def __init__(self, rank: Rank, operation: Operation, step: int) -> None:
        self.outcome: Outcome = "absent"
        self.url = str(step)
        self.progress = SaveProgress()
        self._rank = rank
        self._operation = operation
        rank.begun.append(step)

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        await prepare_together(self._operation, self._all)
        self._operation.close()
        return SaveInfo(self.url, "", int(self.url), 1, 0, "fsync", {})

    async def _all(self) -> None:
        async with self._rank.stager:
            await self._operation.agree("plan")
        await self._rank.dawdle()
        await self._operation.agree("commit")

    def abandon(self) -> None:
        self._operation.report(asyncio.CancelledError())


class Rank:
    def __init__(self, group: RankGroup, in_flight: int, seed: str) -> None:
        self.group = group
        self.queue = SaveQueue(in_flight)
        self.timeout_s = LONG_S
        self.stager = asyncio.Lock()
        self.begun: list[int] = []
        self.pendings: list[PendingSave] = []
        self._random = random.Random(seed)

    async def _claim(self, step: int) -> int:
        await self.dawdle()
        return step

    async def dawdle(self) -> None:
        for _ in range(self._random.choice([0, 1, 2, 5, 20])):
            await asyncio.sleep(self._random.choice([0.0, 0.0, 0.001]))

    def save(self, step: int, *, promised: bool) -> PendingSave:
        operation = self.group.begin("save", Deadline.after(LONG_S), LONG_S)
        entry = self.entry(operation, step, promised=promised)

        async def launch(_: object) -> tuple[Work, None]:
            return Work(self, operation, step), None

        self.pendings.append(PendingSave(QueuedSave("run", step, entry, None, launch)))
        return self.pendings[-1]

    def entry(self, operation: Operation, step: int, *, promised: bool = False) -> GroupQueueEntry:
        entry = GroupQueueEntry(self.queue, "latest", operation, step, self._deadline, self._claim, promised=promised)
        entry.join()
        return entry

    def _deadline(self) -> Deadline:
        return Deadline.after(self.timeout_s)

    def busy(self) -> QueueEntry:
        """One save on its way, which has its slot."""
        entry = QueueEntry(self.queue, "wait")
        entry.join()
        assert entry.request_slot()
        entry.mark_begun()
        return entry

    async def outcome(self, step: int) -> str:
        try:
            await self.pendings[step]
        except (SkippedError, RankFailuresError, asyncio.CancelledError) as error:
            return f"{type(error).__name__} {error}"
        return "committed"


@pytest.mark.parametrize("seed", range(60))
async def test_ranks_agree_at_any_speed(seed: int, three: Ranks) -> None:
    chance = random.Random(seed)
    in_flight = chance.choice([1, 1, 2, 3])
    ranks = [Rank(group, in_flight, f"{seed} {n}") for n, group in enumerate((three.hub, *three.spokes))]
    promised = {step for step in range(SAVES) if chance.random() < 0.2}
    cancelled = {step: chance.randrange(WORLD) for step in range(SAVES - 1) if chance.random() < 0.15}

    async def calls(number: int, rank: Rank) -> None:
        for step in range(SAVES):
            pending = rank.save(step, promised=step in promised)
            await rank.dawdle()
            if cancelled.get(step) == number:
                pending.cancel()

    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*(calls(number, rank) for number, rank in enumerate(ranks)))
        outcomes = [[await rank.outcome(step) for rank in ranks] for step in range(SAVES)]
    for step, on_ranks in enumerate(outcomes):
        told = [one for number, one in enumerate(on_ranks) if cancelled.get(step) != number]
        assert len(set(told)) == 1, (step, told)
        assert told[0] == "committed" or step in cancelled or told[0].startswith("SkippedError"), told
        assert step not in promised or not told[0].startswith("SkippedError"), told
    assert outcomes[-1] == ["committed"] * WORLD
    for rank in ranks:
        assert rank.begun == sorted(rank.begun)
        assert rank.queue.slots_used == 0


# --- its time -------------------------------------------------------------------------------------------------------


@on_the_loop
async def test_the_time_of_one_that_is_suspended_does_not_run_out(three: Ranks) -> None:
    operations = [three.hub.begin("save", Deadline.after(0.05), LONG_S)]
    operations[0].suspend()
    operations += [spoke.begin("save", Deadline.after(LONG_S), LONG_S) for spoke in three.spokes]
    await asyncio.sleep(0.2)
    assert not operations[0].stopping
    for operation in operations:
        operation.on_stop(partial(operation.report, Stopped()))
    operations[0].resume(Deadline.after(0.05))
    verdict = await asyncio.wait_for(operations[0].verdict, LONG_S)
    assert verdict is not None
    assert {one.kind for one in verdict.failures} == {"DeadlineExceededError"}


async def test_the_time_in_the_queue_does_not_count(three: Ranks) -> None:
    ranks = [Rank(group, 1, "") for group in (three.hub, *three.spokes)]
    busy = [rank.busy() for rank in ranks]
    for rank in ranks:
        rank.save(0, promised=False)
    in_loop(lambda: None)
    operation = three.hub._states[1].operation
    assert operation is not None
    async with asyncio.timeout(LONG_S):
        while not operation._suspended:  # all have called
            await asyncio.sleep(0.001)
    operation.deadline = Deadline(time.monotonic() - 1.0, LONG_S)  # as if it had waited for that long
    in_loop(lambda: three.hub._expire(three.hub._states[1]))
    assert not operation.stopping
    for entry in busy:  # where the saves wait
        operation_loop().call(entry.release)
    assert [await rank.outcome(0) for rank in ranks] == ["committed"] * WORLD


@on_the_loop
async def test_the_others_wait_for_as_long_as_something_is_on_its_way(
    three: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is silent: a rank above it gives up when it has waited, with nothing on its way, for as long as it may."""
    monkeypatch.setattr("sidestream._group.rank_group._LATER_S", 0.0)
    rank = Rank(three.spokes[0], 1, "")
    busy = rank.busy()
    operation, coming = await waiting_for_rank_0(rank)
    await asyncio.sleep(0.2)
    assert not operation.stopping
    busy.release()
    await gives_up(rank, coming)
    assert rank.queue.slots_used == 0


@on_the_loop
async def test_one_that_was_stopped_in_the_queue_waits_for_the_verdict_no_longer_than_it_may(
    three: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has told all to stop and is silent then, while another save of this rank is still on its way."""
    monkeypatch.setattr("sidestream._group.rank_group._LATER_S", 0.0)
    monkeypatch.setattr("sidestream._group.rank_group._STOP_S", 0.2)
    rank = Rank(three.spokes[0], 1, "")
    rank.busy()
    operation, coming = await waiting_for_rank_0(rank)
    three.spokes[0]._on_message(GroupMessage(GroupMessageKind.STOP, operation.number, "", b""))
    await gives_up(rank, coming)
    assert rank.queue.slots_used == 1


async def waiting_for_rank_0(rank: Rank) -> tuple[Operation, asyncio.Task[Any]]:
    """A save that was called while another one was on its way; each has a twentieth of a second."""
    rank.timeout_s = 0.05
    operation = rank.group.begin("save", Deadline.after(0.05), LONG_S)
    coming: asyncio.Task[Any] = asyncio.ensure_future(rank.entry(operation, 1).wait_to_begin())
    while not operation._suspended:
        assert not coming.done()
        await asyncio.sleep(0)
    return operation, coming


async def gives_up(rank: Rank, coming: asyncio.Task[Any]) -> None:
    await asyncio.wait([coming], timeout=LONG_S)
    rank.group.close()  # a cancel would not end what has not ended by now
    with pytest.raises(RankFailuresError, match=r"rank 0 .*did not answer within timeout_s"):
        await coming
