"""The items of another writer (stock DCP), for facts that only they contain: the places of payloads, and values."""

from __future__ import annotations

import asyncio
import io
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, BinaryIO, Generic, TypeAlias, TypeVar

import torch

from .._format.records import Chunk, Entry, Manifest, OpaqueEntry, TensorEntry, ValueEntry
from .._layout.values import Allowed, decode_value
from .._runtime.threads import Stop, clear_gradually, current_deadline, io_threads, paced, pause_point, read_threads
from .._storage import Batches, RangeSource, ReadRange, Reads, Scratch
from ..errors import (
    CorruptCheckpointError,
    SidestreamError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    allocating,
)
from ..options import Trust
from .pickles.values import ValueBudget
from .torch_zip.ends import Ends, TensorItems
from .torch_zip.file import Records, TensorPayload, open_tensor_item, open_value_item
from .torch_zip.zip import Seekable, TorchZip, is_older, is_zip
from .transforms import TENSORS_ALWAYS_BYTES, VALUES_ALWAYS_BYTES, UnpackBudget, may_expand, require, unpack

Unlocated: TypeAlias = SidestreamError | FileNotFoundError
"""Why the zip of a tensor cannot be opened."""

_END_BYTES = 64 << 10
_WHOLE_BYTES = 4 * _END_BYTES  # items of at most so many bytes are read as a whole
_SPAN_BYTES = 1 << 20
_GAP_BYTES = 16 << 10  # the most bytes between two items that are read and not used
_MOST_ZIPS = 256  # that are read together: a request to a server ends only when all of them were opened
_AT_A_TIME = 2  # zips that are opened between two looks at the clock; one takes up to 0.4 ms

_OBJECTS = '; pass its type in safe_globals=, or trust="pickle" if you trust the file'
_BARE = {"stored": "bytes"}  # bytes in a format of the planner
MAX_VALUE_BYTES = 64 << 20
"""The largest item of a value from another writer that is read."""
_MOST_SAVED_BYTES = 1 << 30  # of a value that a planner unpickles
_LOOP_GRACE_S = 5.0

T = TypeVar("T")
K = TypeVar("K", TensorEntry, OpaqueEntry)


async def locate(
    source: RangeSource, entries: Mapping[str, K], *, records: Records = "needed"
) -> tuple[dict[str, K], dict[str, Unlocated]]:
    """Open the zips of tensors, and return the tensors with the places and the other facts of their payloads in their
    chunks; for tensors whose zips are damaged, unsafe, not supported or not there, return the errors. Other errors are
    raised. With ``records="all"`` the checksums of all records but the payloads are compared.

    Chunks whose payload is not in a zip are returned unchanged. Compressed ones are left out; ``unpack_chunk`` is for
    them.
    """
    locating = _Locating(entries, TensorItems(records))
    together = await io_threads().run(locating.together)
    await locating.read(source, together)
    await locating.read(source, locating.alone)
    return await io_threads().run(locating.results, together)


