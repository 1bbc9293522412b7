"""Images: pieces of leased memory that a stage fills and its readers read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, overload

import torch

from .._runtime.threads import Condition, Stop, current_deadline
from ..errors import ArenaExhaustedError, ClosedError, SnapshotLostError
from .arena import Allocation


class Copy(NamedTuple):
    """A copy of ``nbytes`` of ``source`` to ``offset`` of the image.

    With a ``storage_start``, the copy is a raw run of bytes that begins there in the storage of ``source``. Without
    one, it is the elements of ``source`` in row-major order, after the first ``skip`` bytes. With a ``dtype``, the
    elements are converted, and all numbers of bytes are those of converted elements.
    """

    source: torch.Tensor
    offset: int
    nbytes: int
    storage_start: int | None = None
    skip: int = 0
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """Copies without their sources, as columns, sorted by offset. Records would be more objects for the garbage
    collector to traverse."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int | None, ...]
    skips: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]
    runs: tuple[tuple[int, int], ...]
    """Groups of adjacent copies of few bytes, each as first index and end index. ``columns_of`` finds them."""

    @property
    def of_copies(self) -> tuple[tuple[Any, ...], ...]:
        """The columns in the order of the fields of ``Copy``, without ``source``."""
        return self.offsets, self.sizes, self.starts, self.skips, self.dtypes


class Copies(Sequence[Copy]):
    """A sequence of copies that is stored as columns and sources."""

    __slots__ = ("columns", "sources")

    def __init__(self, columns: Columns, sources: Sequence[torch.Tensor]) -> None:
        self.columns = columns
        self.sources = sources

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[Copy]:
        return self._some(slice(None))

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> list[Copy]: ...
    def __getitem__(self, index: int | slice) -> Copy | list[Copy]:
        if isinstance(index, slice):
            return list(self._some(index))
        return Copy(self.sources[index], *(column[index] for column in self.columns.of_copies))

    def _some(self, which: slice) -> Iterator[Copy]:
        columns = (column[which] for column in self.columns.of_copies)
        return map(_copy_of, zip(self.sources[which], *columns, strict=True))


_copy_of = partial(tuple.__new__, Copy)  # a third of the time of Copy(...)


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """An image of ``nbytes`` and the copies that fill it, sorted by offset. Bytes without a copy stay undefined."""

    nbytes: int
    copies: Sequence[Copy]


