"""Messages between the trainer and its writer process, over a socket pair.

Plain values are sent as JSON with tags for types that JSON lacks, memory as a descriptor beside the message that names
it.
"""

from __future__ import annotations

import array
import base64
import json
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from enum import IntEnum
from typing import Any, NamedTuple

from .. import events
from .._runtime.messages import Message, MessageDecoder, message_head

READY = struct.Struct("<IIQQQ")  # file, window, number of the memory, offset in it, bytes
UNUSED = struct.Struct("<II")  # file, window
SUMS = struct.Struct("<IQ")  # file, bytes of CRCs
_READ_BYTES = 256 << 10
_EVENTS = ("Retried", "Throttled", "SlowPart")
_MOST_BYTES = 1 << 62  # the other end is trusted
_DESCRIPTORS = 16  # at most, in one read


class WorkerMessageKind(IntEnum):
    """The kinds of messages. The ``number`` of a message is that of its request, or of its memory."""

    # from the trainer
    SETUP = 1
    SEGMENT = 2  # with a descriptor
    FORGET = 3
    WRITE = 4
    BYTES_FILE = 5
    SHARD_FILE = 6
    READY = 7
    END = 8
    CANCEL = 9
    # from the writer process
    UP = 20
    BEAT = 21
    UNUSED = 22
    FILE_DONE = 23
    DONE = 24
    FAILED = 25
    EVENT = 26


class WorkerMessage(NamedTuple):
    """One message."""

    kind: int
    number: int
    body: bytes
    descriptor: int | None = None


def with_length(head: bytes) -> bytes:
    """Return ``head``, preceded by its length, so that ``head_and_rest`` finds its end."""
    return len(head).to_bytes(4, "little") + head


def head_and_rest(body: bytes) -> tuple[bytes, memoryview]:
    """Split ``body`` into what ``with_length`` was given, and the bytes that follow."""
    end = 4 + int.from_bytes(body[:4], "little")
    return body[4:end], memoryview(body)[end:]


