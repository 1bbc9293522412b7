"""Tensor items of which the first and the last bytes are known.

The items of a checkpoint differ in their elements, and rarely in anything else. Such an item is opened by a comparison
with one that was opened before, which takes a tenth of the time.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO
from zlib import crc32

from ...errors import CorruptCheckpointError
from .file import Records, TensorPayload, open_tensor_item
from .zip import RecordPlace, Seekable, TorchZip

_FIRST_BYTES = 256  # they contain the size of the pickle, and mostly all of it
_MOST_PATTERNS = 256
_MOST_FIXED_BYTES = 16 << 10  # of one pattern; items of torch.save have less than 2 KiB beside their elements
_PIECE_BYTES = 64 << 10
_RANDOM = ".data/serialization_id"  # torch.save writes another one into each item


@dataclass(frozen=True, slots=True)
class Ends:
    """The first and the last bytes of an item of ``nbytes``. ``tail`` is empty if ``head`` is the whole item."""

    head: bytes
    tail: bytes
    nbytes: int

    @property
    def tail_at(self) -> int:
        return self.nbytes - len(self.tail)

    def find(self, start: int, end: int) -> bytes | None:
        """Return these bytes of the item; None if they are not all known."""
        if end <= len(self.head):
            return self.head[start:end]
        return self.tail[start - self.tail_at : end - self.tail_at] if start >= self.tail_at else None

    def file(self) -> BinaryIO:
        """Return the item as a file. Unknown bytes are zeros, so that no zip is found in them."""
        return io.BufferedReader(_EndsFile(self)) if self.tail else io.BytesIO(self.head)


class _EndsFile(Seekable):
    def __init__(self, ends: Ends) -> None:
        super().__init__(ends.nbytes)
        self._ends = ends

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        ends, start = self._ends, self._position
        for limit in (len(ends.head), ends.tail_at, ends.nbytes):
            if start < limit:
                end = min(start + len(buffer), limit, start + _PIECE_BYTES)
                piece = ends.find(start, end)
                buffer[: end - start] = bytes(end - start) if piece is None else piece
                self._position = end
                return end - start
        return 0


class TensorItems:
    """Opens the tensor items of a checkpoint. ``open`` may be called from several threads."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._patterns: dict[tuple[int, bytes], _Pattern | None] = {}  # None: nothing can be compared with it

    def open(self, item: Ends) -> TensorPayload:
        """Return what ``open_tensor_item`` returns, and raise what it raises."""
        kind = item.nbytes, item.head[:_FIRST_BYTES]
        pattern = self._patterns.get(kind)
        payload = None if pattern is None else pattern.match(item, self._records)
        if payload is None:
            payload = open_tensor_item(item.file(), item.nbytes, self._records)
            if kind not in self._patterns and len(self._patterns) < _MOST_PATTERNS:
                self._patterns[kind] = _pattern(item, payload)
        return payload


@dataclass(frozen=True, slots=True)
class _Pattern:
    """An item that was opened. ``fixed`` has, with their offsets, all known bytes but the free ones: the content of two
    records and their checksums. Unknown bytes are read as zeros. So ``open_tensor_item`` finds the same in every item
    of this size that has the fixed bytes too."""

    payload: TensorPayload
    record: RecordPlace
    random: RecordPlace | None
    fixed: Sequence[tuple[int, bytes]]

    def match(self, item: Ends, records: Records) -> TensorPayload | None:
        """Return the payload of an item, or None if the item has to be opened by itself."""
        for start, expected in self.fixed:
            if item.find(start, start + len(expected)) != expected:
                return None
        if records == "all" and self.random is not None:
            content = item.find(self.random.start, self.random.end)
            if content is None or crc32(content) != _crc(item, self.random):
                return None
        return replace(self.payload, foreign=replace(self.payload.foreign, crc=_crc(item, self.record)))


def _crc(item: Ends, record: RecordPlace) -> int:
    return int.from_bytes(item.find(record.crc_at, record.crc_at + 4) or b"", "little")


def _pattern(item: Ends, payload: TensorPayload) -> _Pattern | None:
    """Return the pattern of an item that was opened. None if its records overlap, if its directory is not known or not
    at its place, or if it has many bytes beside the elements."""
    try:
        places = TorchZip(item.file(), item.nbytes).places()
    except CorruptCheckpointError:  # a header in the unknown bytes
        return None
    record = next((one for one in places.values() if one.start == payload.payload_offset), None)
    random = places.get(_RANDOM)
    if record is None or random is record:
        return None
    free = [(start, end) for one in (record, random) if one is not None for start, end in one.free]
    fixed = list(_fixed(item, sorted(free)))
    if sum(len(part) for _, part in fixed) > _MOST_FIXED_BYTES:
        return None
    return _Pattern(payload, record, random, fixed)


def _fixed(item: Ends, free: Sequence[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """Yield the known bytes of an item that are not free, with their offsets."""
    at = 0
    for start, end in [*free, (item.nbytes, item.nbytes)]:
        for first, last in ((at, min(start, len(item.head))), (max(at, item.tail_at), start)):
            if first < last:
                part = item.find(first, last)
                assert part is not None
                yield first, part
        at = end
