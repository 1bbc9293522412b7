"""The contract of a store: the few operations that saving and loading need, and what each of them promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Protocol, runtime_checkable

from .._threads import Deadline, Stop, Threads
from ..options import Durability

__all__ = ["Body", "MappingStore", "Part", "ReadRange", "Store"]


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


class Store(Protocol):
    """Directories of files under one root. Names are relative, with ``/`` between components.

    Every method is cancellable: when it raises ``CancelledError``, no thread touches a file or a buffer any more. All
    raise ``StorageError`` (or a subclass) for what the storage refuses, ``DeadlineExceeded`` when ``deadline`` passes.
    """

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
    ) -> None:
        """In the calling thread and in ``threads``, without needing a loop: make the private directory ``attempt`` (it
        must not exist yet) and, durably, every missing parent, and write ``files`` into it one after the other.

        ``files`` may block until it knows the next one. Raises ``Conflict``, having made nothing, if ``target`` exists
        and is not an empty directory, and ``Closed`` when ``stop`` is set. A failure may leave an attempt behind.
        """

    async def put(self, name: str, body: Body, *, durability: Durability, deadline: Deadline) -> None:
        """Write a new file. When this returns it is complete and, with ``"fsync"``, its content is durable; its name
        is so after ``publish``. Raises ``Conflict`` if it exists. A failure may leave a partial file behind."""

    async def publish(self, attempt: str, target: str, *, durability: Durability, deadline: Deadline) -> None:
        """Make ``attempt`` visible as ``target`` in one atomic step, then durable. Raises ``Conflict``, having changed
        nothing, if ``target`` exists and is not an empty directory; ``NotDurable`` if it is visible and a sync failed.
        """

    async def discard(self, attempt: str, *, deadline: Deadline) -> None:
        """Delete an attempt and everything in it. Does nothing if it is not there."""

    def discard_here(self, attempt: str) -> None:
        """``discard``, in the calling thread."""

    async def read(self, name: str, ranges: Sequence[ReadRange], *, deadline: Deadline) -> None:
        """Fill every range. Raises ``Corrupt`` if the file ends before, ``FileNotFoundError`` if there is none.

        Ranges that lie close together are one request; how close is the store's own affair."""

    async def read_tail(self, name: str, nbytes: int, *, deadline: Deadline) -> bytes:
        """The last ``nbytes`` of a small file, or all of it. Raises ``FileNotFoundError``."""

    async def sizes(self, directory: str, *, deadline: Deadline) -> dict[str, int]:
        """Name and size of every regular file directly in ``directory``. Raises ``FileNotFoundError``."""

    async def directories(self, *, deadline: Deadline) -> list[str]:
        """Names of the directories directly under the root; none if the root does not exist."""


@runtime_checkable
class MappingStore(Protocol):
    """A store whose files are on this machine."""

    async def map(self, name: str, nbytes: int, *, deadline: Deadline) -> mmap:
        """The first ``nbytes`` of a file as memory. Writing to it changes private copies of its pages, never the file.

        Raises ``Corrupt`` if the file is shorter, ``FileNotFoundError`` if there is none."""
