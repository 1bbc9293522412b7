"""``SaveOrder``: what a save was asked for, and ``Save``: a save in progress, with its transaction."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .._format.records import Chunk, Manifest, Node, TensorEntry
from .._format.shard import checksums_of
from .._group import Operation
from .._runtime.tasks import run_shielded
from .._runtime.threads import Deadline, Stop, io_threads, report, time_limit, write_threads
from .._runtime.waits import WaitReasons
from .._storage import Attempt, Kind, Location, Space, Transaction, read_sources
from .._worker.client import Worker
from ..errors import NotDurableError, OutcomeUnknownError, SidestreamError, StorageNotSharedError, is_stuck
from ..events import SaveContext
from ..options import Digest, Durability, FileSource, Outcome
from .lifecycle import Lifecycle

READ_BACK_S = 10.0
"""How long the outcome of a commit is looked for after its failure."""
_CLEAN_UP_S = 60.0

_log = logging.getLogger("sidestream")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """What a save was asked for. The same on all ranks, except for the files."""

    durability: Durability
    step: int | None = None
    generation: int = 1
    digest: Digest | None = None
    metadata: Node = None
    files: Mapping[str, FileSource] = field(default_factory=dict)
    """The sidecar files, by name. Only the rank that commits has them."""
    exports: tuple[str, ...] = ()
    """The URLs of the exports of the save."""
    saved_at: int = field(default_factory=lambda: int(time.time()))
    verb: Literal["save", "export", "convert", "copy"] = "save"


class Save:
    """A save in progress, or the part of this rank in it: the order, its attempt, and the phase that it is in.

    ``kind`` and ``replaces_export`` are those of the ``Attempt``. ``operation`` is set for a save by several ranks
    together. ``worker`` is the process that writes, None if threads of this process write; ``fall_back``: threads write
    if no process can be started. ``own_id`` is the id of a save by one process."""

    def __init__(
        self,
        location: Location,
        deadline: Deadline,
        order: SaveOrder,
        *,
        kind: Kind = "directory",
        replaces_export: bool = False,
        operation: Operation | None = None,
        worker: Worker | None = None,
        fall_back: bool = False,
        own_id: str | None = None,
    ) -> None:
        self.location = location
        self.deadline = deadline
        self.order = order
        self.operation = operation
        self.worker = worker
        self.fall_back = fall_back
        self.rank, world = (0, 1) if operation is None else (operation.rank, operation.world)
        run = None if order.step is None else location.store.url
        self.lifecycle = Lifecycle(
            SaveContext(
                order.verb,
                location.url,
                run=run,
                step=order.step,
                generation=order.generation,
                rank=self.rank,
                world=world,
            )
        )
        self.reasons = WaitReasons()
        """Why a caller has to wait until the sources may change."""
        self.space = Space()
        """The space that the save and its exports need on file systems of this machine."""
        self.reads_files = any(not isinstance(one, bytes) for one in order.files.values())
        """Whether ``read_files`` has to be called: some sidecar files are given as paths."""
        self.sidecars = {name: one for name, one in order.files.items() if isinstance(one, bytes)}
        """The content of the sidecar files."""
        if self.rank:  # ranks above 0 join the attempt of rank 0, and never make one
            kind = "joined_files" if kind == "files" else "joined"
        self._kind: Kind = kind
        self._replaces_export = replaces_export and not self.rank
        self._own_id = own_id or uuid.uuid4().hex
        self._lock = threading.Lock()
        self._transaction: Transaction | None = None

    @property
    def save_id(self) -> str:
        """The id of the save. In a group all ranks have the same one, which is known when they have planned."""
        return self._own_id if self.operation is None else self.operation.save_id

    @property
    def transaction(self) -> Transaction:
        """The transaction, which the first access begins. In a group it must not be accessed before the ranks have
        planned, because the id of the save is a part of the attempt, and is not known until then."""
        with self._lock:
            if self._transaction is None:
                attempt = Attempt(
                    self.location.name,
                    self._kind,
                    self.save_id,
                    self.order.durability,
                    in_run=self.order.step is not None,
                    replaces_export=self._replaces_export,
                )
                self._transaction = self.location.store.begin(attempt)
            return self._transaction

    @property
    def outcome(self) -> Outcome:
        return "absent" if self._transaction is None else self._transaction.outcome

    async def begin(self, nbytes: int) -> None:
        """Begin a save of ``nbytes`` whose data a coroutine writes. Raises ``NoSpaceError``."""
        await report(self.lifecycle.started)
        await io_threads().run(self.space.take, self.transaction, nbytes)
        await report(self.lifecycle.planned, self.save_id)

    def make_attempt(self) -> None:
        """Make the attempt, on rank 0 before the other ranks write. Its name is unique, so a rank that finds a
        directory of that name sees the same storage. A rank that does not find it raises an error. Called in a
        thread."""
        self.transaction.write(())

    async def check_shared(self, files: Mapping[str, int]) -> None:
        """Check that this process, which commits, sees the files that the ranks have written: their names and sizes.
        The commit checks them again. Raises ``StorageNotSharedError`` if it does not, and ``CheckpointExistsError`` if
        another save has removed them, because it has replaced the target."""
        transaction = self.transaction
        try:
            found = await self.location.store.sizes(transaction.path_of())
        except FileNotFoundError:
            found = {}
        lost = [name for name, nbytes in files.items() if found.get(name) != nbytes]
        # Two cases look the same here: rank 0 sees other storage than the ranks that wrote, or another save has
        # replaced the target and deleted the files of this one. The marker tells them apart, so it is read first: the
        # advice to share storage would be wrong in the second case.
        if lost:
            await write_threads().run(transaction.check_not_overtaken)
            raise StorageNotSharedError(
                2,
                f"ranks wrote {len(files)} files, and rank 0 does not see {len(lost)} of them "
                f"({', '.join(lost[:4])}): save to storage that all ranks share",
                self.location.url,
            )
        # The attempt of rank 0 has only its own files so far. From here on its commit checks those of all ranks once
        # more, right before they become visible.
        transaction.expect(files)

    # --- sidecar files ---

    async def read_files(self) -> None:
        """Read the sidecar files. Raises what ``read_sources`` raises."""
        self.sidecars = await read_sources(self.order.files, timeout_s=self.deadline.remaining_s())

    def sidecar_files(self) -> dict[str, list[bytes]]:
        """Return the sidecar files, under the names that they have on this store."""
        return {self.transaction.sidecar_name(name): [content] for name, content in self.sidecars.items()}

    def with_sidecars(self, manifest: Manifest) -> Manifest:
        """Return ``manifest`` with the sidecar files and their checksums. Called in a worker thread."""
        digest = self.order.digest if manifest.digest is not None else None
        sidecars: dict[str, TensorEntry] = {}
        files, file_crcs = dict(manifest.files), dict(manifest.file_crcs)
        for name, content in self.sidecars.items():
            file, nbytes = self.transaction.sidecar_name(name), len(content)
            crcs, digests, whole = checksums_of(content, digest)
            chunk = Chunk((0,), (nbytes,), file, 0, nbytes, 0, crcs, digests=digests)
            sidecars[name] = TensorEntry((name,), "uint8", (nbytes,), (chunk,))
            files[file], file_crcs[file] = nbytes, whole
        return replace(manifest, files=files, sidecars=sidecars, file_crcs=file_crcs)

    # --- the ends, for code on the loop of operations ---
    # A transaction blocks while it waits for requests, and file systems without coroutines make these in threads of
    # ``io_threads``, which are few. So transactions never work in those, but in ``write_threads``, which have no limit.

    async def commit(self, files: Mapping[str, Sequence[bytes]]) -> None:
        """Do ``Transaction.commit`` in a thread. If that fails, or this task is cancelled, find out the outcome.

        Raises:
            asyncio.CancelledError: ``outcome`` may have any value.
            CheckpointExistsError: ``outcome`` is ``"absent"``.
            NotDurableError, OutcomeUnknownError: ``outcome`` is ``"committed"`` or ``"unknown"``.
        """
        stop = Stop()
        try:
            await write_threads().run(self.transaction.commit, files, stop, stop=stop)
        except BaseException as error:
            failure = await self.settled(error)
            if failure is error:
                raise
            raise failure from error

    async def settled(self, error: BaseException) -> BaseException:
        """Return the error to raise after ``error`` has ended the commit, or the wait for it. If the commit was sent,
        and its outcome is unknown, it is read back first. So ``outcome`` is true afterwards.

        This is ``error`` itself if it is a cancel, or if nothing was committed."""
        transaction, attempt = self.transaction, self.transaction.attempt
        transaction.end(may_follow=is_stuck(error))
        if not transaction.can_be_read_back:
            return error
        await run_shielded(_read_back, transaction)
        outcome: Outcome = transaction.outcome
        # If the checkpoint is complete, how far the sync has come is unknown. So what was replaced stays until another
        # collection, also after a cancel: after a power cut the old name may be the one that the file system has.
        committed = NotDurableError(
            f"{attempt.target} is committed and complete, but publishing it did not end well: {error}"
        )
        if outcome == "committed":
            transaction.keep_replaced(committed)
        if outcome == "absent" or not isinstance(error, Exception):
            return error
        if outcome == "unknown":
            return OutcomeUnknownError(
                f"the commit of {attempt.target} was sent, and whether it took place could not be read back: {error}. "
                f"Nothing was deleted; look for {attempt.target}, and remove {attempt.name} if it is still there"
            )
        return committed

    async def clean_up(self, error: BaseException) -> None:
        """Delete the files of an attempt that was not committed. A failure to do so is added to ``error`` as a note."""
        # Files of a committed checkpoint stay, and so do those of an unknown outcome: they may be the only checkpoint
        # there is.
        transaction = self.transaction
        if transaction.outcome != "absent":
            return
        await run_shielded(_discard, transaction, error)
        if is_stuck(error):
            attempt = transaction.attempt.name
            if isinstance(error, SidestreamError):
                error.about(left_behind=attempt)
            error.add_note(f"a thread hangs in a system call and may still write {attempt}; remove it if it appears")

    async def remove_replaced(self) -> None:
        """Remove what the save has replaced, if it was committed durably. Called at the end of every save and export,
        also of one that was cancelled after its commit, and not interrupted by a cancel. A failure is only logged,
        because the save itself has succeeded."""
        if self._transaction is not None and self._transaction.has_replaced:
            await run_shielded(_discard_replaced, self._transaction)


async def _read_back(transaction: Transaction) -> None:
    try:
        with time_limit(Deadline.after(READ_BACK_S)):
            await write_threads().run(transaction.read_back)
    except (SidestreamError, OSError):
        return


async def _discard(transaction: Transaction, error: BaseException) -> None:
    try:
        with time_limit(Deadline.after(_CLEAN_UP_S)):
            await write_threads().run(transaction.discard)
    except (SidestreamError, OSError) as failure:
        error.add_note(f"what it had written could not be removed: {failure}")
        if isinstance(error, SidestreamError):
            error.about(left_behind=transaction.attempt.name)


async def _discard_replaced(transaction: Transaction) -> None:
    try:
        with time_limit(Deadline.after(_CLEAN_UP_S)):
            await write_threads().run(transaction.discard_replaced)
    except (SidestreamError, OSError) as error:
        _log.warning("what %s replaced could not be removed: %s", transaction.attempt.target, error)
