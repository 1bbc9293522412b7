"""``Link``: messages of JSON, and descriptors, between a publisher and a subscriber, on the operation loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from .._runtime.descriptors import Descriptor, no_fork
from .._runtime.messages import NOT_A_MESSAGE, Message, MessageDecoder, message_head
from ..errors import CorruptCheckpointError

PROTOCOL = 1
_MOST_BYTES = 64 << 10
_MOST_DESCRIPTORS = 2


class LinkMessageKind(IntEnum):
    """The kinds of messages. The number of a message is that of the protocol."""

    HELLO = 1
    """From a subscriber, first: its name, its id, which stays for all its connections, and the channel."""
    VERSION = 2
    """From the publisher: what the channel points at, with two descriptors, of the image and of its checksums."""
    RECEIVED = 3
    """From a subscriber: the next version may be sent."""
    APPLIED = 4
    """From a subscriber: it serves a version."""
    REFUSED = 5
    """From a subscriber: it does not serve a version, and why."""


class LinkMessage(NamedTuple):
    kind: LinkMessageKind
    content: Mapping[str, Any]
    descriptors: Sequence[Descriptor] = ()


def encoded(message: LinkMessage) -> bytes:
    """Return the bytes of a message. Raises ``ValueError`` if it is too large."""
    body = json.dumps({**message.content, "descriptors": len(message.descriptors)}).encode()
    if len(body) > _MOST_BYTES:
        raise ValueError(f"a message of {len(body)} bytes, and {_MOST_BYTES} are the limit")
    return message_head(message.kind, PROTOCOL, len(body)) + body


class Link:
    """One connection. One task receives, and one sends at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = MessageDecoder(_MOST_BYTES)
        self._messages: deque[Message] = deque()
        self._descriptors: deque[Descriptor] = deque()
        self._sending = asyncio.Lock()

    async def send(self, message: LinkMessage) -> None:
        """Send a message, when the other side has room for it. Raises ``OSError`` if the connection has ended."""
        raw = encoded(message)
        async with self._sending:
            sent = 0
            try:
                while sent < len(raw):
                    try:
                        # The descriptors go with the first byte.
                        numbers = [] if sent else [one.fileno() for one in message.descriptors]
                        sent += socket.send_fds(self._sock, [raw[sent:]], numbers)
                    except BlockingIOError:
                        await ready(self._sock, "writer")
            except BaseException:
                if sent:  # what came next would be taken for the rest of this message
                    self.end()
                raise

    async def receive(self) -> LinkMessage | None:
        """Wait for the next message. None: the connection has ended. Raises ``OSError``, and ``CorruptCheckpointError``
        for what is not of this protocol."""
        while not self._messages:
            try:
                with no_fork():
                    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                    data, numbers, _, _ = socket.recv_fds(self._sock, _MOST_BYTES, _MOST_DESCRIPTORS, flags)
                    self._descriptors.extend(map(Descriptor, numbers))
            except BlockingIOError:
                await ready(self._sock, "reader")
                continue
            if not data:
                return None
            self._messages.extend(self._decoder.feed(data))
            if len(self._descriptors) > _MOST_DESCRIPTORS * (len(self._messages) + 1):
                raise CorruptCheckpointError(NOT_A_MESSAGE)
        return self._decoded(self._messages.popleft())

    def _decoded(self, message: Message) -> LinkMessage:
        try:
            if message.number != PROTOCOL:
                raise CorruptCheckpointError(
                    f"the other side speaks protocol {message.number}, and this version of sidestream {PROTOCOL}"
                )
            content = json.loads(message.body)
            descriptors = [self._descriptors.popleft() for _ in range(content.pop("descriptors"))]
            return LinkMessage(LinkMessageKind(message.kind), content, descriptors)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(NOT_A_MESSAGE) from None

    def end(self) -> None:
        """End the connection: both sides notice it, and every wait for it ends."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """End the connection, and close the socket when nothing is sent any more."""
        self.end()
        async with self._sending:
            self._sock.close()
        for one in self._descriptors:
            one.close()


async def ready(sock: socket.socket, side: Literal["reader", "writer"]) -> None:
    """Wait until a socket can be read from, or written to."""
    loop = asyncio.get_running_loop()
    add, remove = (loop.add_reader, loop.remove_reader) if side == "reader" else (loop.add_writer, loop.remove_writer)
    found = loop.create_future()
    add(sock, _resolve, found)
    try:
        await found
    finally:
        remove(sock)


def _resolve(found: asyncio.Future[None]) -> None:
    if not found.done():
        found.set_result(None)
