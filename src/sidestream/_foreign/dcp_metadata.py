"""Readers of stock DCP's ``.metadata``. They decode it as data, so that nothing that it names is imported or run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .._format.marker import ATTRIBUTE, METADATA_NAME, attribute_end
from .._format.records import (
    DTYPES,
    MAX_FQN_CHARS,
    MAX_PATH_DEPTH,
    MAX_RANK,
    Chunk,
    CompositeEntry,
    DictKey,
    EmptyEntry,
    Entry,
    Key,
    Manifest,
    OpaqueEntry,
    TensorEntry,
    ValueEntry,
    itemsize,
    name_of,
)
from .._runtime.pauses import collected, paced, pause_point
from ..errors import CorruptCheckpointError, UnsupportedCheckpointError
from .pickles.tensors import DtypeNames, is_dtype
from .pickles.unpickle import Global, Limits, Pairs, PickledCall, decode
from .transforms import check_transforms

_METADATA = "torch.distributed.checkpoint.metadata"
_TENSOR = f"{_METADATA}.TensorStorageMetadata"
_LEGACY = "torch.distributed._shard.sharded_tensor.metadata"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"

_GLOBALS = DtypeNames(
    frozenset(
        {f"{_METADATA}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")}
        | {f"{_METADATA}.{name}" for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")}
        | {f"{_METADATA}._MEM_FORMAT_ENCODING", f"{_LEGACY}.TensorProperties", f"{_LEGACY}.MEM_FORMAT_ENCODING"}
        | {f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")}
        | {_STORAGE_INFO, "torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"}
        # early releases of CPython 3.11 pickle a member of an enum with it; here it is only a name
        | {"builtins.getattr"}
    )
)
_PROPERTIES = frozenset({f"{_METADATA}.TensorProperties", f"{_LEGACY}.TensorProperties"})

# The structure of the file is fixed and no function here recurses, so nesting is not checked. Parts may be shared and
# are traversed for each entry. Their sizes are limited, so that a small file cannot cause a very long traversal.
_LIMITS = Limits(integer_bytes=9, depth=None)
_MAX_ATTRIBUTES = 64
_FREED_IN_A_STEP = 64

_Index = tuple[str, str]
"""An FQN and the name of the offsets (``name_of``), which is empty for a value."""


@dataclass(frozen=True, slots=True)
class _Location:
    file: str
    offset: int
    length: int
    transform: str | None
    hint: object
    """The number that it gives its chunk."""


def read_dcp_metadata(data: bytes | bytearray) -> Manifest:
    """Return the checkpoint that a ``.metadata`` file describes. It has an empty ``save_id`` and no ``files``, and has
    not been validated.

    Unknown attributes are ignored. Without ``planner_data`` the path of an entry is its FQN. A tensor of a dtype that
    this version does not read becomes an ``OpaqueEntry``.

    Raises ``CorruptCheckpointError`` if the file is malformed or has no location for a chunk, ``UnsafeObjectError`` if
    it names a type that is not part of the format, and ``UnsupportedCheckpointError`` for unknown transforms.
    """
    metadata = _attributes(decode(data, _GLOBALS, _LIMITS), f"{_METADATA}.Metadata")
    locations = _locations(metadata.get("storage_data"))
    entries = _entries(metadata, locations)
    for value in metadata.values():  # to free 10,000 records at once would hold the GIL for milliseconds
        while isinstance(value, Pairs) and value.flat:
            del value.flat[-_FREED_IN_A_STEP:]
            pause_point()
    return Manifest(save_id="", entries=entries, files={})


@dataclass(frozen=True, slots=True)
class DcpDescription:
    """The complete content of a ``.metadata``, for a comparison with the manifest.

    ``attributes`` are the attributes of ``Metadata`` that are text or None. ``storage_meta`` has the attributes of that
    object, or is None if it is missing. ``pathless`` are the FQNs that ``planner_data`` lacks. ``spare`` are the FQNs
    in ``planner_data`` or ``storage_data`` that are not described. ``properties`` are the properties of each tensor
    except its dtype: layout, whether it requires gradients, memory format, whether it is pinned. ``hints`` has the
    index of the chunk in each location, by FQN and name of the offsets. The index is None if the location has none.
    """

    entries: Mapping[str, Entry]
    attributes: Mapping[str, str | None]
    storage_meta: Mapping[str, object] | None
    pathless: frozenset[str]
    spare: frozenset[str]
    properties: Mapping[str, tuple[object, ...]]
    hints: Mapping[_Index, object]


def read_dcp_description(data: bytes | bytearray) -> DcpDescription:
    """Parse ``data``. Raises what ``read_dcp_metadata`` raises."""
    metadata = _attributes(decode(data, _GLOBALS, _LIMITS), f"{_METADATA}.Metadata")
    locations = _locations(metadata.get("storage_data"))
    hints = collected((index, one.hint) for index, one in locations.items() if index[1])
    entries = _entries(metadata, locations)
    paths = _paths(metadata.get("planner_data")) or {}
    meta = metadata.get("storage_meta")
    described = paced(_pairs(metadata.get("state_dict_metadata"), "state_dict_metadata"))
    properties = (
        _properties(key, one) for key, one in described if isinstance(one, PickledCall) and one.function == _TENSOR
    )
    return DcpDescription(
        entries=entries,
        attributes={name: one for name, one in metadata.items() if one is None or isinstance(one, str)},
        storage_meta=None if meta is None else _attributes(meta, f"{_METADATA}.StorageMeta"),
        pathless=frozenset(entries.keys() - paths.keys()),
        spare=frozenset(fqn for fqn, _ in locations) | (paths.keys() - entries.keys()),
        properties=dict(properties),
        hints=dict(hints),
    )


def _entries(metadata: Mapping[str, object], locations: dict[_Index, _Location]) -> dict[str, Entry]:
    """Return the entries, and remove their locations from ``locations``."""
    paths = _paths(metadata.get("planner_data"))
    entries: dict[str, Entry] = {}
    for key, described in _pairs(metadata.get("state_dict_metadata"), "state_dict_metadata"):
        pause_point()
        fqn = _fqn(key)
        if fqn in entries:
            raise CorruptCheckpointError(f".metadata: {fqn!r} is described twice", fqn=fqn)
        path = (fqn,) if paths is None else _path(fqn, paths)
        if isinstance(described, PickledCall) and described.function == f"{_METADATA}.BytesStorageMetadata":
            where = _take(locations, fqn, None)
            entries[fqn] = ValueEntry(path, where.file, where.offset, where.length, transform=where.transform)
        else:
            entries[fqn] = _tensor_entry(fqn, path, described, locations)
    return entries


def _properties(key: object, described: object) -> tuple[str, tuple[object, ...]]:
    """Return the FQN and the properties as torch pickles them: a tuple with the text or number of each object."""
    fqn = _fqn(key)
    properties = _attributes(described, _TENSOR, fqn).get("properties")
    state = properties.state if isinstance(properties, PickledCall) else None
    if not isinstance(state, tuple) or len(state) > _MAX_ATTRIBUTES:
        return fqn, (None,)
    return fqn, tuple(one.args[0] if isinstance(one, PickledCall) and len(one.args) == 1 else one for one in state[1:])


def _tensor_entry(
    fqn: str, path: tuple[Key, ...], described: object, locations: dict[_Index, _Location]
) -> TensorEntry | OpaqueEntry:
    attributes = _attributes(described, _TENSOR, fqn)
    chunks = attributes.get("chunks")
    if not isinstance(chunks, list):
        raise CorruptCheckpointError(f".metadata: {fqn!r} has no list of chunks", fqn=fqn)
    dtype = _dtype(attributes.get("properties"), fqn)
    shape = _dims(attributes.get("size"), fqn)
    kind = TensorEntry if dtype in DTYPES else OpaqueEntry
    found = collected(_chunk(fqn, chunk, locations) for chunk in chunks)
    return kind(path, dtype, shape, tuple(found))


def _chunk(fqn: str, described: object, locations: dict[_Index, _Location]) -> Chunk:
    attributes = _attributes(described, f"{_METADATA}.ChunkStorageMetadata", fqn)
    offsets = _dims(attributes.get("offsets"), fqn)
    sizes = _dims(attributes.get("sizes"), fqn)
    where = _take(locations, fqn, offsets)
    return Chunk(offsets, sizes, where.file, where.offset, where.length, transform=where.transform)


def _take(locations: dict[_Index, _Location], fqn: str, offsets: tuple[int, ...] | None) -> _Location:
    """Return the location of an item and remove it, so that a repeated chunk raises an error."""
    where = locations.pop((fqn, "" if offsets is None else name_of(offsets)), None)
    if where is None:
        at = "" if offsets is None else f" for the chunk at {list(offsets)}, or has the chunk twice"
        raise CorruptCheckpointError(f".metadata: {fqn!r} has no storage_data{at}", fqn=fqn)
    return where


def _dtype(properties: object, fqn: str) -> str:
    state: object = None
    if isinstance(properties, PickledCall) and properties.function in _PROPERTIES:
        state = properties.state
    if isinstance(state, Pairs):
        dtype = _named(state, fqn).get("dtype")
    else:
        dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Global) or not is_dtype(dtype.name):
        raise CorruptCheckpointError(f".metadata: {fqn!r} has no dtype", fqn=fqn)
    return dtype.name.removeprefix("torch.")


def _locations(storage_data: object) -> dict[_Index, _Location]:
    locations: dict[_Index, _Location] = {}
    for key, value in _pairs(storage_data, "storage_data"):
        pause_point()
        index = _attributes(key, f"{_METADATA}.MetadataIndex")
        fqn = _fqn(index.get("fqn"))
        offset = index.get("offset")
        info = _attributes(value, _STORAGE_INFO, fqn)
        match info.get("relative_path"), info.get("offset"), info.get("length"):
            case str(file), int(start), int(length) if type(start) is int and type(length) is int:
                transform = check_transforms(info.get("transform_descriptors"), fqn)
            case _:
                raise CorruptCheckpointError(f".metadata: the storage_data of {fqn!r} is incomplete", fqn=fqn)
        slot = (fqn, "" if offset is None else name_of(_dims(offset, fqn)))
        if slot in locations:
            raise CorruptCheckpointError(f".metadata: {fqn!r} has two locations for one chunk", fqn=fqn)
        locations[slot] = _Location(file, start, length, transform, index.get("index"))
    return locations


def _paths(planner_data: object) -> dict[str, object] | None:
    if not isinstance(planner_data, Pairs):  # missing, or data of a planner other than that of DCP
        return None
    return {key: path for key, path in paced(_pairs(planner_data, "planner_data")) if isinstance(key, str)}


def _path(fqn: str, paths: dict[str, object]) -> tuple[Key, ...]:
    path = paths.get(fqn, (fqn,))
    if not isinstance(path, tuple) or not 0 < len(path) <= MAX_PATH_DEPTH:
        raise CorruptCheckpointError(
            f".metadata: the path of {fqn!r} is not a tuple of 1 to {MAX_PATH_DEPTH} steps", fqn=fqn
        )
    steps = tuple(step for step in path if isinstance(step, str) or type(step) is int)
    if len(steps) != len(path):
        raise CorruptCheckpointError(
            f".metadata: the path of {fqn!r} has a step that is not a string or an index", fqn=fqn
        )
    return steps


def _dims(value: object, fqn: str) -> tuple[int, ...]:
    """Return sizes or offsets. They are a ``torch.Size``, or a tuple in files of some writers."""
    if isinstance(value, PickledCall) and value.function == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, tuple) and len(value) <= MAX_RANK and all(type(dim) is int and dim >= 0 for dim in value):
        return value
    raise CorruptCheckpointError(f".metadata: {fqn!r} has invalid sizes or offsets", fqn=fqn)


def _attributes(value: object, kind: str, fqn: str | None = None) -> dict[str, object]:
    """Return the attributes of an object of the class ``kind``. An object without a state has no attributes."""
    if not isinstance(value, PickledCall) or value.function != kind:
        raise CorruptCheckpointError(f".metadata: another object is in place of a {kind.rpartition('.')[2]}", fqn=fqn)
    return {} if value.state is None else _named(value.state, fqn)


def _named(state: object, fqn: str | None) -> dict[str, object]:
    if not isinstance(state, Pairs) or len(state) > _MAX_ATTRIBUTES:
        raise CorruptCheckpointError(".metadata: the attributes of an object are not a dict, or too many", fqn=fqn)
    names = [name for name in state.flat[::2] if isinstance(name, str)]
    if len(names) < len(state):
        raise CorruptCheckpointError(".metadata: an attribute of an object has no name", fqn=fqn)
    return dict(zip(names, state.flat[1::2], strict=True))


def _fqn(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_FQN_CHARS:
        raise CorruptCheckpointError(f".metadata: an FQN is not a string, or longer than {MAX_FQN_CHARS} characters")
    return value


def _pairs(value: object, what: str) -> Pairs:
    if isinstance(value, PickledCall) and value.function == "collections.OrderedDict" and value.items is not None:
        value = value.items
    if not isinstance(value, Pairs):
        raise CorruptCheckpointError(f".metadata: {what} is not a dict")
    return value


# --- tensors that this version cannot read ---


def with_opaque_entries(manifest: Manifest) -> Manifest:
    """Return a foreign manifest in which each tensor whose item is too small for its elements is an ``OpaqueEntry``.

    Stock DCP writes such an item for a tensor subclass (of torchao, for instance): ``.metadata`` has the dtype that the
    subclass reports, and the item holds the tensors that it wraps. A damaged ``.metadata`` may look the same. The item
    distinguishes the two cases when the tensor is read.
    """
    entries = collected((fqn, _opaque_if_small(entry)) for fqn, entry in manifest.entries.items())
    return replace(manifest, entries=dict(entries))


def _opaque_if_small(entry: Entry) -> Entry:
    if isinstance(entry, TensorEntry) and any(_too_small(entry.dtype, chunk) for chunk in entry.chunks):
        return OpaqueEntry(entry.path, entry.dtype, entry.shape, entry.chunks)
    return entry


def _too_small(dtype: str, chunk: Chunk) -> bool:
    """Return whether the item is too small for the elements. False for compressed items and for items with a known
    payload, which ``validate`` checks."""
    if chunk.payload_offset is not None or chunk.transform or any(size < 0 for size in chunk.sizes):
        return False
    return math.prod(chunk.sizes) * itemsize(dtype) > chunk.item_bytes


# --- two descriptions of one checkpoint -----------------------------------------------------------------------------


def _compare_metadata(manifest: Manifest, metadata: DcpDescription) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each place where the ``metadata`` that stock DCP reads contradicts the ``manifest``.

    The form of the pickle and unknown attributes are ignored, because another version may have written it.
    """
    # Both directions: an entry that only one of the two files has is a contradiction.
    unknown = (EmptyEntry, CompositeEntry)  # DCP has no such entries
    described = {fqn: entry for fqn, entry in manifest.entries.items() if not isinstance(entry, unknown)}
    for fqn in described.keys() - metadata.entries.keys():
        yield _differs(fqn, "does not have it, but the manifest does")
    for fqn in metadata.entries.keys() - described.keys():
        yield _differs(fqn, "has it, but the manifest does not")
    for fqn, entry in paced(described.items()):
        other = metadata.entries.get(fqn)
        if other is not None and _comparable(entry) != _comparable(other):
            yield _differs(fqn, "describes it differently than the manifest")
    save_id = None if metadata.storage_meta is None else metadata.storage_meta.get("save_id")
    if save_id not in (None, manifest.save_id):
        yield CorruptCheckpointError("storage_meta in .metadata names another save", file=".metadata")
    if metadata.attributes.get("version", _VERSION) not in (_VERSION, None):
        yield CorruptCheckpointError(
            f".metadata has an unexpected version, {metadata.attributes['version']!a:.40}", file=".metadata"
        )
    if manifest.exact:
        yield from _compare_details(manifest, metadata)


