"""The layout of a shard file, and the frames that are written around payloads when these have been staged.

Small items are sealed in runs, in a seventh of the time of the general code: the bytes between two payloads (the
trailer of one item, the gap, and the header of the next) are written as one piece.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from .._runtime.pauses import chunked, collected, pause_point
from .checksum import (
    DIGEST_BYTES,
    Burst,
    DigestOf,
    block_count,
    block_crcs,
    combine,
    crc32,
    installed_digest,
    join_blocks,
    pack_crcs,
    unpack_crcs,
)
from .frame import Frame, frame_tensor
from .records import BLOCK_BYTES, Chunk

_SMALL_BYTES = 64 << 10
_SMALL_RUN_BYTES = 256 << 10  # fits into the cache of a core
RUN_ITEMS = 128
"""The most items that one call seals."""

_CRC = struct.Struct("<I")
_GAPS = [bytes(gap) for gap in range(64)]


def seal_run(
    view: memoryview, window: tuple[int, int], written: int, items: Sequence[tuple[Frame, int]]
) -> tuple[int, list[bytes]]:
    """Seal the first of ``items``, as far as they are small (at most 64 KiB) and lie completely in ``window``. One call
    does some 100 us of work at most. Returns where the last sealed item ends, and the packed CRC of each.

    ``window`` has the offsets in the file of the bytes in ``view``. ``written`` is the end of the item before. All
    bytes from there on get their final content.
    """
    base, limit = window
    pack = _CRC.pack_into
    before, tail, blank, one, two, crc = written, written - base, b"", 0, 0, 0
    found: list[int] = []
    for frame, at in items[:RUN_ITEMS]:
        header, size = frame.header, frame.payload_bytes
        if (
            not 0 < size <= _SMALL_BYTES
            or at < base
            or at + frame.item_bytes > limit
            or at - written > _SMALL_RUN_BYTES
        ):
            break
        # One assignment writes the trailer of the item before, the gap, and the header of this one. The CRC of the item
        # before is packed into its trailer after that, because its place is in the bytes just written.
        payload, gap = at + len(header) - base, at - before
        view[tail:payload] = blank + (_GAPS[gap] if gap < 64 else bytes(gap)) + header
        if blank:
            pack(view, tail + one, crc)
            pack(view, tail + two, crc)
        tail = payload + size
        crc = crc32(view[payload:tail])
        found.append(crc)
        blank, (one, two) = frame.blank, frame.crc_at
        before = at + frame.item_bytes
    if found:
        view[tail : before - base] = blank
        pack(view, tail + one, crc)
        pack(view, tail + two, crc)
    packed = pack_crcs(found)
    return before, [packed[start : start + 4] for start in range(0, len(packed), 4)]


PAGE_BYTES = 4096
_PAGED_PAYLOAD_BYTES = 64 << 10
_PACKED_ALIGN_BYTES = 64
_COMBINED_BYTES = 128 << 10  # for a payload of this size, to combine CRCs takes less than to read the bytes again


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

    @property
    def end(self) -> int:
        return self.item_offset + self.frame.item_bytes

    def chunk(
        self,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        file: str,
        crcs: bytes | None = None,
        digests: bytes | None = None,
    ) -> Chunk:
        """Return the chunk of which this is the item."""
        place = (self.item_offset, self.frame.item_bytes, self.payload_offset)
        return Chunk(offsets, sizes, file, *place, crcs, digests=digests)


class Window(NamedTuple):
    """The bytes ``start`` to ``end`` of a shard, whole pages, which are staged and written together.
    ``items[first:last]`` have bytes in it. It begins before an item, or within a payload at a multiple of
    ``BLOCK_BYTES``."""

    start: int
    end: int
    first: int
    last: int


class BlockSums(NamedTuple):
    """The checksums of a shard: for each item the packed CRCs and the digests of its blocks, and for each window its
    CRC. ``digests`` is empty if the save makes none."""

    crcs: list[bytes]
    digests: list[bytes]
    windows: list[int]

    def pack(self) -> tuple[bytes, bytes]:
        """Encode the CRCs, with those of the windows last, and the digests."""
        return b"".join([*self.crcs, pack_crcs(self.windows)]), b"".join(self.digests)

    def unpack(self, layout: ShardLayout, crcs: bytes, digests: bytes) -> None:
        """Decode what ``pack`` has made into this object. Raises ``ValueError`` if it does not fit the layout."""
        end = max(0, len(crcs) - _CRC_BYTES * len(layout.windows))
        self.windows[:] = unpack_crcs(crcs[end:])
        _distribute(layout, crcs[:end], _CRC_BYTES, self.crcs)
        if self.digests:
            _distribute(layout, digests, DIGEST_BYTES, self.digests)

    def whole(self, layout: ShardLayout) -> int:
        """Return the CRC of the whole shard, when every window has been sealed."""
        total = 0
        for crc, window in zip(self.windows, layout.windows, strict=True):
            total = combine(total, crc, window.end - window.start)
        return total


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A shard of ``nbytes``, its items by offset, and its windows. The size is whole pages, so that direct I/O writes
    all of it."""

    nbytes: int
    items: tuple[Placed, ...]
    windows: tuple[Window, ...]
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What takes long to compute from the rest (``pack``): the layout is used again from save to save."""

    def pack(self) -> bytes:
        """Encode the layout, for the writer process. The first time takes some microseconds for each item; the result
        is kept."""
        packed: bytes | None = self.derived.get("packed")
        if packed is None:
            packed = self.derived["packed"] = _pack(self)
        return packed

    @staticmethod
    def unpack(packed: memoryview) -> ShardLayout:
        """Decode what ``ShardLayout.pack`` has made."""
        nbytes, frame_count, item_count, window_count = _HEAD.unpack_from(packed)
        at = _HEAD.size
        frames: list[Frame] = []
        for _ in range(frame_count):
            payload, header_bytes, trailer_bytes, *crc_at = _FRAME.unpack_from(packed, at)
            start = at + _FRAME.size
            middle, at = start + header_bytes, start + header_bytes + trailer_bytes
            frames.append(Frame(bytes(packed[start:middle]), payload, bytes(packed[middle:at]), (crc_at[0], crc_at[1])))
        end = at + item_count * _ITEM.size
        items = tuple(Placed(frames[number], offset) for number, offset in _ITEM.iter_unpack(packed[at:end]))
        windows = tuple(
            Window(*window) for window in _WINDOW.iter_unpack(packed[end : end + window_count * _WINDOW.size])
        )
        return ShardLayout(nbytes, items, windows)

    def payloads_in(self, window: Window) -> Iterator[tuple[int, int, int, int]]:
        """Yield, for each item with payload in ``window``: its number, the offset of its bytes in the window, their
        number, and the number of its payload bytes in earlier windows."""
        for number in range(window.first, window.last):
            frame, item_offset = self.items[number]
            payload = item_offset + len(frame.header)
            start, end = max(payload, window.start), min(payload + frame.payload_bytes, window.end)
            if start < end:
                yield number, start - window.start, end - start, start - payload

    @staticmethod
    def lay_out(
        tensors: Iterable[tuple[str, tuple[int, ...]]], shard_bytes: int, window_bytes: int
    ) -> list[ShardLayout]:
        """Place the items of tensors, given by dtype and shape, in order. A new shard begins when the last one would
        grow beyond ``shard_bytes``.

        Payloads of 64 KiB and more begin on a page, for direct I/O and mmap. Smaller ones are aligned to 64 bytes. The
        gaps lie before the items, where neither DCP nor a zip reader reads. A window has at most ``window_bytes`` (a
        multiple of ``BLOCK_BYTES``), plus a header if a payload is cut.
        """
        shards: list[ShardLayout] = []
        shard = _Shard(window_bytes)
        for dtype, shape in tensors:
            pause_point()
            frame = frame_tensor(dtype, shape)
            if shard.items and shard.position + frame.item_bytes > shard_bytes:
                shards.append(shard.close())
                shard = _Shard(window_bytes)
            shard.add(frame)
        return [*shards, shard.close()] if shard.items else shards


class _Shard:
    """A shard to which items are added."""

    def __init__(self, window_bytes: int) -> None:
        self.items: list[Placed] = []
        self.position = 0
        self._window_bytes = window_bytes
        self._windows: list[Window] = []
        self._start = self._first = 0  # of the window that is open

    def add(self, frame: Frame) -> None:
        offset = _offset(frame, self.position)
        # There are two cuts. Between two items, on a page, before an item that would not fit. Within a payload that is
        # larger than a window, at a multiple of the blocks: then every block, and its checksum, belongs to one window,
        # and windows can be sealed in any order and by any thread.
        if self.position > self._start and offset + frame.item_bytes > self._start + self._window_bytes:
            self._cut(_pages(self.position), len(self.items))
            offset = _offset(frame, self._start)
        item = Placed(frame, offset)
        self.items.append(item)
        self.position = item.end
        if item.end > self._start + self._window_bytes and frame.payload_bytes > self._window_bytes:
            for cut in range(item.payload_offset + self._window_bytes, item.trailer_offset, self._window_bytes):
                self._cut(cut, len(self.items) - 1)

    def close(self) -> ShardLayout:
        nbytes = _pages(self.position)
        self._cut(nbytes, len(self.items))
        return ShardLayout(nbytes, tuple(self.items), tuple(self._windows))

    def _cut(self, end: int, next_item: int) -> None:
        """Close the window at ``end``. The next one begins within or before item ``next_item``."""
        self._windows.append(Window(self._start, end, self._first, len(self.items)))
        self._start, self._first = end, next_item


def _offset(frame: Frame, position: int) -> int:
    align = PAGE_BYTES if frame.payload_bytes >= _PAGED_PAYLOAD_BYTES else _PACKED_ALIGN_BYTES
    lead = len(frame.header)
    return -(-(position + lead) // align) * align - lead


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Sealer:
    """Writes headers, checksums and trailers into the windows of a shard, in any order and in several threads.

    The memory has been used before, so every byte outside of payloads is written. Gaps are filled with zeros.
    """

    def __init__(self, layout: ShardLayout, digest: DigestOf | None = None, burst: Burst = nullcontext) -> None:
        self._items = layout.items
        self._digest = digest
        self._burst = burst
        self._changed = threading.Condition()
        # For items in several windows: digests and CRCs of blocks, and CRC and bytes of the part in each window.
        self._leaves: dict[int, dict[int, bytes]] = {}
        self._cut: dict[int, list[int | None]] = {}
        self._parts: dict[int, dict[int, tuple[int, int]]] = {}
        self._numbers = {window.start: number for number, window in enumerate(layout.windows)}
        nothing: list[bytes] = [b""] * len(layout.items)
        self.sums = BlockSums(nothing, [] if digest is None else nothing.copy(), [0] * len(layout.windows))
        """The checksums of the blocks. Complete when every window has been sealed."""

    def seal(
        self,
        view: memoryview,
        window: Window,
        *,
        wait: Callable[[threading.Condition], object],
    ) -> Iterator[None]:
        """Seal ``window``, whose payload bytes are in ``view``. The iterator does the work, item by item.

        The window with the trailer of an item waits for the earlier windows with its payload. ``wait`` is called with
        the lock of the condition held. It waits until the condition is notified, or raises an error.
        """
        written = window.start
        total = _WindowCrc(view)
        index = window.first
        while index < window.last:
            written, crcs = self._seal_small(view, window, written, index)
            if crcs:
                self.sums.crcs[index : index + len(crcs)] = crcs
                index += len(crcs)
                yield
                continue
            item = self._items[index]
            if item.item_offset >= window.start:
                _write(view, window, written, bytes(item.item_offset - written))
                _write(view, window, item.item_offset, item.frame.header)
            # The header of the item is written before its payload is read, so that ``total`` sees final bytes.
            start, end = _payload(window, item)
            blocks = block_crcs(view[start:end], self._burst)
            self._note_digests(index, view, window, item)
            crc = join_blocks(blocks, end - start)
            # The CRC of the window is combined from those of its large payloads, which have just been computed. To read
            # them again would take longer than the rest of the work.
            if end - start >= _COMBINED_BYTES:
                total.payload(start, end, crc)
            # The item is cut. Each window leaves its part of the checksums; the one with the trailer waits for the
            # others. That cannot deadlock, because windows are taken in order, and a window waits for earlier ones
            # only.
            if item.item_offset < window.start or item.trailer_offset >= window.end:
                blocks, crc = self._collect(index, item, window, blocks, (crc, end - start), wait)
            if item.end <= window.end:
                _write(view, window, item.trailer_offset, item.frame.trailer(crc))
                self.sums.crcs[index] = pack_crcs(blocks)
            written = min(item.end, window.end)
            index += 1
            yield
        _write(view, window, written, bytes(window.end - written))
        self.sums.windows[self._numbers[window.start]] = total.up_to(window.end - window.start)

    def _seal_small(self, view: memoryview, window: Window, written: int, index: int) -> tuple[int, list[bytes]]:
        """Seal the run of small items that begins with item ``index``, if there is one (``seal_run``)."""
        if self._digest is not None:
            return written, []
        return seal_run(
            view, (window.start, window.end), written, self._items[index : min(index + RUN_ITEMS, window.last)]
        )

    def _note_digests(self, index: int, view: memoryview, window: Window, item: Placed) -> None:
        """Store the digests of the blocks of ``item`` in ``window``. Called before the CRCs of the window are stored,
        so that the digests are complete when the CRCs are."""
        if self._digest is None:
            return
        leaves = [self._digest(view[start:end]) for start, end in _blocks(window, item)]
        if item.item_offset >= window.start and item.trailer_offset < window.end:
            self.sums.digests[index] = b"".join(leaves)
            return
        with self._changed:
            known = self._leaves.setdefault(index, {})
            known.update(enumerate(leaves, _first_block(window, item)))
            if len(known) == block_count(item.frame.payload_bytes):
                self.sums.digests[index] = b"".join(known[block] for block in range(len(known)))

    def _collect(
        self,
        index: int,
        item: Placed,
        window: Window,
        blocks: list[int],
        part: tuple[int, int],
        wait: Callable[[threading.Condition], object],
    ) -> tuple[list[int], int]:
        """Store the block CRCs of one window, with the CRC and the bytes of all of them. If the window has the trailer
        of the item, wait for the other windows, and return the block CRCs and the CRC of the whole item."""
        begin = _first_block(window, item)
        with self._changed:
            known = self._cut.setdefault(index, [None] * block_count(item.frame.payload_bytes))
            parts = self._parts.setdefault(index, {})
            known[begin : begin + len(blocks)] = blocks
            if blocks:
                parts[begin] = part
            self._changed.notify_all()
            if item.end > window.end:
                return blocks, part[0]
            while None in known:
                wait(self._changed)
            crc = 0
            for _, (following, nbytes) in sorted(parts.items()):
                crc = combine(crc, following, nbytes)
            return [block for block in known if block is not None], crc


class _WindowCrc:
    """The CRC of a window. It is combined from the CRCs of large payloads, and computed over all other bytes."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._crc = 0
        self._at = 0

    def payload(self, start: int, end: int, crc: int) -> None:
        """Include a payload with this ``crc``, and the bytes before it, which are in their final state."""
        self._crc = combine(self.up_to(start), crc, end - start)
        self._at = end

    def up_to(self, end: int) -> int:
        """Return the CRC of all bytes up to ``end``."""
        self._crc = crc32(self._view[self._at : end], self._crc)
        self._at = end
        return self._crc


