"""A publisher and a subscriber that do what they are told, and signal themselves at a point of the protocol.

    python _points.py publisher HOME
    python _points.py subscriber HOME NAME

A point is a moment of one message: before it is sent, when the socket took a part of it, after it was sent, and when
it was received and nothing was done about it yet. A connection has points, too: when it is made, before and after this
side ends it, and when it is seen that the other side has ended it. Points are counted, such as "after send APPLIED 2".
With ``POINT`` the program says "at ..." there and sends itself ``POINT_SIGNAL``; without it says all points.

Commands come as lines of JSON: a number, a verb and its arguments. The answer is "reply NUMBER JSON".
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections import Counter
from contextlib import AsyncExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from _programs import lock
from _published import say, state_of, value_in, value_of

import sidestream
from sidestream._weights import links
from sidestream._weights.links import Link, LinkMessage

KEEP, ELEMENTS = 3, 1_000
LARGE = "x" * 30_000
"""Metadata for which a small socket has no room at once."""


# --- points ---


class Points:
    """Wraps what sends and receives, and counts."""

    def __init__(self) -> None:
        self._wanted = os.environ.get("POINT", "")
        self._signal = int(os.environ.get("POINT_SIGNAL", signal.SIGKILL))
        self._counts: Counter[str] = Counter()
        self._sending: ContextVar[str] = ContextVar("sending", default="")

    def reached(self, what: str, stamp: object = "") -> None:
        self._counts[what] += 1
        point = f"{what} {self._counts[what]}"
        if not self._wanted:
            os.write(1, f"point {point}\n".encode())
        elif point == self._wanted:
            os.write(1, f"at {point} {stamp}\n".encode())
            signal.pthread_kill(threading.get_ident(), self._signal)  # this thread gets no further

    def watch(self, small: bool) -> None:
        """Wrap the functions. ``small``: sockets get room for few bytes."""
        made, send, receive, close, ready = Link.__init__, Link.send, Link.receive, Link.close, links.ready

        @functools.wraps(made)
        def make(link: Link, sock: socket.socket) -> None:
            made(link, sock)
            if small:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            self.reached("connected")

        @functools.wraps(send)
        async def sent(link: Link, message: LinkMessage) -> None:
            kind, stamp = message.kind.name, message.content.get("stamp", "")
            self.reached(f"before send {kind}", stamp)
            token = self._sending.set(kind)
            try:
                await send(link, message)
            finally:
                self._sending.reset(token)
            self.reached(f"after send {kind}", stamp)

        @functools.wraps(ready)
        async def waited(sock: socket.socket, side: Any) -> None:
            if (kind := self._sending.get()) and side == "writer":
                self._sending.set("")  # once for each message
                self.reached(f"within send {kind}")
            await ready(sock, side)

        @functools.wraps(receive)
        async def received(link: Link) -> LinkMessage | None:
            try:
                message = await receive(link)
            except OSError:
                self.reached("received end")
                raise
            self.reached("received end" if message is None else f"received {message.kind.name}")
            return message

        @functools.wraps(close)
        async def closed(link: Link) -> None:
            self.reached("before end")
            await close(link)
            self.reached("after end")

        Link.__init__, Link.send, Link.receive, Link.close = make, sent, received, closed  # type: ignore[method-assign]
        links.ready = waited


# --- the two sides ---


class PublisherProgram:
    def __init__(self, home: Path) -> None:
        self._home, self._turn, self._pending = home, asyncio.Lock(), dict[str, sidestream.PendingVersion]()
        self._publisher: Any = None

    async def _open(self) -> int:
        self._publisher = sidestream.Publisher(self._home, keep=KEEP)
        await self._publisher.__aenter__()
        return int(self._publisher.epoch)

    async def open(self) -> int:
        async with self._turn:
            return await self._open()

    async def reopen(self) -> int:
        async with self._turn:
            await self._publisher.__aexit__(None, None, None)
            return await self._open()

    async def publish(self, version: int, metadata: dict[str, Any]) -> list[str]:
        async with self._turn:
            publisher = self._publisher
            state = state_of(publisher.epoch, version, ELEMENTS)
            pending = publisher.publish(state, version=version, metadata=metadata)
            stamp = (await pending).stamp
            self._pending[stamp] = pending
            return [stamp, lock(publisher._versions.channels.held[version].image)]

    async def promote(self, version: int) -> None:
        async with self._turn:
            await self._publisher.promote("stable", version)

    async def rollback(self) -> str:
        async with self._turn:
            return str((await self._publisher.rollback("stable")).stamp)

    async def applied(self, stamp: str, count: int) -> dict[str, Any]:
        report = await self._pending[stamp].applied(count=count, timeout_s=60)
        return {"applied": sorted(report.applied), "refused": dict(report.refused), "skipped": sorted(report.skipped)}

    async def health(self) -> dict[str, Any]:
        async with self._turn:
            health = self._publisher.health()
        return {
            "epoch": health.epoch,
            "versions": sorted(health.versions),
            "spare_bytes": health.spare_bytes,
            "subscribers": dict(health.subscribers),
        }

    async def close(self) -> None:
        async with self._turn:
            self._pending.clear()
            await self._publisher.__aexit__(None, None, None)
            self._publisher = None
        gc.collect()


class SubscriberProgram:
    def __init__(self, home: Path, name: str) -> None:
        self._url, self._name = f"unix:{home}", name
        self._live: Any = sidestream.Live(state_of(0, 0, ELEMENTS))
        self._stack = AsyncExitStack()
        self._turn = asyncio.Lock()
        self._readings, self._wrong = 0, list[str]()
        self._reader: Any = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            with self._live.reading() as reading:
                found = _values(reading.tensors)
                await asyncio.sleep(0.001)
                found |= _values(reading.tensors)
                stamp = reading.stamp
            expected = value_of(0, 0) if stamp is None else value_in(stamp)
            if found != {expected}:
                self._wrong.append(f"{stamp} has {sorted(found)}")
            self._readings += 1
            del reading

    async def _enter(self) -> None:
        self._weights = await self._stack.enter_async_context(sidestream.Subscriber(self._url, name=self._name))
        self._follower = await self._stack.enter_async_context(self._weights.following(self._live, accept=self._accept))

    def _accept(self, candidate: sidestream.Candidate) -> bool:
        return candidate.metadata.get("refused_by") != self._name

    async def open(self) -> None:
        async with self._turn:
            await self._enter()

    async def reopen(self) -> None:
        async with self._turn:
            await self._stack.aclose()
            await self._enter()

    async def state(self) -> dict[str, Any]:
        async with self._turn:
            follower = self._follower.health()
        return {
            "stamp": self._live.stamp,
            "followed": follower.stamp,
            "readings": self._readings,
            "wrong": self._wrong,
            "problem": follower.problem,
            "passed_over": dict(follower.passed_over),
        }

    async def second(self) -> str | None:
        """Serve what is there in a second ``Live``, and end that."""
        live = sidestream.Live(state_of(0, 0, ELEMENTS))
        async with self._weights.following(live) as follower:
            await follower.ready(timeout_s=60)
            with live.reading() as reading:
                assert reading.stamp is not None
                assert _values(reading.tensors) == {value_in(reading.stamp)}
                return reading.stamp

    async def close(self) -> None:
        async with self._turn:
            await self._stack.aclose()
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._live = self._follower = self._weights = self._reader = None
        gc.collect()


def _values(tensors: Any) -> set[float]:
    return {value for one in tensors.values() for value in (float(one.min()), float(one.max()))}


async def obey(program: Any) -> None:
    tasks: set[asyncio.Task[None]] = set()

    async def do(number: int, verb: str, arguments: list[Any]) -> None:
        try:
            answer = await getattr(program, verb)(*arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        say(f"reply {number} {json.dumps(answer)}")

    while line := await asyncio.to_thread(sys.stdin.readline):
        tasks.add(task := asyncio.create_task(do(*json.loads(line))))
        task.add_done_callback(tasks.discard)


async def main(role: str, home: str, *name: str) -> None:
    Points().watch(small=role == "publisher")
    await obey(PublisherProgram(Path(home)) if role == "publisher" else SubscriberProgram(Path(home), *name))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(*sys.argv[1:]))
