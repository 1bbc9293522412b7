"""The versions of a publisher: their numbers, their tensors, their memory, and the sinks that make them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from .._convert.chosen import choose_saved, choose_staged
from .._convert.selection import Selection
from .._convert.source import Source, open_source
from .._convert.streamed import pieces_of
from .._convert.targets import OutTensor
from .._engine.calls import in_operation
from .._group import Operation
from .._layout.ranges import Box
from .._layout.save_layout import SavePlan
from .._load.reader import Reader, Wanted
from .._runtime.public import public
from .._runtime.tasks import run_shielded
from .._runtime.threads import Stop, io_threads
from .._save.running import Save
from .._staging import FirstReader, SnapshotReader
from ..errors import (
    CheckpointNotFoundError,
    ClosedError,
    DeadlineExceededError,
    InvalidOptionError,
    StateMismatchError,
    listed,
)
from ..options import Dtypes, Names, check_count, check_dtype, check_names, check_seconds, plain_integer
from .channels import Answer, Channels, HeldVersion, check_channel, told_apart
from .images import ImageMemory, SealedImage, VersionLayout
from .memory import VersionMemory
from .subscriptions import Subscriptions

_METADATA_BYTES = 32 << 10

Looks: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor of a version."""


@public
@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version that subscribers can take up.

    Attributes:
        stamp: Epoch and version, such as ``"e3.v120"``.
        epoch: The number of the publisher among those that had the home.
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
        names = told_apart(one.subscriber for one in answers)
        answers = [one._replace(subscriber=name) for one, name in zip(answers, names, strict=True)]
        by = {kind: [one for one in answers if one.outcome == kind] for kind in ("applied", "refused", "skipped")}
        refused = MappingProxyType({one.subscriber: one.reason for one in by["refused"]})
        applied, skipped = (tuple(one.subscriber for one in by[kind]) for kind in ("applied", "skipped"))
        return cls(stamp, applied, refused, skipped)


class LaidOut(NamedTuple):
    """What is published of states with one ``description``: the tensors by the items of the plan, and their image."""

    description: object
    by_item: Mapping[int, OutTensor]
    looks: Looks
    layout: VersionLayout


class Versions:
    """The versions of one publisher at ``url``. Those of all have the same tensors."""

    def __init__(
        self,
        url: str,
        select: str | Collection[str] | None,
        names: Names | None,
        dtype: Dtypes | None,
        *,
        keep: int,
        budget_bytes: int | None,
    ) -> None:
        check_count("keep", keep)
        check_dtype(dtype)
        check_names(names)
        if budget_bytes is not None:
            check_count("budget_bytes", budget_bytes)
        self.url, self.select, self.names, self.dtype = url, select, names, dtype
        self.memory = VersionMemory(budget_bytes)
        self.channels = Channels(keep)
        self.epoch = 0
        self.subscriptions: Subscriptions | None = None
        """Set as long as the publisher is open, with the epoch."""
        self._lock = threading.Lock()
        self._published = -1
        self._begun: set[int] = set()
        """The numbers of the versions that are being made."""
        self._looks: Looks | None = None
        """Those of all versions, known from the first one on."""
        self._laid: LaidOut | None = None
        """That of the newest state."""

    def check_open(self) -> int:
        """Return the epoch. Raises ``ClosedError`` if the publisher is not open."""
        if self.subscriptions is None:
            raise ClosedError("enter the publisher first, and use it before it is left: async with Publisher(home)")
        return self.epoch

    def announce(self) -> None:
        """Let subscribers know what channels point at."""
        if self.subscriptions is not None:
            self.subscriptions.announce()

    def sink(self, version: int, metadata: Mapping[str, Any] | None, channel: str | None) -> VersionSink:
        """Return the sink of a version, whose number no other one can have until it has failed. Raises what is wrong
        with the arguments."""
        version, metadata = plain_integer(version), _checked(metadata)
        if type(version) is not int or not 0 <= version < 1 << 63:
            raise InvalidOptionError(f"version={version!r} has to be a number, 0 or higher")
        if channel is not None:
            check_channel(channel)
        epoch = self.check_open()
        with self._lock:
            last = max([self._published, *self._begun])
            if version <= last:
                raise InvalidOptionError(
                    f"version {version} is not higher than {last}, the last one of epoch {epoch}: to serve older "
                    "weights use rollback() or promote(), or publish them under a new number"
                )
            self._begun.add(version)
        return VersionSink(self, version, metadata, channel)

    def laid_out(self, plan: SavePlan) -> LaidOut:
        """Return what is published of a state that is being staged. Called in worker threads. Raises what is wrong with
        it."""
        # States with the same names and tensors have one description. Thousands of objects for each version would make
        # Python collect its whole heap, which holds the GIL for 100 ms with torch imported.
        laid = self._laid
        if laid is None or laid.description is not plan.description:
            chosen, by_item = choose_staged(self, plan, self.url)
            layout = VersionLayout.of([by_item[item] for item in sorted(by_item)], chosen.aliases)
            laid = self._laid = LaidOut(plan.description, by_item, looks_of(chosen), layout)
        self.check(laid.looks)
        return laid

    def ended(self, version: int) -> None:
        """Note that a version is published, or has failed."""
        with self._lock:
            self._begun.discard(version)

    def check(self, looks: Looks) -> None:
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

    def make_visible(self, held: HeldVersion, looks: Looks, channel: str | None) -> None:
        """Let subscribers take up a complete version. Called on the operation loop."""
        self.check_open()
        self.check(looks)
        self.channels.publish(held, channel)
        with self._lock:
            self._published, self._looks = max(self._published, held.version), looks
        self.announce()
        self.memory.touch_ahead(held.image.nbytes)


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


