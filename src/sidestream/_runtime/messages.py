"""The length-prefixed messages between ranks, and between a trainer and its writer process. They contain no pickle."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import CorruptCheckpointError

NOT_A_MESSAGE = "a connection to this process sent data that is not of sidestream's protocol"

_HEAD = struct.Struct("!BQQ")  # kind, number, bytes of the body


class Message(NamedTuple):
    """One message. The connection defines what ``kind`` and ``number`` mean."""

    kind: int
    number: int
    body: bytes


def message_head(kind: int, number: int, nbytes: int) -> bytes:
    """Return the bytes that precede a body of ``nbytes``."""
    return _HEAD.pack(kind, number, nbytes)


class MessageDecoder:
    """Decodes messages from a stream of bytes that arrives in pieces. ``most_bytes`` limits the body of each message,
    and may be changed between two of them."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[Message]:
        """Yield the messages that are complete now. Raises ``CorruptCheckpointError`` if a body is too large."""
        self._buffer += piece
        end = 0
        try:
            while len(self._buffer) - end >= _HEAD.size:
                kind, number, nbytes = _HEAD.unpack_from(self._buffer, end)
                if nbytes > self.most_bytes:
                    raise CorruptCheckpointError(NOT_A_MESSAGE)
                start = end + _HEAD.size
                if len(self._buffer) - start < nbytes:
                    return
                end = start + nbytes
                yield Message(kind, number, bytes(memoryview(self._buffer)[start:end]))
        finally:
            del self._buffer[:end]
