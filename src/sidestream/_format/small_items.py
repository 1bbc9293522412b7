"""Small items of a shard are sealed in runs, in a seventh of the time that the general code (``shard.py``) needs.

What lies between two payloads, the trailer of one item, the gap and the header of the next, is written as one piece.
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
"""So many at most with one call."""

_CRC = struct.Struct("<I")
_GAPS = [bytes(gap) for gap in range(64)]


def seal_run(
    view: memoryview, window: tuple[int, int], written: int, items: Sequence[tuple[Frame, int]]
) -> tuple[int, list[bytes]]:
    """Seal the first of ``items``, as long as they are small (64 KiB at most) and lie in ``window`` as a whole, and not
    more than some 100 us of work. Return where the last one ends, and the packed checksum of each.

    ``window`` has the offsets in the file of the bytes in ``view``. Everything from ``written`` on, which is where the
    item before ends, is given its final content.
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
