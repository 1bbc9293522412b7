"""``Subscriptions``: the subscribers of a publisher, on the operation loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass, field

from .._runtime.descriptors import close_in_children, no_fork
from .._runtime.tasks import create_owned_task
from ..errors import CorruptCheckpointError, printable
from .channels import Answer, Channels, HeldVersion
from .home import check_peer
from .links import Link, LinkMessage, LinkMessageKind, ready

_MOST_NAME = 200
_log = logging.getLogger("sidestream")


@dataclass(eq=False, slots=True)
class Subscription:
    """One connection. ``ready``: the subscriber has received what was sent before, so that of a slow one the newest
    version alone waits. ``sent`` is the version that was sent last."""

    link: Link
    name: str = ""
    id: str = ""
    channel: str = ""
    sent: HeldVersion | None = None
    last: Answer | None = None
    last_stamp: str = ""
    ready: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Subscriptions:
    """Accepts subscribers, sends what their channels point at, and notes their answers."""

    def __init__(self, channels: Channels, listener: socket.socket) -> None:
        self._channels = channels
        self._listener = listener
        self._tasks: set[asyncio.Task[None]] = set()
        self.open: list[Subscription] = []
        self._start(self._accept(), "accept")

    def announce(self) -> None:
        """Send what channels point at now to their subscribers."""
        for one in self.open:
            one.changed.set()

    async def close(self) -> None:
        """End all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    def _start(self, work: object, name: str) -> None:
        task = create_owned_task(work, f"sidestream publisher: {name}")  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            await ready(self._listener, "reader")
            try:
                # A child that had the connection would keep it open when this process has died.
                with no_fork():
                    sock, _ = self._listener.accept()
                    close_in_children(sock)
            except BlockingIOError:
                continue
            except OSError as error:
                _log.warning("a subscriber could not be accepted: %s", error)
                await asyncio.sleep(0.1)  # no descriptors are left, for example
                continue
            sock.setblocking(False)
            self._start(self._serve(Subscription(Link(sock)), sock), "subscriber")

    async def _serve(self, one: Subscription, sock: socket.socket) -> None:
        sending: asyncio.Task[None] | None = None
        try:
            check_peer(sock)
            hello = await one.link.receive()
            if hello is None or hello.kind is not LinkMessageKind.HELLO:
                return
            one.name, one.channel = printable(str(hello.content["name"]))[:_MOST_NAME], str(hello.content["channel"])
            one.id = str(hello.content["id"])
            self.open.append(one)
            one.changed.set()
            sending = create_owned_task(self._send(one), "sidestream publisher: sending")
            while (message := await one.link.receive()) is not None:
                self._take(one, message)
        except (OSError, CorruptCheckpointError, LookupError, TypeError) as error:
            _log.info("a subscriber %s was disconnected: %s", one.name, error)
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            if one in self.open:
                self.open.remove(one)
            await one.link.close()

    async def _send(self, one: Subscription) -> None:
        try:
            while True:
                await one.changed.wait()
                one.changed.clear()
                target, revision = self._channels.target(one.channel), self._channels.revision
                if not one.ready or target is None or one.sent is target:
                    continue
                one.sent, one.ready = target, False
                content = {
                    "epoch": target.epoch,
                    "version": target.version,
                    "revision": revision,
                    "nbytes": target.image.nbytes,
                    "save_id": target.save_id,
                    "metadata": target.metadata,
                }
                image = (target.image.memory, target.image.sums)
                await one.link.send(LinkMessage(LinkMessageKind.VERSION, content, image))
        except (OSError, ValueError) as error:  # also one after which it could not be sent anything more
            _log.info("a subscriber %s was disconnected: %s", one.name, error)
        finally:
            one.link.end()

    def _take(self, one: Subscription, message: LinkMessage) -> None:
        if message.kind is LinkMessageKind.RECEIVED:
            one.ready = True
            one.changed.set()
            return
        version = message.content["version"]
        reason = printable(str(message.content.get("reason", "")))
        applied = message.kind is LinkMessageKind.APPLIED
        one.last = Answer(one.name, "applied" if applied else "refused", reason)
        one.last_stamp = str(message.content["stamp"])
        for held in self._channels.held.values():
            if held.stamp == one.last_stamp:
                self._channels.answer(held, one.id, one.last)
            # One about the version of an earlier publisher says nothing about those of this one.
            later = held.version < version and one.last_stamp == f"e{held.epoch}.v{version}"
            if applied and later and one.channel in held.channels:
                self._channels.answer(held, one.id, Answer(one.name, "skipped"))
