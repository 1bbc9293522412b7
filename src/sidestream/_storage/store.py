"""The contract of a store: the few operations that saving and loading need, and what each of them promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Literal, Protocol

from .._runtime.threads import Stop
from ..options import Capabilities, Durability
from .bodies import Body
from .transaction import Attempt, StoreAddress, Transaction

__all__ = ["Files", "Leftover", "RangeSource", "ReadRange", "Store", "StoreSource"]

_MARKER = ".metadata"


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Fill ``into`` with the bytes from ``offset`` on. ``seen`` is given these in order, piece by piece, each right
    after it was read, while it is in the cache of the processor; ``arrived`` is called when all are there. Both are
    called in the thread that reads. What they raise ends the read."""

    offset: int
    into: memoryview
    arrived: Callable[[], None] | None = None
    seen: Callable[[memoryview], object] | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something under the root that is no checkpoint: an ``"attempt"`` that was not published (yet), of whose name
    ``target_of_attempt`` tells the step, or a ``"retired"`` checkpoint whose deletion was interrupted. ``age_s``: since
    it was last written to, by the storage's clock."""

    name: str
    kind: Literal["attempt", "retired"]
    age_s: float


class Files(Protocol):
    """The files of one directory, for threads that read them without an event loop."""

    def read(self, name: str, ranges: Sequence[ReadRange], stop: Stop) -> None:
        """``Store.read``, in the calling thread. Raises ``ClosedError`` once ``stop`` is set."""


class RangeSource(Protocol):
    """What a reader reads from: the files of one directory, by their names in it.

    A local directory is opened by the first request, in the thread that makes it, and every file is opened relative to
    it: all requests see one directory, also if it is renamed meanwhile and another one takes its place. Requests raise
    what those of a ``Store`` raise, and ``ClosedError`` after ``aclose``.
    """

    @property
    def name(self) -> str:
        """The name of the directory in its store."""

    def path_of(self, file: str) -> str:
        """Return the name of a file in the store, for messages."""

    async def read(self, file: str, ranges: Sequence[ReadRange]) -> None:
        """``Store.read``."""

    def files(self, waiting: Callable[[], None]) -> Files | None:
        """Return what threads read the files with; None where a read is a request to a server.

        ``waiting`` is called once, in one of these threads, when reads turn out to wait for a device or a network
        rather than for the processor: more of them at a time are faster then."""

    async def read_tail(self, file: str, nbytes: int) -> bytes:
        """``Store.read_tail``."""

    async def size(self, file: str) -> int:
        """``Store.size``."""

    async def sizes(self) -> dict[str, int]:
        """``Store.sizes`` of the directory."""

    async def map(self, file: str, nbytes: int) -> mmap:
        """``Store.map``."""

    async def moved(self) -> bool:
        """Return whether another directory has taken the name of this one since it was opened, or none has it. Where
        names of files tell one save from another: whether the marker is another one than that which was read first."""

    async def aclose(self) -> None:
        """Release the directory; a cancel is raised when that is done. A thread that still uses the directory keeps it
        open until it has ended its system call. Does nothing if nothing is open."""


