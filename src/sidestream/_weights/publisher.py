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
from typing import Any

from .._convert.chosen import choose_saved, choose_staged
from .._convert.selection import Selection
from .._convert.source import open_source
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
from .channels import Answer, Channels, HeldVersion
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
        InvalidOptionError: An argument is wrong.
        UnsupportedError: The system is not Linux.
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
        self._channels = Channels(keep, self._drop)
        self._lock = threading.Lock()
        self._last = -1
        self._looks: dict[str, tuple[str, tuple[int, ...]]] | None = None
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
        sink = _VersionSink(self, self._taken(version), _checked(metadata), channel)
        stager = self._stager
        assert stager is not None
        captured = capture(state, copy_value)
        if captured.sharded:
            raise UnsupportedTensorError(
                "the state has tensors that are divided among ranks: save it with publish=, which publishes the "
                "committed checkpoint"
            )
        deadline = Deadline.after(self._timeout_s)
        staging: Staging[SavePlan] = stager.prepare(captured, deadline, passes=True)
        pending = PendingVersion(sink)
        try:
            pending.follow(staging.free)
            stager.enqueue(staging, partial(self._lay_out, stager))
            stager.wait_if_eager(staging)
            pending.begin_alone(partial(_published_alone, sink, staging, deadline))
        except BaseException:
            staging.release()
            raise
        return pending

    def _lay_out(self, stager: AsyncStager, captured: Captured) -> SavePlan:
        plan = SavePlan.of(stager.plans, stager.budget_bytes, captured)
        self._choose(plan)  # what cannot be published is refused before anything is copied
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
        return _VersionSink(self, self._taken(step), _checked(metadata), "stable")

    def _taken(self, version: int) -> int:
        """Return the number of a version, which no other version has from now on."""
        version = plain_integer(version)
        if type(version) is not int or not 0 <= version < 1 << 63:
            raise InvalidOptionError(f"version={version!r} has to be a number, 0 or higher")
        epoch = self._open_home().epoch
        with self._lock:
            if version <= self._last:
                raise InvalidOptionError(
                    f"version {version} is not higher than {self._last}, the last one of epoch {epoch}: to serve older "
                    "weights use rollback() or promote(), or publish them under a new number"
                )
            self._last = version
        return version

    def _choose(self, plan: SavePlan) -> tuple[Selection, Mapping[int, Any]]:
        """Choose the tensors of a version. Raises ``StateMismatchError`` if they differ from those of the versions
        before: a subscriber could not serve them."""
        chosen, by_item = choose_staged(self, plan, self.url)
        self._check_looks(chosen)
        return chosen, by_item

    def _check_looks(self, chosen: Selection) -> None:
        looks = {one.fqn: (one.dtype, one.shape) for one in chosen.tensors}
        with self._lock:
            before = self._looks
            if before is None:
                self._looks = looks
        if before is None or before == looks:
            return
        lines = [f"{name}: missing" for name in before.keys() - looks.keys()]
        lines += [f"{name}: new" for name in looks.keys() - before.keys()]
        changed = (name for name in looks.keys() & before.keys() if looks[name] != before[name])
        lines += [f"{name}: {looks[name]}, and {before[name]} before" for name in changed]
        text = f"{self.url}: all versions of a publisher have the same tensors; start a new one for others:\n  "
        raise StateMismatchError(text + listed(sorted(lines)), sorted(lines))

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
        self._channels.promote(channel, version)
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

    def _drop(self, held: HeldVersion) -> None:
        held.image.close()
        self._images.free(held.image.nbytes)

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
        chosen = metadata if self.metadata is None else self.metadata
        publisher = self.publisher
        return _VersionSink(publisher, publisher._taken(self.number), _checked(chosen), self.channel)


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


def _record(held: HeldVersion) -> PublishedVersion:
    return PublishedVersion(held.stamp, held.epoch, held.version, held.image.nbytes, held.save_id)


