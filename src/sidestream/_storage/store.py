"""The contract of a store: the few operations that saving and loading need, and what each of them promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from .._runtime.threads import Deadline, Stop, Threads
from ..options import Durability, StorePolicy

__all__ = [
    "Body",
    "Leftover",
    "MappingStore",
    "Naming",
    "Part",
    "Place",
    "ReadRange",
    "SharedStore",
    "ShowingPart",
    "Store",
    "StoreAddress",
]

Place: TypeAlias = Literal["new", "joined", "replacing", "apart"]
"""How a writer meets its attempt: it makes it; another process has made it; it makes it, and the publish exchanges it
with what stands at the target; it is a part in the target itself, which others write to as well."""

Naming: TypeAlias = Literal["attempt", "given", "single"]
"""What the files of an attempt are called once they are visible. ``"attempt"``: as ``published_name`` says.
``"given"``: as they are, in the target. ``"single"``: there is one file, and it is the target itself. Where nothing can
be renamed, files with names of their own are visible as soon as they are written: then whoever writes them writes last
the one that readers look for."""


class Part(Protocol):
    """Some of a file. Whoever takes it releases it, when it has been written or will not be."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def take(self, stop: Stop, deadline: Deadline) -> memoryview:
        """Block until the content is there. Raises what staging raised, ``Closed`` when ``stop`` is set."""

    def release(self) -> None:
        """The memory may be used for something else. Idempotent; also for a part that was never taken."""


@runtime_checkable
class ShowingPart(Part, Protocol):
    """A part that goes through its content anyway, and can show it while it is still in the processor's cache."""

    def take_showing(self, stop: Stop, deadline: Deadline, seen: Callable[[memoryview], object] | None) -> memoryview:
        """``take``; ``seen`` is given the content first, run by run in its order."""


class Body(Protocol):
    """The content of a file, one part after the other. Several threads may take parts at once, each in this order: a
    part may wait for what comes of those before it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def aligned(self) -> bool:
        """Whether every part begins on a page of memory and is a multiple of 4096 bytes, as direct I/O needs it."""

    @property
    def parts(self) -> Sequence[Part]: ...


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Fill ``into`` with the bytes from ``offset`` on; ``arrived`` is called when that is done, while they are still in
    the processor's cache, in a thread of the store's own. What it raises ends the read."""

    offset: int
    into: memoryview
    arrived: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something under the root that is no checkpoint: an ``"attempt"`` that was not published (yet), whose name
    contains that of its target, or a ``"retired"`` checkpoint whose deletion was interrupted. ``age_s``: since it was
    last written to, by the storage's clock."""

    name: str
    kind: Literal["attempt", "retired"]
    age_s: float


