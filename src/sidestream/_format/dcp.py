"""Writers of ``.metadata`` for stock DCP, for one process and for several ranks. They need no torch and no object
graph, and do not hold the GIL for long.

DCP unpickles one ``Metadata`` object. This one has only classes of torch, and one more attribute, a string that stock
DCP ignores: the commit marker (``marker.py``). It is emitted last, so that a reader finds it in the tail.

Two saves of one plan differ only in checksums and plain values. All other bytes are rendered once for each plan. For
10,000 tensors that would take 0.15 s of the trainer's interpreter in every save. Of a million items, which take one
process half a minute, each of a thousand ranks emits the places of its own in some milliseconds, and rank 0 joins the
results. A list of chunks that several tensors share is in the file once, and the others refer to it.
"""

from __future__ import annotations

import struct
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import TypeAlias

from .._runtime.pauses import chunked, collected, pause_point
from . import pickles as p
from .manifest import entry_line, head_line, line_around_checksums, metadata_line
from .marker import TAIL_BYTES, Marker, find_marker, marker_attribute
from .records import (
    Chunk,
    CompositeEntry,
    DictKey,
    EmptyEntry,
    Entry,
    Key,
    Manifest,
    Row,
    TensorEntry,
    ValueEntry,
    stored,
    written_dtype,
)
from .shard import BlockSums
from .shared import Shared

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""
_BUILD, _NEW, _POP, _MEMOIZE = b"b", b")\x81", b"0", b"\x94"


class NAMES:
    """The globals that entries need. ``prelude`` memoizes them at these indices."""

    names = (
        (_METADATA, "Metadata"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "MetadataIndex"),
        (_FILESYSTEM, "_StorageInfo"),
        ("torch", "Size"),
    )
    metadata, tensor, value, chunk, properties, index, info, size = (b"h%c" % i for i in range(len(names)))
    layout, memory_format = b"h%c" % len(names), b"h%c" % (len(names) + 1)
    first_dtype = len(names) + 2


