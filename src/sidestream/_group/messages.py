"""The messages between ranks: length-prefixed, over one connection, without pickle."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from ..errors import CorruptCheckpointError

__all__ = ["GroupMessage", "GroupMessageKind", "MessageDecoder", "encode_message"]

_HEAD = struct.Struct("!IQBB")  # bytes that follow, operation, kind, length of the step's name
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
    step: str
    payload: bytes


def encode_message(message: GroupMessage) -> bytes:
    """Return the bytes of ``message``. Raises ``ValueError`` if it is too large."""
    name = message.step.encode()
    nbytes = len(name) + len(message.payload)
    if nbytes > _MAX_BYTES:
        raise ValueError(f"a message of {nbytes} bytes between ranks; {_MAX_BYTES} are the limit")
    return b"".join((_HEAD.pack(nbytes, message.op, message.kind, len(name)), name, message.payload))


class MessageDecoder:
    """Decodes messages from a stream of bytes that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.authenticated = False

    def authenticate(self) -> None:
        """Accept large messages: the peer has shown the token of the group."""
        self.authenticated = True

    def feed(self, piece: bytes) -> Iterator[GroupMessage]:
        """Yield the messages that are complete now. Raises ``CorruptCheckpointError`` if the bytes are not of this
        protocol."""
        self._buffer += piece
        start = 0
        try:
            while len(self._buffer) - start >= _HEAD.size:
                nbytes, op, kind, name_bytes = _HEAD.unpack_from(self._buffer, start)
                if nbytes > (_MAX_BYTES if self.authenticated else _MAX_HELLO_BYTES) or name_bytes > nbytes:
                    raise CorruptCheckpointError(
                        "a connection to this rank sent data that is not of sidestream's protocol"
                    )
                body = start + _HEAD.size
                if len(self._buffer) - body < nbytes:
                    return
                start = body + nbytes
                yield _message(self._buffer, op, kind, body, name_bytes, start)
        finally:
            del self._buffer[:start]


def _message(buffer: bytearray, op: int, kind: int, body: int, name_bytes: int, end: int) -> GroupMessage:
    try:
        name = buffer[body : body + name_bytes].decode("ascii")
        return GroupMessage(GroupMessageKind(kind), op, name, bytes(memoryview(buffer)[body + name_bytes : end]))
    except ValueError:
        raise CorruptCheckpointError(
            "a connection to this rank sent data that is not of sidestream's protocol"
        ) from None
