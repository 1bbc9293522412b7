"""What is read together with other ranks of the machine, and comes in windows instead of in whole ranges."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._format.checksum import crc32
from .._format.records import Chunk
from .._layout.checks import altered
from .._layout.ranges import Range
from .foreign.values import ends_of
from .per_host.sharing import Span

__all__ = ["Ends", "Item", "Landing", "Summed"]

_SLICED_BYTES = 32 << 10


class Landing:
    """One range. ``begin`` gives it memory when its first bytes come, and ``arrived`` is called with that when all
    are there."""

    def __init__(self, one: Range, begin: Callable[[], memoryview], arrived: Callable[[memoryview], None]) -> None:
        self.range = one
        self._begin = begin
        self._arrived = arrived
        self._into: memoryview | None = None

    @property
    def span(self) -> Span:
        return Span(self.range.file, self.range.offset, self.range.offset + self.range.nbytes)

    def take(self, at: int, content: memoryview) -> None:
        into = self._begin() if self._into is None else self._into
        self._into = into
        _copy(into[at : at + len(content)], content)
        if at + len(content) == self.range.nbytes:
            self._into = None
            self._arrived(into)


class Summed:
    """A payload that has one checksum over everything, and of which only ``rows`` are kept: the rest is not."""

    def __init__(self, whole: Landing, rows: Sequence[Landing]) -> None:
        self.range = whole.range
        self.span = whole.span
        self._rows = [(row.range.offset - self.range.offset, row) for row in rows]
        self._crc = 0

    def take(self, at: int, content: memoryview) -> None:
        one = self.range
        self._crc = crc32(content, self._crc)
        for start, row in self._rows:
            low, high = max(at, start), min(at + len(content), start + row.range.nbytes)
            if low < high:
                row.take(low - start, content[low - at : high - at])
        if at + len(content) == one.nbytes and self._crc != one.crc:
            raise altered(one.fqn, one.file, one.offset)


class Item:
    """A compressed item, which is unpacked by ``arrived`` when it is there as a whole."""

    def __init__(self, chunk: Chunk, arrived: Callable[[bytearray], None], wanted: Any) -> None:
        self.chunk = chunk
        self.wanted = wanted
        self.span = Span(chunk.file, chunk.item_offset, chunk.item_offset + chunk.item_bytes)
        self._arrived = arrived
        self._raw = bytearray()

    def take(self, at: int, content: memoryview) -> None:
        self._raw += content
        if len(self._raw) == self.chunk.item_bytes:
            raw, self._raw = self._raw, bytearray()
            self._arrived(raw)


class Ends:
    """One end of an item, or all of a small one; ``arrived`` is called when all ends are there."""

    def __init__(self, span: Span, place: int, ends: list[bytes], arrived: Callable[[Sequence[bytes]], None]) -> None:
        self.span = span
        self._place = place
        self._ends = ends
        self._arrived = arrived
        self._raw = bytearray()

    @classmethod
    def of(cls, chunk: Chunk, arrived: Callable[[Sequence[bytes]], None]) -> Iterator[Ends]:
        bounds = ends_of(chunk)
        ends = [b""] * len(bounds)
        for place, (start, nbytes) in enumerate(bounds):
            yield cls(Span(chunk.file, start, start + nbytes), place, ends, arrived)

    def take(self, at: int, content: memoryview) -> None:
        self._raw += content
        if len(self._raw) == self.span.end - self.span.start:
            self._ends[self._place], self._raw = bytes(self._raw), bytearray()
            if all(self._ends):
                self._arrived(self._ends)
                self._ends.clear()


def _copy(into: memoryview, content: memoryview) -> None:
    if len(content) < _SLICED_BYTES:
        into[:] = content
        return
    target, source = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (into, content))
    ctypes.memmove(target, source, len(content))  # without the GIL