class MetadataHead:
    """The file up to the places: kinds, shapes and names of the entries. The tensors have these ``dtypes``."""

    def __init__(self, dtypes: Iterable[str]) -> None:
        # Only dtypes in use are named, so that a version of torch without one of the others reads the file.
        names = sorted(set(map(written_dtype, dtypes)))
        self.dtypes = {name: b"h%c" % (NAMES.first_dtype + index) for index, name in enumerate(names)}
        # The pickle is written by hand. ``pickle`` would need objects of DCP's classes, whose import takes a second,
        # and would hold the GIL for all of them.
        begin = NAMES.metadata + _NEW + b"}(" + p.text("state_dict_metadata") + b"}("
        self._entries = [b"\x80\x04", prelude(names), begin]
        self._paths = [b"u" + p.text("planner_data") + b"}("]

    def add(self, fqn: str, entry: Entry) -> None:
        """Add an entry. Entries are added in their order."""
        if isinstance(entry, TensorEntry):
            boxes = tuple([(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
            self.put(fqn, entry.path, _tensor(self.dtypes[entry.written_dtype], entry.shape, boxes))
        elif not isinstance(entry, EmptyEntry | CompositeEntry):
            self.put(fqn, entry.path, NAMES.value + _NEW)

    def put(self, fqn: str, path: tuple[Key, ...], described: bytes) -> None:
        name = p.text(fqn)
        self._entries.append(name + described)
        self._paths.append(name + p.tuple_of(*map(path_item, path)))

    def pieces(self) -> list[bytes]:
        return [*self._entries, *self._paths, b"u" + p.text("storage_data") + b"}("]


def _dtypes_of(entries: Iterable[Entry | Row]) -> set[str]:
    return {one[0] if isinstance(one, tuple) else one.dtype for one in entries if isinstance(one, (tuple, TensorEntry))}


def places_of(fqn: str, entry: Entry) -> bytes:
    """Return the places of the bytes of an entry."""
    if isinstance(entry, TensorEntry):
        name = p.text(fqn)
        return b"".join(
            index_of(name, chunk.offsets, number) + info_of(chunk.file, chunk.item_offset, chunk.item_bytes)
            for number, chunk in enumerate(entry.chunks)
        )
    if isinstance(entry, ValueEntry):
        return index_of(p.text(fqn), None, None) + info_of(entry.file, entry.item_offset, entry.item_bytes)
    return b""


def metadata_end(marker: Marker) -> Iterator[bytes]:
    """Yield the end of the file, after the places."""
    yield b"u" + p.text("storage_meta") + p.NONE + p.text("version") + p.text("1.0.0")
    yield marker_attribute(marker)


def prelude(dtypes: Iterable[str]) -> bytes:
    globals_ = [p.global_(module, name) for module, name in NAMES.names]
    globals_.append(p.call(p.global_("torch.serialization", "_get_layout"), p.text("torch.strided")))
    globals_.append(p.call(p.global_(_METADATA, "_MEM_FORMAT_ENCODING"), p.integer(0)))
    globals_.extend(p.global_("torch", dtype) for dtype in dtypes)
    return b"".join(pickled + _MEMOIZE + _POP for pickled in globals_)


@lru_cache(maxsize=65536)
def _size(sizes: tuple[int, ...]) -> bytes:
    return p.call(NAMES.size, p.tuple_of(*map(p.integer, sizes)))


def _object(kind: bytes, *state: bytes) -> bytes:
    """Pickle an instance. ``state`` has the names and values of its attributes in turn."""
    return kind + _NEW + b"}(" + b"".join(state) + b"u" + _BUILD


@lru_cache(maxsize=65536)  # a training run has 10,000 tensors, but few distinct ones
def _tensor(dtype: bytes, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> bytes:
    return tensor_of(dtype, shape, chunk_list(boxes))


def tensor_of(dtype: bytes, shape: tuple[int, ...], chunks: bytes) -> bytes:
    values = p.tuple_of(dtype, NAMES.layout, p.FALSE, NAMES.memory_format, p.FALSE)
    properties = NAMES.properties + _NEW + values + _BUILD
    return _object(NAMES.tensor, _PROPERTIES, properties, _SIZE, _size(shape), _CHUNKS, chunks)


def chunk_list(boxes: Iterable[Box]) -> bytes:
    return p.list_of(chunk_at(offsets, sizes) for offsets, sizes in boxes)


def chunk_at(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bytes:
    return _object(NAMES.chunk, _OFFSETS, _size(offsets), _SIZES, _size(sizes))


def index_of(fqn: bytes, offsets: tuple[int, ...] | None, number: int | None) -> bytes:
    return _object(NAMES.index, _FQN, fqn, _chunk_of(offsets, number))


@lru_cache(maxsize=65536)
def _chunk_of(offsets: tuple[int, ...] | None, number: int | None) -> bytes:
    offset = p.NONE if offsets is None else _size(offsets)
    position = p.NONE if number is None else p.integer(number)
    return _OFFSET + offset + _INDEX + position


def info_of(file: str, offset: int, nbytes: int) -> bytes:
    return _object(NAMES.info, _path_of(file), _OFFSET, p.integer(offset), _LENGTH, p.integer(nbytes))


@lru_cache
def _path_of(file: str) -> bytes:
    return _PATH + p.text(file)


_FQN, _INDEX, _OFFSET, _LENGTH, _PATH = map(p.text, ("fqn", "index", "offset", "length", "relative_path"))
_OFFSETS, _SIZES, _PROPERTIES, _SIZE, _CHUNKS = map(p.text, ("offsets", "sizes", "properties", "size", "chunks"))


def path_item(key: Key) -> bytes:
    """Pickle a step of a path as DCP does: list indices are integers, and every dict key is a string."""
    if isinstance(key, DictKey):
        return p.text(str(key.value))
    return p.text(key) if isinstance(key, str) else p.integer(key)


_MANY = 1024  # items that take 0.1 us each, between two points for pauses
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class Described:
    """The rendered form of ``count`` entries: their lines in the manifest, and ``.metadata`` up to the end of the
    places, each in pieces, which are joined once. ``composite``: whether composite tensors are among them."""

    count: int
    lines: Sequence[bytes]
    places: Sequence[bytes]
    composite: bool

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Described:
        """Render the entries for both files."""
        lines = collected((entry_line(fqn, entry) for fqn, entry in entries.items()), 1)
        composite = any(isinstance(one, CompositeEntry) for one in stored(entries).values())
        return cls(len(entries), lines, _places(entries), composite)

    def manifest(self, manifest: Manifest, torch_version: str) -> bytes:
        """Return the whole file. ``manifest`` has everything except the entries; its own entries are ignored."""
        head = head_line(manifest, torch_version, self.count, composite=self.composite)
        return b"".join([head, *self.lines, metadata_line(manifest)])

    def metadata(self, marker: Marker) -> bytes:
        """Return the whole ``.metadata``."""
        return b"".join([*self.places, *metadata_end(marker)])


def is_metadata_of(entries: Mapping[str, Entry], raw: bytes | bytearray) -> bool:
    """Return whether ``raw`` is what this version writes as ``.metadata`` for these entries and the marker in ``raw``.
    Raises ``CorruptCheckpointError`` for a damaged marker."""
    marker = find_marker(bytes(raw[-TAIL_BYTES:]))
    return marker is not None and raw == b"".join([*_places(entries), *metadata_end(marker)])


def _places(entries: Mapping[str, Entry]) -> list[bytes]:
    head = MetadataHead(_dtypes_of(stored(entries).values()))
    places: list[bytes] = []
    for fqn, entry in entries.items():
        pause_point()
        head.add(fqn, entry)
        places.append(places_of(fqn, entry))
    return [*head.pieces(), *places]


class Template:
    """The result of ``Described.of`` with holes: for values and composite tensors, which are rendered for each save,
    and for the checksums of tensors. Each tensor has one chunk without checksums."""

    def __init__(self, items: Sequence[int]) -> None:
        self._items = items
        self._in_order = list(items) == list(range(len(items)))  # each tensor has an item of its own
        self._lines: list[bytes] = []  # the bytes before each hole, and after the last one; tensors have one each
        self._values: list[int] = []  # the holes for values and composite tensors
        self._places: list[bytes] = []  # the bytes before the place of each value, and after the last one
        self._count = 0
        self._composite = False
        self._head = b""

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Entry]], dtypes: Iterable[str], items: Sequence[int]) -> Template:
        """Render ``entries``, whose tensors have these ``dtypes``. ``items`` has, for each tensor in order, the index
        of the item with its checksums. The template does not refer to ``entries``, because the garbage collector would
        traverse 10,000 of them repeatedly."""
        made = cls(items)
        head = MetadataHead(dtypes)
        line = b""
        places: list[bytes] = []
        for fqn, entry in entries:
            pause_point()
            made._count += 1
            head.add(fqn, entry)
            if isinstance(entry, ValueEntry | CompositeEntry):
                made._composite |= isinstance(entry, CompositeEntry)
                made._values.append(len(made._lines))
                made._lines.append(line)
                made._places.append(b"".join(places))
                line, places = b"", []
            elif isinstance(entry, TensorEntry):
                before, after = line_around_checksums(fqn, entry)
                made._lines.append(line + before)
                places.append(places_of(fqn, entry))
                line = after
            else:
                line += entry_line(fqn, entry)
        made._lines.append(line)
        made._places.append(b"".join(places))
        made._head = b"".join(head.pieces())
        return made

    def fill(self, values: Mapping[str, ValueEntry | CompositeEntry], sums: Sequence[BlockSums]) -> Described:
        """Fill the holes. ``values`` has the values and composite tensors in the order of the entries. Takes some 0.2
        us for each tensor."""
        # Nothing but checksums and values differs from the save before with the same names, so a save of 10,000 tensors
        # joins pieces that exist.
        checksums = _encoded(sums)
        if not self._in_order:
            checksums = collected(map(checksums.__getitem__, self._items), _MANY)
        holes: list[bytes] = []
        done = 0  # tensors
        for hole, (fqn, value) in zip(self._values, values.items(), strict=True):
            before = hole - len(holes)
            holes += checksums[done : done + before]
            holes.append(entry_line(fqn, value))
            done += before
            pause_point()
        holes += checksums[done:]
        places = collected(map(places_of, values.keys(), values.values()))
        written = [self._head, *_woven(self._places, places)]
        return Described(self._count, _woven(self._lines, holes), written, self._composite)


def _woven(pieces: Sequence[bytes], holes: Sequence[bytes]) -> list[bytes]:
    woven = [b""] * (2 * len(holes) + 1)
    woven[::2], woven[1::2] = pieces, holes
    return woven


def _encoded(sums: Iterable[BlockSums]) -> list[bytes]:
    """Return the checksums of each item as they are between the quotation marks of a line."""
    found: list[bytes] = []
    for one in sums:
        if one.digests:
            both = zip(map(_base64, one.crcs), map(_base64, one.digests), strict=True)
            found += collected((crcs + b'","' + digests for crcs, digests in both), _MANY // 4)
        else:
            for some in chunked(one.crcs, _MANY):
                found += _encoded_crcs(some)
                pause_point()
    return found


def _encoded_crcs(crcs: list[bytes]) -> Iterable[bytes]:
    """Return ``crcs`` in base64. Those of items with one block, as small ones are, are encoded together."""
    if set(map(len, crcs)) != {_CRC_BYTES}:
        return map(_base64, crcs)
    raw = b"".join(crcs)
    padded = bytearray(6 * len(crcs))  # whole groups of three bytes
    for byte in range(_CRC_BYTES):
        padded[byte::6] = raw[byte::_CRC_BYTES]
    encoded = bytearray(_base64(padded))
    encoded[6::8] = encoded[7::8] = b"=" * len(crcs)  # in place of the last byte of padding
    return _cut(len(crcs)).unpack(encoded)


@lru_cache(maxsize=16)
def _cut(count: int) -> Struct:
    return Struct("8s" * count)


def _base64(raw: bytes | bytearray) -> bytes:
    return b2a_base64(raw, newline=False)


def described(shared: Shared) -> bytes:
    """Return the beginning of the file, up to the places. It is the same in every save of one plan."""
    head = MetadataHead(row.dtype for row in shared.rows if row.kind == "tensor")
    first = NAMES.first_dtype + len(head.dtypes)  # the memo index of the first list of chunks
    known: dict[int, int] = {}
    for row in shared.rows:
        pause_point()
        if row.kind == "tensor":
            if row.pattern in known:
                chunks = b"j" + struct.pack("<I", known[row.pattern])
            else:
                known[row.pattern] = first + len(known)
                boxes = (chunk_at(one.offsets, one.sizes) for one in shared.patterns[row.pattern])
                chunks = p.list_of(collected(boxes)) + _MEMOIZE
            head.put(row.fqn, row.path, tensor_of(head.dtypes[written_dtype(row.dtype)], row.shape, chunks))
        elif row.kind == "value":  # DCP knows no others
            head.put(row.fqn, row.path, NAMES.value + _NEW)
    return b"".join(head.pieces())


def places_of_rank(
    chunks: Iterable[tuple[str, Chunk]], values: Iterable[tuple[str, str, int, int]]
) -> tuple[bytes, bytes]:
    """Return the places of the chunks, and of the values, of one rank. ``chunks`` has pairs of FQN and chunk, and
    ``values`` has FQN, file, offset and length of each."""
    of_chunks = (
        index_of(p.text(fqn), chunk.offsets, None) + info_of(chunk.file, chunk.item_offset, chunk.item_bytes)
        for fqn, chunk in chunks
    )
    of_values = (index_of(p.text(fqn), None, None) + info_of(file, *place) for fqn, file, *place in values)
    return b"".join(collected(of_chunks)), b"".join(of_values)
