"""``Publisher``: versions of weights in the memory of this host, for the processes that serve them."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias

from .._convert.chosen import choose_saved, choose_staged
from .._convert.selection import Selection
from .._convert.source import Source, open_source
from .._convert.streamed import pieces_of
from .._engine.calls import as_operation, in_operation
from .._group import Operation
from .._layout.ranges import Box
from .._layout.save_layout import SavePlan
from .._layout.values import copy_value
from .._load.reader import Reader, Wanted
from .._runtime.public import Displayed, Table, public, readable_bytes
from .._runtime.tasks import run_shielded
from .._runtime.threads import Deadline, Stop, Threads, io_threads, time_limit
from .._save.running import Save
from .._save.sinks import PendingVersion, read_in_thread
from .._save.writer import copies_ended
from .._staging import AsyncStager, Captured, FirstReader, SnapshotReader, Staging, capture
from ..errors import (
    ArenaExhaustedError,
    CheckpointNotFoundError,
    ClosedError,
    DeadlineExceededError,
    InvalidOptionError,
    StateMismatchError,
    UnsupportedTensorError,
    listed,
    os_errors_as,
)
from ..options import (
    Dtypes,
    Names,
    check_count,
    check_dtype,
    check_names,
    check_seconds,
    check_timeout,
    plain_integer,
)
from .channels import Answer, Channels, HeldVersion, check_channel
from .home import SCHEME, Home, check_system
from .hub import Hub
from .images import ImageLayout, ImageMemory, SealedImage

_METADATA_BYTES = 32 << 10
_GRACE_S = 5.0


@public
@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version that subscribers can take up.

    Attributes:
        stamp: Epoch and version, such as ``"e3.v120"``.
        epoch: How many publishers have had this home, this one included.
        version: The number that the program gave it.
        nbytes: The bytes of its image.
        save_id: The id of the save whose snapshot it was made from. Empty if there was none.
    """

    stamp: str
    epoch: int
    version: int
    nbytes: int
    save_id: str = ""


@public
@dataclass(frozen=True, slots=True)
class AppliedReport:
    """The answers of subscribers to a version.

    Attributes:
        stamp: The version.
        applied: The names of the subscribers that serve it.
        refused: Those that do not, with the reason.
        skipped: Those that have taken a later version without this one.
    """

    stamp: str
    applied: tuple[str, ...]
    refused: Mapping[str, str]
    skipped: tuple[str, ...]

    @classmethod
    def _of(cls, stamp: str, answers: Collection[Answer]) -> AppliedReport:
        by = {kind: [one for one in answers if one.outcome == kind] for kind in ("applied", "refused", "skipped")}
        refused = MappingProxyType({one.subscriber: one.reason for one in by["refused"]})
        applied, skipped = (tuple(one.subscriber for one in by[kind]) for kind in ("applied", "skipped"))
        return cls(stamp, applied, refused, skipped)


