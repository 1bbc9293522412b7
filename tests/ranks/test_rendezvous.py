"""How ranks find each other, within one process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch.distributed as dist
from _hub import on_the_loop

from sidestream._engine.calls import call_from_thread
from sidestream._group import Member, Operation, rendezvous
from sidestream._group.operation import Stopped
from sidestream._group.rank_group import OtherRank, Rank0
from sidestream._runtime.threads import Deadline
from sidestream.errors import InvalidOptionError

TIMEOUT_S = 60.0
NAME = "0/0-1-2"
ADDRESS = {"token": "old", "host": rendezvous._host(), "addresses": []}


async def meet(operation: Operation) -> None:
    await operation.agree("meet")
    operation.close()


def ended(members: list[Member]) -> None:
    for member in members:
        member.group.close()


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
        hub = first[1].group
        assert isinstance(hub, Rank0)
        assert hub.accepting is not None
        await asyncio.wait([hub.accepting], timeout=TIMEOUT_S)
        assert hub.accepting.done(), "it listens after all ranks have come"
        second = await met("second")
        ended([*first, *second])

    call_from_thread(both)


def test_each_operation_waits_for_rank_0_until_its_own_limit() -> None:
    """The first one does not decide about the others."""
    store = dist.HashStore()

    async def both() -> None:
        spoke, hub = Member(OtherRank(1, 2), store, NAME), Member(Rank0(2, "token"), store, NAME)
        short, long = (spoke.begin(kind, Deadline.after(limit_s)) for kind, limit_s in [("load", 0.2), ("save", 60.0)])
        met = asyncio.create_task(meet(long))
        with pytest.raises(Stopped) as stopped:
            await meet(short)
        verdict = await short.failed(stopped.value)
        assert [(one.rank, one.kind) for one in verdict.failures] == [(0, "DeadlineExceededError")]
        assert "rank 0 has not begun anything (within timeout_s=0.2); make this call on every rank" in str(verdict)
        assert not met.done()
        late, also = (hub.begin(kind, Deadline.after(TIMEOUT_S)) for kind in ("load", "save"))
        await asyncio.gather(meet(also), met)
        with pytest.raises(Stopped) as told:
            await meet(late)
        assert [one.rank for one in (await late.failed(told.value)).failures] == [1]
        ended([spoke, hub])

    call_from_thread(both)


def test_the_limit_holds_while_a_server_does_not_answer() -> None:
    """The address in the store is old, and its port belongs to another program. The next address is used."""
    store = dist.HashStore()

    async def both() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            store.set(NAME, json.dumps({**ADDRESS, "port": silent.getsockname()[1]}))
            spoke, hub = Member(OtherRank(1, 2), store, NAME), Member(Rank0(2, "token"), store, NAME)
            short, long = (spoke.begin("load", Deadline.after(limit_s)) for limit_s in (2.0, TIMEOUT_S))
            met = asyncio.create_task(meet(long))
            with pytest.raises(Stopped) as stopped:
                await meet(short)
            assert "127.0.0.1 does not answer (within timeout_s=2)" in str(await short.failed(stopped.value))
            hub.begin("load", Deadline.after(TIMEOUT_S))
            await asyncio.gather(meet(hub.begin("save", Deadline.after(TIMEOUT_S))), met)
        ended([spoke, hub])

    call_from_thread(both)


def test_a_rank_that_finds_no_rank_0_reports_its_own_error() -> None:
    async def fail() -> None:
        operation = Member(OtherRank(1, 2), dist.HashStore(), NAME).begin("save", Deadline.after(0.2))
        verdict = await operation.failed(InvalidOptionError("metadata= is wrong"))
        assert [(one.rank, one.kind, one.text) for one in verdict.failures] == [
            (1, "InvalidOptionError", "metadata= is wrong")
        ]

    call_from_thread(fail)


FULL = """
import os, resource, socket, sys, time
import torch.distributed as dist
from sidestream._engine.calls import call_from_thread
from sidestream._group import Member
from sidestream._group.rank_group import Rank0
from sidestream._runtime.threads import Deadline
from test_rendezvous import NAME, meet

accepted, accept = [], socket.socket.accept

def counted(listener):
    try:
        found = accept(listener)
    except BlockingIOError:
        raise
    except OSError:
        accepted.append(1)
        raise
    accepted.append(1)
    return found

socket.socket.accept = counted
hub = Member(Rank0(3, "token"), dist.FileStore(sys.argv[1], 3), NAME)
operation = hub.begin("save", Deadline.after(60))
while len(accepted) < 1:
    time.sleep(0.001)
print("one is connected", flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    print("full", flush=True)
tries = len(accepted)
while len(accepted) < tries + 3:
    time.sleep(0.001)
time.sleep(0.5)
tries = len(accepted) - tries
for one in taken:
    os.close(one)
call_from_thread(lambda: meet(operation))
print(tries, flush=True)
"""


@on_the_loop
async def test_a_rank_0_without_descriptors_does_not_spin_and_goes_on_when_it_has_some(tmp_path: Path) -> None:
    """One rank is connected already, the other one connects while rank 0 has no descriptor for it."""
    store = tmp_path / "store"
    hub = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FULL, str(store),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert hub.stdout is not None
    assert hub.stderr is not None
    members = [Member(OtherRank(rank, 3), dist.FileStore(str(store), 3), NAME) for rank in (1, 2)]
    async with asyncio.timeout(120):
        first = asyncio.create_task(meet(members[0].begin("save", Deadline.after(TIMEOUT_S))))
        assert await hub.stdout.readline() == b"one is connected\n"
        assert await hub.stdout.readline() == b"full\n"
        await asyncio.gather(first, meet(members[1].begin("save", Deadline.after(TIMEOUT_S))))
        tries = int(await hub.stdout.readline())
        assert 3 <= tries <= 200, "it tries again after a pause"
        said = await hub.stderr.read()
        assert await hub.wait() == 0, said.decode()
    assert said.decode().count("cannot accept connections of other ranks, and tries again") == 1
    ended(members)


@on_the_loop
async def test_a_scope_of_anyio_that_is_cancelled_does_not_keep_the_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Member(OtherRank(1, 2), dist.HashStore(), NAME).begin("save", Deadline.after(0.5))
    waits, wait = [], asyncio.wait
    monkeypatch.setattr(asyncio, "wait", lambda futures: (waits.append(1), wait(futures))[1])
    with anyio.CancelScope() as scope:
        scope.cancel()
        verdict = await operation.failed(ValueError("no"))
    assert [one.rank for one in verdict.failures] == [1]
    assert len(waits) <= 2
    assert operation.cancelled is not None


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

    call_from_thread(fail)
