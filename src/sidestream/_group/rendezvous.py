"""Connecting the ranks of a process group: once for each group, through the store that the group was made with.

Rank 0 listens and publishes its address with a token. The other ranks read both from the store, connect, and send the
token. The process group itself is not used, so that no message can interfere with the collectives of the training.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import logging
import os
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any

from .._runtime.descriptors import close_in_children
from .._runtime.tasks import create_owned_task
from .._runtime.threads import Deadline, io_threads
from .._runtime.torch_probes import group_store
from ..errors import InvalidOptionError, SidestreamError
from ..options import RANK_WAIT_S, GroupChoice, check_seconds
from .connections import Connection, GroupMessage, GroupMessageKind
from .operation import Operation, RankGroup
from .rank_group import OtherRank, Rank0

_POLL_S = 0.02
_CONNECT_S = 5.0
_REFUSED_S = 600.0
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What ``accept`` fails with while this process, or the system, has no descriptors or memory left."""

_log = logging.getLogger("sidestream")

_groups: weakref.WeakKeyDictionary[Any, Member] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Member:
    """This process as a member of a process group.

    The store of the process group serves to find rank 0, and nothing else: messages take connections of our own. So a
    process group may be destroyed while ranks save or load. Its member, which operations refer to, lives until they
    have ended, and the connections are closed after that."""

    def __init__(self, group: RankGroup, store: Any, name: str) -> None:
        self.group = group
        self._store = store  # until it has served its purpose: that of rank 0 may hold a port that the next group needs
        self._name = name
        self._connecting = False
        self._connected = group.world == 1

    def begin(self, kind: str, deadline: Deadline, rank_wait_s: float = RANK_WAIT_S) -> Operation:
        """Begin an operation. Does not block. The first operation establishes the connections. An invalid
        ``rank_wait_s`` is accepted here: it is refused later, on behalf of all ranks."""
        rank_wait_s = _accepted("rank_wait_s", rank_wait_s, RANK_WAIT_S)
        operation = self.group.begin(kind, deadline, rank_wait_s)
        operation.membership = self
        if not self._connected:
            # The connections last, so they do not keep the variables of this caller, and what those refer to.
            Context().run(self.group.loop.call, self._connect)
        return operation

    def _connect(self) -> None:
        if not (self._connected or self._connecting):
            self._connecting = True
            create_owned_task(self._rendezvous(), "sidestream rendezvous")

    async def _rendezvous(self) -> None:
        """Establish the connections, as long as operations wait for them."""
        try:
            if isinstance(self.group, OtherRank):
                self._connected = await _find_rank_0(self.group, self._store, self._name)
            elif isinstance(self.group, Rank0):
                await _listen(self.group, self._store, self._name)
                self._connected = True
            if self._connected:
                self._store = None
        except Exception as error:
            self.group.not_connected(error)
        finally:
            self._connecting = False


def deadline_of(timeout_s: object) -> Deadline:
    """Return the deadline of an operation. An invalid ``timeout_s`` is accepted here: it is refused later, on behalf of
    all ranks."""
    return Deadline.after(_accepted("timeout_s", timeout_s, _REFUSED_S))


def _accepted(name: str, seconds: object, otherwise: float) -> float:
    try:
        check_seconds(name, seconds)
    except InvalidOptionError:
        return otherwise
    assert isinstance(seconds, (int, float))
    return seconds


def group_of(process_group: GroupChoice) -> Member | None:
    """Return this process as a member of the group that saves or loads together, or None if it does so alone. Raises
    ``InvalidOptionError``."""
    if process_group == "alone":
        return None
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        if process_group is None:
            return None
        raise InvalidOptionError("process_group= needs torch.distributed.init_process_group() first")
    if process_group is None:
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise InvalidOptionError(
            f"process_group={process_group!r} has to be a ProcessGroup that this rank is in, None for all ranks, or "
            '"alone"'
        )
    with _lock:
        member = _groups.get(process_group)
        if member is None:
            rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
            group: RankGroup = OtherRank(rank, world) if rank else Rank0(world, secrets.token_hex(16))
            store, name = group_store(process_group)
            member = _groups[process_group] = Member(group, store, name)
            # The member is freed when the process group and all operations are gone, in any thread. Then the
            # connections are closed.
            weakref.finalize(member, _close, group).atexit = False
        return member


def _close(group: RankGroup) -> None:
    if group.pid == os.getpid():  # a forked child has neither the connections nor the loop
        group.loop.call(group.close)


# --- rank 0 --------------------------------------------------------------------------------------------------------


async def _listen(group: Rank0, store: Any, name: str) -> None:
    """Listen for the other ranks, and publish the address."""
    # On all interfaces, because the one that the ranks can reach is not known here. What connects has to show the
    # token from the store within 5 s, and may send 256 bytes until then.
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=4096)
    close_in_children(listener)
    listener.setblocking(False)
    group.accepting = create_owned_task(_accept(group, listener, store), "sidestream listener")
    try:
        await io_threads().run(_publish, store, name, group.token, listener.getsockname()[1])
    except BaseException:
        group.accepting.cancel()
        raise


