"""A proxy between a client and an object store that counts, breaks and tells: real sockets on both sides.

Every ``Lane`` is a port of its own with its own log and its own faults, so that many trials can run at once. All lanes
are served by one thread.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["FAULTS", "REFUSALS", "Exchange", "Fault", "Lane", "Proxy", "proxy"]

Fault = Literal[
    # The server never hears of the request, or not all of it.
    "503", "500", "slow-down", "409", "412", "reset-before", "reset-in-request", "stall-before", "stall-in-request",
    # The server has done what was asked.
    "lost-reset", "lost-500", "lost-stall", "truncated", "reset-in-answer", "stall-in-answer", "trickle",
]  # fmt: skip
FAULTS: tuple[Fault, ...] = get_args(Fault)

_REASONS = {
    "503": (503, "ServiceUnavailable", "Please try again."),
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "lost-500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "slow-down": (503, "SlowDown", "Please reduce your request rate."),
    "409": (409, "ConditionalRequestConflict", "A conflicting operation occurred. Please try again."),
    "412": (412, "PreconditionFailed", "At least one of the preconditions you specified did not hold."),
}
REFUSALS = frozenset(_REASONS)
_READ = 1 << 18
_HOP_HEADERS = (b"connection:", b"expect:", b"keep-alive:", b"proxy-connection:")


@dataclass(slots=True)
class Exchange:
    """One request and what came of it."""

    index: int
    """From 1 on, in the order in which the heads arrived."""
    operation: str
    """As S3 calls it."""
    name: str
    """The last component of the key."""
    method: str
    target: str
    headers: dict[str, str] = field(repr=False)
    sent: int = 0
    """Bytes of content from the client."""
    received: int = 0
    """Bytes of content for the client."""
    status: int = 0
    """As the client was told; 0 where it was told nothing."""
    fault: Fault | None = None


class Lane:
    """A port of the proxy.

    ``decide`` is asked when the head of a request has arrived and returns what is to go wrong with it; ``answered`` is
    told when the server's answer has come and the client knows nothing of it yet. Both are called in the proxy's
    thread. A request for which ``hold`` says so is kept back until it no longer does.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.log: list[Exchange] = []
        self.decide: Callable[[Exchange], Fault | None] = lambda _: None
        self.answered: Callable[[Exchange], object] = lambda _: None
        self.hold: Callable[[Exchange], bool] = lambda _: False

    @property
    def operations(self) -> list[str]:
        return [exchange.operation for exchange in self.log]

    def of(self, *operations: str) -> list[Exchange]:
        return [exchange for exchange in self.log if exchange.operation in operations]

    def break_at(self, index: int, fault: Fault, times: int = 1) -> None:
        """Let the requests from ``index`` on go wrong, ``times`` of them."""
        self.decide = lambda exchange: fault if index <= exchange.index < index + times else None


