"""Copies that another process makes: what it is told, and what is worth telling it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .._runtime.threads import Deadline, Steps, Stop, sliced
from ..errors import UnsupportedTensorError
from .arena import Allocation, SharedMemory
from .host import check_extent, raw_start
from .image import Copy, ImageLayout

__all__ = ["BATCH_BYTES", "FIRST_BATCH_BYTES", "FillPiece", "Filler", "check_sources", "pieces_of"]

FIRST_BATCH_BYTES = 64 << 20  # so that writing begins soon
BATCH_BYTES = 256 << 20
_WORTH_BYTES = 64 << 10  # on average: of smaller pieces, to say where they are takes as long as to copy them


class FillPiece(NamedTuple):
    """``nbytes`` at ``address`` of this process belong at ``offset`` of ``memory``."""

    memory: SharedMemory
    address: int
    offset: int
    nbytes: int


class Filler(Protocol):
    """Somebody who reads the memory of this process, and takes none of its time."""

    def fill(self, pieces: Sequence[FillPiece], *, deadline: Deadline, stop: Stop) -> bool:
        """Block until all ``pieces`` are where they belong; False if they may not be. Nothing reads or writes any of it
        when this returns or raises. Raises ``ClosedError`` when ``stop`` is set, ``DeadlineExceededError``."""


@sliced
def pieces_of(layout: ImageLayout, lease: Allocation) -> Steps[list[FillPiece] | None]:
    """What a filler of this image is told; None if it has to be, or had better be, copied here.

    Raises ``UnsupportedTensorError`` if the memory of a source is gone.
    """
    memory = lease.shared
    if memory is None or layout.nbytes < _WORTH_BYTES * len(layout.copies):
        return None
    found: list[FillPiece] = []
    for copy in layout.copies:
        yield
        address = _address(copy)
        if address is None:
            return None
        found.append(FillPiece(memory, address, lease.start + copy.offset, copy.nbytes))
    return found or None


@sliced
def check_sources(layout: ImageLayout, pieces: Sequence[FillPiece]) -> Steps[None]:
    """Raise ``UnsupportedTensorError`` unless the sources are still where ``pieces`` says."""
    for copy, piece in zip(layout.copies, pieces, strict=True):
        yield
        if _address(copy) != piece.address:
            raise UnsupportedTensorError("the storage of a tensor was resized while it was staged: fence() first")


def _address(copy: Copy) -> int | None:
    start = raw_start(copy)
    if start is None or not copy.source.is_cpu:
        return None
    storage = copy.source.untyped_storage()
    check_extent(storage, start + copy.nbytes)
    return storage.data_ptr() + start