async def _accept(group: Rank0, listener: socket.socket, store: Any) -> None:
    """Accept connections until all ranks are connected, so that a rank of a later group that reads an old address is
    refused and reads again. Until then this keeps the ``store``, which may be served by this process."""
    loop = asyncio.get_running_loop()
    expected = set(range(1, group.world))
    warned = False
    with listener:
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # the peer has closed its connection again, or the connection stays in the queue
                if error.errno in _NONE_LEFT and not warned:
                    _log.warning("rank 0 cannot accept connections of other ranks, and tries again: %s", error)
                    warned = True
                await asyncio.sleep(_POLL_S)
                continue
            connection = Connection()
            connection.on_message = partial(_on_greeting, group, connection, expected)
            await connection.use(sock)
            loop.call_later(_CONNECT_S, _expect_greeting, connection)


def _on_greeting(group: Rank0, connection: Connection, expected: set[int], message: GroupMessage) -> None:
    rank, token = message.op, group.token.encode()
    known = message.kind is GroupMessageKind.HELLO and 0 < rank < group.world
    if not known or not hmac.compare_digest(message.payload, token):
        connection.close()  # the peer is not a rank of this group
        return
    # In this order. The peer may send large messages from here on, its connection is in place, and then it is
    # answered. A rank that has the answer may use the connection at once.
    connection.authenticate()
    group.connected(rank, connection)
    connection.send(GroupMessage(GroupMessageKind.HELLO, 0))
    expected.discard(rank)
    if not expected and group.accepting is not None:
        group.accepting.cancel()


def _expect_greeting(connection: Connection) -> None:
    if not connection.authenticated:
        connection.close()


def _publish(store: Any, name: str, token: str, port: int) -> None:
    """Write to the store how other ranks reach this one. Called in a thread."""
    where = {"token": token, "port": port, "host": _host(), "addresses": list(_addresses())}
    store.set(name, json.dumps(where))


def _host() -> str:
    boot = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()} {boot}"


def _addresses() -> Iterator[str]:
    """Yield the addresses under which other ranks may reach this machine, the likeliest first."""
    seen = set()
    master = os.environ.get("MASTER_ADDR")
    for find in (_interface_to(master), _resolved(socket.gethostname())):
        for address in find:
            if address not in seen and not address.startswith("127."):
                seen.add(address)
                yield address


def _interface_to(host: str | None) -> Iterator[str]:
    """Yield the address of the interface that leads to ``host``. Nothing is sent."""
    if host:
        with suppress(OSError):
            family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as sock:
                sock.connect(where)
                yield sock.getsockname()[0]


def _resolved(host: str) -> Iterator[str]:
    with suppress(OSError):
        for *_, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            yield str(where[0])


# --- the other ranks ------------------------------------------------------------------------------------------------


async def _find_rank_0(group: OtherRank, store: Any, name: str) -> bool:
    """Connect to rank 0, and return True; False if no operation waits for that any more. An address in the store may be
    left from an earlier group, so it is read again after a failure."""
    while group.waiting:
        where = await io_threads().run(_published, store, name)
        for address in where["addresses"]:
            sock = await _connected(group, address, where["port"])
            if sock is None:
                continue
            if await _greet(group, sock, where, store, name):
                return True
            group.why_not_connected = f"the server at {address} is not rank 0 of this group"
        await asyncio.sleep(_POLL_S)
    return False


def _published(store: Any, name: str) -> dict[str, Any]:
    """Return what rank 0 has written to the store, with the addresses to try; no address if it has written nothing.
    Called in a thread. It asks first, because a read that waits would block all other users of the store in this
    process."""
    if not store.check([name]):
        return {"addresses": []}
    where: dict[str, Any] = json.loads(store.get(name))
    if where["host"] == _host():
        where["addresses"] = ["127.0.0.1"]
    if not where["addresses"]:
        raise SidestreamError(
            "rank 0 found no address of its machine that other ranks can reach: set MASTER_ADDR on rank 0 to a name or "
            "address that is not a loopback address"
        )
    return where


async def _connected(group: OtherRank, address: str, port: int) -> socket.socket | None:
    """Return a socket that is connected to ``address``, or None."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    close_in_children(sock)
    sock.setblocking(False)
    group.why_not_connected = f"the server at {address} does not answer"
    try:
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except OSError as error:
        sock.close()
        if error.errno is not None:
            group.why_not_connected = f"rank 0 cannot be reached at {address}: {os.strerror(error.errno)}"
        return None
    return sock


async def _greet(group: OtherRank, sock: socket.socket, where: dict[str, Any], store: Any, name: str) -> bool:
    """Send the token, and return whether rank 0 has accepted it. Without an answer the connection is kept as long as
    the store has this address. Not closed earlier: rank 0 may have received the token, and takes a connection that is
    closed after that for the end of this process."""
    accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    connection = Connection()

    def on_answer(_: GroupMessage) -> None:
        group.connected(connection, where["token"])
        accepted.set_result(True)

    connection.on_message = on_answer
    connection.on_close = lambda: accepted.set_result(False)
    await connection.use(sock)
    connection.authenticate()
    connection.send(GroupMessage(GroupMessageKind.HELLO, group.rank, "", where["token"].encode()))
    try:
        while not await _is_done(accepted):
            if not group.waiting or await io_threads().run(_published, store, name) != where:
                break
    finally:
        if not accepted.done():
            connection.close()
    return accepted.result()


async def _is_done(future: asyncio.Future[bool]) -> bool:
    return bool((await asyncio.wait([future], timeout=_POLL_S))[0])
