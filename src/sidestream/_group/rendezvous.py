"""Connecting the ranks of a process group: once for each group, through the store that the group was made with.

Rank 0 listens and publishes its address with a token. The other ranks read both from the store, connect, and send the
token. The process group itself is not used, so that no message can interfere with the collectives of the training.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

from .._runtime.torch_probes import group_store
from ..errors import InvalidOptionError, SidestreamError
from ..options import RANK_WAIT_S, GroupChoice, check_seconds
from .connections import Connection, GroupMessage, GroupMessageKind, close_in_children, connection_thread
from .operation import Deadline, Operation, RankGroup, remedy
from .rank_group import OtherRank, Rank0

__all__ = ["Member", "deadline_of", "group_of"]

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
        self._waiting: list[Operation] = []  # begun before the connections exist
        self._lock = threading.Lock()

    def begin(self, kind: str, deadline: Deadline, rank_wait_s: float = RANK_WAIT_S) -> Operation:
        """Begin an operation. Does not block. The first operation establishes the connections. An invalid
        ``rank_wait_s`` is accepted here: it is refused later, on behalf of all ranks."""
        rank_wait_s = _accepted("rank_wait_s", rank_wait_s, RANK_WAIT_S)
        operation = self.group.begin(kind, deadline, rank_wait_s)
        operation.membership = self
        with self._lock:
            # The call must not block, and the store of a process group does. So operations begin before the connections
            # exist: their messages are kept, and a thread connects.
            if self._connected:
                return operation
            self._waiting.append(operation)
            if not self._connecting:
                self._connecting = True
                threading.Thread(target=self._connect, name="sidestream-rendezvous", daemon=True).start()
        return operation

    def _connect(self) -> None:
        """Establish the connections. Runs in a thread of its own."""
        failure: Exception | None = None
        try:
            if isinstance(self.group, Rank0):
                _listen(self.group, self._store, self._name)
            elif isinstance(self.group, OtherRank):
                _connect_to_rank_0(self.group, self._store, self._name, self._fail_late)
        except _NobodyWaits:  # the next operation has a thread of its own
            return
        except Exception as error:
            failure = error
        with self._lock:
            self._connecting, self._connected = False, failure is None
            waiting, self._waiting = self._waiting, []
        if failure is None:
            self._store = None
            return
        for operation in waiting:
            if isinstance(self.group, Rank0):
                operation.report(failure)
            else:
                self._fail(operation, f"{type(failure).__name__}: {failure}")

    def _fail_late(self, why: str) -> None:
        """End the operations that have waited for their time limit, with the reason ``why``. Raises ``_NobodyWaits`` if
        no other operation waits."""
        now = time.monotonic()
        with self._lock:
            late = [one for one in self._waiting if now - one.began_at >= _limit_of(one)[1]]
            self._waiting = [one for one in self._waiting if one not in late]
            self._connecting = bool(self._waiting)
            ends = not self._connecting
        for operation in late:
            limit, limit_s = _limit_of(operation)
            self._fail(operation, f"SidestreamError: {why} (within {limit}={limit_s:g}); {remedy(operation.kind)}")
        if ends:
            raise _NobodyWaits

    def _fail(self, operation: Operation, why: str) -> None:
        group, number = self.group, operation.number
        assert isinstance(group, OtherRank)
        connection_thread().post(lambda: group.not_connected(number, why))


class _NobodyWaits(Exception):
    """No operation waits for the connection to rank 0."""


def _limit_of(operation: Operation) -> tuple[str, float]:
    """Return how long an operation waits for the connection to rank 0, in seconds, after the name of the limit."""
    timeout_s = operation.deadline.timeout_s
    if operation.rank_wait_s < timeout_s:
        return "rank_wait_s", operation.rank_wait_s
    return "timeout_s", timeout_s


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
            # The member is freed when the process group and all operations are gone. Then the connections are closed,
            # by a post, because a finalizer may run in any thread.
            weakref.finalize(member, _shut, group).atexit = False
        return member


def _shut(group: RankGroup) -> None:
    connection_thread().post(group.shut)


# --- rank 0 --------------------------------------------------------------------------------------------------------


class _Listener:
    """The listening socket of rank 0. It is closed when all ranks are connected, so that a rank of a later group that
    reads an old address is refused and reads again. Until then it keeps the ``store``, which may be served by this
    process. Methods other than ``__init__`` run in the connection thread."""

    def __init__(self, group: Rank0, store: Any) -> None:
        self._group = group
        self._store = store
        self._expected = set(range(1, group.world))
        self._full = False  # the process has had no descriptor left for a connection
        # On all interfaces, because the one that the ranks can reach is not known here. What connects has to show the
        # token from the store within 5 s, and may send 256 bytes until then.
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=4096)
        self._listener.setblocking(False)
        close_in_children(self._listener)
        self.port: int = self._listener.getsockname()[1]

    def open(self) -> None:
        if self._group.is_shut:
            self.close()
            return
        self._group.stop_listening = self.close
        self._listen()

    def _listen(self) -> None:
        if self._listener.fileno() != -1:
            connection_thread().register(self._listener, selectors.EVENT_READ, lambda _: self._accept())

    def close(self) -> None:
        connection_thread().unregister(self._listener)
        self._listener.close()
        self._store = None

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NONE_LEFT:  # the connection stays in the queue, so the socket stays ready
                connection_thread().unregister(self._listener)
                connection_thread().post_at(time.monotonic() + _POLL_S, self._listen)
                if not self._full:
                    _log.warning("rank 0 cannot accept connections of other ranks, and tries again: %s", error)
                self._full = True
            return  # otherwise the peer has closed its connection again
        connection = Connection(connection_thread(), sock)
        connection.on_message = lambda message: self._greeted(connection, message)
        connection_thread().post_at(time.monotonic() + _CONNECT_S, lambda: _expect_greeting(connection))

    def _greeted(self, connection: Connection, message: GroupMessage) -> None:
        rank, token = message.op, self._group.token.encode()
        known = message.kind is GroupMessageKind.HELLO and 0 < rank < self._group.world
        if not known or not hmac.compare_digest(message.payload, token):
            connection.close("the peer is not a rank of this group")
            return
        # In this order. The peer may send large messages from here on, its connection is in place, and then it is
        # answered. A rank that has the answer may use the connection at once.
        connection.authenticate()
        self._group.connected(rank, connection)
        connection.send(GroupMessage(GroupMessageKind.HELLO, 0))
        if connection.open:
            self._expected.discard(rank)
        if not self._expected:
            self.close()


def _listen(group: Rank0, store: Any, name: str) -> None:
    listener = _Listener(group, store)
    connection_thread().post(listener.open)
    where = {"token": group.token, "port": listener.port, "host": _host(), "addresses": list(_addresses())}
    try:
        store.set(name, json.dumps(where))
    except BaseException:
        connection_thread().post(listener.close)
        raise


def _expect_greeting(connection: Connection) -> None:
    if connection.open and not connection.authenticated:
        connection.close("the peer has sent no token")


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


def _connect_to_rank_0(group: OtherRank, store: Any, name: str, not_yet: Callable[[str], None]) -> None:
    """Connect to rank 0. Polls, because a blocking read of the store would block all other users of the store in this
    process, and calls ``not_yet`` after each attempt with the reason why it failed. An address in the store may be left
    from an earlier group, so it is read again after a failure."""
    why = "rank 0 has not begun anything"
    while True:
        if store.check([name]):
            where = json.loads(store.get(name))
            for address in _addresses_in(where):
                try:
                    sock = socket.create_connection((address, where["port"]), timeout=_CONNECT_S)
                except OSError as error:
                    why = f"rank 0 cannot be reached at {address}: {error}"
                    continue
                if _handshake(group, sock, where["token"], partial(_is_current, store, name, where, address, not_yet)):
                    return
                why = f"the server at {address} is not rank 0 of this group"
        not_yet(why)
        time.sleep(_POLL_S)


def _is_current(store: Any, name: str, where: dict[str, Any], address: str, not_yet: Callable[[str], None]) -> bool:
    """Return whether the store still has this address of rank 0, which does not answer."""
    not_yet(f"the server at {address} does not answer")
    return bool(json.loads(store.get(name)) == where)


def _addresses_in(where: dict[str, Any]) -> list[str]:
    if where["host"] == _host():
        return ["127.0.0.1"]
    addresses: list[str] = where["addresses"]
    if not addresses:
        raise SidestreamError(
            "rank 0 found no address of its machine that other ranks can reach: set MASTER_ADDR on rank 0 to a name or "
            "address that is not a loopback address"
        )
    return addresses


def _handshake(group: OtherRank, sock: socket.socket, token: str, goes_on: Callable[[], bool]) -> bool:
    """Send the token and return whether rank 0 has accepted it. While there is no answer ``goes_on`` is called; when it
    returns False or raises, the connection is closed. Not earlier: rank 0 may have received the token, and takes a
    connection that is closed after that for the end of this process."""
    welcome: Future[bool] = Future()
    opened: list[Connection] = []

    def welcomed(connection: Connection) -> None:
        group.connected(connection, token)
        welcome.set_result(True)

    def begin() -> None:
        connection = Connection(connection_thread(), sock)
        opened.append(connection)
        connection.authenticate()
        connection.on_message = lambda _: welcomed(connection)
        connection.on_close = lambda _: welcome.set_result(False)
        connection.send(GroupMessage(GroupMessageKind.HELLO, group.rank, "", token.encode()))

    def end() -> None:
        if not welcome.done():
            opened[0].close("rank 0 does not answer")

    connection_thread().post(begin)
    try:
        while not _is_done(welcome) and goes_on():
            pass
    finally:
        connection_thread().post(end)
    return welcome.result()


def _is_done(welcome: Future[bool]) -> bool:
    return bool(wait([welcome], _POLL_S).done)