@public
@dataclass(frozen=True, slots=True, repr=False)
class PublisherHealth(Displayed):
    """The state of a ``Publisher``.

    Attributes:
        epoch: How many publishers have had this home, this one included.
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

    A version is an image in shared memory that nobody can change any more, this process included. Servers map it
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
        check_count("keep", keep)
        check_dtype(dtype)
        check_names(names)
        check_timeout(timeout_s)
        if budget_bytes is not None:
            check_count("budget_bytes", budget_bytes)
        self._path = Path(home).absolute()
        self.url = f"{SCHEME}{self._path}"
        """What ``Subscriber`` takes."""
        self.select, self.names, self.dtype = select, names, dtype
        self._stager, self._own_stager = stager, stager is None
        self._timeout_s = timeout_s
        self._images = _Images(budget_bytes)
        self._channels = Channels(keep)
        self._lock = threading.Lock()
        self._published = -1
        self._begun: set[int] = set()
        """The numbers of the versions that are being made."""
        self._looks: _Looks | None = None
        """Those of all versions, known from the first one on."""
        self._home: Home | None = None
        self._hub: Hub | None = None

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
        self._home, self._hub = home, Hub(self._channels, listener)
        if self._stager is None:
            self._stager = AsyncStager(timeout_s=self._timeout_s)

    async def _close(self) -> None:
        hub, self._hub = self._hub, None
        if hub is None or self._home is None:
            return
        await hub.close()
        self._channels.wake()
        await io_threads().run(self._home.close)
        await io_threads().run(self._images.close)
        for one in self._channels.held.values():
            one.image.close()
        if self._own_stager and self._stager is not None:
            with suppress(DeadlineExceededError):
                await self._stager.aclose_by(Deadline.after(_GRACE_S))

    @property
    def epoch(self) -> int:
        """How many publishers have had this home, this one included. Each start raises it."""
        return self._open_home().epoch

    def _open_home(self) -> Home:
        if self._home is None or self._hub is None:
            raise ClosedError("enter the publisher first, and use it before it is left: async with Publisher(home)")
        return self._home

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
        sink = self._sink(version, metadata, channel)
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
        chosen, _ = choose_staged(self, plan, self.url)
        self._check(_looks_of(chosen))  # what cannot be published is refused before anything is copied
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

    def sink(self, step: int | None, metadata: Mapping[str, Any] | None) -> _VersionSink:
        """Return the sink of a save whose step is the version. Called by the save."""
        if step is None:
            raise InvalidOptionError("a save outside of a run has no step: pass publish=publisher.version(120)")
        return self._sink(step, metadata, "stable")

    def _sink(self, version: int, metadata: Mapping[str, Any] | None, channel: str | None) -> _VersionSink:
        """Return the sink of a version, whose number no other one can have until it has failed. Raises what is wrong
        with the arguments."""
        version, metadata = plain_integer(version), _checked(metadata)
        if type(version) is not int or not 0 <= version < 1 << 63:
            raise InvalidOptionError(f"version={version!r} has to be a number, 0 or higher")
        if channel is not None:
            check_channel(channel)
        epoch = self._open_home().epoch
        with self._lock:
            last = max([self._published, *self._begun])
            if version <= last:
                raise InvalidOptionError(
                    f"version {version} is not higher than {last}, the last one of epoch {epoch}: to serve older "
                    "weights use rollback() or promote(), or publish them under a new number"
                )
            self._begun.add(version)
        return _VersionSink(self, version, metadata, channel)

    def _ended(self, version: int) -> None:
        with self._lock:
            self._begun.discard(version)

    def _check(self, looks: _Looks) -> None:
        """Raise ``StateMismatchError`` if the tensors differ from those of the versions before: a subscriber could not
        serve them."""
        before = self._looks
        if before is None or before == looks:
            return
        lines = [f"{name}: missing" for name in before.keys() - looks.keys()]
        lines += [f"{name}: new" for name in looks.keys() - before.keys()]
        changed = (name for name in looks.keys() & before.keys() if looks[name] != before[name])
        lines += [f"{name}: {looks[name]}, and {before[name]} before" for name in changed]
        text = f"{self.url}: all versions of a publisher have the same tensors; start a new one for others:\n  "
        raise StateMismatchError(text + listed(sorted(lines)), sorted(lines))

    def _make_visible(self, held: HeldVersion, looks: _Looks, channel: str | None) -> None:
        """Let subscribers take up a complete version. Called on the operation loop."""
        self._open_home()
        self._check(looks)
        self._channels.publish(held, channel)
        with self._lock:
            self._published, self._looks = max(self._published, held.version), looks
        self._announce()
        self._images.touch_ahead(held.image.nbytes)

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
        self._open_home()
        check_channel(channel)
        self._channels.promote(channel, plain_integer(version))
        self._announce()

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
        self._open_home()
        held = self._channels.roll_back(channel)
        self._announce()
        return _record(held)

    def _announce(self) -> None:
        if self._hub is not None:
            self._hub.announce()

    def health(self) -> PublisherHealth:
        """Return the state: versions, channels and subscribers.

        Raises:
            ClosedError: The publisher is not open.
        """
        epoch, hub = self._open_home().epoch, self._hub
        held = dict(self._channels.held)
        pointers = {name: list(versions) for name, versions in list(self._channels.pointers.items())}
        subscribers = {}
        for one in [] if hub is None else list(hub.subscriptions):
            sent = "nothing yet" if one.sent is None else one.sent[0].stamp
            said = "" if one.last is None else f"; {one.last.outcome} {one.last_stamp} {one.last.reason}".rstrip()
            subscribers[one.name] = f"sent {sent}{said}"
        return PublisherHealth(
            epoch=epoch,
            versions=MappingProxyType({one.stamp: one.image.nbytes for one in held.values()}),
            channels=MappingProxyType({name: f"e{epoch}.v{ones[-1]}" for name, ones in pointers.items() if ones}),
            spare_bytes=self._images.spare_bytes,
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

    def sink(self, step: int | None, metadata: Mapping[str, Any] | None) -> _VersionSink:
        return self.publisher._sink(self.number, metadata if self.metadata is None else self.metadata, self.channel)


def _checked(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a copy of the metadata of a version. Raises ``InvalidOptionError``."""
    try:
        text = json.dumps({} if metadata is None else dict(metadata))
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(f"the metadata of a version have to be data for JSON: {error}") from None
    if len(text) > _METADATA_BYTES:
        raise InvalidOptionError(f"the metadata of a version have {len(text)} bytes, and 32 KiB are the limit")
    found: Mapping[str, Any] = json.loads(text)
    return found


