"""The items of another writer (stock DCP), for facts that only the items contain."""

from __future__ import annotations

import asyncio
import io
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, TypeAlias, TypeVar

import torch

from ..._format.checksum import crc32
from ..._format.pickles.values import ValueBudget
from ..._format.rank_files import Replica
from ..._format.records import Chunk, Entry, ForeignPayload, Manifest, OpaqueEntry, TensorEntry, ValueEntry, itemsize
from ..._format.torch_zip.file import Records, open_tensor_item, open_value_item
from ..._format.torch_zip.zip import TorchZip, is_older, is_zip
from ..._format.transforms import UnpackBudget, require, unpack
from ..._format.values import is_stored
from ..._layout.ranges import PIECE_BYTES
from ..._layout.values import NOTHING_ALLOWED, Allowed, decode_value
from ..._runtime.threads import (
    Steps,
    Threads,
    TorchThreads,
    current_deadline,
    io_threads,
    run_sliced,
    sliced,
    yielding_gil,
)
from ..._storage import RangeSource, ReadRange
from ...errors import (
    ClosedError,
    CorruptCheckpointError,
    SidestreamError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    allocating,
)
from ...options import Trust

__all__ = [
    "MAX_VALUE_BYTES",
    "Located",
    "SourceFile",
    "ValueBudgets",
    "agree",
    "check_item_records",
    "check_opaque_item",
    "locate_tensor",
    "located_already",
    "opaque_entries",
    "read_item",
    "read_values",
    "sorted_out",
    "unpack_chunk",
    "why_opaque",
]

Located: TypeAlias = tuple[TensorEntry, dict[Chunk, ForeignPayload]]
"""A tensor whose chunks have the places of their payloads, and the other facts that the zips contain."""

_Opened: TypeAlias = dict[Chunk, tuple[Chunk, ForeignPayload]]
"""Chunks whose zips were opened, as they were before, with the chunks and payloads that the zips describe."""

_END_BYTES = 64 << 10
_BARE = {"stored": "bytes"}  # bytes in a format of the planner
MAX_VALUE_BYTES = 64 << 20
"""The largest item of a value from another writer that is read."""
_FEW_CHUNKS = 8
_PARSING_THREADS = 4
_LOOP_GRACE_S = 5.0

T = TypeVar("T")


async def read_values(
    source: RangeSource,
    manifest: Manifest,
    entries: Mapping[str, ValueEntry],
    allow: Allowed = NOTHING_ALLOWED,
    trust: Trust = "data",
) -> dict[str, Any]:
    """Return the plain values of ``entries``. A manifest of sidestream contains them. Other writers have pickled them:
    these pickles are decoded as data, or with ``trust="pickle"`` unpickled. If one way fails, the other one is not
    tried.

    Raises ``UnsafeObjectError``, with the FQN, for objects that are neither data nor of the types in ``allow``, and
    ``CorruptCheckpointError``.
    """
    if not entries:
        return {}
    values, rest = await io_threads().run(_inline_values, entries, manifest.own)
    budgets = ValueBudgets()
    for fqn, entry in rest.items():
        values[fqn] = await _read_value(source, fqn, entry, allow, trust, budgets)
    return values


@dataclass(frozen=True, slots=True)
class ValueBudgets:
    """The limits of the size to which all values of one call may expand together. A thread holds ``decoding`` while it
    decodes."""

    unpacked: UnpackBudget = field(default_factory=UnpackBudget)
    parts: ValueBudget = field(default_factory=ValueBudget)
    decoding: threading.Lock = field(default_factory=threading.Lock)


@sliced
def _inline_values(entries: Mapping[str, ValueEntry], own: bool) -> Steps[tuple[dict[str, Any], dict[str, ValueEntry]]]:
    """Return the values that the manifest contains, and the entries of the others. Raises ``MissingExtraError``."""
    values: dict[str, Any] = {}
    rest: dict[str, ValueEntry] = {}
    for fqn, one in entries.items():
        yield
        if one.inline or (own and not is_stored(one.node)):
            values[fqn] = yield from decode_value(one.node, fqn)
        else:
            rest[fqn] = one
    if any(one.transform for one in yielding_gil(rest.values())):
        require()
    return values, rest