def _blocks(window: Window, item: Placed) -> Iterator[tuple[int, int]]:
    begin, end = _payload(window, item)
    return ((start, min(start + BLOCK_BYTES, end)) for start in range(begin, end, BLOCK_BYTES))


def _payload(window: Window, item: Placed) -> tuple[int, int]:
    """Return where in the window the payload of the item begins and ends."""
    begin = max(item.payload_offset, window.start) - window.start
    return begin, max(begin, min(item.trailer_offset, window.end) - window.start)


def _first_block(window: Window, item: Placed) -> int:
    return (max(item.payload_offset, window.start) - item.payload_offset) // BLOCK_BYTES


def _write(view: memoryview, window: Window, offset: int, content: bytes | Sequence[int]) -> None:
    start = offset - window.start
    view[start : start + len(content)] = content  # type: ignore[assignment]


def checksums_of(content: bytes, digest: str | None) -> tuple[bytes, bytes | None, int]:
    """Return the CRCs of the blocks of ``content``, packed, their digests, and the CRC of the whole."""
    view = memoryview(content)
    blocks = block_crcs(view)
    crcs, whole = pack_crcs(blocks), join_blocks(blocks, len(view))
    of = installed_digest(digest)
    if of is None:
        return crcs, None, whole
    starts = range(0, len(view), BLOCK_BYTES)
    return crcs, b"".join(of(view[start : start + BLOCK_BYTES]) for start in starts), whole