_Looks: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor of a version."""


def _looks_of(chosen: Selection) -> _Looks:
    return {one.fqn: (one.dtype, one.shape) for one in chosen.tensors}


def _record(held: HeldVersion) -> PublishedVersion:
    return PublishedVersion(held.stamp, held.epoch, held.version, held.image.nbytes, held.save_id)


async def _published_alone(sink: _VersionSink, staging: Staging[SavePlan], deadline: Deadline) -> PublishedVersion:
    """Publish a state that is not saved, and release its memory."""
    try:
        with time_limit(deadline):
            image, looks = await read_in_thread(FirstReader(staging), sink.draw)
            return sink.make_visible(image, looks, "")
    finally:
        staging.release()
        await run_shielded(copies_ended, staging, _GRACE_S)


@dataclass(slots=True)
class _VersionSink:
    """The sink of one version."""

    publisher: Publisher
    version: int
    metadata: Mapping[str, Any]
    channel: str | None
    together: bool = field(default=False, init=False)
    replaces: bool = field(default=False, init=False)
    _held: HeldVersion | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return self.publisher.url

    async def prepare(self, save: Save) -> None:
        """Do nothing: all that is needed is in the state."""

    def read(self, snapshot: SnapshotReader[Any], save: Save, stop: Stop) -> tuple[SealedImage, _Looks]:
        return self.draw(snapshot, stop)

    def draw(
        self, snapshot: SnapshotReader[SavePlan] | FirstReader[SavePlan], stop: Stop
    ) -> tuple[SealedImage, _Looks]:
        """Copy the chosen tensors of the snapshot into an image. Called in a thread."""
        plan = snapshot.plan(stop)
        chosen, by_item = choose_staged(self.publisher, plan, self.url)
        looks = _looks_of(chosen)
        self.publisher._check(looks)
        layout = ImageLayout.of([by_item[item] for item in sorted(by_item)], chosen.aliases)
        memory = self.publisher._images.take(layout.nbytes)
        parts = pieces_of(snapshot, plan, by_item, stop)
        try:
            return memory.seal(memory.fill(layout, parts, stop)), looks
        except BaseException:
            memory.discard()
            raise
        finally:
            parts.close()

    async def finish(self, read: tuple[SealedImage, _Looks], save: Save) -> PublishedVersion:
        return self.make_visible(*read, save.save_id)

    def make_visible(self, image: SealedImage, looks: _Looks, save_id: str) -> PublishedVersion:
        """Let subscribers take up a complete image."""
        try:
            held = HeldVersion(self.publisher.epoch, self.version, image, save_id, self.metadata)
            self.publisher._make_visible(held, looks, self.channel)
        except BaseException:
            image.close()
            raise
        self._held = held
        return _record(held)

    async def undo(self, error: BaseException) -> None:
        """Do nothing: an image that is not complete is dropped where it is made."""

    async def read_checkpoint(self, save: Save, ranks: Operation | None) -> PublishedVersion:
        opened = await open_source(save.location)
        try:
            if opened.manifest.save_id != save.save_id:
                raise CheckpointNotFoundError(
                    f"version {self.version} was not published: {save.location.url} is not the checkpoint of this save "
                    "any more"
                )
            chosen = await io_threads().run(choose_saved, self.publisher, opened, self.url)
            looks = _looks_of(chosen)
            self.publisher._check(looks)
            layout = ImageLayout.of(chosen.tensors, chosen.aliases)
            memory = await io_threads().run(self.publisher._images.take, layout.nbytes)
            try:
                await _read_into(memory, layout, opened, chosen)
                image = await io_threads().run(memory.complete, layout)
            except BaseException:
                await run_shielded(io_threads().run, memory.discard)
                raise
        finally:
            await opened.aclose()
        return self.make_visible(image, looks, save.save_id)

    def ended(self) -> None:
        self.publisher._ended(self.version)

    async def applied(self, count: int, timeout_s: float | None) -> AppliedReport:
        check_count("count", count)
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        return await in_operation(partial(self._applied, count, timeout_s), "applied", ends=False)

    async def _applied(self, count: int, timeout_s: float | None) -> AppliedReport:
        held = self._held
        assert held is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(held.answers) < count:
                    self.publisher._open_home()
                    await self.publisher._channels.answered()
        report = AppliedReport._of(held.stamp, list(held.answers.values()))
        if len(held.answers) < count:
            raise DeadlineExceededError(
                f"{len(held.answers)} of {count} subscribers have answered within {timeout_s} s: {report}"
            )
        return report


async def _read_into(memory: ImageMemory, layout: ImageLayout, opened: Source, chosen: Selection) -> None:
    """Read the chosen tensors of a checkpoint to their places in an image."""
    wanted = []
    for name, target in memory.targets(layout, chosen.tensors).items():
        entry = opened.tensors[chosen.origin[name]].entry
        wanted.append(Wanted(name, entry, Box.whole(entry.shape), target))
    await Reader(opened.files, "always").read(wanted, own=True)


@dataclass(frozen=True, slots=True)
class _Spare:
    """Memory that is touched ahead, in a thread, until ``stop``."""

    nbytes: int
    stop: Stop
    touched: Future[ImageMemory]


class _Images:
    """The memory of all versions, within a budget. The next version's is touched ahead in a thread of its own, because
    fresh pages cost ten times the copy into them."""

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._sizes: dict[object, int] = {}
        """The bytes of each image. They are removed without a lock: a garbage collection may do it, in any thread, and
        in a forked child."""
        self._spare: _Spare | None = None
        self._threads = Threads("sidestream-touch", 1)
        self._closed = False

    @property
    def spare_bytes(self) -> int:
        spare = self._spare
        return 0 if spare is None else spare.nbytes

    def take(self, nbytes: int) -> ImageMemory:
        """Return memory for an image. Blocks. Raises ``ArenaExhaustedError``."""
        spare = self._taken_spare()
        if spare is not None and spare.nbytes == nbytes:
            return spare
        if spare is not None:
            spare.discard()
        with self._lock:
            if not self._fits(nbytes):
                raise ArenaExhaustedError(
                    f"a version of {nbytes} bytes does not fit: {self.used_bytes} of "
                    f"budget_bytes={self._budget_bytes} are in use by versions that are held; raise budget_bytes=, or "
                    "lower keep="
                )
            key = self._reserved(nbytes)
        return self._made(nbytes, key)

    @property
    def used_bytes(self) -> int:
        """The bytes of all images and of what is touched ahead."""
        return sum(list(self._sizes.values()))

    def _fits(self, nbytes: int) -> bool:
        return self._budget_bytes is None or self.used_bytes + nbytes <= self._budget_bytes

    def _reserved(self, nbytes: int) -> object:
        self._sizes[key := object()] = nbytes
        return key

    def _made(self, nbytes: int, key: object) -> ImageMemory:
        try:
            return ImageMemory(nbytes, partial(self._sizes.pop, key, None))
        except BaseException:
            self._sizes.pop(key, None)
            raise

    def _taken_spare(self) -> ImageMemory | None:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None:
            return None
        spare.stop.set()
        with suppress(ArenaExhaustedError):
            return spare.touched.result()  # after a few milliseconds: it is touched piece by piece
        return None

    def touch_ahead(self, nbytes: int) -> None:
        """Touch memory for the next version in the background, if it fits into the budget."""
        with self._lock:
            if self._closed or self._spare is not None or not self._fits(nbytes):
                return
            stop, key = Stop(), self._reserved(nbytes)
            try:
                self._spare = _Spare(nbytes, stop, self._threads.submit(self._touch, nbytes, key, stop))
            except RuntimeError:  # the system starts no thread: the next version touches its memory itself
                self._sizes.pop(key)

    def _touch(self, nbytes: int, key: object, stop: Stop) -> ImageMemory:
        memory = self._made(nbytes, key)
        memory.touch(stop)
        return memory

    def close(self) -> None:
        """Free what is touched ahead."""
        with self._lock:
            self._closed = True
        if (spare := self._taken_spare()) is not None:
            spare.discard()
        self._threads.close()
