"""The files of a conversion. They consist of windows, which are filled with payloads and then sealed with frames."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from .._format.checksum import crc32
from .._format.records import (
    BLOCK_BYTES,
    CompositeEntry,
    EmptyEntry,
    Entry,
    Key,
    Node,
    TensorEntry,
    ValueEntry,
)
from .._format.safetensors import INDEX_NAME
from .._format.shard import Sealer, ShardLayout
from .._format.torch_file import TorchFile
from .._format.values import ValueItems
from .._layout.assemble import assemble
from .._runtime.threads import Stop, holding_gil, paced, wait_for_change
from .safetensors import ALIGN_BYTES, Named, alignment, file_names, header_of, index_of, shards_of_sizes
from .windows import WindowedFile


@dataclass(frozen=True, slots=True)
class OutTensor(Named):
    """A tensor to write. Tensors with one ``identity`` are tied."""

    path: tuple[Key, ...]
    identity: object


@dataclass(frozen=True, slots=True)
class OutValue:
    fqn: str
    path: tuple[Key, ...]
    node: Node
    empty: bool = False


class Slice(NamedTuple):
    """The bytes ``begin`` to ``begin + nbytes`` of the payload of ``tensor``, for byte ``at`` of a window."""

    tensor: OutTensor
    begin: int
    nbytes: int
    at: int


def _distinct(tensors: Sequence[OutTensor]) -> list[OutTensor]:
    """Return the tensors, of tied ones only the first."""
    found: dict[object, OutTensor] = {}
    for one in tensors:
        found.setdefault(one.identity, one)
    return list(found.values())


class TargetFile(WindowedFile, Protocol):
    def slices(self, index: int) -> Iterator[Slice]:
        """Yield the slices of payloads in a window, which have to be filled before it is sealed."""


Piece = bytes | OutTensor | Callable[[Mapping[int, int]], bytes]


class Written:
    """A file of pieces: known bytes, payloads, and bytes that depend on the checksums of earlier payloads."""

    aligned = False

    def __init__(self, name: str, pieces: Sequence[tuple[int, int, Piece]], window_bytes: int) -> None:
        self.name = name
        self.nbytes = pieces[-1][0] + pieces[-1][1] if pieces else 0
        self.windows: list[tuple[int, int]] = []
        self._parts: list[list[tuple[int, int, int, Piece, int]]] = []
        """For each window: index, begin, nbytes and piece, and the place in the window."""
        self._cut(pieces, window_bytes)
        self._turn = 0
        self._changed = threading.Condition()
        self._crcs: dict[int, int] = {}

    def _cut(self, pieces: Sequence[tuple[int, int, Piece]], window_bytes: int) -> None:
        """Divide the pieces into windows. Payloads are cut at multiples of 1 MiB, which are whole elements."""
        start = 0
        parts: list[tuple[int, int, int, Piece, int]] = []
        number = -1
        for offset, nbytes, piece in pieces:
            number += isinstance(piece, OutTensor)
            begin = 0
            while begin < nbytes:
                room = start + window_bytes - offset - begin
                # What fits is taken whole. Otherwise the window takes a multiple of 1 MiB, which is whole elements of
                # any dtype and whole blocks of checksums. If not even that fits, the window ends here.
                take = min(nbytes - begin, room if room >= nbytes - begin else room // BLOCK_BYTES * BLOCK_BYTES)
                if take <= 0:
                    self._close(start, offset + begin, parts)
                    start, parts = offset + begin, []
                    continue
                parts.append((number, begin, take, piece, offset + begin - start))
                begin += take
        self._close(start, self.nbytes, parts)

    def _close(self, start: int, end: int, parts: list[tuple[int, int, int, Piece, int]]) -> None:
        if end > start or not self.windows:
            self.windows.append((start, end))
            self._parts.append(parts)

    def slices(self, index: int) -> Iterator[Slice]:
        for _, begin, nbytes, piece, at in self._parts[index]:
            if isinstance(piece, OutTensor):
                yield Slice(piece, begin, nbytes, at)

    def seal(self, index: int, view: memoryview, stop: Stop) -> None:
        with self._changed:
            # Windows are sealed by the threads that write them, each in its turn. The checksum of a payload that
            # continues from one window to the next is computed in a chain, and a zip has its directory, with all
            # checksums, at the end.
            while self._turn != index:
                wait_for_change(self._changed, stop, "the part of a file before")
        for number, begin, nbytes, piece, at in paced(self._parts[index]):
            if isinstance(piece, OutTensor):
                self._crcs[number] = crc32(view[at : at + nbytes], self._crcs.get(number, 0))
            else:
                content = piece if isinstance(piece, bytes) else piece(self._crcs)
                view[at : at + nbytes] = content[begin : begin + nbytes]
        with self._changed:
            self._turn += 1
            self._changed.notify_all()


# --- torch.save -----------------------------------------------------------------------------------------------------

_ALIGN_BYTES = 64


def torch_file(
    name: str, tensors: Sequence[OutTensor], values: Sequence[OutValue], order: Sequence[str], window_bytes: int
) -> Written:
    """Return one file with all tensors and values, nested by their paths and in this order. Tied tensors share a
    storage."""
    # As ``torch.save`` does: tied tensors refer to one storage, and ``torch.load`` ties them again.
    first = _distinct(tensors)
    numbers = {one.identity: number for number, one in enumerate(first)}
    file = TorchFile([one.nbytes for one in first])
    leaves: dict[str, tuple[tuple[Key, ...], object]] = {}
    for one in tensors:
        leaves[one.fqn] = (one.path, file.tensor(one.dtype, one.shape, numbers[one.identity]))
    for value in values:
        leaves[value.fqn] = (value.path, file.empty if value.empty else file.value(value.node))
    archive = file.archive(assemble(leaves[fqn] for fqn in order), _ALIGN_BYTES)
    pieces = [
        (offset, nbytes, first[content] if isinstance(content, int) else content)
        for offset, nbytes, content in archive.pieces
    ]
    return Written(name, pieces, window_bytes)


# --- safetensors ----------------------------------------------------------------------------------------------------


class SafetensorsFile(NamedTuple):
    """The layout of a file: its header, and the tensors after it without gaps."""

    name: str
    header: bytes
    tensors: list[OutTensor]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(one.nbytes for one in self.tensors)

    @property
    def late(self) -> list[OutTensor]:
        """The tensors that come later in the file than in the order of the export."""
        return [one for one in self.tensors if alignment(one.nbytes) < ALIGN_BYTES]


def safetensors_layout(
    tensors: Sequence[OutTensor], name: str | None, shard_bytes: int | None, aliases: Mapping[str, str]
) -> tuple[list[SafetensorsFile], dict[str, bytes]]:
    """Return one file called ``name``, or files as transformers names them, and the index of these if there are
    several. ``aliases``: further names of the tensors. Raises ``UnsupportedTensorError``."""
    shards = shards_of_sizes(tensors, None if name is not None else shard_bytes)
    names = file_names(len(shards)) if name is None else [name]
    files = [SafetensorsFile(file, header_of(shard, aliases), shard) for file, shard in zip(names, shards, strict=True)]
    return files, {INDEX_NAME: index_of(shards, names)} if len(files) > 1 else {}


def safetensors_files(
    tensors: Sequence[OutTensor],
    name: str | None,
    shard_bytes: int | None,
    window_bytes: int,
    aliases: Mapping[str, str],
    others: Mapping[str, bytes],
) -> list[Written]:
    """Return ``others`` and the files of ``safetensors_layout``. Files appear one by one on object storage, so the one
    that readers look for is the last."""
    laid, index = safetensors_layout(tensors, name, shard_bytes, aliases)
    files = [_small(*one, window_bytes) for one in others.items()]
    for file in laid:
        pieces: list[tuple[int, int, Piece]] = [(0, len(file.header), file.header)]
        for one in file.tensors:
            pieces.append((pieces[-1][0] + pieces[-1][1], one.nbytes, one))
        files.append(Written(file.name, pieces, window_bytes))
    return [*files, *(_small(*one, window_bytes) for one in index.items())]


def _small(name: str, content: bytes, window_bytes: int) -> Written:
    return Written(name, [(0, len(content), content)], max(window_bytes, len(content)))


# --- a checkpoint for DCP ---


class _DcpShard:
    """A shard file for DCP."""

    aligned = True

    def __init__(self, name: str, layout: ShardLayout, tensors: Sequence[OutTensor]) -> None:
        self.name, self.nbytes = name, layout.nbytes
        self.windows = [(window.start, window.end) for window in layout.windows]
        self.layout = layout
        self.sealer = Sealer(layout, burst=holding_gil)
        self._tensors = tensors

    def slices(self, index: int) -> Iterator[Slice]:
        for number, at, nbytes, begin in self.layout.payloads_in(self.layout.windows[index]):
            yield Slice(self._tensors[number], begin, nbytes, at)

    def seal(self, index: int, view: memoryview, stop: Stop) -> None:
        wait = partial(wait_for_change, stop=stop, name="checksums of the windows before")
        for _ in paced(self.sealer.seal(view, self.layout.windows[index], wait=wait)):
            stop.check()


class DcpTarget:
    """A checkpoint for DCP: its shard files, and its entries when they have been written."""

    def __init__(
        self,
        tensors: Sequence[OutTensor],
        values: Sequence[OutValue],
        composites: Mapping[str, CompositeEntry],
        shard_bytes: int,
        window_bytes: int,
    ) -> None:
        self._tensors, self._values = tensors, values
        items = _distinct(tensors)
        looks = ((one.dtype, one.shape) for one in items)
        layouts = ShardLayout.lay_out(looks, shard_bytes, window_bytes)
        self.shards: list[_DcpShard] = []
        self._places: dict[object, tuple[int, int]] = {}
        for layout in layouts:
            first, items = items[: len(layout.items)], items[len(layout.items) :]
            for number, one in enumerate(first):
                self._places[one.identity] = (len(self.shards), number)
            self.shards.append(_DcpShard(f"__0_{len(self.shards) + 1}.distcp", layout, first))
        self._entries: dict[str, ValueEntry | EmptyEntry | CompositeEntry] = dict(composites)
        contents = ValueItems()
        for value in values:
            if value.empty:
                self._entries[value.fqn] = EmptyEntry(value.path)
                continue
            place = contents.add(value.fqn, value.node)
            self._entries[value.fqn] = ValueEntry(value.path, "__0_0.distcp", *place, value.node)
        contents.check()
        self.values = contents.content()

    @property
    def data_files(self) -> list[TargetFile]:
        files: list[TargetFile] = []
        if self.values:
            files.append(Written("__0_0.distcp", [(0, len(self.values), self.values)], max(len(self.values), 1)))
        return [*files, *self.shards]

    def crcs(self, names: Mapping[str, str]) -> dict[str, int]:
        """Return the CRC of each file, when all windows have been sealed. ``names``: the names of the files."""
        found = {names[shard.name]: shard.sealer.sums.whole(shard.layout) for shard in self.shards}
        return {**found, **({names["__0_0.distcp"]: crc32(self.values)} if self.values else {})}

    def entries(self, order: Sequence[str], names: Mapping[str, str]) -> dict[str, Entry]:
        """Return the entries by FQN in this ``order``, when all windows have been sealed. ``names``: the names of the
        files."""
        found: dict[str, Entry] = {
            fqn: replace(one, file=names[one.file]) if isinstance(one, ValueEntry) else one
            for fqn, one in self._entries.items()
        }
        for one in self._tensors:
            shard, number = self._places[one.identity]
            file = self.shards[shard]
            placed, crcs = file.layout.items[number], file.sealer.sums.crcs[number]
            chunk = placed.chunk((0,) * len(one.shape), one.shape, names[file.name], crcs)
            found[one.fqn] = TensorEntry(one.path, one.dtype, one.shape, (chunk,))
        return {fqn: found[fqn] for fqn in order}
