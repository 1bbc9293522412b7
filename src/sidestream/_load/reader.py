"""The reading of a checkpoint into tensors, in jobs: a few threads take batches of ranges from one queue until it is
empty, read them, and verify them.

No batch needs the event loop. With one switch to the loop and back for each 16 MiB, waiting for a core took a third of
the time of a load whose files were in the page cache.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import torch

from .._format.checksum import crc32, unpack_crcs
from .._format.records import Chunk, TensorEntry, written_dtype
from .._format.transforms import require
from .._layout.checks import addresses_in, altered, check_digests
from .._layout.ranges import (
    Batch,
    Box,
    Direct,
    Payload,
    Range,
    RangePart,
    Scatter,
    Straight,
    StraightBatch,
    batches,
    overlaps,
    plan_ranges,
    straight_batches,
)
from .._runtime.caller import run_in_calling_thread
from .._runtime.steps import chunked
from .._runtime.tasks import first_error, in_parallel
from .._runtime.threads import Steps, Stop, clear_gradually, gathered, io_threads, read_threads, sliced, yielding_gil
from .._runtime.torch_probes import copyable, dtype_from_name, lazy_bits
from .._staging import move_small
from .._storage import Files, RangeSource, ReadRange
from ..options import Progress, Verify
from .buffers import Check, Memory, Scratch, memory_of
from .device_streams import Streams
from .foreign.values import Located, locate_tensor, located_already, read_item, unpack_chunk

__all__ = ["Batches", "Jobs", "Reader", "Reads", "Scratch", "Wanted", "straight_reads", "whole"]


T = TypeVar("T")

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_JOBS = min(max(_CORES, 2), 4)
"""The number of jobs: at most one for each core, because copies from the page cache and checksums keep cores busy."""
_MOST_JOBS = 4  # if reads wait: each job may use 16 MiB of scratch memory, and the gaps between small tensors


class Jobs(Generic[T]):
    """Threads that do ``work`` on each of ``items``. ``work`` returns the number of bytes that it has read, and raises
    ``ClosedError`` once its ``Stop`` is set. ``progress`` is called on the loop with the sum of these numbers."""

    def __init__(
        self, items: Sequence[T], work: Callable[[T, Stop], int], progress: Callable[[int], object] | None
    ) -> None:
        self._items: Iterator[T] = iter(items)
        self._unread = len(items)
        self._work = work
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = Stop()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._more = asyncio.Event()
        self.nbytes = 0
        self._counts: deque[int] = deque()

    def waiting(self) -> None:
        """Start more threads, because reads wait. From any thread."""
        self._set(self._more)

    async def run(self) -> None:
        """Do the work on all items. The first failure, a cancel, or the deadline stops all threads, and is raised when
        the threads have stopped."""
        jobs = min(_JOBS, self._unread)
        late = min(_MOST_JOBS, self._unread) - jobs
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._run()) for _ in range(jobs)]
                for task in running:
                    task.add_done_callback(lambda _: self._changed.set())
                for _ in range(late):
                    group.create_task(self._run_late())
                await self._follow(running)
                self._more.set()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            self._work = _nothing  # breaks a reference cycle
        self._tell()  # for the last items of late jobs

    async def _follow(self, running: Sequence[asyncio.Task[None]]) -> None:
        while not all(task.done() for task in running):
            await self._changed.wait()
            self._changed.clear()
            self._tell()

    def _tell(self) -> None:
        while self._counts and self._progress is not None:
            self._progress(self._counts.popleft())

    async def _run(self) -> None:
        if self._unread:
            await read_threads().run(self._read, stop=self._stop)

    async def _run_late(self) -> None:
        await self._more.wait()
        await self._run()

    # --- the threads ---

    def _read(self) -> None:
        work = self._work
        for item in self._queue():
            nbytes = work(item, self._stop)
            with self._lock:
                self.nbytes += nbytes
                self._counts.append(self.nbytes)
            if self._progress is not None:
                self._set(self._changed)

    def _queue(self) -> Iterator[T]:
        while True:
            with self._lock:
                if not self._unread:
                    return
                self._unread -= 1
                item = next(self._items)
            yield item

    def _set(self, event: asyncio.Event) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(event.set)


def _nothing(item: object, stop: Stop) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Reads:
    """The reads for one batch: ``ranges`` of ``file``. ``scratch`` is memory that is free when they have been read."""

    file: str
    ranges: list[ReadRange]
    nbytes: int
    scratch: Memory | None = None


@dataclass(slots=True)
class Batches(Generic[T]):
    """The reading of batches from ``source``, in jobs. If a read is a request to a server, several requests are made at
    a time instead.

    ``reads`` is called in a thread and returns the reads for a batch. It takes scratch memory from its argument. Its
    ``Stop`` is None for a request. ``progress`` is called on the loop with the sum of the bytes. ``noting`` returns the
    context of each read.
    """

    source: RangeSource
    reads: Callable[[T, Scratch, Stop | None], Reads]
    progress: Callable[[int], object] | None = None
    scratch: Scratch = field(default_factory=Scratch)
    noting: Callable[[T], AbstractContextManager[object]] = nullcontext
    nbytes: int = 0
    _files: Files | None = None

    async def run(self, batches: Sequence[T]) -> None:
        """Read all batches. ``nbytes`` is the number of bytes that were read, also if this raises."""
        jobs = Jobs(batches, self._work, self.progress)
        self._files = self.source.files(jobs.waiting)
        if self._files is None:
            queue = iter(batches)
            await in_parallel(lambda: self._request(queue))
            return
        try:
            await jobs.run()
        finally:
            self.nbytes = jobs.nbytes

    def _work(self, batch: T, stop: Stop) -> int:
        assert self._files is not None
        reads = self.reads(batch, self.scratch, stop)
        with self.noting(batch):
            self._files.read(reads.file, reads.ranges, stop)
        self.scratch.give_back(reads.scratch)
        return reads.nbytes

    def _reads(self, batch: T) -> Reads:
        return self.reads(batch, self.scratch, None)

    async def _request(self, queue: Iterator[T]) -> None:
        for batch in queue:
            reads = await io_threads().run(self._reads, batch)
            with self.noting(batch):
                await self.source.read(reads.file, reads.ranges)
            self.scratch.give_back(reads.scratch)
            self.nbytes += reads.nbytes
            if self.progress is not None:
                self.progress(self.nbytes)


_Batch: TypeAlias = Batch | StraightBatch

_SMALL_BYTES = 64 << 10
"""Copying this many bytes from the cache of the processor costs less than one more read."""
_SPAN_BYTES = 1 << 20
_GAP_BYTES = 16 << 10  # the most bytes between two payloads that are read and not used
_MANY = 32  # the number of payloads that are checked and copied at a time


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to read box ``box`` of the tensor ``entry`` into ``target``, whose shape is ``box.sizes``. Its device
    and dtype may differ from the saved ones. If ``target`` is None, the box is only verified."""

    fqn: str
    entry: TensorEntry
    box: Box
    target: torch.Tensor | None

    @property
    def takes_bytes(self) -> bool:
        """Whether the bytes of the file may be read directly to the memory of the target."""
        target = self.target
        return target is None or (
            target.is_cpu
            and target.dtype == dtype_from_name(self.entry.dtype)
            and target.is_contiguous()
            and not lazy_bits(target)
        )