def looks_of(chosen: Selection) -> Looks:
    return {one.fqn: (one.dtype, one.shape) for one in chosen.tensors}


def record_of(held: HeldVersion) -> PublishedVersion:
    return PublishedVersion(held.stamp, held.epoch, held.version, held.image.nbytes, held.save_id)


@dataclass(slots=True)
class VersionSink:
    """The sink of one version."""

    versions: Versions
    version: int
    metadata: Mapping[str, Any]
    channel: str | None
    together: bool = field(default=False, init=False)
    replaces: bool = field(default=False, init=False)
    _held: HeldVersion | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return self.versions.url

    async def prepare(self, save: Save) -> None:
        """Do nothing: all that is needed is in the state."""

    def read(self, snapshot: SnapshotReader[Any], save: Save, stop: Stop) -> tuple[SealedImage, Looks]:
        return self.draw(snapshot, stop)

    def draw(self, snapshot: SnapshotReader[SavePlan] | FirstReader[SavePlan], stop: Stop) -> tuple[SealedImage, Looks]:
        """Copy the chosen tensors of the snapshot into an image. Called in a thread."""
        plan = snapshot.plan(stop)
        laid = self.versions.laid_out(plan)
        memory = self.versions.memory.take(laid.layout.nbytes)
        parts = pieces_of(snapshot, plan, laid.by_item, stop)
        try:
            return memory.seal(memory.fill(laid.layout, parts, stop)), laid.looks
        except BaseException:
            memory.discard()
            raise
        finally:
            parts.close()

    async def finish(self, read: tuple[SealedImage, Looks], save: Save) -> PublishedVersion:
        return await self.make_visible(*read, save.save_id)

    async def make_visible(self, image: SealedImage, looks: Looks, save_id: str) -> PublishedVersion:
        """Let subscribers take up a complete image."""
        try:
            held = HeldVersion(self.versions.check_open(), self.version, image, save_id, self.metadata)
            self.versions.make_visible(held, looks, self.channel)
        except BaseException:
            await run_shielded(io_threads().run, image.close)
            raise
        self._held = held
        return record_of(held)

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
            chosen, looks, layout = await io_threads().run(self._laid_out, opened)
            memory = await io_threads().run(self.versions.memory.take, layout.nbytes)
            try:
                wanted = await io_threads().run(_wanted, memory, layout, opened, chosen)
                await Reader(opened.files, "always").read(wanted, own=True)
                image = await io_threads().run(memory.complete, layout)
            except BaseException:
                await run_shielded(io_threads().run, memory.discard)
                raise
        finally:
            await opened.aclose()
        return await self.make_visible(image, looks, save.save_id)

    def _laid_out(self, opened: Source) -> tuple[Selection, Looks, VersionLayout]:
        chosen = choose_saved(self.versions, opened, self.url)
        looks = looks_of(chosen)
        self.versions.check(looks)
        return chosen, looks, VersionLayout.of(chosen.tensors, chosen.aliases)

    def ended(self) -> None:
        self.versions.ended(self.version)

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
                    self.versions.check_open()
                    await self.versions.channels.answered()
        report = AppliedReport._of(held.stamp, list(held.answers.values()))
        if len(held.answers) < count:
            raise DeadlineExceededError(
                f"{len(held.answers)} of {count} subscribers have answered within {timeout_s} s: {report}"
            )
        return report


def _wanted(memory: ImageMemory, layout: VersionLayout, opened: Source, chosen: Selection) -> list[Wanted]:
    """Return requests to read the chosen tensors of a checkpoint to their places in an image. Called in a thread."""
    wanted = []
    for name, target in memory.targets(layout, chosen.tensors).items():
        entry = opened.tensors[chosen.origin[name]].entry
        wanted.append(Wanted(name, entry, Box.whole(entry.shape), target))
    return wanted
