"""The reading of a checkpoint into tensors: what is read together, and where its bytes go."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch

from .._foreign.items import located, read_item, unpack_chunk
from .._foreign.transforms import require
from .._format.checksum import crc32, unpack_crcs
from .._format.records import BLOCK_BYTES, Chunk, TensorEntry
from .._layout.ranges import Box, DirectReads, Payload
from .._runtime.caller import run_by_caller
from .._runtime.gil import move_small
from .._runtime.tasks import in_parallel, run_shielded
from .._runtime.threads import Stop, chunked, clear_gradually, collected, holding_gil, io_threads, paced, pause_point
from .._runtime.torch_probes import dtype_from_name, lazy_bits
from .._staging.streams import Streams
from .._storage import Batches, Memory, RangeSource, ReadRange, Reads, Scratch
from ..options import Progress, Verify
from .checks import addresses_in, altered, check_digests
from .device import Arrival, DeviceBatch, DeviceCopies, place
from .ranges import Direct, DirectBatch, Range, RangePart, batches, direct_batches, plan_ranges

_Batch: TypeAlias = list[Range] | DirectBatch | DeviceBatch

_BURST_BYTES = 4 * BLOCK_BYTES
_SMALL_BYTES = 64 << 10
"""Copying this many bytes from the cache of the processor costs less than one more read."""
_SPAN_BYTES = 1 << 20
_GAP_BYTES = 16 << 10  # the most bytes between two payloads that are read and not used
_MANY = 32  # the number of payloads that are checked and copied at a time
_MOST_FOR_DEVICE = 4096  # ranges that are read together, and copied to a device together


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


def memory_of(tensor: torch.Tensor, start: int, nbytes: int) -> memoryview:
    """Return ``nbytes`` of the memory of a tensor, from byte ``start`` on. The view keeps the tensor alive."""
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr() + start)
    array.owner = tensor  # type: ignore[attr-defined]  # a thread that hangs in a read keeps its target alive
    return memoryview(array).cast("B")


class Check:
    """The comparison of a range with its checksums, if it has any, while it is read. Raises
    ``CorruptCheckpointError``."""

    __slots__ = ("_crc", "_done", "_end", "_expected", "_range", "_step")

    def __init__(self, one: Range) -> None:
        self._range = one
        self._done = self._crc = 0
        self._step = BLOCK_BYTES  # each checksum is that of so many bytes
        self._expected = unpack_crcs(one.crcs or b"")
        if one.crc is not None:
            self._step, self._expected = one.nbytes, (one.crc,)
        self._end = min(self._step, one.nbytes)  # of the bytes that the next checksum is for

    def __call__(self, piece: memoryview) -> None:
        """Take the next bytes of the range."""
        if not (self._expected and piece):
            return
        if len(piece) <= self._end - self._done:  # nearly always: readers read pieces of blocks
            self._take(piece)
        elif len(piece) <= _BURST_BYTES or self._step > BLOCK_BYTES:
            self._cut(piece)
        else:  # computing a CRC takes less time than getting the GIL back from a busy loop
            with holding_gil():
                self._cut(piece)

    def _cut(self, piece: memoryview) -> None:
        while piece:
            nbytes = self._end - self._done
            self._take(piece[:nbytes])
            piece = piece[nbytes:]

    def _take(self, piece: memoryview) -> None:
        self._crc = crc32(piece, self._crc)
        self._done += len(piece)
        if self._done < self._end:
            return
        one, number = self._range, (self._done - 1) // self._step
        if self._crc != self._expected[number]:
            raise altered(one.fqn, one.file, one.offset + number * self._step)
        self._crc = 0
        self._end = min(self._end + self._step, one.nbytes)


@dataclass(slots=True)
class Reader:
    """A reader of the checkpoint in ``source``. ``read`` may be called once.

    ``direct`` has tensors that are read together with the arguments of ``read``, without a change of their bytes.
    ``touched`` has the FQNs of the tensors that may have been written to so far. ``unverified`` has those of which some
    byte had no checksum. ``nbytes`` is the number of bytes that were read.
    """

    source: RangeSource
    verify: Verify
    progress: Progress | None = None
    streams: Streams = field(default_factory=Streams)
    direct: DirectReads = field(default_factory=DirectReads)
    touched: set[str] = field(default_factory=set)
    unverified: set[str] = field(default_factory=set)
    nbytes: int = 0
    scratch: Scratch = field(default_factory=Scratch)
    _copies: DeviceCopies | None = None

    async def read(self, wanted: list[Wanted], *, own: bool, found: Mapping[str, TensorEntry] | None = None) -> None:
        """Fill every target, and empty the list. Targets that are row-major, in host memory and of the saved dtype are
        filled by the reads directly. ``found`` has the tensors with the places of the payloads in the zips of another
        writer, if they are known already.

        Raises ``CorruptCheckpointError``, with file, offset and FQN, and ``MissingExtraError`` before anything is read.
        When this raises, no thread writes into a target any more. The exception is a thread that hangs in a system
        call, which may still fill the memory of that call.
        """
        # Everything that grows with the number of tensors runs in threads: 100,000 of them take longer than a loop may
        # be held.
        # There are four ways for bytes to their places. Ordinary tensors are read straight, by tuples and without
        # records. Other ranges are planned one by one, because they are strided, converted or tied. Those for a device
        # are read into registered memory, and copied from there (``device``). What another writer has compressed is
        # read as a whole, unpacked, and copied.
        threads = io_threads()
        packed: list[tuple[Wanted, Chunk]] = []
        if not own:
            packed = await threads.run(_packed, wanted)
            if found is None:
                found = await located(self.source, await threads.run(_entries, wanted))
        targets, planned, total = await threads.run(
            _plan, self.direct, wanted, found or {}, self.verify == "always", self.streams.devices
        )
        total += sum(chunk.item_bytes for _, chunk in packed)
        await self._report_progress(total)
        if any(isinstance(batch, DeviceBatch) for batch in planned):
            self._copies = await threads.run(DeviceCopies, self.streams)
        try:
            await self._read_batches(planned, targets, total)
            await in_parallel(packed, lambda item: self._read_packed(*item, total))
            await io_threads().run(self._finish, planned, targets, wanted)
        except BaseException:
            if self._copies is not None:
                await run_shielded(io_threads().run, self._copies.cancel)
            raise
        finally:
            if self._copies is not None:
                self.streams.drop_slots_later()

    def _finish(self, planned: list[_Batch], targets: dict[str, Wanted], wanted: list[Wanted]) -> None:
        if self._copies is not None:
            self._copies.finish()
        self.streams.finish()
        clear_gradually(planned, targets, wanted, *self.direct.payloads.values())

    async def _read_batches(self, planned: Sequence[_Batch], targets: Mapping[str, Wanted], total: int) -> None:
        progress, done = self.progress, self.nbytes
        report = None if progress is None else lambda read: run_by_caller(progress, done + read, total)
        batches = Batches(self.source, partial(self._reads, targets), report, self.scratch)
        try:
            await batches.run(planned)
        finally:
            self.nbytes += batches.nbytes

    def _reads(self, targets: Mapping[str, Wanted], batch: _Batch, scratch: Scratch, stop: Stop | None) -> Reads:
        """Return the reads for a batch, with the scratch memory that they use. Called in a thread."""
        if isinstance(batch, DirectBatch):
            ranges, memory = self.direct_reads(batch, scratch, stop)
            return Reads(batch.file, ranges, batch.nbytes, memory)
        if isinstance(batch, DeviceBatch):
            return self._reads_for_device(targets, batch)
        views, memory = _buffers(batch, targets, scratch)
        # Before the read and not after it: a read that fails may have written a part.
        self.touched.update([one.fqn for one in batch if isinstance(one.into, Direct)])
        ranges = [
            ReadRange(
                one.offset,
                buffer,
                partial(self._arrived, one, buffer, targets[one.fqn]),
                Check(one) if self.verify == "always" else None,
            )
            for one, buffer in zip(batch, views, strict=True)
        ]
        return Reads(batch[0].file, ranges, _nbytes(batch), memory)

    def _reads_for_device(self, targets: Mapping[str, Wanted], batch: DeviceBatch) -> Reads:
        copies = self._copies
        assert copies is not None
        slot, starts = copies.slot(batch)
        views = slot.views(starts, [one.nbytes for one in batch.ranges])
        ranges: list[ReadRange] = []
        arrivals: list[Arrival] = []
        for one, view, start in zip(batch.ranges, views, starts, strict=True):
            wanted = targets[one.fqn]
            assert wanted.target is not None
            check = Check(one) if self.verify == "always" else None
            ranges.append(ReadRange(one.offset, view, partial(self._check, one, view), check))
            arrivals.append(Arrival(one, start, wanted.entry, wanted.target))

        def arrived() -> None:
            self.touched.update(arrival.one.fqn for arrival in arrivals)
            copies.copy(batch.device, slot, arrivals)

        return Reads(batch.ranges[0].file, ranges, _nbytes(batch), bytearray(), arrived)

    async def _report_progress(self, total: int) -> None:
        if self.progress is not None:
            await run_by_caller(self.progress, self.nbytes, total)

    def _arrived(self, one: Range, buffer: memoryview, wanted: Wanted) -> None:
        """Put bytes into their place that were not read there directly. Called in the thread that reads, after their
        checksums were compared."""
        self._check(one, buffer)
        if wanted.target is not None and not isinstance(one.into, Direct):
            self.touched.add(one.fqn)
            _place(one, buffer, wanted.entry, wanted.target, self.streams)

    def _check(self, one: Range, buffer: memoryview) -> None:
        if self.verify == "always":
            check_digests(one.fqn, one.file, one.offset, buffer, one.digests)
            if one.crc is None and one.crcs is None:
                self.unverified.add(one.fqn)

    async def _read_packed(self, one: Wanted, chunk: Chunk, total: int) -> None:
        raw = await read_item(self.source, chunk)
        await io_threads().run(self._finish_packed, one, chunk, raw)
        self.nbytes += len(raw)
        await self._report_progress(total)

    def _finish_packed(self, one: Wanted, chunk: Chunk, raw: bytearray) -> None:
        """Check a compressed item, which contains one chunk as a whole, and put its elements into their places. Called
        in a thread."""
        content, found = unpack_chunk(one.fqn, one.entry, chunk, raw)
        with memoryview(content) as view:
            for piece in plan_ranges(one.fqn, found, one.box, row_major=one.takes_bytes, verified=True):
                buffer = view[piece.offset : piece.offset + piece.nbytes]
                if self.verify == "always" and crc32(buffer) != piece.crc:
                    raise altered(one.fqn, chunk.file, chunk.item_offset)
                if one.target is not None:
                    self.touched.add(one.fqn)
                    _place(piece, buffer, one.entry, one.target, self.streams)

    # --- direct reads ---

    def direct_reads(self, batch: DirectBatch, scratch: Scratch, stop: Stop | None) -> tuple[list[ReadRange], Memory]:
        """Return the reads for a batch, and the scratch memory that they use.

        Neighbours are read together only if there is a ``stop``, which is checked before they are copied to their
        places. A thread that returns from a read that has hung must not write to tensors after its load has ended."""
        # There are two cases. With a ``stop``, a thread reads local files: neighbours of up to 64 KiB are read
        # together, up to a MiB, and copied after their checksums have been compared. Without one, the store merges the
        # ranges into requests itself.
        spans = [[payload] for payload in batch.payloads] if stop is None else _spans(batch.payloads)
        memory, views = scratch.views([_extent(span) for span in spans if len(span) > 1])
        left = iter(views)
        reads: list[ReadRange] = []
        for span in spans:
            if stop is None or len(span) == 1:
                reads.append(self._read_one(batch.file, span[0]))
            else:
                view = next(left)
                reads.append(ReadRange(span[0][0], view, partial(self._spread, batch.file, span, view, stop)))
        return reads, memory

    def _read_one(self, file: str, payload: Payload) -> ReadRange:
        offset, nbytes, start, crcs, digests, fqn = payload
        tensor = self.direct.tensors[fqn]
        addresses_in([fqn], [tensor], [start], [nbytes])
        into = memory_of(tensor, start, nbytes)
        self.touched.add(fqn)
        if self.verify != "always":
            return ReadRange(offset, into)
        check = Check(Range(fqn, file, offset, nbytes, Direct(start), crcs))
        arrived = partial(check_digests, fqn, file, offset, into, digests) if digests else None
        return ReadRange(offset, into, arrived, check)

    def _spread(self, file: str, span: list[Payload], view: memoryview, stop: Stop) -> None:
        """Check payloads that were read together, and copy them to their places. Called in the thread that has read
        them. Raises ``ClosedError`` once ``stop`` is set."""
        tensors = self.direct.tensors
        source, first = ctypes.addressof(ctypes.c_char.from_buffer(view)) - span[0][0], span[0][0]
        # In columns: this runs for every small tensor of a checkpoint, and each call in Python is one too many.
        for some in paced(chunked(span, _MANY), 1):
            stop.check()
            offsets, sizes, starts, crcs, digests, fqns = zip(*some, strict=True)
            if self.verify == "always":
                pieces = [
                    view[offset - first : offset - first + nbytes]
                    for offset, nbytes in zip(offsets, sizes, strict=True)
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
            self.touched.update(fqns)
            move_small(map(source.__add__, offsets), addresses, sizes)


def _plan(
    direct: DirectReads,
    wanted: Iterable[Wanted],
    found: Mapping[str, TensorEntry],
    verified: bool,
    streamed: Collection[Hashable],
) -> tuple[dict[str, Wanted], list[_Batch], int]:
    """Return what is ``wanted`` by FQN, the batches that are read, and their bytes. ``streamed`` are the devices that
    have streams."""
    targets = dict(collected((one.fqn, one) for one in wanted))
    ranges: list[Range] = []
    of_devices: dict[Hashable, list[Range]] = {}
    for fqn, one in targets.items():
        pause_point()
        entry = found.get(fqn, one.entry)
        device = None if one.target is None else one.target.device
        into = of_devices.setdefault(device, []) if device in streamed else ranges
        into.extend(plan_ranges(fqn, entry, one.box, row_major=one.takes_bytes, verified=verified))
    planned: list[_Batch] = [*direct_batches(direct.payloads), *batches(ranges)]
    for where, of_device in of_devices.items():
        planned += [DeviceBatch(where, some) for some in batches(of_device, _MOST_FOR_DEVICE)]
    return targets, planned, sum(map(_nbytes, planned))


def _nbytes(batch: _Batch) -> int:
    if isinstance(batch, DirectBatch):
        return batch.nbytes
    return sum(one.nbytes for one in (batch.ranges if isinstance(batch, DeviceBatch) else batch))


def _packed(wanted: Iterable[Wanted]) -> list[tuple[Wanted, Chunk]]:
    """Return the compressed chunks. Raises ``MissingExtraError`` if there are some and the package that decompresses
    them is not installed."""
    found = [
        (one, chunk)
        for one in paced(wanted)
        for chunk in one.entry.chunks
        if chunk.transform and Box(chunk.offsets, chunk.sizes).overlap(one.box)
    ]
    if found:
        require()
    return found


def _entries(wanted: Iterable[Wanted]) -> dict[str, TensorEntry]:
    return dict(collected((one.fqn, one.entry) for one in wanted))


def _buffers(batch: list[Range], targets: Mapping[str, Wanted], scratch: Scratch) -> tuple[list[memoryview], Memory]:
    """Return the views into which the ranges of a batch are read, and the scratch memory behind some of these views."""
    direct = [_direct(one, targets[one.fqn].target) for one in batch]
    memory, aside = scratch.views([one.nbytes for one, view in zip(batch, direct, strict=True) if view is None])
    left = iter(aside)
    return [next(left) if view is None else view for view in direct], memory


def _direct(one: Range, target: torch.Tensor | None) -> memoryview | None:
    """Return the memory of the target into which a range is read. None if it is read to other memory first."""
    if isinstance(one.into, Direct) and target is not None:
        return memory_of(target, one.into.start, one.nbytes)
    return None


def _place(one: Range, buffer: memoryview, entry: TensorEntry, target: torch.Tensor, streams: Streams) -> None:
    if isinstance(one.into, Direct):
        memory_of(target, one.into.start, one.nbytes)[:] = buffer
        return
    if isinstance(one.into, RangePart):
        nbytes = one.into.nbytes
        memory_of(target, one.into.start, nbytes)[:] = buffer[one.into.skip : one.into.skip + nbytes]
        return
    with streams.current(one.fqn):
        place(one, torch.frombuffer(buffer, dtype=torch.uint8), entry, target)


# --- direct reads ---


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
