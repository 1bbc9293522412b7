"""The ranges of files for a tensor, or for a box of it, and the places of their bytes in the destination.

Nearly all tensors of a load have plain memory of the same dtype and shape, and are read directly into it. The work for
one of them is described by a tuple of numbers, strings and bytes, and not by records that refer to each other. 10,000
tensors of 1 KiB are loaded in a fifth of the time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, itemgetter, lt
from typing import Protocol, TypeAlias, TypeVar

import torch

from .._format.checksum import DIGEST_BYTES
from .._format.records import BLOCK_BYTES, Chunk, ForeignPayload, Row, TensorEntry, itemsize
from .._runtime.pauses import by_size, chunked, pause_point
from .._runtime.torch_probes import PLAIN_TENSORS, dtype_name, has_shards, on_host_as_is

__all__ = [
    "PIECE_BYTES",
    "Box",
    "Candidate",
    "Direct",
    "Payload",
    "Range",
    "RangePart",
    "Scatter",
    "Straight",
    "StraightBatch",
    "batches",
    "overlap",
    "overlaps",
    "plan_ranges",
    "straight_batches",
]


PIECE_BYTES = 16 * BLOCK_BYTES
_MOST_PARTS = 256  # of a file, that are read together


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor. Offsets and sizes count elements in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


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
    size = itemsize(entry.dtype)
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
        common = overlap(Box(chunk.offsets, chunk.sizes), box)
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
    assert chunk.payload_offset is not None
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


def overlaps(chunk: Chunk, box: Box) -> bool:
    """Return whether an element of the chunk is in the box."""
    return overlap(Box(chunk.offsets, chunk.sizes), box) is not None


def overlap(a: Box, b: Box) -> Box | None:
    """Return the box of the elements that are in both. None if there are none."""
    low = tuple(map(max, a.offsets, b.offsets))
    high = tuple(
        min(ao + size, bo + other) for ao, size, bo, other in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = _minus(high, low)
    return None if any(size <= 0 for size in sizes) else Box(low, sizes)


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.sub, a, b))


def batches(parts: Iterable[P]) -> list[list[P]]:
    """Group parts by file and offset. Many small ones are read with one call, a large one by itself."""
    # By file, and in the order of the offsets: small parts that lie side by side then share one system call, and a
    # device reads forward.
    by_file: dict[str, list[P]] = {}
    for one in parts:
        by_file.setdefault(one.file, []).append(one)
        pause_point()
    found: list[list[P]] = []
    for of_file in by_file.values():
        of_file.sort(key=attrgetter("offset"))
        for some in by_size(of_file, attrgetter("nbytes"), PIECE_BYTES, _MOST_PARTS):
            found.append(some)
            pause_point()
    return found


Payload: TypeAlias = tuple[int, int, int, bytes, bytes | None, str]
"""Offset in the file, number of bytes, offset in the tensor, CRCs, digests, FQN."""

Candidate: TypeAlias = tuple[str, torch.Tensor, Row]
"""FQN, tensor of the target, row of the manifest."""

_FACTS = attrgetter("shape", "dtype", "itemsize")
_MANY = 64


@dataclass(frozen=True, slots=True)
class Straight:
    """Tensors by FQN, and the payloads that are read into them, by file. ``starts`` and ``ends`` are the addresses of
    the tensors."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    payloads: dict[str, list[Payload]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def take(self, found: Sequence[Candidate]) -> set[str]:
        """Add those tensors of ``found`` into whose memory the bytes of their rows can be read as they are. Returns
        their FQNs. Facts of tensors are taken of all of them at once, without a call from Python for each."""
        plain = [one for one in found if type(one[1]) in PLAIN_TENSORS]
        plain = list(compress(plain, on_host_as_is([tensor for _, tensor, _ in plain])))
        tensors = [tensor for _, tensor, _ in plain]
        facts = zip(
            plain,
            map(_FACTS, tensors),
            map(torch.Tensor.is_contiguous, tensors),
            map(torch.Tensor.data_ptr, tensors),
            map(torch.Tensor.storage_offset, tensors),
            map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors)),
            strict=True,
        )
        taken: set[str] = set()
        for (fqn, tensor, row), (shape, dtype, element_bytes), contiguous, start, skipped, held in facts:
            saved_dtype, saved_shape, nbytes, file, _, _, offset, crcs, digests, _ = row
            # Whatever is not ordinary is left to the general code. It finds out whether that is an error, and words it.
            if not (contiguous and start and nbytes) or shape != saved_shape or dtype_name(dtype) != saved_dtype:
                continue
            # A tensor may claim more than its storage holds, for example after ``resize_`` of the storage. Reading into
            # it would write behind the allocation.
            if skipped * element_bytes + nbytes > held or has_shards(tensor):
                continue
            taken.add(fqn)
            self.tensors[fqn] = tensor
            self.starts.append(start)
            self.ends.append(start + nbytes)
            self.payloads.setdefault(file, []).append((offset, nbytes, 0, crcs, digests, fqn))
        return taken

    def shared(self, others: Collection[tuple[int, int]]) -> set[str]:
        """Return the FQNs of tensors that share memory with each other, or with one of ``others``, which are start and
        end addresses."""
        starts = sorted([*self.starts, *(start for start, _ in others)])
        ends = sorted([*self.ends, *(end for _, end in others)])
        # Starts and ends are sorted separately. If no two extents overlap, they are in the same order, and the (n+1)-th
        # smallest start is never less than the n-th smallest end. If two overlap, this fails for some n. So the usual
        # case, without any sharing, costs two sorts of integers and no loop.
        if not any(map(lt, starts[1:], ends)):
            return set()
        extents = sorted([*zip(self.starts, self.ends, self.tensors, strict=True), *((*one, "") for one in others)])
        found: set[str] = set()
        reached, holder = 0, ""
        for some in chunked(extents, _MANY):
            for start, end, name in some:
                if start < reached:
                    found.update((name, holder))
                if end > reached:
                    reached, holder = end, name
            pause_point()
        return found - {""}

    def remove(self, fqns: set[str]) -> None:
        for payloads in self.payloads.values():
            payloads[:] = [payload for payload in payloads if payload[-1] not in fqns]
        for fqn in fqns:
            self.tensors.pop(fqn, None)


@dataclass(frozen=True, slots=True)
class StraightBatch:
    """Payloads of one file, by offset, that one thread reads."""

    file: str
    payloads: list[Payload]
    nbytes: int


def straight_batches(payloads: Mapping[str, list[Payload]]) -> list[StraightBatch]:
    """Group the payloads of each file by offset, with at most 16 MiB in a batch. Larger payloads are cut at blocks."""
    found: list[StraightBatch] = []
    for file, of_file in payloads.items():
        of_file.sort()
        for some in by_size(_cut(of_file), itemgetter(1), PIECE_BYTES, _MOST_PARTS):
            found.append(StraightBatch(file, some, sum(map(itemgetter(1), some))))
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