# --- as bytes, for messages to and from the writer process ------------------------------------------------------------

_HEAD = struct.Struct("<QIII")  # bytes of the shard; frames, items, windows
_FRAME = struct.Struct("<QIIII")  # bytes of the payload, header, trailer; where the trailer has the CRC
_ITEM = struct.Struct("<IQ")
_WINDOW = struct.Struct("<QQII")
_CRC_BYTES = 4
_MANY = 256  # items of less than a microsecond, between two points for pauses


def _pack(layout: ShardLayout) -> bytes:
    numbers: dict[int, int] = {}
    frames: list[Frame] = []
    items = bytearray()
    for item in layout.items:
        pause_point()
        number = numbers.get(id(item.frame))
        if number is None:
            number = numbers[id(item.frame)] = len(frames)
            frames.append(item.frame)
        items += _ITEM.pack(number, item.item_offset)
    head = _HEAD.pack(layout.nbytes, len(frames), len(layout.items), len(layout.windows))
    packed = collected(_packed(frames))
    windows = (_WINDOW.pack(*window) for window in layout.windows)
    return b"".join(chain((head,), packed, (items,), windows))


def _packed(frames: Iterable[Frame]) -> Iterator[bytes]:
    for frame in frames:
        sizes = frame.payload_bytes, len(frame.header), len(frame.blank)
        yield _FRAME.pack(*sizes, *frame.crc_at) + frame.header + frame.blank


def _distribute(layout: ShardLayout, packed: bytes, each_bytes: int, into: list[bytes]) -> None:
    """Cut ``packed``, which has ``each_bytes`` for each block, into the bytes of each item."""
    cuts: list[struct.Struct] | None = layout.derived.get(f"cuts of {each_bytes}")
    if cuts is None:
        counts = (block_count(item.frame.payload_bytes) for item in layout.items)
        cuts = []
        for some in chunked(counts, _MANY):
            cuts.append(struct.Struct("<" + "".join([f"{each_bytes * count}s" for count in some])))
            pause_point()
        layout.derived[f"cuts of {each_bytes}"] = cuts
    total = sum(cut.size for cut in cuts)
    if total != len(packed):
        raise ValueError(f"{len(packed)} bytes of checksums were received, this shard has {total}")
    found: list[bytes] = []
    at = 0
    for cut in cuts:
        found += cut.unpack_from(packed, at)
        at += cut.size
        pause_point()
    into[:] = found
