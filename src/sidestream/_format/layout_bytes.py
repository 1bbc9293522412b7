"""The layout of a shard file as bytes, and its checksums as bytes, for messages to and from the writer process.

The bytes have what the process has to write (bytes of frames and offsets), and not the plan that it was made from.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import chain

from .._runtime.pauses import chunked, collected, pause_point
from .checksum import DIGEST_BYTES, block_count, pack_crcs, unpack_crcs
from .frame import Frame
from .shard import BlockSums, Placed, ShardLayout, Window

__all__ = ["pack_layout", "pack_sums", "unpack_layout", "unpack_sums"]

_HEAD = struct.Struct("<QIII")  # bytes of the shard; frames, items, windows
_FRAME = struct.Struct("<QIIII")  # bytes of the payload, header, trailer; where the trailer has the CRC
_ITEM = struct.Struct("<IQ")
_WINDOW = struct.Struct("<QQII")
_CRC_BYTES = 4
_MANY = 256  # items of less than a microsecond, between two points for pauses


def pack_layout(layout: ShardLayout) -> bytes:
    """Encode ``layout``. The first time takes some microseconds for each item; ``layout`` keeps the result."""
    # A plan that is used again has the same layout object, so a steady run packs it once.
    packed: bytes | None = layout.derived.get("packed")
    if packed is None:
        packed = layout.derived["packed"] = _pack(layout)
    return packed


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


def unpack_layout(packed: memoryview) -> ShardLayout:
    """Decode what ``pack_layout`` has made."""
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
    windows = tuple(Window(*window) for window in _WINDOW.iter_unpack(packed[end : end + window_count * _WINDOW.size]))
    return ShardLayout(nbytes, items, windows)


def pack_sums(sums: BlockSums) -> tuple[bytes, bytes]:
    """Encode the CRCs, with those of the windows last, and the digests."""
    return b"".join([*sums.crcs, pack_crcs(sums.windows)]), b"".join(sums.digests)


def unpack_sums(layout: ShardLayout, crcs: bytes, digests: bytes, into: BlockSums) -> None:
    """Decode what ``pack_sums`` has made into ``into``. Raises ``ValueError`` if it does not fit the layout."""
    end = max(0, len(crcs) - _CRC_BYTES * len(layout.windows))
    into.windows[:] = unpack_crcs(crcs[end:])
    _distribute(layout, crcs[:end], _CRC_BYTES, into.crcs)
    if into.digests:
        _distribute(layout, digests, DIGEST_BYTES, into.digests)


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
