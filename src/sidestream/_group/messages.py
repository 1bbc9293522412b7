"""What ranks say to each other, as bytes: length-prefixed frames over one connection, no pickle."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from ..errors import CorruptCheckpointError

__all__ = ["GroupMessage", "GroupMessageKind", "MessageDecoder", "encode_message"]

_HEAD = struct.Struct("!IQBB")  # bytes that follow, operation, kind, length of the step's name
_MAX_BYTES = 1 << 30
_MAX_HELLO_BYTES = 256  # nobody may say more before it has said who it is


class GroupMessageKind(IntEnum):
    HELLO = 1
    """Token and rank: the first frame of a connection. Rank 0 answers with an empty one."""
    DATA = 2
    """A rank's part of a step."""
    ANSWER = 3
    """What rank 0 made of all parts."""
    FAILED = 4
    """A rank cannot go on."""
    STOP = 5
    """Somebody cannot go on: stop working, and say so."""
    STOPPED = 6
    """This rank has stopped."""
    VERDICT = 7
    """How the operation failed, the same to all."""
    BEGUN = 8
    """A rank has begun the operation: its kind, and how long the rank waits for the others."""
    MISSING = 9
    """From rank 0: the ranks that have not begun the operation, although others have waited for a while."""
    START_OVER = 10
    """In place of a verdict: all ranks have stopped, and start over."""


class GroupMessage(NamedTuple):
    """One message about operation number ``op``."""

    kind: GroupMessageKind
    op: int
    step: str
    payload: bytes


def encode_message(frame: GroupMessage) -> bytes:
    """Raises ``ValueError`` for what is too large to be sent at once."""
    name = frame.step.encode()
    nbytes = len(name) + len(frame.payload)
    if nbytes > _MAX_BYTES:
        raise ValueError(f"a message of {nbytes} bytes between ranks; {_MAX_BYTES} are the limit")
    return b"".join((_HEAD.pack(nbytes, frame.op, frame.kind, len(name)), name, frame.payload))


class MessageDecoder:
    """Frames out of a stream of bytes that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.authenticated = False

    def authenticate(self) -> None:
        """The other side has said who it is."""
        self.authenticated = True

    def feed(self, piece: bytes) -> Iterator[GroupMessage]:
        """The frames that are complete now. Raises ``CorruptCheckpointError`` where the other side does not speak this
        language."""
        self._buffer += piece
        start = 0
        try:
            while len(self._buffer) - start >= _HEAD.size:
                nbytes, op, kind, name_bytes = _HEAD.unpack_from(self._buffer, start)
                if nbytes > (_MAX_BYTES if self.authenticated else _MAX_HELLO_BYTES) or name_bytes > nbytes:
                    raise CorruptCheckpointError("a connection to this rank does not speak sidestream's language")
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
        raise CorruptCheckpointError("a connection to this rank does not speak sidestream's language") from None