class Channel:
    """One end of the socket pair. Any thread may send, and one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lock = threading.Lock()
        self._decoder = MessageDecoder(_MOST_BYTES)
        # Descriptors arrive beside the bytes, and may be delivered with an earlier or a later read than the message
        # that names them. The system keeps their order, so the n-th descriptor belongs to the n-th message of this
        # kind.
        self._descriptors: deque[int] = deque()

    def send_all(self, messages: Iterable[tuple[WorkerMessageKind, int, bytes]]) -> None:
        """Send several messages in one call, so that the other end is woken up once. Large bodies have a call of their
        own, and are not copied."""
        small: list[bytes] = []
        with self._lock:
            for kind, number, body in messages:
                small.append(message_head(kind, number, len(body)))
                if len(body) < _READ_BYTES:
                    small.append(body)
                    continue
                self.socket.sendall(b"".join(small))
                self.socket.sendall(body)
                small.clear()
            self.socket.sendall(b"".join(small))

    def send(
        self, kind: WorkerMessageKind, number: int = 0, body: bytes = b"", *, descriptor: int | None = None
    ) -> None:
        """Send a message. Blocks while the other end does not read. Raises ``OSError`` if it is closed."""
        if descriptor is None:
            self.send_all([(kind, number, body)])
            return
        message = message_head(kind, number, len(body)) + body
        with self._lock:
            # The system may take a part of the message. The descriptor has gone with its first byte, so the rest is
            # sent without it.
            sent = socket.send_fds(self.socket, [message], [descriptor])
            self.socket.sendall(message[sent:])

    def set_timeout(self, seconds: float) -> None:
        """Make ``receive`` raise ``TimeoutError`` when no message has arrived for ``seconds``."""
        # An option of the socket: with a timeout of Python's, each read would poll first and acquire the GIL twice.
        parts = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, parts)

    def receive(self) -> list[WorkerMessage] | None:
        """Block until messages arrive and return them; None if the other end is closed. The caller owns their
        descriptors."""
        try:
            data, extra, _, _ = self.socket.recvmsg(_READ_BYTES, socket.CMSG_SPACE(4 * _DESCRIPTORS))
        except BlockingIOError:
            raise TimeoutError from None
        except ConnectionError:
            return None
        for level, kind, raw in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(raw[: len(raw) - len(raw) % found.itemsize])
                self._descriptors.extend(found)
        return [self._with_descriptor(one) for one in self._decoder.feed(data)] if data else None

    def _with_descriptor(self, message: Message) -> WorkerMessage:
        return WorkerMessage(
            *message, self._descriptors.popleft() if message.kind == WorkerMessageKind.SEGMENT else None
        )

    def close(self) -> None:
        self.socket.close()


class Outbox:
    """A queue of messages, some of which can wait: each wakeup costs the trainer more than the messages do."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._messages: queue.SimpleQueue[tuple[WorkerMessageKind, int, bytes]] = queue.SimpleQueue()
        self._there: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def send_later(
        self, kind: WorkerMessageKind, number: int, body: bytes, *, urgent: Callable[[], bool] = lambda: False
    ) -> None:
        """Queue a message. Neither blocks nor takes a lock, so that finalizers may call it. ``urgent`` is called after
        the message was queued; if it returns True, the queue is sent without waiting for further messages."""
        self._messages.put((kind, number, body))
        self._there.put(urgent())

    def send_now(self, kind: WorkerMessageKind, number: int, body: bytes = b"") -> None:
        """Send a message at once, after all that are queued and together with them. Raises ``OSError`` if the other end
        is closed."""
        self._send([(kind, number, body)])

    def flush(self, timeout_s: float, gather_s: float) -> bool:
        """Wait for something, and up to ``gather_s`` more for what comes with it. False if nothing has come. Raises
        ``OSError``."""
        try:
            urgent = self._there.get(timeout=timeout_s)
        except queue.Empty:
            return False
        end = time.monotonic() + gather_s
        with suppress(queue.Empty):
            while not urgent:
                urgent = self._there.get(timeout=max(0.0, end - time.monotonic()))
        self._send([])
        return True

    def _send(self, last: list[tuple[WorkerMessageKind, int, bytes]]) -> None:
        with self._lock:
            messages: list[tuple[WorkerMessageKind, int, bytes]] = []
            with suppress(queue.Empty):
                while True:
                    messages.append(self._messages.get_nowait())
            messages += last
            if messages:
                self._channel.send_all(messages)


class Unsendable(Exception):
    """A value that is not plain data. The message has its place and its type, and never the value."""


def pack(value: object) -> bytes:
    """Return plain data as bytes: None, numbers, strings, bytes, lists, tuples and mappings. Raises ``Unsendable``."""
    return json.dumps(_tagged(value, ""), separators=(",", ":")).encode()


def unpack(packed: bytes) -> Any:
    """Return the data from what ``pack`` returned."""
    return _plain(json.loads(packed))


def _tagged(value: object, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {"b": base64.b64encode(value).decode()}
    if type(value) in (list, tuple):
        found = [_tagged(one, f"{where}[{index}]") for index, one in enumerate(value)]  # type: ignore[var-annotated,arg-type]
        return {"l" if type(value) is list else "t": found}
    if isinstance(value, Mapping):
        return {
            "d": [[_tagged(key, f"{where} (a key)"), _tagged(one, f"{where}[{key!r}]")] for key, one in value.items()]
        }
    raise Unsendable(f"{where} is a {type(value).__module__}.{type(value).__qualname__}")


def _plain(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "b":
        return base64.b64decode(content)
    if tag == "d":
        return {_plain(key): _plain(one) for key, one in content}
    found = [_plain(one) for one in content]
    return found if tag == "l" else tuple(found)


def pack_event(event: events.Event) -> bytes | None:
    """Return ``event`` as bytes; None for events that the trainer emits itself."""
    name = type(event).__name__
    return pack({"event": name, **asdict(event)}) if name in _EVENTS else None


def unpack_event(packed: bytes) -> events.Event:
    """Return the event from what ``pack_event`` returned."""
    found = unpack(packed)
    name = found.pop("event")
    made: events.Event = getattr(events, name)(**found) if name in _EVENTS else events.GuaranteeLost("", str(name))
    return made
