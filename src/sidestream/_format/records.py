"""What a checkpoint consists of, as frozen records without torch. See ``docs/format.md``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = [
    "BLOCK_BYTES",
    "DTYPES",
    "MAX_PARTS",
    "SAVED_DTYPES",
    "SPARSE_PARTS",
    "STORAGE_DTYPES",
    "SUB_BYTE_DTYPES",
    "Chunk",
    "CompositeEntry",
    "DictKey",
    "EmptyEntry",
    "Entries",
    "Entry",
    "ForeignPayload",
    "Key",
    "Manifest",
    "Node",
    "OpaqueEntry",
    "Row",
    "TensorEntry",
    "ValueEntry",
    "all_parts",
    "itemsize",
    "parts_of",
    "path_of",
    "stored",
    "written_dtype",
]

BLOCK_BYTES = 1 << 20
"""Payloads carry one CRC-32 for each block of this many bytes (the last one may be shorter)."""

Node: TypeAlias = "bool | int | float | str | dict[str, Node] | list[Node] | None"
"""A plain Python value as JSON-ready data: scalars stand for themselves, everything else is a one-entry dict
``{kind: content}``; ``values.py`` lists the kinds."""


@dataclass(frozen=True, slots=True)
class DictKey:
    """A dict key that is not a string (``0``, ``None``, ``2.5``, ``True``), kept so that it comes back as it was."""

    value: int | float | bool | None


Key: TypeAlias = str | int | DictKey
"""One step of a path: a ``str`` is a dict key, a bare ``int`` is the index into a list, ``DictKey`` any other key."""


@dataclass(frozen=True, slots=True)
class ForeignPayload:
    """What the file of another writer says of a payload in it: its CRC-32 (None: it has none), and strides and offset
    if it is not row-major."""

    crc: int | None
    payload_bytes: int
    strides: tuple[int, ...] | None = None
    first_element: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a tensor and where its bytes are.

    ``item_offset`` and ``item_bytes`` delimit the whole item (a ``torch.save`` zip that holds one tensor) in ``file``;
    ``payload_offset`` is where the row-major elements begin in ``file``, or None in a foreign checkpoint, where the
    zip has to be opened to find out. ``crcs`` holds a little-endian u32 CRC-32 per block of ``BLOCK_BYTES`` of the
    payload, or None where a foreign writer left none. ``transform`` is what a foreign writer did to the item as a whole
    (compression); offset and length are then those of the result. ``digests`` holds 32 bytes per block where the save
    was asked for them. ``told`` is what the zip says of the payload, where it has been opened already; several tensors
    may then be views of one item.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    item_offset: int
    item_bytes: int
    payload_offset: int | None = None
    crcs: bytes | None = None
    transform: str | None = None
    digests: bytes | None = None
    told: ForeignPayload | None = None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: ``dtype`` as torch spells it without the prefix (``"bfloat16"``), its global ``shape``, its chunks."""

    path: tuple[Key, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A plain value. ``node`` is None in a foreign checkpoint, where only the pickled item at the location has it;
    without an item (``told``) it is all there is. ``transform`` as in ``Chunk``."""

    path: tuple[Key, ...]
    file: str
    item_offset: int
    item_bytes: int
    node: Node = None
    transform: str | None = None

    @property
    def told(self) -> bool:
        return not self.item_bytes


@dataclass(frozen=True, slots=True)
class EmptyEntry:
    """An empty container, which DCP has no entry for: ``kind`` is ``"dict"`` (a list without elements is a value)."""

    path: tuple[Key, ...]
    kind: str = "dict"


@dataclass(frozen=True, slots=True)
class OpaqueEntry:
    """A tensor of another writer that this version cannot read, such as a quantized one. It is listed, and requesting
    it raises an error that names it. ``dtype``, ``shape`` and ``chunks`` are the unchecked content of ``.metadata``: no
    memory is allocated for them."""

    path: tuple[Key, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class CompositeEntry:
    """A tensor that consists of others, which have entries of their own: the part ``"values"`` of ``w`` is
    ``w.values``.

    ``type`` is a layout of torch (``"sparse_coo"``) or the qualified name of a subclass. ``dtype``, ``shape`` and
    ``strides`` (None for a layout) are those that the tensor itself reports, ``parts`` the names of the others in their
    order. ``context`` is what the type needs besides, as a node. It has no bytes of its own.
    """

    path: tuple[Key, ...]
    type: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    parts: tuple[str, ...]
    context: Node = None

    @property
    def content(self) -> list[Any]:
        """What a line of the manifest says of it."""
        return [self.type, self.dtype, self.shape, self.strides, self.parts, self.context]


SPARSE_PARTS: dict[str, tuple[str, ...]] = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
"""The layouts of sparse tensors, and the parts of each."""

MAX_PARTS = 64
"""So many parts a tensor has at most."""

Entry: TypeAlias = TensorEntry | ValueEntry | EmptyEntry | OpaqueEntry | CompositeEntry

Row: TypeAlias = tuple[str, tuple[int, ...], int, str, int, int, int, bytes, bytes | None, tuple[Key, ...]]
"""A tensor of one chunk with checksums, which ``rows.py`` has checked: dtype, shape, bytes of payload, file, offset and
bytes of the item, offset of the payload, CRCs, digests, path.

Nearly all entries of our own checkpoints are of this kind. A plain tuple takes a third of the time of the records, and
the garbage collector does not track one once it has seen that it holds numbers, strings and bytes only.
"""


class Entries(Mapping[str, Entry]):
    """Entries by FQN, of which some are kept as rows. ``found`` has the rows as they are."""

    __slots__ = ("found",)

    def __init__(self, found: dict[str, Entry | Row]) -> None:
        self.found: dict[str, Entry | Row] = found

    def __getitem__(self, fqn: str) -> Entry:
        one = self.found[fqn]
        return _tensor(one) if isinstance(one, tuple) else one

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self.found

    def popitem(self) -> object:
        """Remove the last entry."""
        return self.found.popitem()


def stored(entries: Mapping[str, Entry]) -> Mapping[str, Entry | Row]:
    """The entries, those that are kept as rows as rows."""
    return entries.found if isinstance(entries, Entries) else entries


def parts_of(fqn: str, entries: Mapping[str, Entry]) -> list[str]:
    """The FQNs of the parts of a composite tensor, and those of their parts, in order."""
    found: list[str] = []
    entry = entries.get(fqn)
    for part in entry.parts if isinstance(entry, CompositeEntry) else ():
        name = f"{fqn}.{part}"
        found += [name, *parts_of(name, entries)]
    return found


def all_parts(entries: Mapping[str, Entry]) -> set[str]:
    """The FQNs of the parts of all composite tensors."""
    composites = ((fqn, one) for fqn, one in stored(entries).items() if isinstance(one, CompositeEntry))
    return {f"{fqn}.{part}" for fqn, one in composites for part in one.parts}


def path_of(one: Entry | Row) -> tuple[Key, ...]:
    return one[-1] if isinstance(one, tuple) else one.path


def _tensor(row: Row) -> TensorEntry:
    dtype, shape, _, file, item_offset, item_bytes, payload_offset, crcs, digests, path = row
    begin = (0,) * len(shape)
    chunk = Chunk(begin, shape, file, item_offset, item_bytes, payload_offset, crcs, digests=digests)
    return TensorEntry(path, dtype, shape, (chunk,))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but its bytes.

    ``entries`` is keyed by FQN, in the order of the saved state dict. ``files`` maps each data file to its size.
    ``digest`` names the algorithm of the chunks' digests, if they have some. ``save_id`` is empty for a checkpoint that
    another writer (stock DCP) made; ``own`` says so. ``metadata`` is what the user noted about it: a dict, as a node;
    None if there is nothing. ``planner``: whose rules named the entries. DCP's make strings of all keys, drop empty
    dicts, and save tied tensors one by one. ``planner_data`` is what a planner of another kind than DCP's default noted
    for its own use, as data.
    """

    save_id: str
    entries: dict[str, Entry] | Entries
    files: dict[str, int]
    step: int | None = None
    generation: int = 1
    digest: str | None = None
    metadata: Node = None
    planner: Literal["sidestream", "dcp"] = "sidestream"
    planner_data: Node = None
    ranks: int = 0
    """How many ranks wrote it, each with a part of the manifest of its own; 0 where it is in one piece."""
    parts: tuple[Any, ...] = ()
    """The markers of the ranks, where they saved apart."""
    sidecars: Mapping[str, TensorEntry] = field(default_factory=dict)
    """The files that the user added, by name: each is one chunk of bytes, a whole file, which ``files`` has too."""
    file_crcs: Mapping[str, int] = field(default_factory=dict)
    """The CRC-32 of each of ``files`` that it is known of."""

    checked: bool = True
    """False for a file that has no checksums at all, not even of its plain values."""

    @property
    def own(self) -> bool:
        return bool(self.save_id)

    @property
    def exact(self) -> bool:
        """Whether paths and ties are those of the state dict that was saved."""
        return self.own and self.planner == "sidestream"


# --- dtypes ---

DTYPES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "BoolStorage"),
    "uint8": (1, "ByteStorage"),
    "int8": (1, "CharStorage"),
    "int16": (2, "ShortStorage"),
    "int32": (4, "IntStorage"),
    "int64": (8, "LongStorage"),
    "float16": (2, "HalfStorage"),
    "bfloat16": (2, "BFloat16Storage"),
    "float32": (4, "FloatStorage"),
    "float64": (8, "DoubleStorage"),
    "complex64": (8, "ComplexFloatStorage"),
    "complex128": (16, "ComplexDoubleStorage"),
    "complex32": (4, None),
    "uint16": (2, None),
    "uint32": (4, None),
    "uint64": (8, None),
    "float8_e4m3fn": (1, None),
    "float8_e4m3fnuz": (1, None),
    "float8_e5m2": (1, None),
    "float8_e5m2fnuz": (1, None),
    "float8_e8m0fnu": (1, None),
    "float4_e2m1fn_x2": (1, None),
    "bits8": (1, None),
    "bits16": (2, None),
    "bits1x8": (1, None),
    "bits2x4": (1, None),
    "bits4x2": (1, None),
}
"""The dtypes that a checkpoint may hold, by torch's names: element size in bytes and the storage class, if it has one.

``torch.save`` writes a dtype that once had a typed storage under that storage's name (``_rebuild_tensor_v2``), and the
later ones as untyped storage with the dtype beside it (``_rebuild_tensor_v3``). Left out are those that torch itself
cannot serialize (``SUB_BYTE_DTYPES``) and the quantized ones, which carry more than bytes.
"""

SUB_BYTE_DTYPES = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8))
"""Dtypes whose elements have a byte each in memory and need less. Torch neither serializes nor copies them."""

SAVED_DTYPES = frozenset(DTYPES) | SUB_BYTE_DTYPES
"""The dtypes of tensors in checkpoints of ours."""

STORAGE_DTYPES = {storage: name for name, (_, storage) in DTYPES.items() if storage is not None}


def itemsize(dtype: str) -> int:
    """Bytes per element. Raises ``KeyError`` for a dtype that a checkpoint cannot hold."""
    return 1 if dtype in SUB_BYTE_DTYPES else DTYPES[dtype][0]


def written_dtype(dtype: str) -> str:
    """The dtype that items and ``.metadata`` have for a tensor of ``dtype``: one that stock torch reads."""
    return "uint8" if dtype in SUB_BYTE_DTYPES else dtype