class Proxy:
    """Serves lanes in front of the server on ``port``. Made by ``proxy``."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="fault-proxy", daemon=True)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """A new port, for the length of the block. Afterwards all its connections are cut."""
        serving = asyncio.run_coroutine_threadsafe(_open(self._server), self._loop).result(30)
        try:
            yield serving.lane
        finally:
            asyncio.run_coroutine_threadsafe(serving.aclose(), self._loop).result(30)


@contextmanager
def proxy(host: str, port: int) -> Iterator[Proxy]:
    """A proxy in front of ``host:port``."""
    serving = Proxy(host, port)
    serving._thread.start()
    try:
        yield serving
    finally:
        serving._loop.call_soon_threadsafe(serving._loop.stop)
        serving._thread.join(30)
        serving._loop.close()


async def _open(server: tuple[str, int]) -> _Serving:
    serving = _Serving(server)
    await serving.listen()
    return serving


class _Cut(Exception):
    """This connection is at its end."""


class _Serving:
    """One lane at work."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._upstream = server
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def listen(self) -> None:
        self._listening = await asyncio.start_server(self._accept, self._upstream[0], 0, limit=1 << 20)
        self.lane = Lane(self._listening.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        self._listening.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)  # transports close in callbacks

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with suppress(_Cut, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                exchange = _exchange(len(self.lane.log) + 1, head)
                self.lane.log.append(exchange)
                exchange.fault = self.lane.decide(exchange)
                await self._exchange(exchange, head, reader, writer)
        writer.close()

    async def _exchange(
        self, exchange: Exchange, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fault = exchange.fault
        if fault == "reset-before":
            _reset(writer)
        if fault == "stall-before":
            await _stall()
        if exchange.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault in REFUSALS and fault != "lost-500":
            async for _ in _content(exchange.headers, reader):
                pass
            await _refuse(exchange, fault, writer)
            return
        while self.lane.hold(exchange):
            await asyncio.sleep(0.005)
        upstream_reader, upstream = await asyncio.open_connection(*self._upstream, limit=1 << 20)
        try:
            upstream.write(_forwarded(head))
            await self._send(exchange, reader, writer, upstream)
            await self._answer(exchange, upstream_reader, writer)
        finally:
            upstream.transport.abort()

    async def _send(
        self,
        exchange: Exchange,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream: asyncio.StreamWriter,
    ) -> None:
        half = int(exchange.headers.get("content-length", 0)) // 2
        async for raw, nbytes in _content(exchange.headers, reader):
            if exchange.fault in ("reset-in-request", "stall-in-request") and exchange.sent + nbytes > half:
                if exchange.fault == "reset-in-request":
                    _reset(writer)
                await _stall()
            exchange.sent += nbytes
            upstream.write(raw)
            await upstream.drain()
        if exchange.fault == "reset-in-request":  # there was nothing in it to be reset in
            _reset(writer)
        if exchange.fault == "stall-in-request":
            await _stall()

    async def _answer(self, exchange: Exchange, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await upstream.readuntil(b"\r\n\r\n")
        while head.split(b" ", 2)[1] == b"100":
            head = await upstream.readuntil(b"\r\n\r\n")
        status, headers = int(head.split(b" ", 2)[1]), _headers(head)
        if exchange.method == "HEAD" or status in (204, 304):
            headers = {"content-length": "0"}
        fault = exchange.fault
        if fault is not None and fault.startswith("lost-"):
            async for _ in _content(headers, upstream):
                pass
        self.lane.answered(exchange)
        if fault == "lost-reset":
            _reset(writer)
        if fault == "lost-stall":
            await _stall()
        if fault == "lost-500":
            await _refuse(exchange, fault, writer)
            return
        exchange.status = status
        answer = _forwarded(head, closing=False)
        if fault == "trickle":
            await _trickle(answer, writer)
        whole = int(headers.get("content-length", 0))
        if fault in ("truncated", "reset-in-answer", "stall-in-answer") and whole < 2:
            await _broken_off(exchange, answer[: len(answer) // 2], writer)
        writer.write(answer)
        async for raw, nbytes in _content(headers, upstream):
            if fault in ("truncated", "reset-in-answer", "stall-in-answer") and exchange.received + nbytes > whole // 2:
                await _broken_off(exchange, raw[: max(whole // 2 - exchange.received, 0)], writer)
            exchange.received += nbytes
            writer.write(raw)
            await writer.drain()
        await writer.drain()


# --- faults ---


def _reset(writer: asyncio.StreamWriter) -> None:
    """The client sees a connection reset, not an end."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    raise _Cut


async def _stall() -> None:
    """Until the lane is closed."""
    await asyncio.get_running_loop().create_future()


async def _trickle(answer: bytes, writer: asyncio.StreamWriter) -> None:
    for at in range(len(answer)):
        writer.write(answer[at : at + 1])
        await writer.drain()
        await asyncio.sleep(1)
    raise _Cut


async def _broken_off(exchange: Exchange, last: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(last)
    exchange.received += len(last)
    await writer.drain()
    if exchange.fault == "reset-in-answer":
        _reset(writer)
    if exchange.fault == "stall-in-answer":
        await _stall()
    raise _Cut


async def _refuse(exchange: Exchange, fault: str | None, writer: asyncio.StreamWriter) -> None:
    exchange.status, code, message = _REASONS[fault or ""]
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    content = b"" if exchange.method == "HEAD" else text.encode()
    headers = f"Content-Type: application/xml\r\nContent-Length: {len(content)}\r\n\r\n"
    head = f"HTTP/1.1 {exchange.status} {code}\r\n{headers}"
    writer.write(head.encode() + content)
    await writer.drain()


# --- HTTP, as little of it as both sides use ---


def _exchange(index: int, head: bytes) -> Exchange:
    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    headers = _headers(head)
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    path = unquote(parts.path).strip("/")
    bucket = "/" not in path
    return Exchange(index, _operation(method, query, bucket, headers), path.rpartition("/")[2], method, target, headers)


def _operation(method: str, query: dict[str, list[str]], bucket: bool, headers: dict[str, str]) -> str:
    if "uploads" in query:
        return "CreateMultipartUpload" if method == "POST" else "ListMultipartUploads"
    if "uploadId" in query:
        return {
            "PUT": "UploadPart",
            "POST": "CompleteMultipartUpload",
            "DELETE": "AbortMultipartUpload",
            "GET": "ListParts",
        }[method]
    if "delete" in query:
        return "DeleteObjects"
    if bucket:
        return {"GET": "ListObjects", "HEAD": "HeadBucket", "PUT": "CreateBucket"}.get(method, f"{method} bucket")
    if method == "PUT" and "x-amz-copy-source" in headers:
        return "CopyObject"
    return {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject"}.get(method, method)


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, value in pairs}


def _forwarded(head: bytes, closing: bool = True) -> bytes:
    """Without what concerns one connection only. Nothing of that is covered by signatures."""
    lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith(_HOP_HEADERS)]
    return b"\r\n".join([*lines, *([b"Connection: close"] if closing else [])]) + b"\r\n\r\n"


async def _content(headers: dict[str, str], reader: asyncio.StreamReader):  # type: ignore[no-untyped-def]
    """Pairs of raw bytes, to be passed on as they are, and how many bytes of content they carry."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line + await reader.readexactly(size + 2), size
            if size == 0:
                return
    left = int(headers.get("content-length", 0))
    while left:
        raw = await reader.read(min(left, _READ))
        if not raw:
            raise _Cut
        left -= len(raw)
        yield raw, len(raw)