def whole(entry: TensorEntry) -> Box:
    return Box((0,) * len(entry.shape), entry.shape)


@dataclass(slots=True)
class Reader:
    """A reader of the checkpoint in ``source``. ``read`` may be called once.

    ``straight`` has tensors that are read together with the arguments of ``read``, without a change of their bytes.
    ``touched`` has the FQNs of the tensors that may have been written to so far. ``unverified`` has those of which some
    byte had no checksum. ``nbytes`` is the number of bytes that were read.
    """

    source: RangeSource
    verify: Verify
    progress: Progress | None = None
    streams: Streams = field(default_factory=Streams)
    straight: Straight = field(default_factory=Straight)
    touched: set[str] = field(default_factory=set)
    unverified: set[str] = field(default_factory=set)
    nbytes: int = 0
    scratch: Scratch = field(default_factory=Scratch)

    async def read(self, wanted: list[Wanted], *, own: bool, located: Mapping[str, Located] | None = None) -> None:
        """Fill every target, and empty the list. Targets that are row-major, in host memory and of the saved dtype are
        filled by the reads directly. ``located`` has the places of the payloads in the zips of another writer, if they
        are known already.

        Raises ``CorruptCheckpointError``, with file, offset and FQN, and ``MissingExtraError`` before anything is read.
        When this raises, no thread writes into a target any more. The exception is a thread that hangs in a system
        call, which may still fill the memory of that call.
        """
        targets = await io_threads().run(_by_fqn, wanted)
        packed = [] if own else await io_threads().run(_packed, targets)
        foreign = None if own else located or await self._locate(targets)
        verified = self.verify == "always"
        planned, total = await io_threads().run(_plan, self.straight, targets, foreign, verified)
        total += sum(chunk.item_bytes for _, chunk in packed)
        self._tell(total)
        await self._read_batches(planned, targets, total)
        items = iter(packed)
        await in_parallel(lambda: self._work_packed(items, total))
        await io_threads().run(self._finish, planned, targets, wanted)

    def _finish(self, planned: list[_Batch], targets: dict[str, Wanted], wanted: list[Wanted]) -> None:
        self.streams.finish()
        clear_gradually(planned, targets, wanted, *self.straight.payloads.values())

    async def _read_batches(self, planned: Sequence[_Batch], targets: Mapping[str, Wanted], total: int) -> None:
        progress, done = self.progress, self.nbytes
        report = None if progress is None else lambda read: run_in_calling_thread(progress, done + read, total)
        batches = Batches(self.source, partial(self._reads, targets), report, self.scratch)
        try:
            await batches.run(planned)
        finally:
            self.nbytes += batches.nbytes

    def _reads(self, targets: Mapping[str, Wanted], batch: _Batch, scratch: Scratch, stop: Stop | None) -> Reads:
        """Return the reads for a batch, with the scratch memory that they use. Called in a thread."""
        if isinstance(batch, StraightBatch):
            ranges, memory = straight_reads(batch, self.straight.tensors, self.verify, self.touched, scratch, stop)
            return Reads(batch.file, ranges, batch.nbytes, memory)
        buffers = _buffers(batch, targets, scratch)
        self.touched.update([one.fqn for one in batch.ranges if isinstance(one.into, Direct)])
        ranges = [
            ReadRange(
                one.offset,
                buffer,
                partial(self._arrived, one, buffer, targets[one.fqn]),
                Check(one) if self.verify == "always" else None,
            )
            for one, buffer in zip(batch.ranges, buffers.views, strict=True)
        ]
        return Reads(batch.file, ranges, batch.nbytes, buffers.scratch)

    def _tell(self, total: int) -> None:
        if self.progress is not None:
            run_in_calling_thread(self.progress, self.nbytes, total)

    def _arrived(self, one: Range, buffer: memoryview, wanted: Wanted) -> None:
        """Put bytes into their place that were not read there directly. Called in the thread that reads, after their
        checksums were compared."""
        if self.verify == "always":
            check_digests(one.fqn, one.file, one.offset, buffer, one.digests)
            if one.crc is None and one.crcs is None:
                self.unverified.add(one.fqn)
        if wanted.target is not None and not isinstance(one.into, Direct):
            self.touched.add(one.fqn)
            _place(one, buffer, wanted.entry, wanted.target, self.streams)

    async def _work_packed(self, queue: Iterator[tuple[Wanted, Chunk]], total: int) -> None:
        for one, chunk in queue:
            raw = await read_item(self.source, chunk)
            await io_threads().run(self._finish_packed, one, chunk, raw)
            self.nbytes += len(raw)
            self._tell(total)

    def _finish_packed(self, one: Wanted, chunk: Chunk, raw: bytearray) -> None:
        """Check a compressed item, which contains one chunk as a whole, and put its elements into their places. Called
        in a thread."""
        content, located = unpack_chunk(one.fqn, one.entry, chunk, raw)
        with memoryview(content) as view:
            for piece in _ranges(one, located):
                buffer = view[piece.offset : piece.offset + piece.nbytes]
                if self.verify == "always" and crc32(buffer) != piece.crc:
                    raise altered(one.fqn, chunk.file, chunk.item_offset)
                if one.target is not None:
                    self.touched.add(one.fqn)
                    _place(piece, buffer, one.entry, one.target, self.streams)

    async def _locate(self, targets: Mapping[str, Wanted]) -> dict[str, Located]:
        """Return the places of the payloads of another writer. Only the zips of the items contain them."""
        located, closed = await io_threads().run(_located_already, targets)
        queue = iter(closed.items())

        async def work() -> None:
            for fqn, entry in queue:
                located[fqn] = await locate_tensor(self.source, fqn, entry)

        await in_parallel(work)
        return located


