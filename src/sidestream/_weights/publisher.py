"""``Publisher``: versions of weights in the memory of this host, for the processes that serve them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from .._engine.calls import as_operation, in_operation
from .._layout.save_layout import SavePlan
from .._layout.values import copy_value
from .._runtime.public import Displayed, Table, public, readable_bytes
from .._runtime.tasks import run_shielded
from .._runtime.threads import Deadline, io_threads, time_limit
from .._save.sinks import PendingVersion, read_in_thread
from .._save.writer import copies_ended
from .._staging import AsyncStager, Captured, FirstReader, Staging, capture
from ..errors import (
    ClosedError,
    DeadlineExceededError,
    InvalidOptionError,
    UnsupportedTensorError,
    os_errors_as,
)
from ..options import (
    Dtypes,
    Names,
    check_timeout,
    plain_integer,
)
from .channels import check_channel, told_apart
from .home import SCHEME, Home, check_system
from .subscriptions import Subscriptions
from .versions import PublishedVersion, Versions, VersionSink, record_of

_GRACE_S = 5.0


@public
@dataclass(frozen=True, slots=True, repr=False)
class PublisherHealth(Displayed):
    """The state of a ``Publisher``.

    Attributes:
        epoch: The number of the publisher among those that had the home.
        versions: The bytes of the images that it holds, by stamp. Subscribers may hold older ones.
        channels: The stamp that each channel points at.
        spare_bytes: The memory that is touched ahead for the next version.
        subscribers: For each subscriber the stamp that it was sent last, and its last answer.
    """

    epoch: int
    versions: Mapping[str, int]
    channels: Mapping[str, str]
    spare_bytes: int
    subscribers: Mapping[str, str]

    def _summary(self) -> str:
        held = readable_bytes(sum(self.versions.values()))
        return f"epoch {self.epoch}: {len(self.versions)} versions ({held}), {len(self.subscribers)} subscribers"

    def _table(self) -> Table:
        rows = [[f"channel {name}", stamp] for name, stamp in self.channels.items()]
        rows += [[f"version {stamp}", readable_bytes(nbytes)] for stamp, nbytes in self.versions.items()]
        rows += [["touched ahead", readable_bytes(self.spare_bytes)]]
        rows += [[f"subscriber {name}", state] for name, state in self.subscribers.items()]
        return Table(("what", "state"), rows, len(rows))


@public
class Publisher:
    """Publishes versions of weights in the memory of this host: ``async with sidestream.Publisher(home) as publisher``.

    A version is an image in shared memory that no process can change any more, this one included. Servers map it
    (``Subscriber``): all of them share one copy, and no file is written. Linux only. Leaving it ends the connections;
    servers go on with what they have.

    Args:
        home: A directory of this host, which is made with mode 0700. One publisher at a time has it.
        serve: How subscribers reach it: ``"unix:"``, a socket in the home. Only processes of the same user may connect.
        select: Patterns of names in the state (``"model.*"``). None: every tensor.
        names: The name of each tensor in the version (``options.Names``), such as ``strip_prefix("model.")``. None
            leaves a tensor out.
        dtype: What floating-point tensors are converted to, as for ``HF``.
        keep: How many versions are held, those with the highest numbers. What channels point at is held, too.
        budget_bytes: The most memory for versions, in bytes: those that are held, the one that is being made, and the
            memory that is touched ahead for the next one. None: no limit. Subscribers that still use an older version
            keep its memory, which is not counted here.
        stager: The stager of ``publish()``. None: one of its own.
        timeout_s: The limit of ``publish()``, in seconds.

    Raises:
        InvalidOptionError: An argument is wrong, or, when it is entered, others have access to the home.
        UnsupportedError: The system is not Linux.
        PublisherRunningError: When it is entered: another publisher has the home.
        CorruptCheckpointError: When it is entered: the file with the epoch is damaged.
        StorageError: When it is entered: the home cannot be made or written to.
    """

    def __init__(
        self,
        home: str | os.PathLike[str],
        *,
        serve: str = SCHEME,
        select: str | Collection[str] | None = None,
        names: Names | None = None,
        dtype: Dtypes | None = None,
        keep: int = 2,
        budget_bytes: int | None = None,
        stager: AsyncStager | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        check_system()
        if serve != SCHEME:
            raise InvalidOptionError(f"serve={serve!r} has to be {SCHEME!r}: the socket lies in the home")
        check_timeout(timeout_s)
        self._path = Path(home).absolute()
        self.url = f"{SCHEME}{self._path}"
        """What ``Subscriber`` takes."""
        self._versions = Versions(self.url, select, names, dtype, keep=keep, budget_bytes=budget_bytes)
        self._stager, self._own_stager = stager, stager is None
        self._timeout_s = timeout_s
        self._home: Home | None = None

    # --- opening and closing ---

    async def __aenter__(self) -> Publisher:
        await in_operation(self._open, "Publisher")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await in_operation(partial(run_shielded, self._close), "Publisher")

    async def _open(self) -> None:
        if self._home is not None:
            raise ClosedError("this publisher was entered before: make a new one")
        with os_errors_as("opening the home of a publisher", self._path):
            home = await io_threads().run(Home, self._path)
            try:
                listener = await io_threads().run(home.listen)
            except BaseException:
                home.close()
                raise
        versions = self._versions
        self._home, versions.epoch = home, home.epoch
        versions.subscriptions = Subscriptions(versions.channels, listener)
        if self._stager is None:
            self._stager = AsyncStager(timeout_s=self._timeout_s)

    async def _close(self) -> None:
        versions = self._versions
        subscriptions, versions.subscriptions = versions.subscriptions, None
        if subscriptions is None or self._home is None:
            return
        await subscriptions.close()
        versions.channels.wake()
        await io_threads().run(self._home.close)
        await io_threads().run(versions.memory.close)
        for one in versions.channels.held.values():
            await io_threads().run(one.image.close)
        if self._own_stager and self._stager is not None:
            with suppress(DeadlineExceededError):
                await self._stager.aclose_by(Deadline.after(_GRACE_S))

    @property
    def epoch(self) -> int:
        """The number of this publisher among those that had the home. Each start raises it."""
        return self._versions.check_open()

    # --- publishing ---

    def publish(
        self,
        state: Mapping[str, Any],
        *,
        version: int,
        metadata: Mapping[str, Any] | None = None,
        channel: str | None = "stable",
    ) -> PendingVersion:
        """Start to publish the tensors of ``state``, and return at once. No file is written.

        The version has the values at the call, provided that no tensor changes before ``pending.staged`` is done, or
        the ``stager`` of this publisher guards the optimizer. May be called in any thread.

        Args:
            state: As for ``save``. Of it only plain tensors are published.
            version: Its number, higher than that of each version before.
            metadata: Data that JSON can hold, at most 32 KiB, for the subscribers.
            channel: The channel that points at it then. None: none, until ``promote``.

        Returns:
            The version in progress. It continues if it is not awaited.

        Raises:
            InvalidOptionError: The version is not higher than the last one, or the metadata are not for JSON.
            UnsupportedTensorError: The state has tensors that are divided among ranks: publish with a save.
            ClosedError: The publisher is not open.
        """
        sink = self._versions.sink(version, metadata, channel)
        pending = PendingVersion(sink)
        staging: Staging[SavePlan] | None = None
        try:
            captured = capture(state, copy_value)
            if captured.sharded:
                raise UnsupportedTensorError(
                    "the state has tensors that are divided among ranks: save it with publish=, which publishes the "
                    "committed checkpoint"
                )
            stager, deadline = self._stager, Deadline.after(self._timeout_s)
            assert stager is not None
            staging = stager.prepare(captured, deadline, passes=True)
            pending.follow(staging.free)
            stager.enqueue(staging, partial(self._lay_out, stager))
            pending.begin_alone(partial(_published_alone, sink, staging, deadline))
            # Last: copies of a state that is larger than the memory wait for the windows that this version releases.
            stager.wait_if_eager(staging)
        except BaseException:
            if staging is not None:
                staging.release()
            pending.drop()
            raise
        return pending

    def _lay_out(self, stager: AsyncStager, captured: Captured) -> SavePlan:
        plan = SavePlan.of(stager.plans, stager.budget_bytes, captured)
        self._versions.laid_out(plan)  # what cannot be published is refused before anything is copied
        return plan

    def version(
        self, version: int, *, metadata: Mapping[str, Any] | None = None, channel: str | None = "stable"
    ) -> NumberedVersion:
        """Return what ``publish=`` of a save takes, for a version with this number.

        Args:
            version: Its number, higher than that of each version before.
            metadata: As for ``publish``. None: the ``metadata=`` of the save.
            channel: As for ``publish``.

        Returns:
            The argument of one save.
        """
        return NumberedVersion(self, version, metadata, channel)

    def sink(self, step: int | None, metadata: Mapping[str, Any] | None) -> VersionSink:
        """Return the sink of a save whose step is the version. Called by the save."""
        if step is None:
            raise InvalidOptionError("a save outside of a run has no step: pass publish=publisher.version(120)")
        return self._versions.sink(step, metadata, "stable")

    # --- channels ---

    @as_operation
    async def promote(self, channel: str, version: int) -> None:
        """Point a channel at a version that is held, whether it is higher or lower than the present one.

        Args:
            channel: The channel, which is made if there is none of this name.
            version: The number of the version.

        Raises:
            VersionNotFoundError: It is not held. ``health()`` lists those that are.
            ClosedError: The publisher is not open.
        """
        self._versions.check_open()
        check_channel(channel)
        self._versions.channels.promote(channel, plain_integer(version))
        self._versions.announce()

    @as_operation
    async def rollback(self, channel: str) -> PublishedVersion:
        """Point a channel at the version that it pointed at before. The next ``publish`` raises it again.

        Args:
            channel: The channel.

        Returns:
            The version that it points at now.

        Raises:
            VersionNotFoundError: No earlier version of the channel is held: ``keep=`` says how many are.
            ClosedError: The publisher is not open.
        """
        self._versions.check_open()
        held = self._versions.channels.roll_back(channel)
        self._versions.announce()
        return record_of(held)

    def health(self) -> PublisherHealth:
        """Return the state: versions, channels and subscribers.

        Raises:
            ClosedError: The publisher is not open.
        """
        versions = self._versions
        epoch, channels, subscriptions = versions.check_open(), versions.channels, versions.subscriptions
        held = dict(channels.held)
        pointers = {name: list(ones) for name, ones in list(channels.pointers.items())}
        subscribers = {}
        # By their ids, because the connection that a subscriber had before may not have ended yet.
        latest = {} if subscriptions is None else {one.id: one for one in list(subscriptions.open)}
        for name, one in zip(told_apart(one.name for one in latest.values()), latest.values(), strict=True):
            sent = "nothing yet" if one.sent is None else one.sent.stamp
            said = "" if one.last is None else f"; {one.last.outcome} {one.last_stamp} {one.last.reason}".rstrip()
            subscribers[name] = f"sent {sent}{said}"
        return PublisherHealth(
            epoch=epoch,
            versions=MappingProxyType({one.stamp: one.image.nbytes for one in held.values()}),
            channels=MappingProxyType({name: f"e{epoch}.v{ones[-1]}" for name, ones in pointers.items() if ones}),
            spare_bytes=versions.memory.spare_bytes,
            subscribers=MappingProxyType(subscribers),
        )

    def __repr__(self) -> str:
        return f"<Publisher {self.url}>"


@dataclass(frozen=True, slots=True)
class NumberedVersion:
    """The ``publish=`` of one save, with a number of its own."""

    publisher: Publisher
    number: int
    metadata: Mapping[str, Any] | None
    channel: str | None

    def sink(self, step: int | None, metadata: Mapping[str, Any] | None) -> VersionSink:
        chosen = metadata if self.metadata is None else self.metadata
        return self.publisher._versions.sink(self.number, chosen, self.channel)


async def _published_alone(sink: VersionSink, staging: Staging[SavePlan], deadline: Deadline) -> PublishedVersion:
    """Publish a state that is not saved, and release its memory."""
    try:
        with time_limit(deadline):
            image, looks = await read_in_thread(FirstReader(staging), sink.draw)
            return await sink.make_visible(image, looks, "")
    finally:
        staging.release()
        await run_shielded(copies_ended, staging, _GRACE_S)
