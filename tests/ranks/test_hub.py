"""Rank 0's side of the connections, with socket pairs in place of other processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from sidestream._threads import Deadline
from sidestream.ranks.failure import Stopped
from sidestream.ranks.group import Hub, Spoke
from sidestream.ranks.owner import Link, owner

LONG_S = 60.0


class Ranks:
    """A hub and its spokes in one process; ``ends``: of each spoke, the hub's end of the connection."""

    def __init__(self, world: int) -> None:
        self.hub = Hub(world, "token")
        self.spokes = [Spoke(rank, world) for rank in range(1, world)]
        self.ends: list[socket.socket] = []
        for rank, spoke in enumerate(self.spokes, 1):
            one, other = socket.socketpair()
            self.ends.append(one)
            in_owner(lambda rank=rank, one=one: self.hub.connected(rank, Link(owner(), one)))  # type: ignore[misc]
            in_owner(lambda spoke=spoke, other=other: spoke.connected(Link(owner(), other), "token"))  # type: ignore[misc]

    def close(self) -> None:
        for group in (self.hub, *self.spokes):
            in_owner(group.shut)


def in_owner(work: Callable[[], None]) -> None:
    """Done when this returns."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
            raise

    owner().post(run)
    done.result(LONG_S)


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