def _located_already(targets: Mapping[str, Wanted]) -> tuple[dict[str, Located], dict[str, TensorEntry]]:
    return located_already(dict(gathered((fqn, one.entry) for fqn, one in targets.items())))


def _by_fqn(wanted: Iterable[Wanted]) -> dict[str, Wanted]:
    return dict(gathered((one.fqn, one) for one in wanted))


@sliced
def _plan(
    straight: Straight, targets: Mapping[str, Wanted], foreign: Mapping[str, Located] | None, verified: bool
) -> Steps[tuple[list[_Batch], int]]:
    ranges: list[Range] = []
    for fqn, one in targets.items():
        yield
        ranges.extend(_ranges(one, (one.entry, {}) if foreign is None else foreign[fqn], verified))
    planned: list[_Batch] = [*(yield from straight_batches(straight.payloads)), *(yield from batches(ranges))]
    return planned, sum(batch.nbytes for batch in planned)


def _ranges(one: Wanted, located: Located, verified: bool = True) -> Iterator[Range]:
    entry, payloads = located
    return plan_ranges(one.fqn, entry, one.box, row_major=one.takes_bytes, foreign=payloads, verified=verified)


def _packed(targets: Mapping[str, Wanted]) -> list[tuple[Wanted, Chunk]]:
    """Return the compressed chunks. Raises ``MissingExtraError`` if there are some and the package that decompresses
    them is not installed."""
    found = [
        (one, chunk)
        for one in yielding_gil(targets.values())
        for chunk in one.entry.chunks
        if chunk.transform and overlaps(chunk, one.box)
    ]
    if found:
        require()
    return found


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The views into which the ranges of a batch are read, and the scratch memory behind some of these views."""

    views: list[memoryview]
    scratch: Memory | None


def _buffers(batch: Batch, targets: Mapping[str, Wanted], scratch: Scratch) -> _Buffers:
    def aside(one: Range) -> bool:
        return not isinstance(one.into, Direct) or targets[one.fqn].target is None

    nbytes = sum(_aligned(one.nbytes) for one in batch.ranges if aside(one))
    memory = scratch.take(nbytes) if nbytes else None
    views = []
    position = 0
    for one in batch.ranges:
        target = targets[one.fqn].target
        if isinstance(one.into, Direct) and target is not None:
            views.append(memory_of(target, one.into.start, one.nbytes))
        else:
            assert memory is not None
            views.append(memoryview(memory)[position : position + one.nbytes])
            position += _aligned(one.nbytes)
    return _Buffers(views, memory)


def _aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up, so that the next range begins at an address that suits every dtype."""
    return -(-nbytes // 64) * 64


def _place(one: Range, buffer: memoryview, entry: TensorEntry, target: torch.Tensor, streams: Streams) -> None:
    if isinstance(one.into, Direct):
        memory_of(target, one.into.start, one.nbytes)[:] = buffer
        return
    if isinstance(one.into, RangePart):
        nbytes = one.into.nbytes
        memory_of(target, one.into.start, nbytes)[:] = buffer[one.into.skip : one.into.skip + nbytes]
        return
    assert isinstance(one.into, Scatter)
    into = one.into
    elements = torch.frombuffer(buffer, dtype=dtype_from_name(written_dtype(entry.dtype)), offset=into.skip)
    target = copyable(target)
    strides = into.strides or torch.empty(into.shape, device="meta").stride()
    source = elements.as_strided(into.shape, strides)[_slices(into.source)]
    with torch.inference_mode(target.is_inference()), torch.no_grad(), streams.current(one.fqn):
        target[_slices(Box(into.target, into.source.sizes))].copy_(source)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))


