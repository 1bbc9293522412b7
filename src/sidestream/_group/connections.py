"""The connections between ranks.

The body of a message begins with the name of the step.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from .._runtime.descriptors import close_in_children
from .._runtime.messages import NOT_A_MESSAGE, Message, MessageDecoder, message_head
from ..errors import CorruptCheckpointError

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


_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))


# Connections of our own, and not a group of gloo: a collective ends when all ranks have come or its time is over, and
# cannot be taken back. A closed socket is noticed in milliseconds, and a message names the operation that it belongs
# to.
class Connection(asyncio.Protocol):
    """One connection, on the operation loop, which calls ``on_message`` and ``on_close``."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._decoder = MessageDecoder(_MAX_HELLO_BYTES)
        self.authenticated = False
        self.on_message: Callable[[GroupMessage], None]
        self.on_close: Callable[[], object] = lambda: None
        self.open = False

    async def use(self, sock: socket.socket) -> None:
        """Send and receive over ``sock``. ``on_message`` is set already."""
        close_in_children(sock)
        sock.setblocking(False)
        with suppress(OSError):  # a socket pair has none of these options
            # asyncio does this too, but not for sockets that were made without a protocol.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # A process that ends closes its connections, and its peers notice it in milliseconds. A machine that loses
            # power closes nothing: then the probes find it, after some 20 s.
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)

    def authenticate(self) -> None:
        """Accept large messages: the peer has shown the token of the group."""
        self.authenticated = True
        self._decoder.most_bytes = _MAX_BYTES

    def send(self, message: GroupMessage) -> None:
        if self.open:
            # What the socket does not take waits in the transport, which has no limit. One slow rank then delays no
            # message to another.
            self._transport.write(encode_message(message))

    def close(self) -> None:
        if self.open:
            # Before ``on_close``, which may send to this connection and close it again.
            self.open = False
            self._transport.abort()
            self.on_close()

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.open = True

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                if self.open:
                    self.on_message(decode_message(message))
        except CorruptCheckpointError:  # the peer is not one of ours, or of another version
            self.close()

    def eof_received(self) -> None:
        self.close()  # or the transport would first wait until it has sent everything

    def connection_lost(self, _: Exception | None) -> None:
        self.close()
