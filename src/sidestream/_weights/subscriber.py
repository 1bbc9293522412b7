"""``Subscriber``: the versions that a ``Publisher`` of this host publishes to a channel."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from .._engine.calls import as_operation, in_operation
from .._load.checkpoint import TensorInfo
from .._runtime.descriptors import Descriptor
from .._runtime.public import Displayed, Table, public, readable_bytes
from .._runtime.tasks import create_owned_task
from .._runtime.threads import io_threads
from ..errors import (
    ClosedError,
    CorruptCheckpointError,
    InvalidOptionError,
    SidestreamError,
    StateMismatchError,
    StorageError,
    UnsupportedCheckpointError,
    printable,
)
from .channels import check_channel
from .following import Candidate, Follower, NotServed
from .home import connect, path_of
from .images import ImageHeader, MappedImage
from .links import Link, LinkMessage, LinkMessageKind
from .live import Live
from .matching import match

_PAUSES_S = (0.02, 0.05, 0.1, 0.25, 0.5)
"""Before a publisher is looked for again."""
_POLL_S = 1.0
_GRACE_S = 0.2
"""How long the last answers may take when a subscriber is left."""
_MOST_REASON = 2000
_MOST_NAME = 200


@dataclass(frozen=True, slots=True)
class _Announced:
    """What the publisher has sent last. The descriptors are closed when nothing refers to them any more."""

    content: Mapping[str, Any]
    memory: Descriptor
    sums: Descriptor

    @property
    def stamp(self) -> str:
        return f"e{self.content['epoch']}.v{self.content['version']}"

    @property
    def epoch(self) -> int:
        epoch: int = self.content["epoch"]
        return epoch


@public
class VersionImage(Displayed):
    """A version that is mapped into this process. Its memory is shared with all others that have mapped it.

    What a program writes into a tensor stays in its own process. The memory is given back when the last tensor over it
    is gone.

    Attributes:
        stamp: Epoch and version, such as ``"e3.v120"``.
        epoch: The number of the publisher among those that had its home.
        version: Its number.
        save_id: The id of the save whose snapshot it was made from. Empty if there was none.
        metadata: The ``metadata=`` of the version.
    """

    def __init__(self, subscriber: Subscriber, announced: _Announced) -> None:
        content = announced.content
        self.stamp: str = announced.stamp
        self.epoch: int = content["epoch"]
        self.version: int = content["version"]
        self.save_id: str = content["save_id"]
        self.metadata: Mapping[str, Any] = MappingProxyType(content["metadata"])
        self._subscriber = subscriber
        self._image = MappedImage(announced.memory, announced.sums, content["nbytes"])

    def _summary(self) -> str:
        return f"{self.stamp}: {len(self._image.tensors)} tensors, {readable_bytes(self.nbytes)}"

    def _table(self) -> Table:
        found = self._image.tensors
        rows = ((name, str(one.dtype).removeprefix("torch."), str(list(one.shape))) for name, one in found.items())
        return Table(("tensor", "dtype", "shape"), rows, len(found))

    @property
    def nbytes(self) -> int:
        """The bytes of the image."""
        return self._image.nbytes

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name. Tied names have one tensor."""
        return MappingProxyType(self._image.tensors)

    @as_operation
    async def verify(self) -> None:
        """Compare the image with its checksums. A sealed image cannot change: this finds faults of the memory.

        Raises:
            CorruptCheckpointError: A block differs.
        """
        await io_threads().run(self._image.verify)

    @as_operation
    async def applied(self) -> None:
        """Tell the publisher that this process serves the version. ``following`` does that by itself. Does not wait
        until the publisher reads it."""
        self._subscriber._answer(LinkMessageKind.APPLIED, self.stamp, self.version)

    @as_operation
    async def refused(self, reason: str) -> None:
        """Tell the publisher that this process does not serve the version. Does not wait until the publisher reads it.

        Args:
            reason: Why, for the ``AppliedReport``.
        """
        self._subscriber._answer(LinkMessageKind.REFUSED, self.stamp, self.version, reason)


