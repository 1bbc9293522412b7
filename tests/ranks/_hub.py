"""Rank 0 and the others in one process, with socket pairs between them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from sidestream._group.connections import Connection, connection_thread
from sidestream._group.rank_group import OtherRank, Rank0

LONG_S = 60.0


class Ranks:
    """A hub and its spokes in one process; ``ends``: of each spoke, the hub's end of the connection."""

    def __init__(self, world: int) -> None:
        self.hub = Rank0(world, "token")
        self.spokes = [OtherRank(rank, world) for rank in range(1, world)]
        self.ends: list[socket.socket] = []
        for rank, spoke in enumerate(self.spokes, 1):
            one, other = socket.socketpair()
            self.ends.append(one)
            in_owner(lambda rank=rank, one=one: self.hub.connected(rank, Connection(connection_thread(), one)))  # type: ignore[misc]
            in_owner(lambda spoke=spoke, other=other: spoke.connected(Connection(connection_thread(), other), "token"))  # type: ignore[misc]

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

    connection_thread().post(run)
    done.result(LONG_S)


@contextmanager
def owner_held() -> Iterator[None]:
    """Nothing that is due is done meanwhile, however slow this thread is."""
    gate = threading.Event()

    def hold() -> None:
        gate.wait(LONG_S)

    connection_thread().post(hold)
    try:
        yield
    finally:
        gate.set()
