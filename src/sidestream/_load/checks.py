"""The expected bytes of a checkpoint, as pieces. A caller reads and checks pieces in any order, and in parallel."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from operator import add, attrgetter, le, mul
from typing import NamedTuple

import torch

from .._format.checksum import (
    DIGEST_BYTES,
    Burst,
    block_crcs,
    combine,
    crc32,
    installed_digest,
    join_blocks,
    unpack_crcs,
)
from .._format.frame import frame_tensor
from .._format.records import (
    BLOCK_BYTES,
    Chunk,
    ForeignPayload,
    TensorEntry,
    ValueEntry,
)
from .._format.values import value_item
from .._storage import PIECE_BYTES
from ..errors import CorruptCheckpointError, UnsupportedTensorError

_ITEMSIZE = attrgetter("itemsize")
_SMALL_BYTES = 64 << 10
"""The largest item that is read as one piece. Reading a piece costs as much as checking 10 KiB."""


def has_no_checksum(chunk: Chunk) -> bool:
    """Return whether the payload of another writer has a known place and no checksum."""
    return chunk.payload_offset is not None and (chunk.foreign is None or chunk.foreign.crc is None)


class SmallItem(NamedTuple):
    """A small item of sidestream that is read as a whole: the dtype of its tensor, and the chunk."""

    dtype: str
    chunk: Chunk

    def is_right(self, view: memoryview) -> bool:
        """Return whether all bytes are the expected ones, without a look at digests. Which byte is wrong is found with
        pieces, of which making takes longer than all other work on a small item."""
        chunk, frame = self.chunk, frame_tensor(self.dtype, self.chunk.sizes)
        start, end = len(frame.header), len(frame.header) + frame.payload_bytes
        crc = crc32(view[start:end])
        return (
            list(unpack_crcs(chunk.crcs or b"")) == ([crc] if frame.payload_bytes else [])
            and bytes(view[:start]) == frame.header
            and bytes(view[end:]) == frame.trailer(crc)
        )


class Piece(NamedTuple):
    """``nbytes`` from ``offset`` of ``file``, which belong to ``fqn``.

    ``expected`` is the bytes, the chunk with the checksums of their blocks, a ``Whole``, or a ``SmallItem``. ``number``
    is the number of the first block, or of the part of the ``Whole``. A piece is one object: with a closure in each,
    the garbage collector had to traverse 120,000 objects for 10,000 tensors.
    """

    fqn: str
    file: str
    offset: int
    nbytes: int
    expected: bytes | Chunk | Whole | SmallItem
    number: int = 0

    def check(self, view: memoryview, burst: Burst = nullcontext) -> None:
        """Compare the bytes in ``view``. Raises ``CorruptCheckpointError`` if they differ from the expected ones."""
        expected = self.expected
        if isinstance(expected, Chunk):
            self._check_blocks(expected, view, burst)
        elif isinstance(expected, Whole):
            expected.check(self.number, view)
        elif isinstance(expected, SmallItem):
            if expected.chunk.digests is not None or not expected.is_right(view):
                for one in _item_pieces(self.fqn, *expected):
                    start = one.offset - self.offset
                    one.check(view[start : start + one.nbytes], burst)
        elif bytes(view) != expected:  # a view itself would be compared element by element
            raise altered(self.fqn, self.file, self.offset, "they are not what the manifest says")

    def _check_blocks(self, chunk: Chunk, view: memoryview, burst: Burst) -> None:
        crcs, digests = chunk.crcs or b"", chunk.digests
        for number, found in enumerate(block_crcs(view, burst), self.number):
            if found != int.from_bytes(crcs[4 * number : 4 * number + 4], "little"):
                raise altered(self.fqn, self.file, self.offset + (number - self.number) * BLOCK_BYTES)
        check_digests(self.fqn, self.file, self.offset, view, digests and digests[DIGEST_BYTES * self.number :])


def own_pieces(fqn: str, entry: TensorEntry) -> Iterator[Piece]:
    """Yield pieces for all bytes of the items of a tensor of sidestream. The frames follow from dtype and shape."""
    for chunk in entry.chunks:
        start = chunk.payload_offset
        assert start is not None
        assert chunk.crcs is not None
        frame = frame_tensor(entry.dtype, chunk.sizes)
        # The frame follows from dtype and shape, so the place of the payload in its item does as well. A manifest that
        # says otherwise was not written by a save.
        if (start - len(frame.header), frame.item_bytes) != (chunk.item_offset, chunk.item_bytes):
            raise CorruptCheckpointError(
                f"{fqn}: its item is not as large as its dtype and shape make it", file=chunk.file, fqn=fqn
            )
        # Header, payload and trailer of a small item are read together and compared as three pieces of that memory.
        if frame.item_bytes <= _SMALL_BYTES:
            yield Piece(fqn, chunk.file, chunk.item_offset, frame.item_bytes, SmallItem(entry.dtype, chunk))
        else:
            yield from _item_pieces(fqn, entry.dtype, chunk)


def _item_pieces(fqn: str, dtype: str, chunk: Chunk) -> Iterator[Piece]:
    """Yield the pieces of an item: header, payload and trailer."""
    frame = frame_tensor(dtype, chunk.sizes)
    start = chunk.item_offset + len(frame.header)
    trailer = frame.trailer(join_blocks(list(unpack_crcs(chunk.crcs or b"")), frame.payload_bytes))
    # Stock DCP opens an item with ``torch.load``, which needs the frame. Sidestream's own loads read the payload alone,
    # so only a verification finds damage in header and trailer.
    yield Piece(fqn, chunk.file, chunk.item_offset, len(frame.header), frame.header)
    yield from _block_pieces(fqn, chunk, start, frame.payload_bytes)
    yield Piece(fqn, chunk.file, start + frame.payload_bytes, len(trailer), trailer)


def sidecar_pieces(name: str, entry: TensorEntry) -> Iterator[Piece]:
    """Every byte of a sidecar file."""
    (chunk,) = entry.chunks
    yield from _block_pieces(name, chunk, 0, chunk.item_bytes)


def _block_pieces(fqn: str, chunk: Chunk, start: int, nbytes: int) -> Iterator[Piece]:
    """Yield pieces for ``nbytes`` that have a checksum for each block."""
    for begin in range(0, nbytes, PIECE_BYTES):
        yield Piece(fqn, chunk.file, start + begin, min(PIECE_BYTES, nbytes - begin), chunk, begin // BLOCK_BYTES)


def value_pieces(fqn: str, entry: ValueEntry) -> Iterator[Piece]:
    """Yield the piece for the item of a value of sidestream. The item has to be the value in the manifest, because
    stock DCP reads the item."""
    try:
        # The value stands twice: as data in the manifest, which we read, and as a pickle in the shard file, which stock
        # DCP reads. The pickle is made again from the data, and has to be the same bytes.
        content = value_item(entry.node)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(
            f"{fqn}: its value in the manifest is damaged ({type(error).__name__})", fqn=fqn
        ) from None
    if len(content) != entry.item_bytes:
        raise CorruptCheckpointError(f"{fqn}: its item has another size than its value", file=entry.file, fqn=fqn)
    for begin in range(0, len(content), PIECE_BYTES):
        part = content[begin : begin + PIECE_BYTES]
        yield Piece(fqn, entry.file, entry.item_offset + begin, len(part), part)


def foreign_pieces(fqn: str, entry: TensorEntry, seen: set[object]) -> Iterator[Piece]:
    """Yield pieces for the payloads of another writer's tensor, as far as they have a checksum. Several tensors may be
    views of one payload: those that are in ``seen`` are left out, and the others are added to it."""
    for chunk in entry.chunks:
        payload, start = chunk.foreign, chunk.payload_offset
        # ``torch.save`` writes a storage once for all of its views.
        if payload is None or payload.crc is None or start is None or (chunk.file, start) in seen:
            continue
        seen.add((chunk.file, start))
        whole = Whole(fqn, chunk, payload)
        for begin in range(0, payload.payload_bytes, PIECE_BYTES):
            nbytes = min(PIECE_BYTES, payload.payload_bytes - begin)
            yield Piece(fqn, chunk.file, start + begin, nbytes, whole, begin // PIECE_BYTES)


def check_digests(fqn: str, file: str, offset: int, view: memoryview, digests: bytes | None) -> None:
    """Compare the digests of the blocks from ``offset`` on, if there are digests and the package is installed."""
    digest_of = installed_digest("blake3") if digests else None
    if digest_of is None or digests is None:
        return
    for number, start in enumerate(range(0, len(view), BLOCK_BYTES)):
        expected = digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]
        if digest_of(view[start : start + BLOCK_BYTES]) != expected:
            raise altered(fqn, file, offset + start, "the digest differs, though the checksum does not")


class Whole:
    """A payload with one checksum over all of it. The check of the last part compares the checksum."""

    def __init__(self, fqn: str, chunk: Chunk, payload: ForeignPayload) -> None:
        self._fqn, self._chunk, self._payload = fqn, chunk, payload
        self._parts: dict[int, tuple[int, int]] = {}
        self._missing = -(-payload.payload_bytes // PIECE_BYTES)
        self._lock = threading.Lock()

    def check(self, number: int, view: memoryview) -> None:
        # The parts arrive in any order, in several threads, so each is kept with its length, and they are combined in
        # the order of the file when the last one has come. The checksum is computed without the lock.
        found = crc32(view), len(view)
        with self._lock:
            self._parts[number] = found
            self._missing -= 1
            last = not self._missing
        if last:
            self._compare()

    def _compare(self) -> None:
        total = 0
        for number in sorted(self._parts):
            crc, nbytes = self._parts[number]
            total = combine(total, crc, nbytes)
        if total != self._payload.crc:
            raise altered(self._fqn, self._chunk.file, self._chunk.payload_offset or 0)


def addresses_in(
    fqns: Sequence[str], tensors: Sequence[torch.Tensor], starts: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    """Return the current address of byte ``starts[n]`` of each contiguous tensor. Raises ``UnsupportedTensorError`` if
    the storage of one does not have ``sizes[n]`` bytes from there on, because it was freed or shrunk after the load was
    planned."""
    # A tensor keeps its shape when its storage is freed, as FSDP does with ``resize_(0)``. The addresses that the plan
    # has seen would then be those of other memory.
    held = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))
    skipped = map(mul, map(torch.Tensor.storage_offset, tensors), map(_ITEMSIZE, tensors))
    ends = map(add, map(add, skipped, starts), sizes)
    for number, fits in enumerate(map(le, ends, held)):
        if not fits:
            raise UnsupportedTensorError(
                f"{fqns[number]}: its storage was freed or shrunk while it was being loaded into"
            )
    return list(map(add, map(torch.Tensor.data_ptr, tensors), starts))


def altered(fqn: str, file: str, offset: int, why: str = "the checksum differs") -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{fqn}: its bytes in {file} from offset {offset} on were altered ({why}); restore the file, or load an older "
        "checkpoint",
        file=file,
        fqn=fqn,
        offset=offset,
    )