@public
class Subscriber:
    """The versions of a channel of a ``Publisher`` on this host: ``async with sidestream.Subscriber("unix:PATH")``.

    ``following`` puts them into a ``Live``. ``async for version in subscriber`` yields each newest one, for servers of
    another kind. A subscriber that is slow gets the newest version, and not those before it. When the publisher ends,
    what is served stays, and its successor is taken up. Linux only.

    Args:
        url: The ``url`` of the publisher: ``unix:`` and its home. There need not be a publisher yet.
        channel: The channel.
        name: The name in the reports of the publisher, which call a second subscriber of this name ``name (2)``. None:
            host and process.

    Raises:
        InvalidOptionError: An argument is wrong.
        UnsupportedError: The system is not Linux.
    """

    def __init__(self, url: str, *, channel: str = "stable", name: str | None = None) -> None:
        self._path = path_of(url)
        self.url = url
        """The URL of the publisher."""
        check_channel(channel)
        if name is not None and not isinstance(name, str):
            raise InvalidOptionError(f"name={name!r} has to be a text")
        self._channel = channel
        self._name = (name or f"{os.uname().nodename}:{os.getpid()}")[:_MOST_NAME]
        self._id = uuid.uuid4().hex
        self._announced: _Announced | None = None
        self._link: Link | None = None
        self._problem: ConnectionError | None = None
        self._heard: float | None = None
        self._since = ""
        self._changes = 0
        """How often something has changed."""
        self._received = 0
        """How many versions have been received."""
        self._changed: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._answers: dict[str, LinkMessage] = {}
        """The last answer to each version, by stamp, until it is sent."""
        self._answering: asyncio.Task[None] | None = None
        """What sends them, as long as there are any."""
        self._closed = False
        self._yielded = ""

    async def __aenter__(self) -> Subscriber:
        await in_operation(self._open, "Subscriber")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await in_operation(self._close, "Subscriber")

    async def _open(self) -> None:
        if self._task is not None or self._closed:
            raise ClosedError("this subscriber was entered before: make a new one")
        self._changed = asyncio.Event()
        self._task = create_owned_task(self._connect_again_and_again(), f"sidestream subscriber of {self.url}")

    async def _close(self) -> None:
        task, self._task, self._closed = self._task, None, True
        try:
            if self._answering is not None:
                await asyncio.wait([self._answering], timeout=_GRACE_S)
        finally:  # also if this is cancelled
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            self._announced = None
            self._notify()

    # --- what a program calls ---

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> VersionImage:
        """Wait for a version that was not yielded yet, and map it."""
        return await in_operation(self._next, "Subscriber", ends=False)

    async def _next(self) -> VersionImage:
        while True:
            self._check()
            announced, seen = self._announced, self._changes
            if announced is not None and announced.stamp != self._yielded:
                image = await io_threads().run(VersionImage, self, announced)
                self._yielded = announced.stamp
                return image
            await self._wait_for_change(seen, None)

    def following(
        self,
        live: Live,
        *,
        accept: Callable[[Candidate], object] | None = None,
        before_swap: Callable[[Candidate], object] | None = None,
        after_swap: Callable[[Candidate], object] | None = None,
    ) -> Follower:
        """Return a follower, which puts what the channel points at into ``live``, as long as its ``async with`` block
        lasts.

        The publisher learns what is served and what was refused, and why. A version that lacks names of ``live``, or
        has other shapes, is refused. The hooks are called in a task on the loop that enters the block, and may be
        coroutine functions.

        Args:
            live: What is served.
            accept: Called with a ``Candidate`` before it is served. If it does not return True, or raises, the version
                is refused.
            before_swap: Called before the weights are exchanged. If it raises, the version is refused.
            after_swap: Called when readings that begin have the new weights.

        Returns:
            The follower, which has to be entered.

        Raises:
            InvalidOptionError: ``live`` is not a ``Live``.
        """
        if not isinstance(live, Live):
            raise InvalidOptionError(f"live={live!r} has to be a sidestream.Live")
        return Follower(_ChannelSource(self, live), live, (accept, before_swap, after_swap))

    # --- on the operation loop ---

    def _check(self) -> None:
        if self._task is None:
            raise ClosedError(f"enter the subscriber first: async with sidestream.Subscriber({self.url!r})")

    async def _wait_for_change(self, seen: int, timeout_s: float | None) -> None:
        """Wait until there have been more changes than ``seen``: the publisher has sent something, or is gone."""
        self._check()
        if self._changes == seen and self._changed is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()

    def _answer(self, kind: LinkMessageKind, stamp: str, version: int, reason: str = "") -> None:
        """Answer to a version. Does not wait until it is sent: a publisher that stands still reads nothing."""
        content = {"version": version, "stamp": stamp, "reason": printable(reason)[:_MOST_REASON]}
        if self._link is not None:
            self._answers[stamp] = LinkMessage(kind, content)
            if self._answering is None:
                name = f"sidestream subscriber of {self.url}: answers"
                self._answering = create_owned_task(self._send_answers(), name)

    async def _send_answers(self) -> None:
        try:
            while self._answers and self._link is not None:
                with suppress(OSError):  # the publisher is gone
                    await self._link.send(self._answers.pop(next(iter(self._answers))))
        finally:
            self._answering = None  # a task that has ended keeps the context of the call that started it

    def _notify(self) -> None:
        self._changes += 1
        changed, self._changed = self._changed, asyncio.Event()
        if changed is not None:
            changed.set()

    async def _connect_again_and_again(self) -> None:
        tries = 0
        while True:
            received = self._received
            try:
                link = Link(await io_threads().run(connect, self._path))
                self._link = link
                self._answers.clear()  # they were for another connection
                try:
                    await self._listen(link)
                    self._lost("it has ended")
                finally:
                    self._link = None
                    await link.close()
            except (OSError, CorruptCheckpointError, LookupError, TypeError, ValueError) as error:
                self._lost(f"{type(error).__name__}: {error}")
            tries = 0 if self._received > received else tries + 1
            await asyncio.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])

    def _lost(self, why: str) -> None:
        first = self._problem is None
        if first and self._heard is not None:
            self._since = f", since {time.strftime('%H:%M:%S')}"
        self._problem = ConnectionError(f"{self.url} has no publisher{self._since}: {why}")
        if first:
            self._notify()

    async def _listen(self, link: Link) -> None:
        hello = {"name": self._name, "id": self._id, "channel": self._channel}
        await link.send(LinkMessage(LinkMessageKind.HELLO, hello))
        self._problem, self._heard = None, time.monotonic()
        self._notify()
        while (message := await link.receive()) is not None:
            self._heard = time.monotonic()
            if message.kind is not LinkMessageKind.VERSION:
                continue
            memory, sums = message.descriptors
            announced, before = _Announced(message.content, memory, sums), self._announced
            self._received += 1
            if before is not None and announced.epoch < before.epoch:
                self._problem = ConnectionError(
                    f"{self.url} has a publisher of epoch {announced.epoch}, and one of epoch {before.epoch} came "
                    "before: the file with the epoch was lost; start this subscriber anew to follow it"
                )
            else:
                self._announced = announced
            self._notify()
            del announced, before, memory, sums, message  # or they would keep the memory until the next one comes
            await link.send(LinkMessage(LinkMessageKind.RECEIVED, {}))


