"""Copies that another process makes: the request to it, and the decision whether a request is worth it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import add
from typing import NamedTuple, Protocol, TypeAlias

import torch

from .._runtime.threads import Deadline, Steps, Stop, sliced
from ..errors import UnsupportedTensorError
from .arena import Allocation, MappedMemory
from .host import check_extent, raw_start
from .image import Columns, Copies, Copy, CopyTable, ImageLayout
from .plans import Places

__all__ = [
    "BATCH_BYTES",
    "FIRST_BATCH_BYTES",
    "FillPart",
    "FillPiece",
    "FillTable",
    "Filler",
    "check_sources",
    "pieces_of",
    "table_of",
]

FIRST_BATCH_BYTES = 64 << 20  # so that writing begins soon
BATCH_BYTES = 256 << 20
_WORTH_BYTES = 64 << 10  # on average: to describe a smaller piece takes as long as to copy it
_WORTH_COPIES = 2000  # in a table, which takes no time for each piece: to copy fewer is faster than to ask
_MOST_BYTES = 1 << 32  # of an image with a table
_EVERY = 256  # sources that are looked at in one step
_STORAGE, _BYTES = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes
_ADDRESS = torch.Tensor.data_ptr


class FillPiece(NamedTuple):
    """A copy of ``nbytes`` at ``address`` of this process to ``offset`` of ``memory``."""

    memory: MappedMemory
    address: int
    offset: int
    nbytes: int


class FillTable(NamedTuple):
    """Copies of pieces of this process into the image at ``offset`` of ``memory``. ``packed`` has three columns of
    ``rows`` integers each: addresses (8 bytes), offsets in the image and numbers of bytes (4 bytes)."""

    memory: MappedMemory
    offset: int
    rows: int
    packed: bytes


FillPart: TypeAlias = FillPiece | FillTable


class Filler(Protocol):
    """Another process that reads the memory of this one, and makes copies without its processor time."""

    def fill(self, pieces: Sequence[FillPart], *, deadline: Deadline, stop: Stop) -> bool:
        """Block until all ``pieces`` have been copied. Returns False if they may not have been. When this returns or
        raises, the other process does not access the memory any more. Raises ``ClosedError`` when ``stop`` is set, and
        ``DeadlineExceededError``."""


def table_of(columns: Columns, places: Places, nbytes: int) -> CopyTable | None:
    """Return the table for the copies of an image of ``nbytes`` whose sources have these ``places``. None if this
    process copies them faster, or has to."""
    raw = None not in columns.starts and not any(columns.dtypes)
    worth = len(columns.sizes) >= _WORTH_COPIES and nbytes < _WORTH_BYTES * len(columns.sizes)
    if not (raw and worth and nbytes < _MOST_BYTES):
        return None
    begins = array("Q", map(add, places.addresses, columns.skips))
    packed = begins.tobytes() + array("I", columns.offsets).tobytes() + array("I", columns.sizes).tobytes()
    return CopyTable(*places, packed)


@sliced
def pieces_of(layout: ImageLayout, lease: Allocation) -> Steps[list[FillPart] | None]:
    """Return the pieces for a filler of this image. None if this process has to copy the image, or does so faster.

    Raises ``UnsupportedTensorError`` if the memory of a source is gone.
    """
    memory = lease.shared
    if memory is None:
        return None
    if isinstance(layout.copies, Copies) and (table := layout.copies.table) is not None:
        return [FillTable(memory, lease.start, len(table.addresses), table.packed)]
    if layout.nbytes < _WORTH_BYTES * len(layout.copies):
        return None
    found: list[FillPart] = []
    for copy in layout.copies:
        yield
        address = _address(copy)
        if address is None:
            return None
        found.append(FillPiece(memory, address, lease.start + copy.offset, copy.nbytes))
    return found or None


@sliced
def check_sources(layout: ImageLayout, pieces: Sequence[FillPart]) -> Steps[None]:
    """Raise ``UnsupportedTensorError`` unless the sources still have the addresses in ``pieces``."""
    if isinstance(layout.copies, Copies) and layout.copies.table is not None:
        yield from _check_table(layout.copies, layout.copies.table)
        return
    for copy, piece in zip(layout.copies, pieces, strict=True):
        yield
        if _address(copy) != piece[1]:
            raise _resized()


def _check_table(copies: Copies, table: CopyTable) -> Steps[None]:
    for first in range(0, len(copies), _EVERY):
        some = slice(first, first + _EVERY)
        sources = copies.sources[some]
        extents, addresses = map(_BYTES, map(_STORAGE, sources)), map(_ADDRESS, sources)
        if tuple(extents) != table.extents[some] or tuple(addresses) != table.addresses[some]:
            for copy in copies[some]:
                _address(copy)  # raises if there is less memory than before
            raise _resized()
        yield


def _resized() -> UnsupportedTensorError:
    return UnsupportedTensorError("the storage of a tensor was resized while it was staged: fence() first")


def _address(copy: Copy) -> int | None:
    start = raw_start(copy)
    if start is None or not copy.source.is_cpu:
        return None
    storage = copy.source.untyped_storage()
    check_extent(storage, start + copy.nbytes)
    return storage.data_ptr() + start