class StagedImage:
    """One image: the memory of a window. The stager fills it from its beginning, and its first reader, which writes the
    checkpoint, waits, reads, and releases it.

    After ``wait`` has returned once, the reader may write the bytes without a copy (frames). ``others`` are the numbers
    of further readers, which read payloads only. Memory that only they need is offered to stages that wait for memory.
    When it has been taken back, ``read`` raises ``SnapshotLostError``.
    """

    def __init__(self, nbytes: int, others: Collection[int] = ()) -> None:
        self.nbytes = nbytes
        self._others = set(others)
        self._withdraw: Callable[[], None] | None = None  # withdraws the offer
        self._taken = False
        self._changed = Condition()
        self._lease: Allocation | None = None
        self._filled = -1
        self._wanted = 0  # the number of bytes that the reader waits for
        self._error: BaseException | None = None
        self._writers = 0
        self._released = False

    # --- the stager's side ---

    def begin(self, lease: Allocation) -> None:
        """Take over ``lease``. The first writer may write into it until its ``finish()``."""
        with self._changed:
            self._lease = lease
            self._writers += 1
            self._filled = 0
            self._changed.notify_all()

    def join(self) -> None:
        """Add a writer, until its ``finish()``. Only allowed while there is a writer."""
        with self._changed:
            self._writers += 1

    def finish(self) -> None:
        """End the part of one writer. After the last one, release the memory if the reader has released it before."""
        with self._changed:
            self._writers -= 1
            if self._writers:
                return
            if self._error is None:
                self._filled = self.nbytes
                self._changed.notify_all()
            self._release_unneeded()

    def advance(self, filled: int) -> None:
        """Set the offset below which all copies have ended."""
        with self._changed:
            self._filled = filled
            if filled >= self._wanted:  # a thread that wakes up for nothing slows the loop down
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # --- the reader's side ---

    def wait(self, end: int, *, stop: Stop) -> memoryview:
        """Block until the first ``end`` bytes have been staged, and return a view of the whole image.

        Raises the error of the stage, ``DeadlineExceededError``, ``ArenaExhaustedError`` if the image has no memory at
        the deadline, and ``ClosedError`` when ``stop`` is set.
        """
        with stop.waking(self._wake), self._changed:
            self._wanted = end
            self._wait_for(end, stop)
            if self._lease is None or self._released:
                raise ClosedError("this image was released")
            return self._lease.view

    def _wait_for(self, end: int, stop: Stop) -> None:
        """Block until ``end`` bytes have been staged. Raises what ``wait`` raises. The caller holds the lock."""
        deadline = current_deadline()
        while self._filled < end:
            stop.check()
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._changed.wait(deadline.remaining_s()):
                continue
            if self._lease is not None:
                raise deadline.exceeded(f"staging of {self.nbytes} bytes")
            raise ArenaExhaustedError(
                f"{self.nbytes} bytes of staging memory did not become free within {deadline.timeout_s:g} s: "
                "release() staged state dicts, or raise budget_bytes="
            )

    @property
    def whole(self) -> bool:
        """Whether all bytes have been staged."""
        return self._filled >= self.nbytes

    @property
    def staged_bytes(self) -> int:
        """The bytes that are known to be staged."""
        return max(self._filled, 0)

    def lease(self) -> Allocation:
        """Return the allocation, for a reader that takes it over when the stage has ended."""
        if self._lease is None:
            raise ClosedError("this image has no memory")
        return self._lease

    def release(self) -> None:
        """Release the memory as soon as the stager no longer writes into it and no further reader needs it.
        Idempotent."""
        with self._changed:
            self._released = True
            self._release_unneeded()

    # --- further readers ---

    def read(self, reader: int, *, stop: Stop) -> memoryview:
        """Block until the image has been staged, and return a view of it. Only payloads have defined contents.

        Memory that is taken back later is not reused until the last view or tensor over it is gone. Raises
        ``SnapshotLostError`` if the memory was taken back, and what ``wait`` raises.
        """
        with stop.waking(self._wake), self._changed:
            if reader not in self._others:
                raise SnapshotLostError(
                    "this window was read before, or the state did not fit into free staging memory"
                )
            self._wait_for(self.nbytes, stop)
            if self._lease is None or self._taken:
                raise SnapshotLostError("the staged memory was taken back for another stage")
            return self._lease.view.toreadonly()

    def release_for(self, reader: int) -> None:
        """Remove a further reader. Idempotent."""
        with self._changed:
            self._others.discard(reader)
            self._release_unneeded()

    def _release_unneeded(self) -> None:
        """Release memory that no reader needs, and offer memory that only further readers need. The caller holds the
        lock."""
        # There are three cases. Something still writes, or the first reader has not released the image: it stays. Only
        # further readers need it: it stays, and is offered to stages that wait for memory. None needs it: the lease
        # ends, and with it the offer.
        if self._lease is None or self._writers or not self._released:
            return
        if self._others and self._filled >= self.nbytes and not self._taken:
            self._withdraw = self._withdraw or self._lease.offer(self._take_back, by_sink=True)
            return
        self._lease.release()
        if self._withdraw is not None:
            self._withdraw()
            self._withdraw = None

    def _take_back(self) -> None:
        """Take the memory from the further readers. Called in a thread that waits for memory. A view that a reader has
        now keeps the memory until it is released."""
        with self._changed:
            # A reader that is inside of the window keeps the bytes, because its view refers to the array. The extent
            # returns to the arena when that view is gone, so the stage that took it back may have to wait for one read.
            self._taken, self._withdraw = True, None
            self._release_unneeded()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