async def located(source: RangeSource, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors as ``locate`` does. Raises the first error if not all zips can be opened."""
    found, errors = await locate(source, entries)
    for error in errors.values():
        raise error
    return found


async def locate_all(
    source: RangeSource, manifest: Manifest, *, records: Records = "needed"
) -> tuple[dict[str, TensorEntry], dict[str, Unlocated]]:
    """Return the tensors of a manifest and the errors, as ``locate`` does. The errors include those of
    ``opaque_errors``. There are neither for a manifest of sidestream."""
    if manifest.own:
        return {}, {}
    threads = io_threads()
    found, errors = await locate(source, await threads.run(_of_kind, manifest.entries, TensorEntry), records=records)
    errors.update(await opaque_errors(source, await threads.run(_of_kind, manifest.entries, OpaqueEntry)))
    return found, errors


def _of_kind(entries: Mapping[str, Entry], kind: type[K]) -> dict[str, K]:
    """Return the entries of this kind. Called in a worker thread."""
    return {fqn: entry for fqn, entry in paced(entries.items()) if isinstance(entry, kind)}


_Item: TypeAlias = tuple[str, int, str, Chunk]
"""A chunk in a zip: its FQN, its number among the chunks of the tensor, the dtype of the tensor, and itself."""


@dataclass(frozen=True, slots=True)
class _Zips:
    """Zips of one file that are read together: neighbours in one span, from ``spans[0][0]`` on, or the two ends of a
    large one. Spans are offsets and lengths."""

    file: str
    spans: list[tuple[int, int]]
    items: list[_Item]


@dataclass(slots=True)
class _Locating(Generic[K]):
    """The opening of the zips of ``entries``. ``opened`` and ``failed`` have the results by FQN and number of chunk.
    ``alone`` has zips whose neighbours could not be read; each of them is read by itself, to find out which it is."""

    entries: Mapping[str, K]
    zips: TensorItems
    opened: dict[tuple[str, int], Chunk] = field(default_factory=dict)
    failed: dict[tuple[str, int], Unlocated] = field(default_factory=dict)
    alone: list[_Zips] = field(default_factory=list)

    def together(self) -> list[_Zips]:
        """Return what is to be read. Called in a worker thread."""
        items: list[_Item] = []
        for fqn, entry in self.entries.items():
            for number, chunk in enumerate(entry.chunks):
                pause_point()
                if _is_closed(chunk):
                    item = (fqn, number, entry.dtype, chunk)
                    if chunk.item_bytes:
                        items.append(item)
                    else:  # no bytes arrive
                        self._open(item, Ends(b"", b"", 0))
        items.sort(key=lambda item: (item[3].file, item[3].item_offset))
        found: list[_Zips] = []
        for item in paced(items):
            if not (found and _join(found[-1], item[3])):
                found.append(_zips(item))
            else:
                found[-1].items.append(item)
        return found

    async def read(self, source: RangeSource, zips: list[_Zips]) -> None:
        if zips:
            await Batches(source, self._reads, noting=self._noting).run(zips)

    @contextmanager
    def _noting(self, zips: _Zips) -> Iterator[None]:
        try:
            yield
        except (CorruptCheckpointError, FileNotFoundError) as error:
            if len(zips.items) > 1:
                self.alone.extend(map(_zips, zips.items))
                return
            for item in zips.items:
                self._fail(item, error)

    def _reads(self, zips: _Zips, scratch: Scratch, stop: Stop | None) -> Reads:
        """Return the reads of zips, which are opened when all of them have arrived. Called in a thread."""
        sizes = [nbytes for _, nbytes in zips.spans]
        memory, parts = scratch.views(sizes)
        earlier = iter(zips.spans[1:])  # the arrivals before the last one take these; next() is atomic
        arrived = partial(self._arrived, zips, parts, earlier, stop)
        ranges = [ReadRange(start, part, arrived) for (start, _), part in zip(zips.spans, parts, strict=True)]
        return Reads(zips.file, ranges, sum(sizes), memory)

    def _arrived(self, zips: _Zips, parts: Sequence[memoryview], earlier: Iterator[object], stop: Stop | None) -> None:
        if next(earlier, None) is not None:
            return
        for item in paced(zips.items, _AT_A_TIME):
            if stop is not None:
                stop.check()
            chunk = item[3]
            first, *tail = parts
            if not tail:
                first = first[chunk.item_offset - zips.spans[0][0] :][: chunk.item_bytes]
            self._open(item, Ends(bytes(first), b"".join(tail), chunk.item_bytes))

    def _open(self, item: _Item, ends: Ends) -> None:
        fqn, number, dtype, chunk = item
        try:
            with _about(chunk, fqn):
                self.opened[fqn, number] = _described(dtype, chunk, self.zips.open(ends))
        except (CorruptCheckpointError, UnsafeObjectError, UnsupportedCheckpointError) as error:
            self._fail(item, error)

    def _fail(self, item: _Item, error: Unlocated) -> None:
        """Record the error of a zip, without the frames in its tracebacks, which refer to the bytes of the zip."""
        error.__context__ = error.__cause__ = None
        self.failed[item[0], item[1]] = error.with_traceback(None)

    def results(self, together: list[_Zips]) -> tuple[dict[str, K], dict[str, Unlocated]]:
        """Return the tensors and the errors, and free everything else. Called in a worker thread."""
        found: dict[str, K] = {}
        errors: dict[str, Unlocated] = {}
        for fqn, entry in self.entries.items():
            chunks: list[Chunk] = []
            for number, chunk in enumerate(entry.chunks):
                pause_point()
                if (fqn, number) in self.failed:
                    errors.setdefault(fqn, self.failed[fqn, number])
                elif (fqn, number) in self.opened:
                    chunks.append(self.opened[fqn, number])
                elif not chunk.transform:
                    assert not _is_closed(chunk)
                    chunks.append(chunk)
            if fqn not in errors:
                found[fqn] = replace(entry, chunks=tuple(chunks))
        clear_gradually(together, self.alone, self.opened, self.failed)
        return found, errors


def _is_closed(chunk: Chunk) -> bool:
    """Return whether the zip of a chunk has to be opened to find the place of the payload."""
    return not chunk.transform and chunk.foreign is None and chunk.payload_offset is None


def _zips(item: _Item) -> _Zips:
    """Return the reads for one zip. Its records are before the payload, and its directory is after the payload."""
    chunk = item[3]
    start, nbytes = chunk.item_offset, chunk.item_bytes
    spans = [(start, nbytes)]
    if nbytes > _WHOLE_BYTES:
        spans = [(start, _END_BYTES), (start + nbytes - _END_BYTES, _END_BYTES)]
    return _Zips(chunk.file, spans, [item])


def _join(zips: _Zips, chunk: Chunk) -> bool:
    """Extend ``zips`` by a neighbour. Returns False if it is to be read by itself."""
    start, nbytes = zips.spans[0]
    end = chunk.item_offset + chunk.item_bytes
    if (
        zips.file != chunk.file
        or len(zips.spans) > 1
        or len(zips.items) == _MOST_ZIPS
        or chunk.item_bytes > _WHOLE_BYTES
        or not 0 <= chunk.item_offset - (start + nbytes) <= _GAP_BYTES
        or end - start > _SPAN_BYTES
    ):
        return False
    zips.spans[0] = start, end - start
    return True


def _described(dtype: str, chunk: Chunk, payload: TensorPayload) -> Chunk:
    """Return the chunk with the facts from its zip. Raises ``CorruptCheckpointError``."""
    if payload.dtype != dtype or tuple(payload.shape) != chunk.sizes:
        found = f"a {payload.dtype} of shape {tuple(payload.shape)}"
        raise CorruptCheckpointError(f"{chunk.file} has {found}, .metadata says {dtype} {chunk.sizes}")
    return replace(chunk, payload_offset=chunk.item_offset + payload.payload_offset, foreign=payload.foreign)


def unpack_chunk(fqn: str, entry: TensorEntry, chunk: Chunk, raw: bytearray) -> tuple[bytearray, TensorEntry]:
    """Return the decompressed item of a chunk, and the tensor with only this chunk, located in the item.

    The item is not decompressed to more bytes than the dtype and the shape of the chunk explain.
    """
    with _about(chunk, fqn):
        content = _unpacked(entry, chunk, raw)
        return content, replace(entry, chunks=(_open_unpacked(entry, chunk, content),))


def _unpacked(entry: TensorEntry, chunk: Chunk, raw: bytearray) -> bytearray:
    return unpack(raw, math.prod(chunk.sizes) * entry.itemsize + 4 * _END_BYTES)


def _open_unpacked(entry: TensorEntry, chunk: Chunk, content: bytearray) -> Chunk:
    item = replace(chunk, item_offset=0, item_bytes=len(content), transform=None)
    return _described(entry.dtype, item, open_tensor_item(io.BytesIO(content), len(content)))


async def opaque_errors(source: RangeSource, entries: Mapping[str, OpaqueEntry]) -> dict[str, Unlocated]:
    """Return the error to raise when one of ``entries`` is requested. Only the ends of their items are read: they show
    whether the tensor is of a kind that this version does not read (``UnsupportedCheckpointError``) or damaged
    (``CorruptCheckpointError``)."""
    if not entries:
        return {}
    _, errors = await locate(source, entries)
    return await io_threads().run(_opaque_errors, entries, errors)


async def refuse_opaque(
    source: RangeSource, url: str, opaque: Mapping[str, OpaqueEntry], several: str, end: str = ""
) -> None:
    """Raise the error of the first of these tensors, if there are any, or ``FileNotFoundError``. It ends with
    ``several``, in which ``{}`` stands for their number, if there are more of them, and with ``end``."""
    for fqn, entry in opaque.items():
        why = (await opaque_errors(source, {fqn: entry}))[fqn]
        if isinstance(why, FileNotFoundError):
            raise why
        raise why.within(url, (several.format(len(opaque)) if len(opaque) > 1 else "") + end)


def _opaque_errors(entries: Mapping[str, OpaqueEntry], errors: Mapping[str, Unlocated]) -> dict[str, Unlocated]:
    found: dict[str, Unlocated] = {}
    for fqn, entry in paced(entries.items()):
        refusal = entry.refusal(fqn) or errors.get(fqn)
        found[fqn] = refusal or UnsupportedCheckpointError(
            f"{fqn}: it was saved with dtype {entry.dtype}, which this version does not read; load it with "
            "torch.distributed.checkpoint"
        )
    return found


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
    format is damaged. Raises ``UnsupportedCheckpointError`` for a tensor of a kind that this version does not read,
    whose checksums are right. Types that a load accepts only with ``allow`` are not checked. All calls for one
    checkpoint share ``budgets``."""
    raw = await (read_value(source, fqn, item) if isinstance(item, ValueEntry) else read_item(source, item))

    def check() -> bool:
        with _about(item, fqn):
            if isinstance(item, Chunk):
                assert isinstance(entry, TensorEntry)
                content = _unpacked(entry, item, raw)
                _check_records(content)
                _open_unpacked(entry, item, content)
                return True
            content = budgets.values.unpack(raw, MAX_VALUE_BYTES) if item.transform else raw
            bare = item.node == _BARE
            if is_older(content) or (bare and not is_zip(content)):
                return False
            _check_records(content)
            if not bare:
                with suppress(UnsafeObjectError), budgets.decoding:
                    open_value_item(io.BytesIO(content), len(content), budget=budgets.parts)
            return True

    return await io_threads().run(check)


async def check_opaque_item(source: RangeSource, fqn: str, chunk: Chunk, budgets: ValueBudgets) -> None:
    """Read an item that only its writer can decode, and verify the checksums of all its records. It is read in pieces
    if it is not compressed. All calls for one checkpoint share ``budgets``."""
    if chunk.transform:
        raw = await read_item(source, chunk)
        with _about(chunk, fqn):
            await io_threads().run(lambda: _check_records(budgets.tensors.unpack(raw, may_expand(len(raw)))))
        return
    item = SourceFile(source, chunk.file, chunk.item_bytes, chunk.item_offset)

    def check(file: BinaryIO) -> None:
        with _about(chunk, fqn):
            TorchZip(file, chunk.item_bytes).check()

    await item.run(check, _END_BYTES)


async def read_values(
    source: RangeSource,
    manifest: Manifest,
    entries: Mapping[str, ValueEntry],
    allow: Allowed = MappingProxyType({}),
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
    """The limits of the size to which all values of one call may expand together, and all tensors whose size is not
    known. A thread holds ``decoding`` while it decodes."""

    values: UnpackBudget = field(default_factory=partial(UnpackBudget, VALUES_ALWAYS_BYTES))
    tensors: UnpackBudget = field(default_factory=partial(UnpackBudget, TENSORS_ALWAYS_BYTES))
    parts: ValueBudget = field(default_factory=ValueBudget)
    decoding: threading.Lock = field(default_factory=threading.Lock)


def _inline_values(entries: Mapping[str, ValueEntry], own: bool) -> tuple[dict[str, Any], dict[str, ValueEntry]]:
    """Return the values that the manifest contains, and the entries of the others. Raises ``MissingExtraError``."""
    values: dict[str, Any] = {}
    rest: dict[str, ValueEntry] = {}
    for fqn, one in entries.items():
        pause_point()
        if one.inline or (own and not one.is_stored):
            values[fqn] = decode_value(one.node, fqn)
        else:
            rest[fqn] = one
    if any(one.transform for one in paced(rest.values())):
        require()
    return values, rest


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
    raw = await read_value(source, fqn, entry)
    return await io_threads().run(_open_value, raw, fqn, entry, allow, trust, budgets)


def _open_value(
    raw: bytearray, fqn: str, entry: ValueEntry, allow: Allowed, trust: Trust, budgets: ValueBudgets
) -> Any:
    with _about(entry, fqn):
        content = budgets.values.unpack(raw, MAX_VALUE_BYTES) if entry.transform else raw
        if trust == "pickle":
            return _unpickle(content)
        try:
            node = open_value_item(io.BytesIO(content), len(content), frozenset(allow), budgets.parts)
        except UnsafeObjectError as error:
            raise error.reworded(lambda text: text + _OBJECTS) from None
    return decode_value(node, fqn, allow)


def _unpickle(content: bytearray) -> Any:
    """Unpickle an item. This is the only place where code from a file may run, and the caller has allowed it."""
    if not is_older(content):
        _check_records(content)  # torch does not verify checksums
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
    except Exception as error:
        raise UnsupportedCheckpointError(f"it cannot be unpickled here: {type(error).__name__}: {error}") from error


async def read_as_saved(source: RangeSource, entry: ValueEntry) -> bytes:
    """Return the bytes that were pickled, for a planner that unpickles them. Raises ``CorruptCheckpointError``."""
    raw = await read_item(source, entry)

    def checked() -> bytes:
        content = unpack(raw, _MOST_SAVED_BYTES) if entry.transform else raw
        if is_zip(content):
            _check_records(content)  # torch does not verify checksums
        return bytes(content)

    return await io_threads().run(checked)


def _check_records(content: bytearray) -> None:
    TorchZip(io.BytesIO(content), len(content)).check()


@contextmanager
def _about(item: Chunk | ValueEntry, fqn: str) -> Iterator[None]:
    """Add the name and the place of an item to errors that are raised in this context."""
    try:
        yield
    except (CorruptCheckpointError, UnsafeObjectError, UnsupportedCheckpointError) as error:
        error.within(fqn, f" ({item.file}, byte {item.item_offset})")
        error.about(fqn=fqn, file=item.file, offset=item.item_offset)
        raise


async def read_value(source: RangeSource, fqn: str, entry: ValueEntry) -> bytearray:
    """Return all bytes of a value, as they are in the file. Raises ``CorruptCheckpointError`` for one that is too
    large to be read."""
    if entry.item_bytes > MAX_VALUE_BYTES:
        raise CorruptCheckpointError(f"{fqn}: a plain value of {entry.item_bytes} bytes", file=entry.file, fqn=fqn)
    return await read_item(source, entry)


async def read_item(source: RangeSource, item: Chunk | ValueEntry) -> bytearray:
    """Return all bytes of an item, as they are in the file."""
    with allocating(f"reading an item of {item.file}"):
        raw = bytearray(item.item_bytes)
    await source.read(item.file, [ReadRange(item.item_offset, memoryview(raw))])
    return raw


class SourceFile(Seekable):
    """A readable view of ``nbytes`` of a file in a source, from ``start`` on, for code in a worker thread.

    The loop on which this object was created reads the bytes, and ``run`` runs the code in one of ``read_threads``. A
    thread of ``io_threads`` must not wait for these reads, because they need such a thread themselves.
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

        return await read_threads().run(work)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        nbytes = max(0, min(len(buffer), self.nbytes - self._position))
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
        future = asyncio.run_coroutine_threadsafe(self._source.read(self._file, [one]), self._loop)
        try:
            future.result(current_deadline().remaining_s() + _LOOP_GRACE_S)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self._name} was deleted while it was read") from error
        except TimeoutError as error:
            if isinstance(error, SidestreamError):
                raise
            raise current_deadline().exceeded(f"reading {self._name}") from error