@sliced
def sorted_out(entries: Mapping[str, Entry]) -> Steps[tuple[dict[str, TensorEntry], dict[str, ValueEntry]]]:
    """Return the tensors and the plain values. Called in a worker thread."""
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, ValueEntry] = {}
    for fqn, entry in entries.items():
        yield
        if isinstance(entry, TensorEntry):
            tensors[fqn] = entry
        elif isinstance(entry, ValueEntry):
            values[fqn] = entry
    return tensors, values


def opaque_entries(entries: Mapping[str, Entry]) -> dict[str, OpaqueEntry]:
    """Return the tensors of a kind that this version does not read. Called in a worker thread."""
    return {fqn: entry for fqn, entry in yielding_gil(entries.items()) if isinstance(entry, OpaqueEntry)}


async def _read_value(
    source: RangeSource,
    fqn: str,
    entry: ValueEntry,
    allow: Allowed,
    trust: Trust,
    budgets: ValueBudgets,
) -> Any:
    if entry.node == _BARE:
        raise UnsafeObjectError(
            f"{fqn}: a planner wrote it as bytes in its own format, which only that planner can read; load it with "
            "sidestream.dcp.StorageReader and that planner"
        )
    if entry.item_bytes > MAX_VALUE_BYTES:
        raise CorruptCheckpointError(f"{fqn}: a plain value of {entry.item_bytes} bytes", file=entry.file, fqn=fqn)
    raw = await read_item(source, entry)
    return await io_threads().run(_open_value, raw, fqn, entry, allow, trust, budgets)


def _open_value(
    raw: bytearray, fqn: str, entry: ValueEntry, allow: Allowed, trust: Trust, budgets: ValueBudgets
) -> Any:
    with _about(entry, fqn):
        content = run_sliced(budgets.unpacked.unpack(raw, MAX_VALUE_BYTES)) if entry.transform else raw
        if trust == "pickle":
            return _unpickle(content)
        node = run_sliced(open_value_item(io.BytesIO(content), len(content), frozenset(allow), budgets.parts))
    return run_sliced(decode_value(node, fqn, allow))


def _unpickle(content: bytearray) -> Any:
    """Unpickle an item. This is the only place where code from a file may run, and the caller has allowed it."""
    if not is_older(content):
        _check_records(content)  # torch does not verify checksums
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
    except Exception as error:
        raise UnsupportedCheckpointError(f"it cannot be unpickled here: {type(error).__name__}: {error}") from error


async def locate_tensor(
    source: RangeSource,
    fqn: str,
    entry: TensorEntry,
    *,
    records: Records = "needed",
) -> Located:
    """Open the zip of each chunk of another writer, and return the tensor with the places and the layout of its
    payloads.

    Chunks whose payload is not in a zip are returned unchanged. Compressed ones are left out; ``unpack_chunk`` is for
    them.
    """
    threads = io_threads()
    few = len(entry.chunks) <= _FEW_CHUNKS  # done faster than a thread starts
    opened: _Opened = {}
    for chunk in _closed(entry) if few else await threads.run(_closed, entry):
        ends = await _read_ends(source, chunk)
        opened[chunk] = await threads.run(_open_ends, fqn, entry, chunk, ends, records)
    return _located(entry, opened) if few else await threads.run(_located, entry, opened)


@sliced
def located_already(entries: Mapping[str, TensorEntry]) -> Steps[tuple[dict[str, Located], dict[str, TensorEntry]]]:
    """Return the results of ``locate_tensor`` for the tensors whose zips need not be opened, and the other tensors.
    Called in a worker thread."""
    located: dict[str, Located] = {}
    closed: dict[str, TensorEntry] = {}
    for fqn, entry in entries.items():
        yield
        if any(_is_closed(chunk) for chunk in entry.chunks):
            closed[fqn] = entry
        else:
            located[fqn] = _located(entry, {})
    return located, closed


def _closed(entry: TensorEntry) -> list[Chunk]:
    return [chunk for chunk in yielding_gil(entry.chunks) if _is_closed(chunk)]


def _located(entry: TensorEntry, opened: _Opened) -> Located:
    chunks: list[Chunk] = []
    payloads: dict[Chunk, ForeignPayload] = {}
    for chunk in yielding_gil(entry.chunks):
        located = chunk
        if chunk.transform:
            continue
        if chunk.foreign is not None:
            payloads[chunk] = chunk.foreign
        elif _is_closed(chunk):
            located, payloads[located] = opened[chunk]
        chunks.append(located)
    return replace(entry, chunks=tuple(chunks)), payloads