# --- straight ---


def straight_reads(
    batch: StraightBatch,
    tensors: Mapping[str, torch.Tensor],
    verify: Verify,
    touched: set[str],
    scratch: Scratch,
    stop: Stop | None,
) -> tuple[list[ReadRange], Memory | None]:
    """Return the reads for a batch, and the scratch memory that they use. The FQNs of tensors that may be written to
    are added to ``touched``.

    Neighbours are read together only if there is a ``stop``, which is checked before they are copied to their places. A
    thread that returns from a read that has hung must not write to tensors after its load has ended."""
    spans = [[payload] for payload in batch.payloads] if stop is None else _spans(batch.payloads)
    nbytes = sum(_aligned(_extent(span)) for span in spans if len(span) > 1)
    memory = scratch.take(nbytes) if nbytes else None
    position = 0
    reads: list[ReadRange] = []
    for span in spans:
        if len(span) == 1:
            reads.append(_read_one(batch.file, span[0], tensors, verify, touched))
            continue
        assert memory is not None
        assert stop is not None
        view = memoryview(memory)[position : position + _extent(span)]
        position += _aligned(_extent(span))
        spread = partial(_spread, batch.file, span, view, tensors, verify, touched, stop)
        reads.append(ReadRange(span[0][0], view, spread))
    return reads, memory


