"""The ranges of files for a tensor, or for a box of it, and the places of their bytes in the destination."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Protocol, TypeAlias, TypeVar

from .._format.checksum import DIGEST_BYTES
from .._format.records import BLOCK_BYTES, Chunk, ForeignPayload, TensorEntry
from .._layout.ranges import Box, Payload
from .._runtime.pauses import by_size, pause_point
from .._storage import PIECE_BYTES

_MOST_PARTS = 256  # of a file, that are read together


@dataclass(frozen=True, slots=True)
class Direct:
    """A copy of the range to byte ``start`` of the destination, whose memory is row-major."""

    start: int


@dataclass(frozen=True, slots=True)
class RangePart:
    """A copy of bytes ``skip`` to ``skip + nbytes`` of the range to byte ``start`` of the destination. The rest is read
    for its checksum."""

    start: int
    skip: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """A copy of a box. From byte ``skip`` on, the range holds elements of ``shape``, with ``strides`` that count
    elements. The box ``source`` of these is copied to the box of the destination that begins at ``target``."""

    skip: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    source: Box
    target: tuple[int, ...]


Into: TypeAlias = Direct | RangePart | Scatter


@dataclass(frozen=True, slots=True)
class Range:
    """``nbytes`` from ``offset`` of ``file``. With ``crcs``, the range begins at a block of its payload and holds whole
    blocks. With ``crc``, it is a whole payload of a foreign writer. With neither, it cannot be verified."""

    fqn: str
    file: str
    offset: int
    nbytes: int
    into: Into
    crcs: bytes | None = None
    crc: int | None = None
    digests: bytes | None = None


class _Part(Protocol):
    """Some bytes of a file."""

    @property
    def file(self) -> str: ...

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=_Part)


def plan_ranges(
    fqn: str,
    entry: TensorEntry,
    box: Box,
    *,
    row_major: bool,
    verified: bool,
) -> Iterator[Range]:
    """Yield the ranges that fill a destination of ``box.sizes`` with that box of the tensor.

    ``row_major``: the destination is row-major, so that a read can fill it directly. Only the rows of a chunk (along
    the first dimension) that overlap with the box are read, extended to whole blocks. Chunks of another writer have one
    checksum over the whole payload. They are read whole, unless they are row-major and not to be ``verified``.
    """
    size = entry.itemsize
    for chunk in entry.chunks:
        payload = chunk.foreign
        # There are four cases. The whole chunk is the whole destination: read straight, without an overlap to compute.
        # A payload of another writer with one checksum over all of it: read whole, if it is verified or not row-major.
        # Whole rows into whole rows: read straight, from the first row to the last. Anything else: rows are read into
        # scratch memory, and the box is copied out of them.
        if row_major and payload is None and chunk.sizes == box.sizes and chunk.offsets == box.offsets:
            nbytes = math.prod(chunk.sizes) * size  # the whole chunk, the most frequent case
            yield from _straight(fqn, chunk, 0, nbytes, 0, nbytes)
            continue
        common = Box(chunk.offsets, chunk.sizes).overlap(box)
        if common is None:
            continue
        source = Box(_minus(common.offsets, chunk.offsets), common.sizes)
        target = _minus(common.offsets, box.offsets)
        if payload is not None and (verified or not _is_row_major(payload, chunk, size)):
            # The only checksum is that of the whole payload, so a part of it could not be compared with anything.
            yield _foreign(fqn, chunk, payload, source, target, box, row_major, size)
            continue
        row_bytes = math.prod(chunk.sizes[1:]) * size
        first = source.offsets[0] if source.offsets else 0
        rows = source.sizes[0] if source.sizes else 1
        start, end = first * row_bytes, (first + rows) * row_bytes
        # All inner dimensions are whole on both sides, so rows follow one another in the file and in the destination.
        if row_major and common.sizes[1:] == chunk.sizes[1:] == box.sizes[1:]:
            begin = target[0] * row_bytes if target else 0
            yield from _straight(fqn, chunk, start, end, begin, math.prod(chunk.sizes) * size)
        else:
            yield from _scattered(fqn, chunk, source, target, row_bytes, math.prod(chunk.sizes) * size)


def _straight(fqn: str, chunk: Chunk, start: int, end: int, begin: int, total: int) -> Iterator[Range]:
    """Yield ranges for payload bytes ``start`` to ``end``, which belong at byte ``begin``. They end at blocks."""
    position = start
    while position < end:
        # A checksum covers a whole block. At the two ends of the rows, where a block begins or ends outside of them,
        # the block is read into scratch memory and a part of it is copied. All blocks between go straight to the
        # destination, up to 16 MiB at a time.
        block = position // BLOCK_BYTES * BLOCK_BYTES
        if position != block or (end < block + BLOCK_BYTES and end < total):
            stop = min(block + BLOCK_BYTES, end)
            nbytes = min(BLOCK_BYTES, total - block)
            into: Into = RangePart(begin + position - start, position - block, stop - position)
            yield _range(fqn, chunk, block, nbytes, into)
        else:
            stop = min(position + PIECE_BYTES, end)
            # The end of the payload may be in the middle of a block, and its checksum covers just that. Any other end
            # is moved back to a block.
            if stop < total:
                stop = stop // BLOCK_BYTES * BLOCK_BYTES
            yield _range(fqn, chunk, position, stop - position, Direct(begin + position - start))
        position = stop


def _scattered(
    fqn: str, chunk: Chunk, source: Box, target: tuple[int, ...], row_bytes: int, total: int
) -> Iterator[Range]:
    """Yield ranges of whole rows for staging memory. Each is extended to whole blocks."""
    if not source.sizes:
        yield _range(fqn, chunk, 0, total, Scatter(0, (), None, source, target))
        return
    per_piece = max(1, PIECE_BYTES // max(1, row_bytes))
    for done in range(0, source.sizes[0], per_piece):
        rows = min(per_piece, source.sizes[0] - done)
        start = (source.offsets[0] + done) * row_bytes
        block = start // BLOCK_BYTES * BLOCK_BYTES
        end = min(total, -(-(start + rows * row_bytes) // BLOCK_BYTES) * BLOCK_BYTES)
        piece = Box((0, *source.offsets[1:]), (rows, *source.sizes[1:]))
        shape = (rows, *chunk.sizes[1:])
        into = Scatter(start - block, shape, None, piece, (target[0] + done, *target[1:]))
        yield _range(fqn, chunk, block, end - block, into)


def _range(fqn: str, chunk: Chunk, start: int, nbytes: int, into: Into) -> Range:
    # Where the payload of a foreign chunk begins is known only after its zip was opened, which ``locate`` has done.
    assert chunk.payload_offset is not None  # foreign chunks are located before ranges are planned
    first = start // BLOCK_BYTES
    end = first + -(-nbytes // BLOCK_BYTES)
    crcs = None if chunk.crcs is None else chunk.crcs[4 * first : 4 * end]
    digests = None if chunk.digests is None else chunk.digests[DIGEST_BYTES * first : DIGEST_BYTES * end]
    return Range(fqn, chunk.file, chunk.payload_offset + start, nbytes, into, crcs, digests=digests)


def _foreign(
    fqn: str,
    chunk: Chunk,
    payload: ForeignPayload,
    source: Box,
    target: tuple[int, ...],
    box: Box,
    row_major: bool,
    size: int,
) -> Range:
    """Return the range of a whole payload."""
    assert chunk.payload_offset is not None
    whole = source.sizes == chunk.sizes and source.sizes[1:] == box.sizes[1:]
    into: Into
    if row_major and whole and _is_row_major(payload, chunk, size):
        into = Direct(target[0] * math.prod(chunk.sizes[1:]) * size if target else 0)
    else:
        into = Scatter(payload.first_element * size, chunk.sizes, payload.strides, source, target)
    return Range(fqn, chunk.file, chunk.payload_offset, payload.payload_bytes, into, crc=payload.crc)


def _is_row_major(payload: ForeignPayload, chunk: Chunk, size: int) -> bool:
    """Return whether the payload is exactly the elements of the chunk, one after the other."""
    return payload.strides is None and payload.payload_bytes == math.prod(chunk.sizes) * size


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.sub, a, b))


def batches(parts: Iterable[P], most: int = _MOST_PARTS) -> list[list[P]]:
    """Group parts by file and offset, ``most`` at a time. Many small ones are read with one call, a large one by
    itself."""
    # By file, and in the order of the offsets: small parts that lie side by side then share one system call, and a
    # device reads forward.
    by_file: dict[str, list[P]] = {}
    for one in parts:
        by_file.setdefault(one.file, []).append(one)
        pause_point()
    found: list[list[P]] = []
    for of_file in by_file.values():
        of_file.sort(key=attrgetter("offset"))
        for some in by_size(of_file, attrgetter("nbytes"), PIECE_BYTES, most):
            found.append(some)
            pause_point()
    return found


@dataclass(frozen=True, slots=True)
class DirectBatch:
    """Payloads of one file, by offset, that one thread reads."""

    file: str
    payloads: list[Payload]
    nbytes: int


def direct_batches(payloads: Mapping[str, list[Payload]]) -> list[DirectBatch]:
    """Group the payloads of each file by offset, with at most 16 MiB in a batch. Larger payloads are cut at blocks."""
    found: list[DirectBatch] = []
    for file, of_file in payloads.items():
        of_file.sort()
        for some in by_size(_cut(of_file), itemgetter(1), PIECE_BYTES, _MOST_PARTS):
            found.append(DirectBatch(file, some, sum(map(itemgetter(1), some))))
            pause_point()
    return found


def _cut(payloads: Iterable[Payload]) -> Iterable[Payload]:
    for payload in payloads:
        offset, nbytes, _, crcs, digests, fqn = payload
        if nbytes <= PIECE_BYTES:
            yield payload
            continue
        for start in range(0, nbytes, PIECE_BYTES):
            first, end = start // BLOCK_BYTES, (start + PIECE_BYTES) // BLOCK_BYTES
            some = None if digests is None else digests[DIGEST_BYTES * first : DIGEST_BYTES * end]
            size = min(PIECE_BYTES, nbytes - start)
            yield offset + start, size, start, crcs[4 * first : 4 * end], some, fqn