def unpack_chunk(fqn: str, entry: TensorEntry, chunk: Chunk, raw: bytearray) -> tuple[bytearray, Located]:
    """Return the decompressed item of a chunk, and the tensor with only this chunk, located in the item.

    The item is not decompressed to more bytes than the dtype and the shape of the chunk explain.
    """
    most_bytes = math.prod(chunk.sizes) * itemsize(entry.dtype) + 4 * _END_BYTES
    with _about(chunk, fqn):
        content = run_sliced(unpack(raw, most_bytes))
        item = replace(chunk, item_offset=0, item_bytes=len(content), transform=None)
        located, payload = _open_chunk(entry, item, io.BytesIO(content))
    return content, (replace(entry, chunks=(located,)), {located: payload})


def _open_chunk(
    entry: TensorEntry, chunk: Chunk, item: BinaryIO, records: Records = "needed"
) -> tuple[Chunk, ForeignPayload]:
    payload = open_tensor_item(item, chunk.item_bytes, records)
    if payload.dtype != entry.dtype or tuple(payload.shape) != chunk.sizes:
        found = f"a {payload.dtype} of shape {tuple(payload.shape)}"
        raise CorruptCheckpointError(f"{chunk.file} has {found}, .metadata says {entry.dtype} {chunk.sizes}")
    located = replace(chunk, payload_offset=chunk.item_offset + payload.payload_offset)
    plain = payload.storage_offset == 0 and torch.empty(chunk.sizes, device="meta").stride() == payload.strides
    strides = None if plain else tuple(payload.strides)
    return located, ForeignPayload(payload.crc32, payload.payload_bytes, strides, payload.storage_offset)


async def check_item_records(
    source: RangeSource,
    fqn: str,
    entry: Entry,
    item: Chunk | ValueEntry,
    budgets: ValueBudgets,
) -> bool:
    """Read a whole item, verify its checksums and decode it as a load would, without building the value. Returns False
    if it has no checksums.

    Raises ``CorruptCheckpointError`` in the same cases as a load: an item that is neither a zip nor in torch's older
    format is damaged. Types that a load accepts only with ``allow`` are not checked. All calls for one checkpoint share
    ``budgets``."""
    if isinstance(item, ValueEntry) and item.item_bytes > MAX_VALUE_BYTES:
        raise CorruptCheckpointError(f"{fqn}: a plain value of {item.item_bytes} bytes", file=item.file, fqn=fqn)
    raw = await read_item(source, item)

    def check() -> bool:
        with _about(item, fqn):
            content = raw
            if isinstance(item, Chunk) and isinstance(entry, TensorEntry):
                content, _ = unpack_chunk(fqn, entry, item, raw)
            elif item.transform:
                content = run_sliced(budgets.unpacked.unpack(raw, MAX_VALUE_BYTES))
            bare = isinstance(item, ValueEntry) and item.node == _BARE
            if is_older(content) or (bare and not is_zip(content)):
                return False
            _check_records(content)
            if isinstance(item, ValueEntry) and not bare:
                with suppress(UnsafeObjectError), budgets.decoding:
                    run_sliced(open_value_item(io.BytesIO(content), len(content), budget=budgets.parts))
            return True

    return await io_threads().run(check)


def _check_records(content: bytearray) -> None:
    TorchZip(io.BytesIO(content), len(content)).check()


async def check_opaque_item(source: RangeSource, fqn: str, chunk: Chunk) -> None:
    """Read an item that only its writer can decode in pieces, and verify the checksums of all its records.

    Compressed items are skipped."""
    if chunk.transform:
        return
    item = SourceFile(source, chunk.file, chunk.item_bytes, chunk.item_offset)

    def check(file: BinaryIO) -> None:
        with _about(chunk, fqn):
            TorchZip(file, chunk.item_bytes).check()

    await item.run(check, _END_BYTES)


