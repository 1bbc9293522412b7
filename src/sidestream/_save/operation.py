"""``SaveOperation``: the course of every save, from launched copies to the commit.

Three objects have the parts that differ between saves. A writer writes the data to storage. A layout describes the data
files in a manifest and ``.metadata``. A coordinator makes the files visible, for one process or for all ranks of a
group.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, Protocol

from .._runtime.tasks import run_shielded
from .._runtime.threads import Stop, report, time_limit
from .._runtime.waits import WaitReasons
from ..events import SaveContext
from ..options import Outcome
from .pending import SaveInfo, SaveProgress
from .running import Save
from .sinks import PendingOutcome


@dataclass(frozen=True, slots=True)
class RankReceipt:
    """The record of what one rank has written.

    ``files`` has the sizes of its data files by their names in the checkpoint. ``content`` is what the layout needs in
    order to describe them. ``crcs`` has the CRC-32 of those files for which it is known."""

    files: Mapping[str, int]
    content: Any
    crcs: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True, slots=True)
class Committed:
    """The facts of a commit for ``SaveInfo``: the bytes of all data files and, for a group, the times of the phases on
    all ranks."""

    nbytes: int
    seconds: Mapping[str, float] | None = None


class Writer(Protocol):
    """The part of a save that writes the data to storage, in threads."""

    def pass_on(self, staged: Future[None]) -> None:
        """Resolve ``staged`` when the sources, and the sidecar files, may change, or with the error of the staging."""

    async def ended(self) -> Any:
        """Wait until the sidecar files are read, all data is on storage, and ``Coordinator.finish`` has returned, in
        the thread that has written. Return what that has returned."""

    async def release(self) -> None:
        """Release all memory. No copy reads a source any more when this returns."""

    def interrupt(self) -> None:
        """Stop the threads, so that ``ended`` raises. Called in any thread; does not block."""

    def progress(self) -> SaveProgress: ...


class Layout(Protocol):
    """The part of a save that describes the data files in the manifest and ``.metadata``. Its methods block."""

    def receipt(self, plan: Any, written: Any, stop: Stop) -> RankReceipt:
        """Return this rank's receipt for what its writer has written."""

    def files(self, receipts: Sequence[RankReceipt]) -> Mapping[str, Sequence[bytes]]:
        """Return the files that the commit adds, each as a sequence of pieces. Readers look for the last one. Called on
        the rank that commits, with the receipts of all ranks."""


class SharedLayout(Layout, Protocol):
    """The layout of a save by several ranks, which send their receipts to rank 0."""

    def pack(self, receipt: RankReceipt) -> bytes:
        """Return the content of ``receipt`` as bytes."""

    def unpack(self, rank: int, content: bytes) -> Any:
        """Return the content that ``rank`` has packed. Called on rank 0."""


class Coordinator(Protocol):
    """The part of a save that commits it, or ends it after a failure."""

    def attach(self, writer: Writer) -> None:
        """Interrupt ``writer`` when the save cannot be committed any more."""

    def relay(self, staged: Future[None]) -> Future[None]:
        """Return the future that the writer resolves in place of ``staged``."""

    def finish(self, plan: Any, written: Any, stop: Stop) -> Any:
        """Do what follows when all data is on storage, in the thread that has written it. ``plan`` and ``written`` are
        what the layout needs. One process commits here."""

    async def commit(self, finished: Any) -> Committed:
        """Make the checkpoint visible, if ``finish`` has not done that. ``finished`` is its result."""

    async def fail(self, error: BaseException) -> Committed:
        """Find out the outcome after ``error``, and delete an attempt that was not committed. Raises the error of the
        save; returns only if the checkpoint has been committed."""

    def close(self) -> None:
        """End the coordination of a save that was committed."""


def join_pieces(*pieces: bytes) -> bytes:
    """Return ``pieces`` as the bytes that one rank sends, for ``split_pieces``."""
    return b"".join((struct.pack(f"<{len(pieces)}Q", *map(len, pieces)), *pieces))


def split_pieces(joined: bytes, count: int) -> list[bytes]:
    """Return the ``count`` pieces that ``join_pieces`` was given."""
    sizes = struct.unpack_from(f"<{count}Q", joined)
    return [joined[start:end] for start, end in pairwise(accumulate(sizes, initial=8 * count))]


