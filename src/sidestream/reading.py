"""Bytes of a checkpoint into tensors: batches of ranges, several in flight, each verified before it counts."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ._threads import Deadline, io_threads
from ._torch import dtype_from_name
from .errors import Corrupt, SidestreamError
from .foreign import Located, locate_tensor, read_item, unpack_chunk
from .format.checksum import crc32, unpack_crcs
from .format.records import BLOCK_BYTES, Chunk, TensorEntry
from .format.transforms import require
from .options import Verify
from .plan.ranges import Batch, Box, Direct, Part, Range, Scatter, batches, overlaps, plan_ranges
from .storage import ReadRange, Store

__all__ = ["Reader", "Wanted", "whole"]

_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """Box ``box`` of the tensor ``entry`` is to be read into ``target``, whose shape is ``box.sizes``."""

    fqn: str
    entry: TensorEntry
    box: Box
    target: torch.Tensor


def whole(entry: TensorEntry) -> Box:
    return Box((0,) * len(entry.shape), entry.shape)


@dataclass(slots=True)
class Reader:
    """Reads from the checkpoint in ``directory``.

    ``touched`` has the FQNs of the tensors that may have been written to so far, ``unverified`` those of which some
    byte had no checksum, ``nbytes`` what was read.
    """

    store: Store
    directory: str
    verify: Verify
    deadline: Deadline
    touched: set[str] = field(default_factory=set)
    unverified: set[str] = field(default_factory=set)
    nbytes: int = 0

    async def read(self, wanted: Iterable[Wanted], *, own: bool) -> None:
        """Fill every target. The targets are row-major or not; those that are are read into directly.

        Raises ``Corrupt``, naming file, offset and FQN, and ``MissingExtra`` before anything is read. When this raises,
        no thread writes into a target any more.
        """
        targets = {one.fqn: one for one in wanted}
        packed = [] if own else await io_threads().run(_packed, targets, deadline=self.deadline)
        foreign = None if own else await self._locate(targets)
        planned = await io_threads().run(_plan, targets, foreign, deadline=self.deadline)
        queue = iter(planned)
        await _in_parallel(lambda: self._work(queue, targets))
        rest = iter(packed)
        await _in_parallel(lambda: self._work_packed(rest))

    async def _work(self, queue: Iterator[Batch], targets: Mapping[str, Wanted]) -> None:
        for batch in queue:
            buffers = await io_threads().run(_buffers, batch, targets, deadline=self.deadline)
            self.touched.update(one.fqn for one in batch.ranges if isinstance(one.into, Direct))
            reads = [ReadRange(one.offset, buffer) for one, buffer in zip(batch.ranges, buffers, strict=True)]
            await self.store.read(f"{self.directory}/{batch.file}", reads, deadline=self.deadline)
            await io_threads().run(self._finish, batch, buffers, targets, deadline=self.deadline)
            self.nbytes += batch.nbytes

    async def _work_packed(self, queue: Iterator[tuple[Wanted, Chunk]]) -> None:
        for one, chunk in queue:
            raw = await read_item(self.store, self.directory, chunk, self.deadline)
            await io_threads().run(self._finish_packed, one, chunk, raw, deadline=self.deadline)
            self.nbytes += len(raw)

    def _finish_packed(self, one: Wanted, chunk: Chunk, raw: bytearray) -> None:
        """In a thread: a compressed item holds one tensor whole, which is checked and put in place from memory."""
        content, located = unpack_chunk(one.fqn, one.entry, chunk, raw)
        with memoryview(content) as view:
            for piece in _ranges(one, located):
                buffer = view[piece.offset : piece.offset + piece.nbytes]
                if self.verify == "always" and crc32(buffer) != piece.crc:
                    raise _altered(piece, chunk.item_offset)
                self.touched.add(one.fqn)
                if isinstance(piece.into, Direct):
                    _memory(one.target, piece.into.start, piece.nbytes)[:] = buffer
                else:
                    _place(piece, buffer, one)

    def _finish(self, batch: Batch, buffers: list[memoryview], targets: Mapping[str, Wanted]) -> None:
        """In a thread: check what has arrived, then put in place what was not read there directly."""
        for one, buffer in zip(batch.ranges, buffers, strict=True):
            if self.verify == "always" and not _verified(one, buffer):
                self.unverified.add(one.fqn)
            if not isinstance(one.into, Direct):
                self.touched.add(one.fqn)
                _place(one, buffer, targets[one.fqn])

    async def _locate(self, targets: Mapping[str, Wanted]) -> dict[str, Located]:
        """Where another writer put the payloads; only the zips say."""
        located: dict[str, Located] = {}
        queue = iter(targets.items())

        async def work() -> None:
            for fqn, one in queue:
                located[fqn] = await locate_tensor(self.store, self.directory, fqn, one.entry, self.deadline)

        await _in_parallel(work)
        return located


async def _in_parallel(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A few workers on one queue. Raises damage before anything else, otherwise what came first."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_IN_FLIGHT):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


def _packed(targets: Mapping[str, Wanted]) -> list[tuple[Wanted, Chunk]]:
    """The compressed chunks. Raises ``MissingExtra`` where there are some and nothing can decompress them."""
    found = [
        (one, chunk)
        for one in targets.values()
        for chunk in one.entry.chunks
        if chunk.transform and overlaps(chunk, one.box)
    ]
    if found:
        require()
    return found


def _plan(targets: Mapping[str, Wanted], foreign: Mapping[str, Located] | None) -> list[Batch]:
    ranges: list[Range] = []
    for fqn, one in targets.items():
        ranges.extend(_ranges(one, (one.entry, {}) if foreign is None else foreign[fqn]))
    return batches(ranges)


def _ranges(one: Wanted, located: Located) -> Iterator[Range]:
    entry, payloads = located
    row_major = one.target.is_contiguous() and not one.target.is_conj() and not one.target.is_neg()
    return plan_ranges(one.fqn, entry, one.box, row_major=row_major, foreign=payloads)


def _buffers(batch: Batch, targets: Mapping[str, Wanted]) -> list[memoryview]:
    """Where the bytes of each range are read to."""
    return [_buffer(one, targets[one.fqn].target) for one in batch.ranges]


def _buffer(one: Range, target: torch.Tensor) -> memoryview:
    if isinstance(one.into, Direct):
        return _memory(target, one.into.start, one.nbytes)
    # A large bytearray would be cleared, page by page, while the GIL is held.
    return memoryview(bytearray(one.nbytes) if one.nbytes <= 1 << 16 else mmap.mmap(-1, one.nbytes))


def _memory(tensor: torch.Tensor, start: int, nbytes: int) -> memoryview:
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr() + start)
    array.owner = tensor  # type: ignore[attr-defined]  # a thread that hangs in a read keeps its target alive
    return memoryview(array).cast("B")


def _verified(one: Range, buffer: memoryview) -> bool:
    """Whether there was a checksum to compare. Raises ``Corrupt`` if it differs."""
    if one.crc is not None:
        if crc32(buffer) != one.crc:
            raise _altered(one, one.offset)
        return True
    if one.crcs is None:
        return False
    for block, expected in enumerate(unpack_crcs(one.crcs)):
        start = block * BLOCK_BYTES
        if crc32(buffer[start : start + BLOCK_BYTES]) != expected:
            raise _altered(one, one.offset + start)
    return True


def _altered(one: Range, offset: int) -> Corrupt:
    return Corrupt(
        f"{one.fqn}: its bytes in {one.file} from offset {offset} on were altered (the checksum differs); restore the "
        "file, or load an older checkpoint",
        file=one.file,
        fqn=one.fqn,
        offset=offset,
    )


def _place(one: Range, buffer: memoryview, wanted: Wanted) -> None:
    target = wanted.target
    if isinstance(one.into, Part):
        nbytes = one.into.nbytes
        _memory(target, one.into.start, nbytes)[:] = buffer[one.into.skip : one.into.skip + nbytes]
        return
    assert isinstance(one.into, Scatter)
    into = one.into
    elements = torch.frombuffer(buffer, dtype=dtype_from_name(wanted.entry.dtype), offset=into.skip)
    strides = into.strides or torch.empty(into.shape, device="meta").stride()
    source = elements.as_strided(into.shape, strides)[_slices(into.source)]
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target[_slices(Box(into.target, into.source.sizes))].copy_(source)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to tell of several failures: damage before anything else, otherwise the one that came first."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.extend(error.exceptions if isinstance(error, BaseExceptionGroup) else [error])
    ours = [error for error in flat if isinstance(error, SidestreamError)]
    return next((error for error in ours if isinstance(error, Corrupt)), (ours or flat)[0])