async def why_opaque(source: RangeSource, fqn: str, entry: OpaqueEntry) -> SidestreamError:
    """Return the error to raise when an ``OpaqueEntry`` is requested. Only the ends of its items are read: they show
    whether the tensor is of a kind that this version does not read (``UnsupportedCheckpointError``) or damaged
    (``CorruptCheckpointError``)."""
    tensor = TensorEntry(entry.path, entry.dtype, entry.shape, entry.chunks)
    for chunk in entry.chunks:
        if chunk.transform:
            continue
        ends = await _read_ends(source, chunk)
        try:
            await io_threads().run(_open_ends, fqn, tensor, chunk, ends)
        except (CorruptCheckpointError, UnsafeObjectError, UnsupportedCheckpointError) as error:
            return error
    return UnsupportedCheckpointError(
        f"{fqn}: it was saved with dtype {entry.dtype}, which this version does not read; load it with "
        "torch.distributed.checkpoint"
    )


@contextmanager
def _about(item: Chunk | ValueEntry, fqn: str) -> Iterator[None]:
    """Add the name and the place of an item to errors that are raised in this context."""
    try:
        yield
    except (CorruptCheckpointError, UnsafeObjectError, UnsupportedCheckpointError) as error:
        error.within(fqn, f" ({item.file}, byte {item.item_offset})")
        error.about(fqn=fqn, file=item.file, offset=item.item_offset)
        raise


async def read_item(source: RangeSource, item: Chunk | ValueEntry) -> bytearray:
    """Return all bytes of an item, as they are in the file."""
    with allocating(f"reading an item of {item.file}"):
        raw = bytearray(item.item_bytes)
    await source.read(item.file, [ReadRange(item.item_offset, memoryview(raw))])
    return raw


async def agree(source: RangeSource, replica: Replica) -> bool:
    """Return whether two ranks wrote the same item. For tensors the checksums are compared, if the files have them."""
    first, other = replica.first, replica.other
    if isinstance(first, ValueEntry) and isinstance(other, ValueEntry):
        return await _same_value(source, replica.fqn, first, other)
    if isinstance(first, ValueEntry) or isinstance(other, ValueEntry):
        return False
    one = await _digest(source, replica.fqn, *first)
    return one == await _digest(source, replica.fqn, *other)


async def _same_value(source: RangeSource, fqn: str, first: ValueEntry, other: ValueEntry) -> bool:
    if max(first.item_bytes, other.item_bytes) > MAX_VALUE_BYTES:
        raise CorruptCheckpointError(f"{fqn}: a plain value of {first.item_bytes} bytes", file=first.file, fqn=fqn)
    items = [await read_item(source, entry) for entry in (first, other)]
    return first.transform == other.transform and items[0] == items[1]


async def _digest(source: RangeSource, fqn: str, entry: TensorEntry, chunk: Chunk) -> object:
    if chunk.transform:
        require()
        raw = await read_item(source, chunk)
        _, (_, payloads) = await io_threads().run(unpack_chunk, fqn, entry, chunk, raw)
        return next(iter(payloads.values()))
    if chunk.payload_offset is None:
        _, payloads = await locate_tensor(source, fqn, replace(entry, chunks=(chunk,)))
        return next(iter(payloads.values()))
    crc = 0
    for start in range(0, chunk.item_bytes, PIECE_BYTES):
        nbytes = min(PIECE_BYTES, chunk.item_bytes - start)
        part = replace(chunk, item_offset=chunk.item_offset + start, item_bytes=nbytes)
        crc = await io_threads().run(crc32, await read_item(source, part), crc)
    return crc


def _is_closed(chunk: Chunk) -> bool:
    """Return whether the zip of a chunk has to be opened to find the place of the payload."""
    return not chunk.transform and chunk.foreign is None and chunk.payload_offset is None


def _ends_of(chunk: Chunk) -> list[tuple[int, int]]:
    """Return the offsets and lengths of what has to be read of the zip of a chunk. Its records are before the payload,
    and its directory is after the payload."""
    if chunk.item_bytes <= 4 * _END_BYTES:
        return [(chunk.item_offset, chunk.item_bytes)]
    return [(chunk.item_offset, _END_BYTES), (chunk.item_offset + chunk.item_bytes - _END_BYTES, _END_BYTES)]