class Store(Protocol):
    """Directories of files under one root. Names are relative, with ``/`` between components.

    Every method is cancellable: when it raises ``CancelledError``, no thread touches a file or a buffer any more. All
    raise ``StorageError`` (or a subclass) for what the storage refuses, ``DeadlineExceeded`` when ``deadline`` passes.
    """

    @property
    def url(self) -> str:
        """The root, in the form used in messages."""

    @property
    def appears_whole(self) -> bool:
        """Whether a directory appears with everything in it, so that one without a marker has lost it. Elsewhere it is
        an attempt."""

    @property
    def lists(self) -> bool:
        """Whether ``sizes`` and ``directories`` work. Web servers have no listings: there ``size`` has to do."""

    def published_name(self, attempt: str, name: str) -> str:
        """What the file ``name`` that ``write`` is given is called in the published directory. Pure."""

    def write(
        self,
        attempt: str,
        target: str,
        files: Iterable[tuple[str, Body]],
        *,
        threads: Threads,
        durability: Durability,
        stop: Stop,
        deadline: Deadline,
        place: Place = "new",
        naming: Naming = "attempt",
    ) -> None:
        """In the calling thread and in ``threads``, without needing a loop: make the private directory ``attempt`` (it
        must not exist yet) and, durably, every missing parent, and write ``files`` into it one after the other.

        ``files`` may block until it knows the next one. Raises ``Conflict``, having made nothing, if ``target`` exists
        and is not an empty directory, and ``Closed`` when ``stop`` is set. A failure may leave an attempt behind.

        ``place="joined"``: the attempt is another process's, which looked at the target too; raises ``NotShared`` if it
        is not there. ``"replacing"``: ``Conflict`` only where two directories cannot be exchanged in one step. An
        attempt of one's own is joined to write more files of it, with the same ``naming``. ``"apart"``: ``files`` go
        into the target, which is made if it is not there, under the names that they are given, which nobody else uses;
        ``attempt`` is what ``publish_part`` and ``discard`` call them. More of them may be written in the same way.
        """

    async def put(self, name: str, body: Body, *, durability: Durability, deadline: Deadline) -> None:
        """Write a new file, of an attempt or in a directory that need not exist yet. When this returns it is complete
        and, with ``"fsync"``, its content is durable; its name is so after ``publish``. Raises ``Conflict`` if it
        exists. A failure may leave a partial file behind."""

    async def publish(self, attempt: str, target: str, *, durability: Durability, deadline: Deadline) -> None:
        """Make ``attempt`` visible as ``target`` in one atomic step, then durable. Raises ``Conflict``, having changed
        nothing, if ``target`` exists and is not an empty directory; ``NotDurable`` if it is visible and a sync failed.
        What an attempt that was begun as ``"replacing"`` takes the place of is in ``attempt`` afterwards.
        """

    async def publish_file(self, attempt: str, target: str, *, durability: Durability, deadline: Deadline) -> None:
        """Make the one file of an attempt, written as ``"single"``, visible as ``target`` in one atomic step, then
        durable, and remove the attempt. Raises ``Conflict``, having changed nothing, if there is anything of that name;
        ``NotDurable``. On object storage it is visible when it has been written, and this compares its size."""

    async def publish_part(
        self, attempt: str, target: str, name: str, body: Body, *, durability: Durability, deadline: Deadline
    ) -> None:
        """Make the file ``name`` appear in ``target`` in one atomic step, when what was written ``"apart"`` is durable
        there; then durable itself. Raises ``Conflict``, having changed nothing, if it exists; ``NotDurable``."""

    async def discard(self, attempt: str, *, deadline: Deadline) -> None:
        """Delete a leftover and everything in it. Does nothing if it is not there, or is being deleted elsewhere.

        Whoever was writing an attempt that is deleted from elsewhere cannot publish what is left of it."""

    def discard_here(self, attempt: str) -> None:
        """``discard``, in the calling thread."""

    def forget(self, attempt: str) -> None:
        """This process has written what it had to write of an attempt that another one publishes, or discards: keep
        nothing of it in memory."""

    async def retire(self, directory: str, *, durability: Durability, deadline: Deadline) -> None:
        """End a committed checkpoint: it is invisible, with ``"fsync"`` durably, before its first byte is deleted.

        Interrupted, what remains is found by ``leftovers``. Does nothing if it is not there."""

    async def leftovers(self, *, deadline: Deadline) -> list[Leftover]:
        """Attempts and unfinished deletions under the root, by names that only sidestream makes; for ``discard``."""

    async def remove(self, names: Sequence[str], *, deadline: Deadline) -> None:
        """Delete single files. Those that are not there are passed over."""

    async def ages(self, directory: str, *, deadline: Deadline) -> dict[str, float]:
        """Name and age in seconds, by the storage's clock, of every file directly in ``directory``; none if it does
        not exist. Files that were complete before the call are among them."""

    async def read(self, name: str, ranges: Sequence[ReadRange], *, deadline: Deadline) -> None:
        """Fill every range. Raises ``Corrupt`` if the file ends before, ``FileNotFoundError`` if there is none.

        Ranges that lie close together are one request; how close is the store's own affair."""

    async def read_tail(self, name: str, nbytes: int, *, deadline: Deadline) -> bytes:
        """The last ``nbytes`` of a small file, or all of it. Raises ``FileNotFoundError``."""

    async def size(self, name: str, *, deadline: Deadline) -> int:
        """Of one file. Raises ``FileNotFoundError``."""

    async def sizes(self, directory: str, *, deadline: Deadline) -> dict[str, int]:
        """Name and size of every regular file directly in ``directory``. Raises ``FileNotFoundError``."""

    async def directories(self, directory: str = ".", *, deadline: Deadline) -> list[str]:
        """Return the names of the directories directly in ``directory``, by default the root; none if it does not
        exist."""


@runtime_checkable
class MappingStore(Protocol):
    """A store whose files are on this machine."""

    async def map(self, name: str, nbytes: int, *, deadline: Deadline) -> mmap:
        """The first ``nbytes`` of a file as memory. Writing to it changes private copies of its pages, never the file.

        Raises ``Corrupt`` if the file is shorter, ``FileNotFoundError`` if there is none."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What another process on this machine opens the same store with: secrets included, which are never shown."""

    url: str = field(repr=False)
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    policy: StorePolicy | None = None

    def __reduce__(self) -> Any:
        raise TypeError("storage options hold credentials: they are not pickled")


@runtime_checkable
class SharedStore(Protocol):
    """A store whose attempts several processes of one machine may write.

    One of them makes the attempt (``write`` of no files) and publishes it; another one writes files into it
    (``place="joined"``).
    """

    @property
    def address(self) -> StoreAddress | None:
        """None for what only this process has: memory, or a file system object that cannot be made again."""

    def wrote(self, attempt: str, sizes: Mapping[str, int]) -> None:
        """Another process has written these files, named as in ``write``, into an attempt of ours: the publish looks
        for them too."""

    def clear(self, attempt: str, names: Sequence[str], *, deadline: Deadline) -> None:
        """In the calling thread: remove what a dead process has left of these files of an attempt of ours, which
        stays. What is not there is passed over."""