class Solo:
    """The coordinator of a save by one process."""

    def __init__(self, save: Save, layout: Layout) -> None:
        self._save = save
        self._layout = layout

    def attach(self, writer: Writer) -> None:
        """Do nothing: only the caller stops this save."""

    def relay(self, staged: Future[None]) -> Future[None]:
        return staged

    def finish(self, plan: Any, written: Any, stop: Stop) -> Committed:
        # The thread that has written commits: between its last byte and the marker no other thread has to be woken up,
        # for which it would wait beside a busy loop or a thread that computes.
        save, layout = self._save, self._layout
        receipt = layout.receipt(plan, written, stop)
        save.lifecycle.written(receipt.nbytes)
        save.transaction.commit(partial(layout.files, [receipt]), stop)
        return Committed(receipt.nbytes)

    async def commit(self, finished: Committed) -> Committed:
        return finished

    async def fail(self, error: BaseException) -> Committed:
        failure = await self._save.settled(error)
        await self._save.clean_up(failure)
        if failure is error:
            raise error
        raise failure from error

    def close(self) -> None:
        """Do nothing: nothing has been opened."""


@dataclass(slots=True, kw_only=True)
class SaveOperation:
    """One save, or the part of this rank in a save of a group."""

    save: Save
    writer: Writer
    coordinator: Coordinator
    outcomes: Sequence[PendingOutcome] = ()
    snapshots: tuple[Any, ...] = ()
    """For each of ``outcomes`` the ``SnapshotReader`` that it reads. Empty if they read the checkpoint."""

    @property
    def url(self) -> str:
        return self.save.location.url

    @property
    def outcome(self) -> Outcome:
        return self.save.outcome

    @property
    def progress(self) -> SaveProgress:
        return self.writer.progress()

    @property
    def context(self) -> SaveContext:
        return self.save.lifecycle.context

    @property
    def reasons(self) -> WaitReasons:
        return self.save.reasons

    async def run(self, staged: Future[None]) -> SaveInfo:
        lifecycle = self.save.lifecycle
        try:
            # The outcomes take over their readers here: from then on each closes its own.
            snapshots = self.snapshots or (None,) * len(self.outcomes)
            for number, (outcome, snapshot) in enumerate(zip(self.outcomes, snapshots, strict=True)):
                outcome.begin(self.save, number, snapshot)
            self.snapshots = ()
            # The deadline is set once, here. It holds for this task, for the tasks that it creates, and for threads
            # that work for them, so no function of a store takes a deadline. Work that cleans up sets a limit of its
            # own, because this one may have passed. The outcomes are outside: they may take longer than the save.
            with time_limit(self.save.deadline):
                committed = await self._run(staged)
        except BaseException as error:
            with suppress(asyncio.CancelledError):
                await report(lifecycle.failed, error, self.outcome)
            raise
        seconds = MappingProxyType(dict(lifecycle.seconds if committed.seconds is None else committed.seconds))
        await report(lifecycle.committed, committed.nbytes, seconds)
        save = self.save
        return SaveInfo(
            self.url,
            save.save_id,
            save.order.step,
            save.order.generation,
            committed.nbytes,
            save.order.durability,
            seconds,
        )

    async def _run(self, staged: Future[None]) -> Committed:
        coordinator, committed = self.coordinator, None
        try:
            coordinator.attach(self.writer)  # first: the failure of another rank has to reach the writer
            self.writer.pass_on(coordinator.relay(staged))
            committed = await coordinator.commit(await self.writer.ended())
            self.save.lifecycle.mark("committed")
        # ``fail`` has three ends. It raises the error of the save: the usual one. It raises the caller's cancel, after
        # the outcome was read back. Or it returns, because the checkpoint is there: rank 0 has died after its commit.
        except BaseException as error:
            committed = await coordinator.fail(error)
        finally:
            try:
                await self._clean_up()
            finally:
                if committed is not None:
                    coordinator.close()
        return committed

    async def _clean_up(self) -> None:
        try:
            # Also for a save that was cancelled after its commit.
            await self.save.remove_replaced()
        finally:
            # Last, and before the caller has the result. A caller that saves again at once finds the memory free, and a
            # failed save has left nothing behind when its error is raised.
            await run_shielded(self.writer.release)