def _spans(payloads: Iterable[Payload]) -> list[list[Payload]]:
    """Return groups of payloads that are read together. Small neighbours form a group; every other payload is a group
    by itself."""
    spans: list[list[Payload]] = []
    start = end = 0
    for payload in payloads:
        offset, nbytes, *_ = payload
        small = nbytes <= _SMALL_BYTES
        if small and spans and 0 <= offset - end <= _GAP_BYTES and offset + nbytes - start <= _SPAN_BYTES:
            spans[-1].append(payload)
        else:
            spans.append([payload])
            start = offset
        end = offset + nbytes if small else -_SPAN_BYTES
    return spans


def _extent(span: list[Payload]) -> int:
    return span[-1][0] + span[-1][1] - span[0][0]


def _read_one(
    file: str, payload: Payload, tensors: Mapping[str, torch.Tensor], verify: Verify, touched: set[str]
) -> ReadRange:
    offset, nbytes, start, crcs, digests, fqn = payload
    addresses_in([fqn], [tensors[fqn]], [start], [nbytes])
    into = memory_of(tensors[fqn], start, nbytes)
    touched.add(fqn)
    if verify != "always":
        return ReadRange(offset, into)
    check = Check(Range(fqn, file, offset, nbytes, Direct(start), crcs))
    return ReadRange(offset, into, partial(check_digests, fqn, file, offset, into, digests) if digests else None, check)


def _spread(
    file: str,
    span: list[Payload],
    view: memoryview,
    tensors: Mapping[str, torch.Tensor],
    verify: Verify,
    touched: set[str],
    stop: Stop,
) -> None:
    """Check payloads that were read together, and copy them to their places. Called in the thread that has read them.
    Raises ``ClosedError`` once ``stop`` is set."""
    source, first = ctypes.addressof(ctypes.c_char.from_buffer(view)) - span[0][0], span[0][0]
    for some in yielding_gil(chunked(span, _MANY), 1):
        stop.check()
        offsets, sizes, starts, crcs, digests, fqns = zip(*some, strict=True)
        if verify == "always":
            pieces = [
                view[offset - first : offset - first + nbytes] for offset, nbytes in zip(offsets, sizes, strict=True)
            ]
            found = list(map(crc32, pieces))
            expected = unpack_crcs(b"".join(crcs))  # none is larger than a block
            for number, (crc, saved) in enumerate(zip(found, expected, strict=True)):
                if crc != saved:
                    raise altered(fqns[number], file, offsets[number])
            if any(digests):
                for fqn, offset, piece, digest in zip(fqns, offsets, pieces, digests, strict=True):
                    check_digests(fqn, file, offset, piece, digest)
        addresses = addresses_in(fqns, [tensors[fqn] for fqn in fqns], starts, sizes)
        touched.update(fqns)
        move_small(map(source.__add__, offsets), addresses, sizes)
