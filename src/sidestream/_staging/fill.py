"""Copies that another process makes: the request to it, and the decision whether a request is worth it."""

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
_WORTH_BYTES = 64 << 10  # on average: to describe a smaller piece takes as long as to copy it


class FillPiece(NamedTuple):
    """A copy of ``nbytes`` at ``address`` of this process to ``offset`` of ``memory``."""

    memory: SharedMemory
    address: int
    offset: int
    nbytes: int


class Filler(Protocol):
    """Another process that reads the memory of this one, and makes copies without its processor time."""

    def fill(self, pieces: Sequence[FillPiece], *, deadline: Deadline, stop: Stop) -> bool:
        """Block until all ``pieces`` have been copied. Returns False if they may not have been. When this returns or
        raises, the other process does not access the memory any more. Raises ``ClosedError`` when ``stop`` is set, and
        ``DeadlineExceededError``."""


@sliced
def pieces_of(layout: ImageLayout, lease: Allocation) -> Steps[list[FillPiece] | None]:
    """Return the pieces for a filler of this image. None if this process has to copy the image, or does so faster.

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
    """Raise ``UnsupportedTensorError`` unless the sources still have the addresses in ``pieces``."""
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
