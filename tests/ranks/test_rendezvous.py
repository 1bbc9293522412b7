"""How ranks find each other, within one process."""

from __future__ import annotations

import asyncio
from typing import Any

import torch.distributed as dist

from sidestream._group import Member, Operation
from sidestream._group.rank_group import OtherRank, Rank0
from sidestream._runtime.threads import Deadline

TIMEOUT_S = 60.0
NAME = "0/0-1-2"


async def meet(operation: Operation) -> None:
    await operation.agree("meet")
    operation.close()


def ended(members: list[Member]) -> None:
    for member in members:
        member.group._thread.post(member.group.shut)


def test_a_later_group_of_the_same_name_finds_its_own_rank_0() -> None:
    store = dist.HashStore()

    async def met(token: str) -> list[Member]:
        spoke, hub = Member(OtherRank(1, 2), store, NAME), Member(Rank0(2, token), store, NAME)
        other = asyncio.create_task(meet(spoke.begin("save", Deadline.after(TIMEOUT_S))))
        await asyncio.sleep(0.05)  # mostly it finds where the first group was
        await asyncio.gather(meet(hub.begin("save", Deadline.after(TIMEOUT_S))), other)
        assert spoke.group.token == token
        return [spoke, hub]

    async def both() -> None:
        first = await met("first")
        door = first[1].group.stop_listening.__self__  # type: ignore[attr-defined]
        assert door._listener.fileno() == -1, "it listens after all ranks have come"
        second = await met("second")
        ended([*first, *second])

    asyncio.run(both())


class Broken:
    """A store whose server is gone."""

    def set(self, name: str, value: Any) -> None:
        raise ConnectionError("the store is gone")


def test_rank_0_says_why_it_cannot_be_found() -> None:
    async def fail() -> None:
        operation = Member(Rank0(2, "token"), Broken(), NAME).begin("save", Deadline.after(TIMEOUT_S))
        try:
            await meet(operation)
        except Exception as error:
            verdict = await operation.failed(error)
            assert [(one.rank, one.kind, one.text) for one in verdict.failures] == [
                (0, "ConnectionError", "the store is gone")
            ]
        else:
            raise AssertionError("it met nobody")

    asyncio.run(fail())