async def _read_ends(source: RangeSource, chunk: Chunk) -> list[bytes]:
    ends = [(start, bytearray(nbytes)) for start, nbytes in _ends_of(chunk)]
    await source.read(chunk.file, [ReadRange(start, memoryview(raw)) for start, raw in ends])
    return [bytes(raw) for _, raw in ends]


def _open_ends(
    fqn: str, entry: TensorEntry, chunk: Chunk, ends: Sequence[bytes], records: Records = "needed"
) -> tuple[Chunk, ForeignPayload]:
    """Return the chunk and its payload as its zip describes them. Raises ``CorruptCheckpointError``,
    ``UnsafeObjectError``, ``UnsupportedCheckpointError``."""
    item: BinaryIO = io.BytesIO(ends[0])
    if len(ends) > 1:
        item = io.BufferedReader(_Ends(ends[0], ends[1], chunk.item_bytes))
    with _about(chunk, fqn):
        return _open_chunk(entry, chunk, item, records)


class _Seekable(io.RawIOBase):
    """A readable and seekable file of ``nbytes``. Subclasses implement ``readinto``."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._nbytes)[whence]
        self._position = max(0, base + offset)
        return self._position


class SourceFile(_Seekable):
    """A readable view of ``nbytes`` of a file in a source, from ``start`` on, for code in a worker thread.

    The loop on which this object was created reads the bytes, and ``run`` runs the code. A thread of the shared pool
    must not wait for these reads, because they need a thread of that pool themselves.
    """

    def __init__(self, source: RangeSource, file: str, nbytes: int, start: int = 0) -> None:
        super().__init__(nbytes)
        self._source, self._file, self._start = source, file, start
        self._name = source.path_of(file)
        self._loop = asyncio.get_running_loop()
        self._failure: BaseException | None = None

    async def run(self, parse: Callable[[BinaryIO], T], buffer_bytes: int) -> T:
        """Run ``parse`` in a thread, with this file. If a read of the file failed, raises the error of the read, and
        otherwise what ``parse`` raises. Parsers such as ``zipfile`` report a failed read as a damaged file."""

        def work() -> T:
            try:
                with io.BufferedReader(self, buffer_bytes) as file:
                    return parse(file)
            except BaseException:
                if self._failure is not None:
                    raise self._failure from None
                raise

        return await _parsing_threads().run(work)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        nbytes = max(0, min(len(buffer), self._nbytes - self._position))
        if nbytes:
            try:
                self._read(memoryview(buffer)[:nbytes])
            except BaseException as error:
                self._failure = error
                raise
        self._position += nbytes
        return nbytes

    def _read(self, into: memoryview) -> None:
        one = ReadRange(self._start + self._position, into)
        read = self._source.read(self._file, [one])
        try:
            future = asyncio.run_coroutine_threadsafe(read, self._loop)
        except RuntimeError as error:
            read.close()
            raise ClosedError(f"the event loop was closed while {self._name} was read") from error
        try:
            future.result(current_deadline().remaining_s() + _LOOP_GRACE_S)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self._name} was deleted while it was read") from error
        except TimeoutError as error:
            if isinstance(error, SidestreamError):
                raise
            raise current_deadline().exceeded(f"reading {self._name}") from error


_parsing: Threads | None = None
_parsing_lock = threading.Lock()


def _parsing_threads() -> Threads:
    """Return the threads of this process that parse files while the shared pool reads them."""
    global _parsing
    with _parsing_lock:
        if _parsing is None:
            _parsing = TorchThreads("sidestream-parse", _PARSING_THREADS)
        return _parsing


def _forget_after_fork() -> None:
    global _parsing, _parsing_lock
    _parsing, _parsing_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


class _Ends(_Seekable):
    """A file of which only the head and the tail are known. Reads between them return zeros, so that no zip is found
    there."""

    def __init__(self, head: bytes, tail: bytes, nbytes: int) -> None:
        super().__init__(nbytes)
        self._head, self._tail = head, tail

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        start = self._position
        end = min(start + len(buffer), self._nbytes)
        tail_at = self._nbytes - len(self._tail)
        if start < len(self._head):
            end = min(end, len(self._head))
            piece = self._head[start:end]
        elif start >= tail_at:
            piece = self._tail[start - tail_at : end - tail_at]
        else:
            end = min(end, tail_at)
            piece = bytes(max(0, min(end - start, _END_BYTES)))
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)