class _ChannelSource:
    """What a channel points at, for a ``Follower``."""

    def __init__(self, subscriber: Subscriber, live: Live) -> None:
        self.url = subscriber.url
        self.passed_over: dict[str, SidestreamError] = {}
        self._subscriber, self._live = subscriber, live
        self._fetched: _Announced | None = None
        self._done: _Announced | None = None
        """What was served or passed over last."""
        self._stamp = ""
        """What is served."""
        self._seen = 0
        self._header: ImageHeader | None = None
        self._found: Mapping[str, str] = {}
        """The name in the versions with this header of each place."""

    @property
    def checked(self) -> float | None:
        return self._subscriber._heard

    @property
    def problem(self) -> BaseException | None:
        return self._subscriber._problem

    def accept_lower(self) -> None:
        raise InvalidOptionError("a channel is followed to lower versions, too: roll it back at the publisher")

    def close(self) -> None:
        self._fetched = self._done = None

    async def look(self) -> bool:
        subscriber = self._subscriber
        subscriber._check()
        announced, self._seen = subscriber._announced, subscriber._changes
        if announced is None or announced is self._done:
            return False
        if announced.stamp == self._stamp:  # after a new connection, or when it was rolled back and promoted again
            self._answered(announced)
            return False
        if announced.stamp in self.passed_over:  # refused once, and pointed at again
            self._done = announced
            return False
        return True

    async def wait(self) -> None:
        await self._subscriber._wait_for_change(self._seen, _POLL_S)

    async def fetch(self) -> Candidate | NotServed | None:
        self._fetched = announced = self._subscriber._announced
        if announced is None or announced is self._done:
            return None
        try:
            image, tensors = await io_threads().run(self._mapped, announced)
        except (StateMismatchError, CorruptCheckpointError, UnsupportedCheckpointError) as error:
            return NotServed(announced.stamp, error)
        except OSError as error:
            raise StorageError(f"{announced.stamp} could not be mapped: {error}") from error
        return Candidate(image.stamp, image.version, image.save_id, image.metadata, tensors)

    def _mapped(self, announced: _Announced) -> tuple[VersionImage, Mapping[str, torch.Tensor]]:
        image = VersionImage(self._subscriber, announced)
        places, tensors = self._live._shells.places, image.tensors
        if self._header is not image._image.header:  # the same for all versions of a publisher
            infos = {name: TensorInfo(one.dtype, one.shape, one.nbytes) for name, one in tensors.items()}
            self._found = match(infos, image.stamp, places, None, "the Publisher")
            self._header = image._image.header
        image._image.make_present()
        by_name: dict[str, torch.Tensor] = {}
        for leader, name in self._found.items():
            tensor = tensors[name].to(places[leader].dtype)  # the same tensor if the dtype is the same
            by_name |= dict.fromkeys(places[leader].names, tensor)
        return image, MappingProxyType(by_name)

    async def pass_over(self, error: SidestreamError) -> None:
        self._done, self._fetched = self._fetched, None
        if (refused := self._done) is not None:
            text = f"{type(error).__name__}: {error}"
            version = refused.content["version"]
            self._subscriber._answer(LinkMessageKind.REFUSED, refused.stamp, version, text)

    async def served(self, candidate: Candidate) -> None:
        self.passed_over = {}
        self._stamp = candidate.stamp
        if self._fetched is not None:
            self._answered(self._fetched)
        self._fetched = None

    def _answered(self, announced: _Announced) -> None:
        self._done = announced
        self._subscriber._answer(LinkMessageKind.APPLIED, announced.stamp, announced.content["version"])
