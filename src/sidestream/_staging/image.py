"""Bytes on their way into leased memory: what a stage hands to its readers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, overload

import torch

from .._runtime.threads import Deadline, Stop
from ..errors import ArenaExhaustedError, ClosedError, SidestreamError, SnapshotLostError
from .arena import Allocation

__all__ = ["Columns", "Copies", "Copy", "ImageLayout", "StagedImage"]


class Copy(NamedTuple):
    """Put ``nbytes`` of ``source`` at ``offset`` of the image.

    ``storage_start`` is None for the elements of ``source`` in row-major order, whatever its strides, of which the
    first ``skip`` bytes are left out; otherwise it is where in the storage of ``source`` a raw run of bytes begins.
    With a ``dtype`` the elements are converted to that, and all numbers of bytes are those of converted elements.
    """

    source: torch.Tensor
    offset: int
    nbytes: int
    storage_start: int | None = None
    skip: int = 0
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """Copies without their sources, column by column, sorted by offset. A record for each would be one more object for
    the garbage collector to walk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int | None, ...]
    skips: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]
    runs: tuple[tuple[int, int], ...]
    """The copies of small runs of bytes, some next to each other at a time: first and last, which is not one of them.
    ``columns_of`` finds them."""

    @property
    def of_copies(self) -> tuple[tuple[Any, ...], ...]:
        """All but the runs, in the order of the fields of ``Copy``."""
        return self.offsets, self.sizes, self.starts, self.skips, self.dtypes


class Copies(Sequence[Copy]):
    """Copies that are kept as columns, and their sources."""

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


_copy_of = partial(tuple.__new__, Copy)  # as Copy(...) would make them, in a third of the time


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """An image of ``nbytes`` and the copies that fill it, sorted by offset. What no copy covers is left undefined."""

    nbytes: int
    copies: Sequence[Copy]


class StagedImage:
    """One image being filled from its beginning. The stager fills it; its reader waits, reads, and releases it.

    The reader may write where no copy goes (framing), at any time after ``wait`` has returned once. ``others`` are the
    numbers of further readers, which read payloads only. Memory that only they need is offered to stages that wait for
    memory; when it is taken back, they raise ``SnapshotLostError``.
    """

    def __init__(self, nbytes: int, others: Collection[int] = ()) -> None:
        self.nbytes = nbytes
        self._others = set(others)
        self._withdraw: Callable[[], None] | None = None  # the offer
        self._taken = False
        self._changed = threading.Condition()
        self._lease: Allocation | None = None
        self._filled = -1
        self._wanted = 0  # the reader waits for so many bytes
        self._error: BaseException | None = None
        self._writers = 0
        self._released = False

    # --- the stager's side ---

    def begin(self, lease: Allocation) -> None:
        """Take over ``lease``, into which one writer writes from now on until its ``finish()``."""
        with self._changed:
            self._lease = lease
            self._writers += 1
            self._filled = 0
            self._changed.notify_all()

    def join(self) -> None:
        """One more writer, until its ``finish()``. Only while there is one."""
        with self._changed:
            self._writers += 1

    def finish(self) -> None:
        """Note that a writer has ended. When the last one ends, the memory that the reader has released goes back."""
        with self._changed:
            self._writers -= 1
            if self._writers:
                return
            if self._error is None:
                self._filled = self.nbytes
                self._changed.notify_all()
            self._settle()

    def advance(self, filled: int) -> None:
        """All copies that lie below offset ``filled`` have ended."""
        with self._changed:
            self._filled = filled
            if filled >= self._wanted:  # a thread that is woken up in vain makes the loop slower
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # --- the reader's side ---

    def wait(self, end: int, *, deadline: Deadline, stop: Stop) -> memoryview:
        """Block until the first ``end`` bytes have been staged and return a view of the whole image.

        Raises what made the stage fail, ``DeadlineExceededError``, ``ArenaExhaustedError`` if it has no memory by then,
        or ``ClosedError`` once ``stop`` is set.
        """
        with stop.waking(self._wake), self._changed:
            self._wanted = end
            while self._filled < end:
                stop.check()
                if self._error is not None:
                    raise self._error.with_traceback(None)
                if not self._changed.wait(deadline.remaining_s()):
                    raise self._late(deadline)
            if self._lease is None or self._released:
                raise ClosedError("this image was released")
            return self._lease.view

    def _late(self, deadline: Deadline) -> SidestreamError:
        if self._lease is not None:
            return deadline.exceeded(f"staging of {self.nbytes} bytes")
        return ArenaExhaustedError(
            f"no {self.nbytes} bytes of staging memory became free within {deadline.timeout_s:g} s: "
            "release() staged state dicts, or raise budget_bytes="
        )

    @property
    def whole(self) -> bool:
        """Whether it can be had without waiting."""
        return self._filled >= self.nbytes

    @property
    def staged_bytes(self) -> int:
        """How much of it is in memory, as far as is known."""
        return max(self._filled, 0)

    def lease(self) -> Allocation:
        """The memory itself, for whoever takes it over when the stage has ended."""
        if self._lease is None:
            raise ClosedError("this image has no memory")
        return self._lease

    def release(self) -> None:
        """Give the memory back as soon as the stager no longer writes into it and no further reader needs it.
        Idempotent."""
        with self._changed:
            self._released = True
            self._settle()

    # --- further readers ---

    def read(self, reader: int, *, deadline: Deadline, stop: Stop) -> memoryview:
        """Block until all of it has been staged, and return a view of it, of which only payloads have defined contents.
        Memory that is taken back stays as it is until the last view or tensor over it is gone.

        Raises ``SnapshotLostError`` if the memory was taken back, what made the stage fail, ``DeadlineExceededError``,
        and ``ClosedError`` once ``stop`` is set.
        """
        with stop.waking(self._wake), self._changed:
            if reader not in self._others:
                raise SnapshotLostError(
                    "this window was read before, or the state did not fit into free staging memory"
                )
            while self._filled < self.nbytes:
                stop.check()
                if self._error is not None:
                    raise self._error.with_traceback(None)
                if not self._changed.wait(deadline.remaining_s()):
                    raise deadline.exceeded(f"staging of {self.nbytes} bytes")
            if self._lease is None or self._taken:
                raise SnapshotLostError("the staged memory was taken back for another stage")
            return self._lease.view.toreadonly()

    def leave(self, reader: int) -> None:
        """``reader`` needs the memory no more. Idempotent."""
        with self._changed:
            self._others.discard(reader)
            self._settle()

    def _settle(self) -> None:
        """Release memory that no reader needs, and offer memory that only further readers need. With the lock held."""
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
        """In a thread that waits for memory. A view that a reader has now keeps the memory until it is released."""
        with self._changed:
            self._taken, self._withdraw = True, None
            self._settle()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
