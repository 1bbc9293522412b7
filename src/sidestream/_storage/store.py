"""The contract of a store: the few operations that saving and loading need, and what each of them promises."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from typing import Literal, Protocol

from .._format.marker import TAIL_BYTES, Marker, find_marker
from .._format.records import MAX_MANIFEST_BYTES
from .._runtime.threads import Stop, pause_point
from ..errors import CorruptCheckpointError, allocating
from ..options import Capabilities, Durability
from .names import MARKER
from .replacing import Found, Use
from .transaction import Attempt, StoreAddress, Transaction

_MOST_METADATA_BYTES = 1 << 30
PIECE_BYTES = 16 << 20
"""The most bytes that are read with one request."""
_PAGE_BYTES = 4096
_EMPTY_PAGE = bytes(_PAGE_BYTES)
_MOST_EMPTY_PAGES = 4096


@dataclass(frozen=True, slots=True)
class ReadRange:
    """A request to fill ``into`` with the bytes from ``offset`` on.

    ``seen`` is called with the bytes in order, piece by piece, each right after it was read, while it is in the cache
    of the processor. ``arrived`` is called when all bytes are there. Both are called in the thread that reads. What
    they raise ends the read."""

    offset: int
    into: memoryview
    arrived: Callable[[], None] | None = None
    seen: Callable[[memoryview], object] | None = None


def coalesce(ranges: Iterable[ReadRange], *, gap_bytes: int, most: int, most_bytes: int) -> Iterator[list[ReadRange]]:
    """Yield runs of at most ``most`` ranges. Each range of a run begins at most ``gap_bytes`` after the end of the one
    before it.

    Runs and ranges are ordered by their offsets. A run of several ranges spans at most ``most_bytes``. Ranges that
    overlap are in different runs. Empty ranges are left out.
    """
    run: list[ReadRange] = []
    end = 0
    for one in sorted(ranges, key=lambda one: one.offset):
        if not len(one.into):
            continue
        fits = len(run) < most and one.offset + len(one.into) - run[0].offset <= most_bytes if run else True
        if run and not (fits and 0 <= one.offset - end <= gap_bytes):
            yield run
            run = []
        run.append(one)
        end = one.offset + len(one.into)
    if run:
        yield run


@dataclass(frozen=True, slots=True)
class Leftover:
    """The remains of a save or of a deletion under the root.

    An ``"attempt"`` was not published, or not yet; ``target_of_attempt`` returns its step. A ``"retired"`` checkpoint
    is one whose deletion was interrupted. ``age_s`` is the time since the last write to it, by the storage's clock; for
    an attempt in a local directory infinity if its process has ended, and 0 if it has not, where a lock shows it."""

    name: str
    kind: Literal["attempt", "retired"]
    age_s: float

    @property
    def is_certain(self) -> bool:
        """Whether no process writes it any more, whatever clocks and leases show."""
        return self.kind == "retired" or self.age_s == math.inf


class Files(Protocol):
    """The files of one directory, for threads that read them without an event loop."""

    def read(self, name: str, ranges: Sequence[ReadRange], stop: Stop) -> None:
        """Do ``RangeSource.read`` in the calling thread. Raises ``ClosedError`` once ``stop`` is set."""


class _Content:
    """The bytes read from a file. The memory grows with the bytes that arrive and not with the size that the file
    claims."""

    def __init__(self, name: str) -> None:
        self.raw = bytearray()
        self._name = name
        self._pages = self._empty = 0

    def take(self, piece: bytearray) -> None:
        """Take bytes as they arrive. Called in a thread of the store."""
        for start in range(0, len(piece), _PAGE_BYTES):
            pause_point()
            self._pages += 1
            self._empty += piece[start : start + _PAGE_BYTES] == _EMPTY_PAGE
        if self._empty > max(_MOST_EMPTY_PAGES, self._pages // 2):
            raise CorruptCheckpointError(
                f"{self._name} consists mostly of zeros: it is sparse or damaged", file=self._name
            )
        self.raw += piece


class RangeSource(ABC):
    """The files of one directory for a reader, which names them relative to the directory. ``name`` is the name of the
    directory in its store.

    The first request opens a local directory, in the thread that makes the request. Every file is opened relative to
    the open directory. So all requests see the same directory, also if it is renamed meanwhile and another one takes
    its place. Requests can be cancelled, and raise, as those of a ``Store``. They raise ``ClosedError`` after
    ``aclose``.
    """

    concurrency: int = 4
    """How many reads of a load are in progress at the same time, where a read is a request to a server."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._marker: tuple[int, bytes] | None = None  # of the first read: bytes requested, result

    def path_of(self, file: str) -> str:
        """Return the name of a file in the store, for messages."""
        return file if self.name == "." else f"{self.name}/{file}"

    @abstractmethod
    async def read(self, file: str, ranges: Sequence[ReadRange]) -> None:
        """Fill every range. Raises ``CorruptCheckpointError`` if the file ends before the end of a range, and
        ``FileNotFoundError`` if there is no such file.

        Ranges that lie close together are read with one request. Each store decides how close."""

    def files(self, waiting: Callable[[], None]) -> Files | None:
        """Return the object with which threads read the files; None where a read is a request to a server.

        ``waiting`` is called once, in one of these threads, when reads wait for a device or a network more than for
        the processor. Then more reads at a time are faster."""
        return None

    async def read_tail(self, file: str, nbytes: int) -> bytes:
        """Return the last ``nbytes`` of a file, or all of it if it is smaller. Raises ``FileNotFoundError``."""
        tail = await self._tail(file, nbytes)
        # The first marker that was read is the checkpoint that this source reads. ``moved`` compares with it.
        if file == MARKER and self._marker is None:
            self._marker = nbytes, tail
        return tail

    async def read_file(self, file: str, nbytes: int, *, most_bytes: int = MAX_MANIFEST_BYTES) -> bytearray:
        """Read a whole file that describes other files and whose size is known, in pieces.

        Raises ``CorruptCheckpointError`` before reading if the file is larger than ``most_bytes``, and while reading if
        most of it is empty, because a sparse file can have any size without using space. Raises ``OutOfMemoryError``.
        """
        name = self.path_of(file)
        if nbytes > most_bytes:
            raise CorruptCheckpointError(f"{name} has {nbytes} bytes, more than the limit of {most_bytes}", file=name)
        content = _Content(name)
        for start in range(0, nbytes, PIECE_BYTES):
            with allocating(f"reading {name}"):
                piece = bytearray(min(PIECE_BYTES, nbytes - start))
            read = ReadRange(start, memoryview(piece), partial(content.take, piece))
            await self.read(file, [read])
        return content.raw

    async def read_metadata(self, file: str, nbytes: int) -> bytearray:
        """Do ``read_file`` for a ``.metadata`` of DCP, of the whole or of one rank."""
        return await self.read_file(file, nbytes, most_bytes=_MOST_METADATA_BYTES)

    async def marker(self) -> Marker | None:
        """Return the marker of the checkpoint; None if another writer made it. Raises ``FileNotFoundError``,
        ``CorruptCheckpointError``."""
        return find_marker(await self.read_tail(MARKER, TAIL_BYTES))

    async def committed_marker(self) -> Marker | None:
        """Do ``marker``, also for saves that create the marker in place. If such a marker lacks its last bytes, raise
        ``FileNotFoundError``: its save is committing at this moment, or has died in the commit."""
        return await self.marker()

    @abstractmethod
    async def _tail(self, file: str, nbytes: int) -> bytes:
        """Do ``read_tail``."""

    @abstractmethod
    async def size(self, file: str) -> int:
        """Return the size of one file. Raises ``FileNotFoundError``."""

    @abstractmethod
    async def sizes(self) -> dict[str, int]:
        """Do ``Store.sizes`` of the directory."""

    async def versions(self, files: Iterable[str]) -> dict[str, Hashable]:
        """Return for each of ``files`` what differs if another file has taken its name. Empty if the storage does not
        show that. Raises ``FileNotFoundError``."""
        return {}

    @abstractmethod
    async def map(self, file: str, nbytes: int) -> mmap:
        """Map the first ``nbytes`` of a file into memory. Only stores with ``capabilities.mapping`` can. Writing to the
        memory changes private copies of its pages, never the file.

        Raises ``CorruptCheckpointError`` if the file is shorter, and ``FileNotFoundError`` if there is no such
        file."""

    async def moved(self) -> bool:
        """Return whether the name of this directory now belongs to another directory, or to none, since it was opened.
        Where a save that replaces a checkpoint does not replace the directory, it replaces the marker: return whether
        the marker differs from the one that was read first."""
        if self._marker is None:
            return False
        nbytes, tail = self._marker
        try:
            return await self._tail(MARKER, nbytes) != tail
        except FileNotFoundError:
            return True

    async def aclose(self) -> None:
        """Release the directory. A cancel is raised afterwards. A thread that still uses the directory keeps it open
        until its system call has ended. Does nothing if the directory is not open."""
        return


