"""The connections between ranks, and the one thread of a process that reads, writes and closes all of them.

The body of a message begins with the name of the step.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

from .._runtime.messages import NOT_A_MESSAGE, Message, MessageDecoder, message_head
from ..errors import CorruptCheckpointError

__all__ = [
    "Connection",
    "ConnectionThread",
    "GroupMessage",
    "GroupMessageKind",
    "close_in_children",
    "connection_thread",
]


_MAX_BYTES = 1 << 30
_MAX_HELLO_BYTES = 256  # the limit for a connection that is not authenticated yet


class GroupMessageKind(IntEnum):
    """The kinds of messages."""

    HELLO = 1
    """The token and the rank: the first message of a connection. Rank 0 answers with an empty one."""
    DATA = 2
    """The part of a step that a rank contributes."""
    ANSWER = 3
    """The result that rank 0 has made from all parts."""
    FAILED = 4
    """A rank cannot continue the operation."""
    STOP = 5
    """From rank 0: a rank has failed. Stop working, and answer with STOPPED."""
    STOPPED = 6
    """This rank has stopped."""
    VERDICT = 7
    """From rank 0: the failures of the operation, the same to all ranks."""
    BEGUN = 8
    """A rank has begun the operation: its kind, and how long the rank waits for the others."""
    MISSING = 9
    """From rank 0: the ranks that have not begun the operation, although others have waited for a while."""
    START_OVER = 10
    """From rank 0, in place of a verdict: all ranks have stopped, and start over."""


class GroupMessage(NamedTuple):
    """One message about operation number ``op``. ``step`` names the step of a DATA or ANSWER message."""

    kind: GroupMessageKind
    op: int
    step: str = ""
    payload: bytes = b""


def encode_message(message: GroupMessage) -> bytes:
    """Return the bytes of ``message``. Raises ``ValueError`` if it is too large."""
    name = message.step.encode()
    nbytes = 1 + len(name) + len(message.payload)
    if nbytes > _MAX_BYTES:
        raise ValueError(f"a message of {nbytes} bytes between ranks; {_MAX_BYTES} are the limit")
    return b"".join((message_head(message.kind, message.op, nbytes), bytes((len(name),)), name, message.payload))


def decode_message(message: Message) -> GroupMessage:
    """Return ``message`` with the name of its step. Raises ``CorruptCheckpointError`` if it is not of this protocol."""
    body = message.body
    end = 1 + body[0] if body else 1
    try:
        # The peer may be of another version, or not one of ours at all. Such a connection is closed, and no other one
        # is affected.
        if end > len(body):
            raise ValueError("it ends within the name of the step")
        return GroupMessage(GroupMessageKind(message.kind), message.number, body[1:end].decode("ascii"), body[end:])
    except ValueError:
        raise CorruptCheckpointError(NOT_A_MESSAGE) from None


_log = logging.getLogger("sidestream")

_READ_BYTES = 1 << 20
_MAX_WAIT_S = 3600.0  # a selector refuses more than 24 days
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))


class ConnectionThread:
    """A thread that runs callbacks: those that other threads post, those whose time has come, and those of sockets that
    are ready."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._wakeup, receiver = socket.socketpair()
        self._wakeup.setblocking(False)
        receiver.setblocking(False)
        self._selector.register(receiver, selectors.EVENT_READ, lambda _: self._drain_wakeups(receiver))
        # Posts are appended without a lock, which a finalizer or a signal handler could find taken. ``_wakeup`` only
        # ends a wait in ``select``: if it is full, the thread has been woken up already.
        self._work: deque[Callable[[], None]] = deque()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        threading.Thread(target=self._run, name="sidestream-ranks", daemon=True).start()

    def post(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread, after earlier posts. May be called in any thread."""
        self._work.append(work)
        with suppress(BlockingIOError):  # the thread has been woken up already
            self._wakeup.send(b"!")

    def post_at(self, when: float, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread at ``when`` (``time.monotonic`` seconds) or later. May be called in any thread."""
        self.post(lambda: heapq.heappush(self._due, (when, next(self._count), work)))

    def register(self, sock: socket.socket, events: int, arrived: Callable[[int], None]) -> None:
        """Call ``arrived`` with the events of ``sock`` that occur. Called in the thread."""
        try:
            self._selector.modify(sock, events, arrived)
        except KeyError:
            self._selector.register(sock, events, arrived)

    def unregister(self, sock: socket.socket) -> None:
        """Stop watching ``sock``. Called in the thread."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def _drain_wakeups(self, receiver: socket.socket) -> None:
        with suppress(BlockingIOError):
            while receiver.recv(4096):
                pass

    def _run(self) -> None:
        while True:
            timeout = _MAX_WAIT_S if not self._due else max(0.0, self._due[0][0] - time.monotonic())
            # Sockets first, then timers, then posts. A message that has arrived is handled before a timer that judges
            # the rank that sent it to be late.
            ready = self._selector.select(0.0 if self._work else min(timeout, _MAX_WAIT_S))
            for key, events in ready:
                self._guarded(lambda key=key, events=events: key.data(events))  # type: ignore[misc]
            while self._due and self._due[0][0] <= time.monotonic():
                self._guarded(heapq.heappop(self._due)[2])
            while self._work:
                self._guarded(self._work.popleft())

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run ``work`` and log its error: a bug in the messages of one group must not end the connections of others."""
        try:
            work()
        except Exception:
            _log.exception("control traffic between ranks: unexpected")


# Connections of our own, and not a group of gloo: a collective ends when all ranks have come or its time is over, and
# cannot be taken back. A closed socket is noticed in milliseconds, and a message names the operation that it belongs
# to.
class Connection:
    """One connection. All methods run in the connection thread, which also calls ``on_message`` and ``on_close``."""

    def __init__(self, thread: ConnectionThread, sock: socket.socket) -> None:
        self._thread = thread
        self._sock = sock
        self._out: deque[memoryview] = deque()
        self._decoder = MessageDecoder(_MAX_HELLO_BYTES)
        self.authenticated = False
        self.on_message: Callable[[GroupMessage], None] = _ignore
        self.on_close: Callable[[str], None] = _ignore
        self.open = True
        close_in_children(sock)
        sock.setblocking(False)
        with suppress(OSError):  # a socket pair has none of these options
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # A process that ends closes its connections, and its peers notice it in milliseconds. A machine that loses
            # power closes nothing: then the probes find it, after some 20 s.
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        thread.register(sock, selectors.EVENT_READ, self._ready)

    def authenticate(self) -> None:
        """Accept large messages: the peer has shown the token of the group."""
        self.authenticated = True
        self._decoder.most_bytes = _MAX_BYTES

    def send(self, message: GroupMessage) -> None:
        if self.open:
            # The socket does not block, and what it does not take waits here. One slow rank then delays no message to
            # another.
            self._out.append(memoryview(encode_message(message)))
            self._write()

    def close(self, why: str) -> None:
        if not self.open:
            return
        # Before ``on_close``, which may send to this connection and close it again.
        self.open = False
        self._thread.unregister(self._sock)
        self._sock.close()
        self._out.clear()
        self.on_close(why)

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._read()
        if self.open and events & selectors.EVENT_WRITE:
            self._write()

    def _read(self) -> None:
        try:
            piece = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"its connection broke: {error.strerror or error}")
            return
        if not piece:
            self.close("its connection was closed")
            return
        try:
            for message in self._decoder.feed(piece):
                self.on_message(decode_message(message))
        except CorruptCheckpointError as error:
            self.close(str(error))

    def _write(self) -> None:
        try:
            while self._out:
                sent = self._sock.send(self._out[0])
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                else:
                    self._out.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(f"its connection broke: {error.strerror or error}")
            return
        # Watched for writing only while something waits: a socket can nearly always be written to, and ``select`` would
        # return at once, for ever.
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._thread.register(self._sock, wanted, self._ready)


def _ignore(_: Any) -> None:
    """Drop a message: no callback has been set yet."""


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Close ``sock`` in forked children. A child (a worker of a data loader) would keep the connection open after this
    process has died, so that its peers would not notice the death."""
    _sockets.add(sock)


_running: ConnectionThread | None = None
_running_lock = threading.Lock()


def connection_thread() -> ConnectionThread:
    """Return the connection thread of this process; a forked child has its own."""
    global _running
    with _running_lock:
        if _running is None or _running.pid != os.getpid():
            _running = ConnectionThread()
        return _running


def _after_fork() -> None:
    # A new lock too: a thread of the parent may have held the old one at the fork, and that thread does not exist here.
    global _running, _running_lock
    _running, _running_lock = None, threading.Lock()
    for sock in list(_sockets):
        if sock.fileno() >= 0:
            # Not ``shutdown``, which would end the connection of the parent too.
            os.close(sock.detach())
    _sockets.clear()


os.register_at_fork(after_in_child=_after_fork)
