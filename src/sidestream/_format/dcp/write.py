"""``.metadata`` as stock DCP reads it, emitted by hand: no torch, no object graph, and no long hold of the GIL.

DCP unpickles one ``Metadata`` object. Ours has the classes of torch alone in it, and one attribute more, a string,
which stock DCP ignores: the commit marker (``marker.py``). It is emitted last, so that a reader finds it in the tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TypeAlias

from ..marker import Marker, marker_attribute
from ..pickles import write as p
from ..records import CompositeEntry, DictKey, EmptyEntry, Entry, Key, TensorEntry, ValueEntry, written_dtype

__all__ = [
    "NAMES",
    "MetadataHead",
    "chunk_at",
    "chunk_list",
    "dtypes_of",
    "index_of",
    "info_of",
    "metadata_end",
    "path_item",
    "places_of",
    "prelude",
    "tensor_of",
]


_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""
_BUILD, _NEW, _POP, _MEMOIZE = b"b", b")\x81", b"0", b"\x94"


class NAMES:
    """The globals that every entry needs, memoized once at the start: ``prelude`` and these indices go together."""

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
    """Up to the places: what the entries, of which the tensors have these ``dtypes``, are and what they are called."""

    def __init__(self, dtypes: Iterable[str]) -> None:
        # Only those in use: a version of torch that lacks one of the others reads the file too.
        names = sorted(set(map(written_dtype, dtypes)))
        self._dtypes = {name: b"h%c" % (NAMES.first_dtype + index) for index, name in enumerate(names)}
        begin = NAMES.metadata + _NEW + b"}(" + p.text("state_dict_metadata") + b"}("
        self._entries = [b"\x80\x04", prelude(names), begin]
        self._paths = [b"u" + p.text("planner_data") + b"}("]

    def add(self, fqn: str, entry: Entry) -> None:
        """The entries come in their order."""
        if isinstance(entry, EmptyEntry | CompositeEntry):
            return
        name = p.text(fqn)
        if isinstance(entry, TensorEntry):
            boxes = tuple([(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
            self._entries.append(name + _tensor(self._dtypes[written_dtype(entry.dtype)], entry.shape, boxes))
        else:
            self._entries.append(name + NAMES.value + _NEW)
        self._paths.append(name + p.tuple_of(*map(path_item, entry.path)))

    def pieces(self) -> list[bytes]:
        return [*self._entries, *self._paths, b"u" + p.text("storage_data") + b"}("]


def dtypes_of(entries: Iterable[Entry]) -> set[str]:
    return {entry.dtype for entry in entries if isinstance(entry, TensorEntry)}


def places_of(fqn: str, entry: Entry) -> bytes:
    """Where an entry's bytes are."""
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
    """What comes after the places."""
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
    """The opcodes that make an object of the class ``kind``. ``state`` has the names and values of its attributes,
    alternately."""
    return kind + _NEW + b"}(" + b"".join(state) + b"u" + _BUILD


@lru_cache(maxsize=65536)  # a training run has few distinct ones, and 10,000 tensors
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
    """DCP keeps list indices as integers and turns every dict key into a string."""
    if isinstance(key, DictKey):
        return p.text(str(key.value))
    return p.text(key) if isinstance(key, str) else p.integer(key)