class Store(Protocol):
    """Directories of files under one root. Names are relative, with ``/`` between components.

    Every method is cancellable: when it raises ``CancelledError``, no thread touches a file or a buffer any more. Every
    method raises ``StorageError`` (or a subclass) if the storage refuses a request, and ``DeadlineExceededError`` when
    the deadline of the calling task passes.
    """

    @property
    def url(self) -> str:
        """The root, as messages name it."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def address(self) -> StoreAddress | None:
        """The address with which another process opens the store. None if only this process has the store: it is in
        memory, or is a file system object that cannot be made again."""

    async def connect(self) -> None:
        """Import the clients that a save needs, and send a first request. Changes nothing on the storage."""

    def begin(self, attempt: Attempt) -> Transaction:
        """Return a transaction for one attempt. Changes nothing on the storage and never raises."""

    def check_replaces(self) -> None:
        """Raise ``InvalidOptionError`` if this store is known not to replace a checkpoint in one step."""

    async def put(self, name: str, content: bytes, *, durability: Durability) -> None:
        """Write a new file, in a directory that need not exist yet. When this returns, the file is complete and, with
        ``"fsync"``, its content is durable. Raises ``CheckpointExistsError`` if the file exists. A failure may leave a
        partial file behind."""

    async def discard(self, leftover: str) -> None:
        """Delete a ``Leftover`` by its name, with everything in it. Does nothing if it does not exist, or if another
        process deletes it. A writer that still has a transaction on it cannot commit the rest of it."""

    async def look_at(self, directory: str) -> Found:
        """Return what lies at ``directory``."""

    async def remove_directory(self, directory: str, *, durability: Durability, use: Use = "remove") -> bool:
        """Delete a checkpoint or an export, as ``use`` allows. It is made invisible, with ``"fsync"`` durably, before
        anything else is deleted. Files of other saves in the directory stay, if they can be distinguished. Return False
        if there is nothing. Raises ``CheckpointNotFoundError`` if ``use`` may not delete what is there.

        If the deletion of a checkpoint is interrupted, ``leftovers`` lists the rest. A store without
        ``capabilities.rename`` puts the file ``NOTE`` beside the files until all of them are deleted."""

    async def collect(self, target: str, *, after_s: float) -> list[str]:
        """Delete attempts at ``target`` that killed processes left behind, and return their names. An attempt counts as
        left behind if it was last written to more than ``after_s`` ago, or if a lock shows that its process has ended.
        Attempts in a run are not deleted here by their age: the run deletes them, because it knows the leases. In a
        local directory, attempts at other targets in it are deleted too."""

    async def leftovers(self) -> list[Leftover]:
        """Return the attempts and the unfinished deletions under the root, for ``discard``. They are found by names
        that only sidestream makes."""

    async def remove(self, names: Sequence[str]) -> None:
        """Delete single files. Files that do not exist are skipped."""

    async def ages(self, directory: str) -> dict[str, float]:
        """Return the name and the age in seconds, by the storage's clock, of every file directly in ``directory``. The
        result is empty if the directory does not exist. It has every file that was complete before the call."""

    def source(self, directory: str) -> RangeSource:
        """Return the ``RangeSource`` of ``directory``, which the caller closes. The first request opens the directory;
        nothing is raised before it."""

    async def sizes(self, directory: str) -> dict[str, int]:
        """Return the name and the size of every regular file directly in ``directory``. Raises
        ``FileNotFoundError``."""

    async def directories(self, directory: str = ".") -> list[str]:
        """Return the names of the directories directly in ``directory``, by default the root. The result is empty if
        it does not exist."""
