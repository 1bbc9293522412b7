"""A shard file: where each item goes, and the framing that is written around the payloads as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .checksum import crc32, join_blocks, pack_crcs
from .frame import Frame
from .records import BLOCK_BYTES

__all__ = ["PAGE_BYTES", "Placed", "Sealer", "ShardLayout", "lay_out"]

PAGE_BYTES = 4096
_PAGED_PAYLOAD_BYTES = 64 << 10
_PACKED_ALIGN_BYTES = 64


class Placed(NamedTuple):
    """An item at ``item_offset`` of its shard."""

    frame: Frame
    item_offset: int

    @property
    def payload_offset(self) -> int:
        return self.item_offset + len(self.frame.header)

    @property
    def trailer_offset(self) -> int:
        return self.payload_offset + self.frame.payload_bytes


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A shard of ``nbytes`` (whole pages, so that direct I/O needs no tail of its own) and its items by offset."""

    nbytes: int
    items: tuple[Placed, ...]


def lay_out(frames: Iterable[Frame], shard_bytes: int) -> Iterator[ShardLayout]:
    """Place the items in order, a new shard whenever one would grow beyond ``shard_bytes``.

    Payloads of 64 KiB and more begin on a page, for direct I/O and mmap; smaller ones are packed at 64 bytes. The gaps
    lie before the items, where neither DCP nor a zip reader looks.
    """
    items: list[Placed] = []
    position = 0
    for frame in frames:
        if items and position + frame.item_bytes > shard_bytes:
            yield _close(items, position)
            items, position = [], 0
        align = PAGE_BYTES if frame.payload_bytes >= _PAGED_PAYLOAD_BYTES else _PACKED_ALIGN_BYTES
        lead = len(frame.header)
        offset = -(-(position + lead) // align) * align - lead
        items.append(Placed(frame, offset))
        position = offset + frame.item_bytes
    if items:
        yield _close(items, position)


def _close(items: Sequence[Placed], position: int) -> ShardLayout:
    return ShardLayout(-(-position // PAGE_BYTES) * PAGE_BYTES, tuple(items))


class Sealer:
    """Writes headers, checksums and trailers into the image of a shard, from its beginning on.

    Memory is used again and again, so every byte that no payload covers is written too: gaps become zeros.
    """

    def __init__(self, layout: ShardLayout) -> None:
        self._layout = layout
        self._framed = 0  # items whose header stands in the image
        self._sealed = 0  # items whose trailer stands in the image
        self._written = 0  # end of what the items so far occupy
        self._blocks: list[int] = []  # of the first item that is not sealed yet
        self.crcs: list[bytes] = []
        """For each sealed item the CRCs of its blocks, packed."""

    def seal(self, image: memoryview, end: int) -> Iterator[None]:
        """Finish everything that begins below ``end``, given that payload bytes below ``end`` are in place.

        Iterating does the work, item by item.
        """
        items = self._layout.items
        while self._framed < len(items) and items[self._framed].item_offset < end:
            self._frame(image, items[self._framed])
            self._framed += 1
            self._checksum(image, end)
            yield
        self._checksum(image, end)
        if end == self._layout.nbytes:
            image[self._written : end] = bytes(end - self._written)

    def _frame(self, image: memoryview, item: Placed) -> None:
        image[self._written : item.item_offset] = bytes(item.item_offset - self._written)
        image[item.item_offset : item.payload_offset] = item.frame.header
        self._written = item.item_offset + item.frame.item_bytes

    def _checksum(self, image: memoryview, end: int) -> None:
        """Check in the blocks that are complete; an item is sealed once its payload has ended."""
        while self._sealed < self._framed:
            item = self._layout.items[self._sealed]
            nbytes, start = item.frame.payload_bytes, item.payload_offset
            while (done := len(self._blocks) * BLOCK_BYTES) < nbytes:
                stop = min(done + BLOCK_BYTES, nbytes)
                if start + stop > end:
                    return
                self._blocks.append(crc32(image[start + done : start + stop]))
            if item.trailer_offset > end:
                return
            trailer = item.frame.trailer(join_blocks(self._blocks, nbytes))
            image[item.trailer_offset : item.trailer_offset + len(trailer)] = trailer
            self.crcs.append(pack_crcs(self._blocks))
            self._blocks = []
            self._sealed += 1