async def _published_alone(sink: _VersionSink, staging: Staging[SavePlan], deadline: Deadline) -> PublishedVersion:
    """Publish a state that is not saved, and release its memory."""
    try:
        with time_limit(deadline):
            image = await read_in_thread(FirstReader(staging), sink.draw)
            return await sink.make_visible(image, "")
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

    def read(self, snapshot: SnapshotReader[Any], save: Save, stop: Stop) -> SealedImage:
        return self.draw(snapshot, stop)

    def draw(self, snapshot: SnapshotReader[SavePlan] | FirstReader[SavePlan], stop: Stop) -> SealedImage:
        """Copy the chosen tensors of the snapshot into an image. Called in a thread."""
        plan = snapshot.plan(stop)
        chosen, by_item = self.publisher._choose(plan)
        layout = ImageLayout.of([by_item[item] for item in sorted(by_item)], chosen.aliases)
        images = self.publisher._images
        memory = images.take(layout.nbytes)
        parts = pieces_of(snapshot, plan, by_item, stop)
        try:
            return memory.seal(memory.fill(layout, parts, stop))
        except BaseException:
            images.discard(memory)
            raise
        finally:
            parts.close()

    async def finish(self, read: SealedImage, save: Save) -> PublishedVersion:
        return await self.make_visible(read, save.save_id)

    async def make_visible(self, image: SealedImage, save_id: str) -> PublishedVersion:
        """Let subscribers take up a complete image."""
        publisher = self.publisher
        try:
            epoch = publisher._open_home().epoch
            held = HeldVersion(epoch, self.version, image, save_id, self.metadata)
            publisher._channels.publish(held, self.channel)
        except BaseException:
            image.close()
            publisher._images.free(image.nbytes)
            raise
        self._held = held
        publisher._announce()
        publisher._images.touch_ahead(image.nbytes)
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
            self.publisher._check_looks(chosen)
            layout = ImageLayout.of(chosen.tensors, chosen.aliases)
            images = self.publisher._images
            memory = await io_threads().run(images.take, layout.nbytes)
            try:
                targets = memory.targets(layout, chosen.tensors)
                wanted = []
                for name, target in targets.items():
                    entry = opened.tensors[chosen.origin[name]].entry
                    wanted.append(Wanted(name, entry, Box.whole(entry.shape), target))
                await Reader(opened.files, "always").read(wanted, own=True)
                del targets, target
                image = await io_threads().run(memory.complete, layout)
            except BaseException:
                await io_threads().run(images.discard, memory)
                raise
        finally:
            await opened.aclose()
        return await self.make_visible(image, save.save_id)

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
        self._used = 0
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
            self.discard(spare)
        with self._lock:
            if not self._fits(nbytes):
                raise ArenaExhaustedError(
                    f"a version of {nbytes} bytes does not fit: {self._used} of budget_bytes={self._budget_bytes} are "
                    "in use by versions that are held; raise budget_bytes=, or lower keep="
                )
            self._used += nbytes
        return self._made(nbytes)

    def _fits(self, nbytes: int) -> bool:
        return self._budget_bytes is None or self._used + nbytes <= self._budget_bytes

    def _made(self, nbytes: int) -> ImageMemory:
        try:
            return ImageMemory(nbytes)
        except BaseException:
            self.free(nbytes)
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

    def free(self, nbytes: int) -> None:
        """Count the memory of a version as free."""
        with self._lock:
            self._used -= nbytes

    def discard(self, memory: ImageMemory) -> None:
        """Free memory that no version was made of."""
        memory.discard()
        self.free(memory.nbytes)

    def touch_ahead(self, nbytes: int) -> None:
        """Touch memory for the next version in the background, if it fits into the budget."""
        with self._lock:
            if self._closed or self._spare is not None or not self._fits(nbytes):
                return
            self._used += nbytes
            stop = Stop()
            self._spare = _Spare(nbytes, stop, self._threads.submit(self._touch, nbytes, stop))

    def _touch(self, nbytes: int, stop: Stop) -> ImageMemory:
        memory = self._made(nbytes)
        memory.touch(stop)
        return memory

    def close(self) -> None:
        """Free what is touched ahead."""
        with self._lock:
            self._closed = True
        if (spare := self._taken_spare()) is not None:
            self.discard(spare)
        self._threads.close()
