"""The sealing of small items in runs. It takes a seventh of the time of the general code (``shard.py``).

The bytes between two payloads (the trailer of one item, the gap, and the header of the next) are written as one piece.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .checksum import crc32, pack_crcs
from .frame import Frame

__all__ = ["RUN_ITEMS", "seal_run"]

_SMALL_BYTES = 64 << 10
_RUN_BYTES = 256 << 10  # fits into the cache of a core
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
        if not 0 < size <= _SMALL_BYTES or at < base or at + frame.item_bytes > limit or at - written > _RUN_BYTES:
            break
        payload, gap = at + len(header) - base, at - before
        view[tail:payload] = blank + (_GAPS[gap] if gap < 64 else bytes(gap)) + header
        if blank:
            pack(view, tail + one, crc)
            pack(view, tail + two, crc)
        tail = payload + size
        crc = crc32(view[payload:tail])
        found.append(crc)
        blank, (one, two) = frame.blank_trailer
        before = at + frame.item_bytes
    if found:
        view[tail : before - base] = blank
        pack(view, tail + one, crc)
        pack(view, tail + two, crc)
    packed = pack_crcs(found)
    return before, [packed[start : start + 4] for start in range(0, len(packed), 4)]