class Store(Protocol):
    """Directories of files under one root. Names are relative, with ``/`` between components.

    Every method is cancellable: when it raises ``CancelledError``, no thread touches a file or a buffer any more. All
    raise ``StorageError`` (or a subclass) for what the storage refuses, ``DeadlineExceededError`` when ``deadline``
    passes.
    """

    @property
    def url(self) -> str:
        """The root, in the form used in messages."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def address(self) -> StoreAddress | None:
        """What another process opens the store with; None for what only this process has: memory, or a file system
        object that cannot be made again."""

    async def connect(self) -> None:
        """Import the clients that a save needs, and send a first request. Changes nothing on the storage."""

    def begin(self, attempt: Attempt) -> Transaction:
        """Return a transaction for one attempt. Changes nothing on the storage, and raises nothing."""

    @property
    def retired_note(self) -> str | None:
        """The name of the file that ``retire`` puts beside a checkpoint until the last of it is deleted, if it does."""

    def check_replaces(self) -> None:
        """Raise ``InvalidOptionError`` if this store is known not to replace a checkpoint in one step."""

    async def put(self, name: str, body: Body, *, durability: Durability) -> None:
        """Write a new file, in a directory that need not exist yet. When this returns it is complete and, with
        ``"fsync"``, its content is durable. Raises ``CheckpointExistsError`` if it exists. A failure may leave a
        partial file behind."""

    async def discard(self, leftover: str) -> None:
        """Delete what ``leftovers`` has listed, and everything in it. Does nothing if it is not there, or is being
        deleted elsewhere. A writer that still has a transaction on it cannot commit what is left of it."""

    async def retire(self, directory: str, *, durability: Durability) -> None:
        """End a committed checkpoint: it is invisible, with ``"fsync"`` durably, before its first byte is deleted.

        Interrupted, what remains is found by ``leftovers``. Does nothing if it is not there."""

    async def collect(self, target: str, *, after_s: float) -> list[str]:
        """Delete what killed processes have left of attempts at ``target`` that nobody has written to for ``after_s``,
        and return its names. Those of a run are left to the run, which knows who has a lease."""

    async def leftovers(self) -> list[Leftover]:
        """Attempts and unfinished deletions under the root, by names that only sidestream makes; for ``discard``."""

    async def remove(self, names: Sequence[str]) -> None:
        """Delete single files. Those that are not there are passed over."""

    async def ages(self, directory: str) -> dict[str, float]:
        """Name and age in seconds, by the storage's clock, of every file directly in ``directory``; none if it does
        not exist. Files that were complete before the call are among them."""

    async def read(self, name: str, ranges: Sequence[ReadRange]) -> None:
        """Fill every range. Raises ``CorruptCheckpointError`` if the file ends before, ``FileNotFoundError`` if there
        is none.

        Ranges that lie close together are one request; how close is the store's own affair."""

    def source(self, directory: str) -> RangeSource:
        """Return what the files of ``directory`` are read from. Nothing is opened, and nothing is raised, before the
        first request. The caller closes it."""

    async def read_tail(self, name: str, nbytes: int) -> bytes:
        """The last ``nbytes`` of a small file, or all of it. Raises ``FileNotFoundError``."""

    async def size(self, name: str) -> int:
        """Of one file. Raises ``FileNotFoundError``."""

    async def sizes(self, directory: str) -> dict[str, int]:
        """Name and size of every regular file directly in ``directory``. Raises ``FileNotFoundError``."""

    async def directories(self, directory: str = ".") -> list[str]:
        """Return the names of the directories directly in ``directory``, by default the root; none if it does not
        exist."""

    async def map(self, name: str, nbytes: int) -> mmap:
        """With ``capabilities.mapping`` only: the first ``nbytes`` of a file as memory. Writing to it changes private
        copies of its pages, never the file.

        Raises ``CorruptCheckpointError`` if the file is shorter, ``FileNotFoundError`` if there is none."""


class StoreSource:
    """The ``RangeSource`` of a store that finds a file by its name at every request."""

    def __init__(self, store: Store, directory: str) -> None:
        self._store = store
        self._marker: tuple[int, bytes] | None = None  # how much of its end was asked for first, and what came
        self.name = directory

    def path_of(self, file: str) -> str:
        return file if self.name == "." else f"{self.name}/{file}"

    async def read(self, file: str, ranges: Sequence[ReadRange]) -> None:
        await self._store.read(self.path_of(file), ranges)

    def files(self, waiting: Callable[[], None]) -> None:
        return None

    async def read_tail(self, file: str, nbytes: int) -> bytes:
        tail = await self._store.read_tail(self.path_of(file), nbytes)
        if file == _MARKER and self._marker is None:
            self._marker = nbytes, tail
        return tail

    async def size(self, file: str) -> int:
        return await self._store.size(self.path_of(file))

    async def sizes(self) -> dict[str, int]:
        return await self._store.sizes(self.name)

    async def map(self, file: str, nbytes: int) -> mmap:
        return await self._store.map(self.path_of(file), nbytes)

    async def moved(self) -> bool:
        """Here a save replaces the marker."""
        if self._marker is None:
            return False
        nbytes, tail = self._marker
        try:
            return await self._store.read_tail(self.path_of(_MARKER), nbytes) != tail
        except FileNotFoundError:
            return True

    async def aclose(self) -> None:
        """Nothing is open between two requests."""
