"""Who of the ranks on one machine reads which bytes for all of them. Pure: every rank comes to the same plan."""

from __future__ import annotations

import json
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..._runtime.threads import politely

__all__ = ["Piece", "Segment", "SharedReads", "Slice", "Span", "Window", "pack", "plan_windows", "slices", "unpack"]

_SEGMENTS = 256  # of a window: as many as a store is asked for at once


class Span(NamedTuple):
    """Bytes ``start`` to ``end`` of a file."""

    file: str
    start: int
    end: int


class Piece(Protocol):
    """What a rank needs as a whole: bytes that are checked, or put in place, together."""

    @property
    def span(self) -> Span: ...

    def take(self, at: int, content: memoryview) -> None:
        """In a thread: the bytes from ``at`` on, each exactly once and in order; the last ones complete it. What it
        raises ends the read."""


class SharedReads(Protocol):
    """Reads for all ranks of one machine at once."""

    async def read(self, directory: str, pieces: Sequence[Piece], delivered: Callable[[int], None]) -> Sequence[Piece]:
        """Deliver the pieces that other ranks need some of, and return the rest. All ranks call it alike, with what
        they need themselves. ``delivered`` is told on the loop how many bytes have come."""


class Segment(NamedTuple):
    """Bytes of a file, and which ranks need them."""

    span: Span
    users: frozenset[int]


@dataclass(frozen=True, slots=True)
class Window:
    """What ``reader`` reads in one go, as the ``turn``-th of its own: ``bounds`` of ``file``, packed one after the
    other. ``users`` need some of it."""

    file: str
    bounds: tuple[tuple[int, int], ...]
    users: frozenset[int]
    reader: int
    turn: int

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self.bounds)


class Slice(NamedTuple):
    """``nbytes`` at ``position`` of a window are those from ``at`` on of piece number ``piece``."""

    piece: int
    at: int
    position: int
    nbytes: int


def plan_windows(needs: Sequence[Sequence[Span]], window_bytes: int) -> list[Window]:
    """By file and offset, over every piece of which another rank needs some byte too. ``needs``: the pieces of each
    rank, sorted. In a thread."""
    alike: dict[tuple[Span, ...], list[int]] = {}
    for rank, spans in enumerate(needs):
        alike.setdefault(tuple(spans), []).append(rank)
    kinds = list(alike.items())
    common = [one.span for one in _swept(kinds) if len(one.users) > 1]
    whole = [(list(_touching(spans, common)), ranks) for spans, ranks in kinds]
    return list(_packed(_swept(whole), len(needs), window_bytes))


def _swept(kinds: Sequence[tuple[Sequence[Span], Sequence[int]]]) -> Iterator[Segment]:
    """The bytes that anybody needs, by file and offset, cut where the ranks that need them change."""
    events: dict[str, list[tuple[int, int, int]]] = {}
    for kind, (spans, _) in enumerate(kinds):
        for span in politely(spans):
            if span.end > span.start:
                events.setdefault(span.file, []).extend(((span.start, 1, kind), (span.end, -1, kind)))
    users_of: dict[frozenset[int], frozenset[int]] = {}
    for file in sorted(events):
        active: Counter[int] = Counter()
        last = 0
        for position, change, kind in politely(sorted(events[file])):
            if active and position > last:
                now = frozenset(active)
                if now not in users_of:
                    users_of[now] = frozenset(rank for one in now for rank in kinds[one][1])
                yield Segment(Span(file, last, position), users_of[now])
            last = position
            active[kind] += change
            if not active[kind]:
                del active[kind]


def _touching(spans: Sequence[Span], common: Sequence[Span]) -> Iterator[Span]:
    """Those that have a byte in common with ``common``, whose spans lie one after the other."""
    first = 0
    for span in politely(spans):
        while first < len(common) and (common[first].file, common[first].end) <= (span.file, span.start):
            first += 1
        if first < len(common) and common[first].file == span.file and common[first].start < span.end:
            yield span


def _packed(segments: Iterable[Segment], readers: int, window_bytes: int) -> Iterator[Window]:
    """Each window is read by whoever has the least to read so far."""
    turns, load = [0] * readers, [0] * readers
    bounds: list[tuple[int, int]] = []
    users: frozenset[int] = frozenset()
    file, nbytes = "", 0

    def close() -> Window:
        reader = load.index(min(load))
        load[reader] += nbytes
        turns[reader] += 1
        return Window(file, tuple(bounds), users, reader, turns[reader] - 1)

    for segment in politely(segments):
        start = segment.span.start
        while start < segment.span.end:
            if bounds and (segment.span.file != file or nbytes == window_bytes or len(bounds) == _SEGMENTS):
                yield close()
                bounds, users, nbytes = [], frozenset(), 0
            file = segment.span.file
            end = min(segment.span.end, start + window_bytes - nbytes)
            bounds.append((start, end))
            users |= segment.users
            nbytes += end - start
            start = end
    if bounds:
        yield close()


def slices(pieces: Sequence[Span], windows: Sequence[Window]) -> list[tuple[int, list[Slice]]]:
    """The windows that this rank takes something of, in order, and what: so each piece gets its bytes in order.
    ``pieces`` are sorted; only those that the windows cover as a whole get any. In a thread."""
    covered = [0] * len(pieces)
    for _, taken in _slices(pieces, windows):
        for one in taken:
            covered[one.piece] += one.nbytes
    found = []
    for number, taken in _slices(pieces, windows):
        whole = [one for one in taken if covered[one.piece] == pieces[one.piece].end - pieces[one.piece].start]
        if whole:
            found.append((number, whole))
    return found


def _slices(pieces: Sequence[Span], windows: Sequence[Window]) -> Iterator[tuple[int, list[Slice]]]:
    coming, started = 0, list[int]()
    for number, window in enumerate(politely(windows)):
        taken: list[Slice] = []
        position = 0
        for start, end in window.bounds:
            while coming < len(pieces) and pieces[coming][:2] < (window.file, end):
                started.append(coming)
                coming += 1
            started = [one for one in started if (pieces[one].file, pieces[one].end) > (window.file, start)]
            for one in started:
                low, high = max(start, pieces[one].start), min(end, pieces[one].end)
                if low < high:
                    taken.append(Slice(one, low - pieces[one].start, position + low - start, high - low))
            position += end - start
        yield number, taken


def pack(spans: Sequence[Span]) -> bytes:
    """As bytes for other processes of this machine."""
    files = {file: number for number, file in enumerate(dict.fromkeys(span.file for span in spans))}
    table = json.dumps(list(files)).encode()
    numbers = array("Q")
    for span in politely(spans):
        numbers.extend((files[span.file], span.start, span.end))
    return struct.pack("<Q", len(table)) + table + numbers.tobytes()


def unpack(raw: bytes) -> list[Span]:
    (size,) = struct.unpack_from("<Q", raw)
    files = json.loads(raw[8 : 8 + size])
    numbers = array("Q", raw[8 + size :])
    return [Span(files[numbers[at]], numbers[at + 1], numbers[at + 2]) for at in politely(range(0, len(numbers), 3))]
