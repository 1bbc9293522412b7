"""Rank 0 and the others in one process, with socket pairs between them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, ParamSpec

from sidestream._engine.calls import call_from_thread, in_operation
from sidestream._group.connections import Connection
from sidestream._group.rank_group import OtherRank, Rank0

P = ParamSpec("P")

LONG_S = 60.0


class Ranks:
    """A hub and its spokes in one process; ``ends``: of each spoke, the hub's end of the connection."""

    def __init__(self, world: int) -> None:
        self.hub = Rank0(world, "token")
        self.spokes = [OtherRank(rank, world) for rank in range(1, world)]
        self.ends: list[socket.socket] = []
        call_from_thread(self._connect)

    async def _connect(self) -> None:
        for rank, spoke in enumerate(self.spokes, 1):
            one, other = socket.socketpair()
            self.ends.append(one)
            ends = Connection(), Connection()
            self.hub.connected(rank, ends[0])
            spoke.connected(ends[1], "token")
            await ends[0].use(one)
            await ends[1].use(other)
            for end in ends:
                end.authenticate()

    def close(self) -> None:
        for group in (self.hub, *self.spokes):
            in_loop(group.close)


def on_the_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, Coroutine[Any, Any, None]]:
    """Run ``test`` where operations run."""

    @wraps(test)
    async def run(*args: P.args, **kwargs: P.kwargs) -> None:
        await in_operation(partial(test, *args, **kwargs), test.__name__)

    return run


def in_loop(work: Callable[[], object]) -> None:
    """Call ``work`` where operations run. It is done when this returns, and so is what was called there before."""

    async def call() -> None:
        work()

    call_from_thread(call)
