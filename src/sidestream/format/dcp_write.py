"""``.metadata`` as stock DCP reads it, emitted by hand: no torch, no object graph, and no long hold of the GIL.

DCP unpickles one ``Metadata`` object. Ours has the classes of torch alone in it, and one attribute more, a string,
which stock DCP ignores: the commit marker (``marker.py``). It is emitted last, so that a reader finds it in the tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from . import pickles as p
from .marker import Marker, marker_attribute
from .records import Chunk, DictKey, EmptyEntry, Entry, Key, TensorEntry, ValueEntry

__all__ = ["dcp_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_BUILD, _NEW, _POP, _MEMOIZE = b"b", b")\x81", b"0", b"\x94"


class _Names:
    """The globals that every entry needs, memoized once at the start: ``_prelude`` and these indices go together."""

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


def dcp_metadata(entries: Mapping[str, Entry], marker: Marker) -> Iterator[bytes]:
    """The file, in many small pieces."""
    # Only those in use: a version of torch that lacks one of the others reads the file too.
    names = sorted({entry.dtype for entry in entries.values() if isinstance(entry, TensorEntry)})
    dtypes = {name: b"h%c" % (_Names.first_dtype + index) for index, name in enumerate(names)}
    yield b"\x80\x04"
    yield _prelude(names)
    yield _Names.metadata + _NEW + b"}(" + p.text("state_dict_metadata") + b"}("
    for fqn, entry in entries.items():
        if isinstance(entry, TensorEntry):
            yield p.text(fqn) + _tensor(entry, dtypes[entry.dtype])
        elif isinstance(entry, ValueEntry):
            yield p.text(fqn) + _Names.value + _NEW
    yield b"u" + p.text("planner_data") + b"}("
    for fqn, entry in entries.items():
        if not isinstance(entry, EmptyEntry):
            yield p.text(fqn) + p.tuple_of(*map(_path_item, entry.path))
    yield b"u" + p.text("storage_data") + b"}("
    for fqn, entry in entries.items():
        if isinstance(entry, TensorEntry):
            for number, chunk in enumerate(entry.chunks):
                yield _index(fqn, chunk, number) + _info(chunk.file, chunk.item_offset, chunk.item_bytes)
        elif isinstance(entry, ValueEntry):
            yield _index(fqn, None, None) + _info(entry.file, entry.item_offset, entry.item_bytes)
    yield b"u" + p.text("storage_meta") + p.NONE + p.text("version") + p.text("1.0.0")
    yield marker_attribute(marker)


def _prelude(dtypes: Iterable[str]) -> bytes:
    globals_ = [p.global_(module, name) for module, name in _Names.names]
    globals_.append(p.call(p.global_("torch.serialization", "_get_layout"), p.text("torch.strided")))
    globals_.append(p.call(p.global_(_METADATA, "_MEM_FORMAT_ENCODING"), p.integer(0)))
    globals_.extend(p.global_("torch", dtype) for dtype in dtypes)
    return b"".join(pickled + _MEMOIZE + _POP for pickled in globals_)


def _size(sizes: tuple[int, ...]) -> bytes:
    return p.call(_Names.size, p.tuple_of(*map(p.integer, sizes)))


def _object(kind: bytes, state: bytes) -> bytes:
    return kind + _NEW + state + _BUILD


def _tensor(entry: TensorEntry, dtype: bytes) -> bytes:
    properties = _object(_Names.properties, p.tuple_of(dtype, _Names.layout, p.FALSE, _Names.memory_format, p.FALSE))
    chunks = (
        _object(_Names.chunk, _state(offsets=_size(chunk.offsets), sizes=_size(chunk.sizes))) for chunk in entry.chunks
    )
    return _object(_Names.tensor, _state(properties=properties, size=_size(entry.shape), chunks=p.list_of(chunks)))


def _index(fqn: str, chunk: Chunk | None, number: int | None) -> bytes:
    offset = p.NONE if chunk is None else _size(chunk.offsets)
    position = p.NONE if number is None else p.integer(number)
    return _object(_Names.index, _state(fqn=p.text(fqn), offset=offset, index=position))


def _info(file: str, offset: int, nbytes: int) -> bytes:
    return _object(_Names.info, _state(relative_path=p.text(file), offset=p.integer(offset), length=p.integer(nbytes)))


def _state(**attributes: bytes) -> bytes:
    return p.dict_of((p.text(name), value) for name, value in attributes.items())


def _path_item(key: Key) -> bytes:
    """DCP keeps list indices as integers and turns every dict key into a string."""
    if isinstance(key, DictKey):
        return p.text(str(key.value))
    return p.text(key) if isinstance(key, str) else p.integer(key)