def _compare_details(manifest: Manifest, metadata: DcpDescription) -> Iterator[CorruptCheckpointError]:
    """Compare details that sidestream always writes in the same way. Other planners may write them in any way."""
    for fqn in sorted(metadata.pathless):
        yield _differs(fqn, "has no path for it in planner_data")
    for fqn in sorted(metadata.spare):
        yield _differs(fqn, "has a location or a path for it but does not describe it")
    for fqn, properties in metadata.properties.items():
        if properties != _OWN_PROPERTIES:
            yield _differs(fqn, f"has other properties for it than {_OWN_PROPERTIES}")
    for fqn, entry in paced(manifest.entries.items()):
        chunks = entry.chunks if isinstance(entry, TensorEntry) else ()
        hints = [metadata.hints.get((fqn, name_of(chunk.offsets))) for chunk in chunks]
        if any(hint is not None and hint != number for number, hint in enumerate(hints)):
            yield _differs(fqn, "numbers its chunks differently than the manifest")


_VERSION = "1.0.0"
_OWN_PROPERTIES = ("torch.strided", False, 0, False)
"""The properties: layout, whether it requires gradients, memory format, whether it is pinned."""


def _differs(fqn: str, how: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{fqn}: .metadata {how}", file=".metadata", fqn=fqn)


def _comparable(entry: Entry) -> object:
    """Return the facts about an entry that both files have. DCP converts every dict key to a string."""
    path = tuple(str(key.value) if isinstance(key, DictKey) else key for key in entry.path)
    if isinstance(entry, ValueEntry):
        return path, (entry.file, entry.item_offset, entry.item_bytes), entry.transform
    assert isinstance(entry, TensorEntry | OpaqueEntry)
    # By offsets and sizes: the order of the chunks in the two files need not be the same.
    chunks = {
        name_of(one.offsets, one.sizes): (one.file, one.item_offset, one.item_bytes, one.transform)
        for one in entry.chunks
    }
    return path, entry.written_dtype, entry.shape, chunks


def differences(
    manifest: Manifest, raw: bytes | bytearray, attribute: str = ATTRIBUTE, file: str = METADATA_NAME
) -> list[CorruptCheckpointError]:
    """Return the places where ``.metadata`` contradicts the manifest. ``attribute`` is the name of the attribute that
    points to the manifest."""
    try:
        metadata = read_dcp_description(raw)
    except UnsupportedCheckpointError as error:
        if not manifest.exact:
            raise
        return [CorruptCheckpointError(f"{file}: {error.args[0]}, which sidestream never writes", file=file)]
    found = list(_compare_metadata(manifest, metadata))
    pointer = metadata.attributes.get(attribute)
    if pointer is None or not raw.endswith(attribute_end(attribute, pointer)):
        found.append(
            CorruptCheckpointError(f"{file}: its attribute {attribute!r} does not point to this manifest", file=file)
        )
    return found
