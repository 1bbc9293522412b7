"""The source of a conversion (a checkpoint directory, a ``torch.save`` file or safetensors), and the flow of its
data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .._foreign.items import locate_all, read_values
from .._format.records import (
    CompositeEntry,
    Entry,
    Manifest,
    Node,
    OpaqueEntry,
    TensorEntry,
    ValueEntry,
    itemsize,
)
from .._layout.ranges import Box
from .._layout.values import encode_value
from .._load.checks import Piece, foreign_pieces, has_no_checksum
from .._load.open.manifest import all_there, open_manifest
from .._load.open.steps import Step
from .._load.reader import Reader, Wanted
from .._runtime.caller import run_by_caller
from .._runtime.tasks import in_parallel
from .._runtime.threads import collected, holding_gil, io_threads, paced, pause_point
from .._runtime.torch_probes import dtype_from_name
from .._storage import (
    PIECE_BYTES,
    Location,
    RangeSource,
    ReadRange,
    Scratch,
    Store,
    Transaction,
)
from ..errors import SidestreamError, UnsupportedCheckpointError, allocating
from ..options import Progress, Verify
from .targets import Slice, TargetFile
from .windows import WINDOWS, WindowedFile, Windows

_MIB = 1 << 20
_VIEWS_ALWAYS_BYTES = 64 << 20
_VIEWS_RATIO = 16


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the source.

    ``entry`` is the tensor as it was saved. ``flat`` is it with one dimension, if any part of its bytes can be read
    by itself. ``located`` is it with the facts from the zips of another writer. Tensors with one ``identity`` are tied.
    """

    entry: TensorEntry
    flat: TensorEntry | None
    located: TensorEntry | None
    identity: object


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a conversion. ``entries`` are those of the manifest. ``tensors`` has those tensors that can be
    read, and ``refused`` the errors to raise if one of the others is selected. ``files`` is open until ``aclose``."""

    files: RangeSource
    url: str
    manifest: Manifest
    entries: Mapping[str, Entry]
    tensors: Mapping[str, SourceTensor]
    refused: Mapping[str, SidestreamError]
    unverified: frozenset[str]

    def parts(self) -> dict[str, str]:
        """Return the FQNs of the parts of all composite tensors, with the outermost tensor of each. Called in a worker
        thread."""
        found: dict[str, str] = {}
        for fqn, one in paced(self.entries.items()):
            if isinstance(one, CompositeEntry):
                for part in self.manifest.parts_of(fqn):
                    found.setdefault(part, fqn)
        return found

    async def nodes(self, entries: Mapping[str, ValueEntry]) -> dict[str, Node]:
        """Read the values of ``entries``, and return them as data. Raises what ``read_values`` raises."""
        values = await read_values(self.files, self.manifest, entries)
        return await io_threads().run(_encoded, values)

    async def contents(self, verify: Verify) -> dict[str, bytes]:
        """Return the content of the sidecar files. Raises ``CorruptCheckpointError``."""
        sidecars = self.manifest.sidecars
        found = {name: bytearray(entry.nbytes) for name, entry in sidecars.items()}
        wanted = [
            Wanted(name, entry, Box.whole(entry.shape), torch.frombuffer(found[name], dtype=torch.uint8))
            for name, entry in sidecars.items()
            if entry.nbytes
        ]
        await Reader(self.files, verify).read(wanted, own=True)
        return {name: await io_threads().run(bytes, content) for name, content in found.items()}

    def all_there(self) -> AbstractContextManager[None]:
        """Return a context that raises ``CorruptCheckpointError`` for a file that is gone."""
        return all_there(self.url)

    async def aclose(self) -> None:
        await self.files.aclose()


async def open_source(location: Location) -> Source:
    """Open a source. Reads no payload of a tensor and no value. The caller closes the result. Raises what the opening
    of a checkpoint raises."""
    # The manifest is opened whole, and the zips of another writer are opened for the places of the payloads. Payloads
    # are read while they are written.
    files, manifest = await open_manifest(location)
    try:
        return await source_of(files, location.url, manifest)
    except BaseException:
        await files.aclose()
        raise


async def source_of(files: RangeSource, url: str, manifest: Manifest) -> Source:
    """Do ``open_source`` for a checkpoint that is open. ``aclose`` of the result closes ``files``."""
    with all_there(url):
        return await _of_manifest(files, url, manifest)


async def _of_manifest(files: RangeSource, url: str, manifest: Manifest) -> Source:
    located, errors = await locate_all(files, manifest)
    refused: dict[str, SidestreamError] = {}
    for fqn, error in errors.items():
        # There are two kinds of errors. A tensor of a kind that this version does not read: an error only if it is
        # selected. Anything else, such as a missing file: an error of the source, whatever was selected.
        opaque = isinstance(manifest.entries[fqn], OpaqueEntry)
        if isinstance(error, FileNotFoundError) or not (opaque or isinstance(error, UnsupportedCheckpointError)):
            raise error
        refused[fqn] = error
    return await io_threads().run(_described, files, url, manifest, located, refused)


def _described(
    files: RangeSource,
    url: str,
    manifest: Manifest,
    located: Mapping[str, TensorEntry],
    refused: Mapping[str, SidestreamError],
) -> Source:
    """Describe the checkpoint. Called in a worker thread."""
    entries: dict[str, Entry] = {}
    tensors: dict[str, SourceTensor] = {}
    unverified: set[str] = set()
    for fqn, entry in manifest.entries.items():
        pause_point()
        entries[fqn] = entry
        if not isinstance(entry, TensorEntry) or fqn in refused:
            continue
        if manifest.own:
            tensors[fqn] = SourceTensor(entry, _flat(entry), None, (entry.dtype, entry.chunks))
        else:
            tensors[fqn] = _foreign_tensor(fqn, entry, located[fqn])
            if any(map(has_no_checksum, entry.chunks)):
                unverified.add(fqn)
    _check_views(manifest, url)
    return Source(files, url, manifest, entries, tensors, refused, frozenset(unverified))


def _encoded(values: Mapping[str, Any]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    for fqn, value in values.items():
        pause_point()
        found[fqn] = encode_value(value, fqn)
    return found


def _check_views(manifest: Manifest, url: str) -> None:
    """Raise ``UnsupportedCheckpointError`` if views of the same storage would take far more bytes than the file has.
    Every target format stores each view separately."""
    distinct: dict[object, int] = {}
    for entry in manifest.entries.values():
        pause_point()
        if isinstance(entry, TensorEntry) and any(chunk.foreign is not None for chunk in entry.chunks):
            # Tied tensors are written once in every format. Only different views of one storage are multiplied, and a
            # file can have many of them at no cost: a kilobyte that says that it is a terabyte.
            distinct[entry.dtype, entry.chunks] = entry.nbytes
    nbytes, there = sum(distinct.values()), sum(manifest.files.values())
    if nbytes > _VIEWS_ALWAYS_BYTES + _VIEWS_RATIO * there:
        raise UnsupportedCheckpointError(
            f"{url}: its tensors are views of the same storages; written one by one they would take {nbytes} bytes, "
            f"and the file has {there}: clone() the tensors that are needed and save them again"
        )


def _foreign_tensor(fqn: str, entry: TensorEntry, located: TensorEntry) -> SourceTensor:
    # A compressed item is decompressed as a whole, so no part of it has a place in the file.
    if any(chunk.transform for chunk in entry.chunks):
        return SourceTensor(entry, None, None, fqn)
    identity = (entry.dtype, entry.chunks) if all(chunk.foreign is not None for chunk in entry.chunks) else fqn
    return SourceTensor(entry, _flat(_row_major(located)), located, identity)


def _row_major(located: TensorEntry) -> TensorEntry | None:
    """Return the tensor with the offset of the elements of every chunk. None if a chunk is not row-major."""
    size = located.itemsize
    chunks = []
    for chunk in located.chunks:
        payload = chunk.foreign
        if payload is None:
            chunks.append(chunk)
            continue
        if chunk.payload_offset is None or not payload.is_row_major(chunk.sizes):
            return None
        if payload.strides is None and payload.payload_bytes != math.prod(chunk.sizes) * size:
            return None
        chunks.append(replace(chunk, payload_offset=chunk.payload_offset + payload.first_element * size, foreign=None))
    return replace(located, chunks=tuple(chunks))


def _flat(entry: TensorEntry | None) -> TensorEntry | None:
    """Return the tensor with one dimension. None if it is not row-major, or if a chunk is not whole rows."""
    if entry is None:
        return None
    row = math.prod(entry.shape[1:])
    chunks = []
    for chunk in entry.chunks:
        if any(chunk.offsets[1:]) or chunk.sizes[1:] != entry.shape[1:]:
            return None
        first = chunk.offsets[0] * row if chunk.offsets else 0
        chunks.append(replace(chunk, offsets=(first,), sizes=(math.prod(chunk.sizes),)))
    return replace(entry, shape=(math.prod(entry.shape),), chunks=tuple(chunks))


# --- the flow of data -------------------


def window_bytes_within(budget_bytes: int) -> int:
    """Return the most bytes of a window for a conversion within a budget."""
    return min(64 * _MIB, (budget_bytes - WINDOWS * PIECE_BYTES) // WINDOWS) // _MIB * _MIB


@dataclass(slots=True)
class Pipeline:
    """The flow of data in one conversion. ``origin`` has the name in the source of each tensor of the target."""

    source: Source
    origin: Mapping[str, str]
    verify: Verify
    progress: Progress | None
    total_bytes: int
    _done_bytes: int = 0
    _scratch: Scratch = field(default_factory=Scratch)
    _held: dict[str, torch.Tensor] = field(default_factory=dict)

    async def check(self) -> None:
        """Compare checksums that cover more than one piece. Called before anything is written."""
        # A payload of another writer has one checksum, which is known to be right only after its last byte. Its pieces
        # would have been written by then. So it is read twice: once to compare, and once to write.
        pieces = await io_threads().run(self._checks)

        async def work(piece: Piece) -> None:
            memory = self._scratch.take(piece.nbytes)
            view = memoryview(memory)[: piece.nbytes]
            read = ReadRange(piece.offset, view, partial(piece.check, view, holding_gil))
            await self.source.files.read(piece.file, [read])
            self._scratch.give_back(memory)

        await in_parallel(pieces, work)

    def _checks(self) -> list[Piece]:
        """Return the payloads that are read in pieces and have one checksum, each of them once. Called in a worker
        thread."""
        pieces: list[Piece] = []
        seen: set[object] = set()
        for fqn in self.origin.values():
            pause_point()
            one = self.source.tensors[fqn]
            if one.flat is not None and one.located is not None:
                pieces.extend(foreign_pieces(fqn, one.located, seen))
        return pieces

    async def write(self, files: Sequence[TargetFile], into: Transaction) -> None:
        """Write all of ``files``. When this returns or raises, no thread works on them any more."""
        await self._report_progress(0)
        by_name = {file.name: file for file in files}

        async def fill(file: WindowedFile, index: int, view: memoryview) -> None:
            slices, nbytes = await io_threads().run(_slices_of, by_name[file.name], index)
            await self._fill(slices, view)
            await self._report_progress(nbytes)

        await Windows(fill).write(files, into)

    async def _fill(self, slices: Sequence[Slice], view: memoryview) -> None:
        direct, others = await io_threads().run(self._targets, slices, view)
        # The tensors that are read whole come first, one at a time: each takes memory of its own size beside the
        # window.
        for one, into in others:
            fqn = self.origin[one.tensor.fqn]
            # A tensor that lies in one window is read into it. One that continues in the next window is read once and
            # held, since reading it again for each window would read all of it each time.
            if one.nbytes == one.tensor.nbytes:
                await self._read_whole(fqn, into.reshape(one.tensor.shape))
            else:
                await self._from_held(fqn, one, into)
        if direct:
            await self._reader().read(direct, own=True)

    def _targets(
        self, slices: Sequence[Slice], view: memoryview
    ) -> tuple[list[Wanted], list[tuple[Slice, torch.Tensor]]]:
        """Return the targets that can be read piece by piece, and the slices of tensors that are read whole. Called in
        a worker thread."""
        direct: list[Wanted] = []
        others: list[tuple[Slice, torch.Tensor]] = []
        for one in slices:
            pause_point()
            if not one.nbytes:
                continue
            fqn = self.origin[one.tensor.fqn]
            size = itemsize(one.tensor.dtype)
            count, first = one.nbytes // size, one.begin // size
            into = torch.frombuffer(view, dtype=dtype_from_name(one.tensor.dtype), count=count, offset=one.at)
            entry = self.source.tensors[fqn].flat
            if entry is not None:
                direct.append(Wanted(fqn, entry, Box((first,), (count,)), into))
            else:
                others.append((one, into))
        return direct, others

    async def _from_held(self, fqn: str, one: Slice, into: torch.Tensor) -> None:
        """Fill a slice of a tensor that cannot be read in pieces. The whole tensor is held until its last slice."""
        held = self._held.get(fqn)
        if held is None:
            with allocating(f"converting {fqn}"):
                held = torch.empty(one.tensor.shape, dtype=dtype_from_name(one.tensor.dtype))
            await self._read_whole(fqn, held)
            self._held[fqn] = held
        first = one.begin // itemsize(one.tensor.dtype)
        flat = held.reshape(-1)[first : first + into.numel()]
        await io_threads().run(into.copy_, flat)
        # Windows are filled in the order of the file, so this is the last slice of the tensor.
        if one.begin + one.nbytes == one.tensor.nbytes:
            del self._held[fqn]

    async def _read_whole(self, fqn: str, into: torch.Tensor) -> None:
        source = self.source.tensors[fqn]
        found = None if source.located is None else {fqn: source.located}
        wanted = [Wanted(fqn, source.entry, Box.whole(source.entry.shape), into)]
        await self._reader().read(wanted, own=self.source.manifest.own, found=found)

    def _reader(self) -> Reader:
        return Reader(self.source.files, self.verify, scratch=self._scratch)

    async def _report_progress(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self.progress is not None:
            await run_by_caller(self.progress, self._done_bytes, self.total_bytes)


def _slices_of(file: TargetFile, index: int) -> tuple[list[Slice], int]:
    """Return the slices in a window of a file, and their size in bytes."""
    slices = collected(file.slices(index))
    return slices, sum(one.nbytes for one in slices)


async def holds(location: Location, save_id: str) -> bool:
    """Return whether the checkpoint of this save is at ``location``. True also if that cannot be found out."""
    async with aclosing(location.source()) as source:
        try:
            marker = await source.marker()
        except FileNotFoundError:
            return False
        except SidestreamError:
            return True
    return marker is not None and marker.save_id == save_id


async def newer_generation(store: Store, step: int | None, generation: int) -> str | None:
    """Return the directory of a committed generation of ``step`` that is newer than ``generation``, if there is one."""
    for found in await io_threads().run(Step.among, await store.directories()):
        if found.step == step and found.generation > generation and await found.current(store) is not None:
            return found.name
    return None
