"""``SaveOrder``: the arguments of a save, with its transaction, and ``Lifecycle``: its phases."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .._format.records import Chunk, Manifest, Node, TensorEntry
from .._format.shard import checksums_of
from .._group import Deadline, Operation
from .._storage import Attempt, Kind, Location, Space, Transaction, read_sources
from .._worker.client import Worker
from ..errors import SidestreamError, SkippedError
from ..events import (
    SaveCommitted,
    SaveContext,
    SaveEvent,
    SaveFailed,
    SavePlanned,
    SaveSkipped,
    SaveStaged,
    SaveStarted,
    SaveWritten,
    emit,
)
from ..options import Digest, Durability, FileSource, Outcome
from .commit import remove_replaced

__all__ = ["Lifecycle", "SaveOrder"]


class Lifecycle:
    """The phases of one save: their times in seconds since the call, and an event for each.

    Phases end in different threads, the loop among them, and an observer may take long, wait for another thread, or end
    the save. So observers are called without a lock: events are queued in their order, and one thread at a time emits
    what is in the queue. A thread that finds another one emitting leaves its event to that one.
    """

    def __init__(self, save: SaveContext) -> None:
        self.seconds: dict[str, float] = {}
        self._save = save
        self._phase: Literal["plan", "write", "commit"] = "plan"
        self._began = time.monotonic()
        self._open = False  # started, and not ended
        self._lock = threading.Lock()  # never held while an observer runs
        self._queued: deque[SaveEvent] = deque()
        self._emitting = False

    @classmethod
    def of_rank(cls, url: str, operation: Operation) -> Lifecycle:
        """Return the lifecycle of a save that this rank could not begin."""
        return cls(SaveContext("save", url, rank=operation.rank, world=operation.world))

    def mark(self, phase: str) -> None:
        """Record that ``phase`` has ended, the first time that this is called for it."""
        self.seconds.setdefault(phase, time.monotonic() - self._began)

    def started(self, world: int | None = None) -> None:
        """Emit the start of the save. ``world`` is the number of ranks, if another library coordinates them."""
        self.will_start(world)
        self.emit_queued()

    def will_start(self, world: int | None = None) -> None:
        """Do ``started``, but leave the event to the next ``emit_queued``, in another thread."""
        with self._lock:
            self._save = self._save if world is None else replace(self._save, world=world)
            self._open = True
            self._queue(SaveStarted(self._save))

    def planned(self, save_id: str) -> None:
        with self._lock:
            self._phase = "write"
            self._save = replace(self._save, save_id=save_id)
            self._queue(SavePlanned(self._save))
        self.emit_queued()

    def staged(self) -> None:
        with self._lock:
            self.mark("staged")
            self._queue(SaveStaged(self._save))
        self.emit_queued()

    def written(self, nbytes: int) -> None:
        with self._lock:
            self.mark("written")
            self._phase = "commit"
            self._queue(SaveWritten(self._save, nbytes))
        self.emit_queued()

    def committed(self, nbytes: int, seconds: Mapping[str, float]) -> None:
        with self._lock:
            self._queue(SaveCommitted(self._save, nbytes, seconds))
            self._open = False
        self.emit_queued()

    def failed(self, error: BaseException, outcome: Outcome) -> None:
        """Emit the failure of a save, unless the save has ended before or never started."""
        with self._lock:
            if isinstance(error, SidestreamError):
                error.about(phase=self._phase, url=self._save.url, step=self._save.step)
            if isinstance(error, SkippedError):
                self._queue(SaveSkipped(self._save, str(error)))
            else:
                self._queue(SaveFailed(self._save, self._phase, type(error).__name__, str(error), outcome))
            self._open = False
        self.emit_queued()

    def _queue(self, event: SaveEvent) -> None:
        """Queue ``event`` if the save has started and not ended. A thread that was left behind emits nothing."""
        if self._open:
            self._queued.append(event)

    def emit_queued(self) -> None:
        """Emit the events in the queue, unless another thread, or a caller of this one, is emitting: it continues until
        the queue is empty."""
        while True:
            with self._lock:
                if self._emitting or not self._queued:
                    return
                event = self._queued.popleft()
                self._emitting = True
            try:
                emit(event)
            finally:
                # Without the lock. Only the thread that has set the flag resets it, and the next round of the loop
                # looks at the queue again. An event that was queued in between is emitted there or by the thread that
                # has queued it.
                self._emitting = False


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """The arguments of a save, and its transaction."""

    location: Location
    durability: Durability
    deadline: Deadline
    step: int | None = None
    generation: int = 1
    budget_bytes: int | None = None
    """The limit of the memory that is mapped for this save alone."""
    digest: Digest | None = None
    metadata: Node = None
    operation: Operation | None = None
    """Set for a save by several ranks together."""
    worker: Worker | None = None
    """The process that writes. None if threads of this process write."""
    fall_back: bool = False
    """Whether threads write if no process can be started."""
    kind: Kind = "directory"
    """The kind of the transaction, unless it follows from ``operation`` or ``replaces_export``."""
    replaces_export: bool = False
    """Whether an export replaces an existing one."""
    files: Mapping[str, FileSource] = field(default_factory=dict)
    """The sidecar files, by name."""
    exports: tuple[str, ...] = ()
    """The URLs of the exports of the save."""
    own_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    saved_at: int = field(default_factory=lambda: int(time.time()))
    verb: Literal["save", "export", "convert", "copy"] = "save"
    lifecycle: Lifecycle = field(init=False, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    _begun: list[Transaction] = field(default_factory=list, init=False, repr=False, compare=False)
    space: Space = field(default_factory=Space, init=False, repr=False, compare=False)
    """The space that the save and its exports need on file systems of this machine."""
    sidecars: dict[str, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The content of ``files``, which ``read_files`` has read."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lifecycle", Lifecycle(self._context()))

    def _context(self) -> SaveContext:
        world = 1
        if self.operation is not None:
            world = self.operation.world
        run = None if self.step is None else self.location.store.url
        rank, url = self.rank, self.location.url
        return SaveContext(self.verb, url, run=run, step=self.step, generation=self.generation, rank=rank, world=world)

    @property
    def rank(self) -> int:
        """The number of this rank among those whose files the checkpoint has."""
        if self.operation is not None:
            return self.operation.rank
        return 0

    @property
    def transaction(self) -> Transaction:
        """The transaction, which the first access begins. In a group it must not be accessed before the ranks have
        planned, because the id of the save is not known until then."""
        with self._lock:
            if not self._begun:
                # On the first access, because the id of the save is a part of the attempt, and a group has it only
                # after its planning. An export replaces an existing one as a whole where directories can be exchanged.
                # Elsewhere its files keep the names that other programs look for, so the old ones are deleted first,
                # or, on a marked mount, the export is refused.
                # Ranks above 0 join the attempt of rank 0, and never make one.
                kind = self.kind
                if self.replaces_export and self.location.store.capabilities.rename:
                    kind = "replacement"
                if self.operation is not None and self.operation.rank:
                    kind = "joined_files" if kind == "files" else "joined"
                in_run = self.step is not None
                replaces = self.replaces_export and kind in ("files", "replacement")
                attempt = Attempt(self.location.name, kind, self.save_id, self.durability, in_run, replaces)
                self._begun.append(self.location.store.begin(attempt))
            return self._begun[0]

    def make_attempt(self) -> None:
        """Make the attempt, on rank 0 before the other ranks write. Its name is unique, so a rank that finds a
        directory of that name sees the same storage. A rank that does not find it raises an error. Called in a
        thread."""
        self.transaction.write(())

    async def read_files(self) -> None:
        """Read the sidecar files. Raises what ``read_sources`` raises."""
        self.sidecars.update(await read_sources(self.files, timeout_s=self.deadline.remaining_s()))

    def sidecar_files(self) -> dict[str, list[bytes]]:
        """Return the sidecar files, under the names that they have on this store."""
        return {self.transaction.sidecar_name(name): [content] for name, content in self.sidecars.items()}

    def with_sidecars(self, manifest: Manifest) -> Manifest:
        """Return ``manifest`` with the sidecar files and their checksums. Called in a worker thread."""
        digest = self.digest if manifest.digest is not None else None
        sidecars: dict[str, TensorEntry] = {}
        files, file_crcs = dict(manifest.files), dict(manifest.file_crcs)
        for name, content in self.sidecars.items():
            file, nbytes = self.transaction.sidecar_name(name), len(content)
            crcs, digests, whole = checksums_of(content, digest)
            chunk = Chunk((0,), (nbytes,), file, 0, nbytes, 0, crcs, digests=digests)
            sidecars[name] = TensorEntry((name,), "uint8", (nbytes,), (chunk,))
            files[file], file_crcs[file] = nbytes, whole
        return replace(manifest, files=files, sidecars=sidecars, file_crcs=file_crcs)

    async def remove_replaced(self) -> None:
        """Remove what the save has replaced, if there is a transaction."""
        for transaction in self._begun:
            await remove_replaced(transaction)

    @property
    def outcome(self) -> Outcome:
        return self._begun[0].outcome if self._begun else "absent"

    @property
    def save_id(self) -> str:
        """The id of the save. In a group all ranks have the same one, which is known when they have planned."""
        return self.own_id if self.operation is None else self.operation.save_id
