"""The parts of a checkpoint as frozen records, without torch. See ``docs/format.md``."""

from __future__ import annotations

import base64
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..errors import SidestreamError

BLOCK_BYTES = 1 << 20
"""The size of a block. A payload has one CRC-32 for each block. The last block may be shorter."""

MAX_FQN_CHARS = 4096
MAX_PATH_DEPTH = 64
MAX_RANK = 64
MAX_SIZE = (1 << 63) - 1
MAX_INTEGER_BYTES = 1024
MAX_MANIFEST_BYTES = 1 << 32
"""The limits of names, paths, shapes, integers and manifests. Readers refuse more, so nothing more is written."""

SLICE_BYTES = 3 << 18
"""The bytes that are encoded or decoded in one call, which holds the GIL."""

_SHOWN_CHARS = 200

Node: TypeAlias = "bool | int | float | str | dict[str, Node] | list[Node] | None"
"""A plain Python value as JSON-ready data. Scalars are themselves. Everything else is a dict with one entry,
``{kind: content}``. ``values.py`` lists the kinds."""


@dataclass(frozen=True, slots=True)
class DictKey:
    """A dict key that is not a string (``0``, ``None``, ``2.5``, ``True``)."""

    value: int | float | bool | None


Key: TypeAlias = str | int | DictKey
"""A step of a path: a ``str`` is a dict key, an ``int`` is an index into a list, ``DictKey`` is any other key."""


@dataclass(frozen=True, slots=True)
class ForeignPayload:
    """The facts about a payload in the file of another writer: its CRC-32 (None: there is none), and strides and offset
    if it is not row-major."""

    crc: int | None
    payload_bytes: int
    strides: tuple[int, ...] | None = None
    first_element: int = 0

    def is_row_major(self, shape: tuple[int, ...]) -> bool:
        """Return whether the strides are those of a row-major tensor of this shape."""
        return self.strides in (None, row_major_strides(shape))


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a tensor, and where its bytes are.

    ``item_offset`` and ``item_bytes`` delimit the whole item (a ``torch.save`` zip that holds one tensor) in ``file``.
    ``payload_offset`` is the offset of the row-major elements in ``file``. It is None in a foreign checkpoint, where a
    reader has to open the zip to find it. ``crcs`` holds a little-endian u32 CRC-32 for each block of the payload, or
    None if a foreign writer made none. ``transform`` is what a foreign writer applied to the whole item (compression);
    offset and length are then those of the result. ``digests`` holds 32 bytes for each block if the save made
    digests. ``foreign`` has the facts from the zip of another writer if it has been opened already. Several tensors may
    then be views of one item.
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
    foreign: ForeignPayload | None = None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: ``dtype`` as torch spells it without the prefix (``"bfloat16"``), its global ``shape``, its chunks."""

    path: tuple[Key, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def is_sub_byte(self) -> bool:
        """Whether its dtype is one of ``SUB_BYTE_DTYPES``."""
        return self.dtype in SUB_BYTE_DTYPES

    @property
    def written_dtype(self) -> str:
        """The dtype as which the payload is written (``written_dtype``)."""
        return written_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A plain value. ``node`` is None in a foreign checkpoint, where only the pickled item has the value. An ``inline``
    value has no item. ``transform`` as in ``Chunk``."""

    path: tuple[Key, ...]
    file: str
    item_offset: int
    item_bytes: int
    node: Node = None
    transform: str | None = None

    @property
    def inline(self) -> bool:
        return not self.item_bytes

    @property
    def is_stored(self) -> bool:
        """Whether only the item has the value."""
        return isinstance(self.node, dict) and "stored" in self.node


@dataclass(frozen=True, slots=True)
class EmptyEntry:
    """An empty dict, for which DCP has no entry. A list without elements is a value."""

    path: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class OpaqueEntry:
    """A tensor of another writer that this version cannot read, such as a quantized one. It is listed, and a request
    for it raises an error that names it. ``dtype``, ``shape`` and ``chunks`` are the unchecked content of
    ``.metadata``. No memory is allocated for them. ``why`` is the error of a request, if it is known before the item is
    opened; without a ``dtype``, only its name is known."""

    path: tuple[Key, ...]
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    why: SidestreamError | None = None

    @property
    def written_dtype(self) -> str:
        """The dtype as which the payload is written (``written_dtype``)."""
        return written_dtype(self.dtype)

    def refusal(self, fqn: str) -> SidestreamError | None:
        """Return the error of a request for this tensor, which is ``fqn``, if it is known."""
        return None if self.why is None else copy.copy(self.why).within(fqn).about(fqn=fqn)


@dataclass(frozen=True, slots=True)
class CompositeEntry:
    """A tensor that consists of other tensors. They have entries of their own: the part ``"values"`` of ``w`` is
    ``w.values``.

    ``type`` is a layout of torch (``"sparse_coo"``) or the qualified name of a subclass. ``dtype``, ``shape`` and
    ``strides`` (None for a layout) are those of the tensor itself. ``parts`` are the names of the parts in their order.
    ``context`` is what the type needs in addition, as a node. The tensor has no bytes of its own.
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
"""The most parts of a tensor."""

Entry: TypeAlias = TensorEntry | ValueEntry | EmptyEntry | OpaqueEntry | CompositeEntry

Row: TypeAlias = tuple[str, tuple[int, ...], int, str, int, int, int, bytes, bytes | None, tuple[Key, ...]]
"""A tensor of one chunk with checksums, which ``rows.py`` has checked: dtype, shape, bytes of payload, file, offset and
bytes of the item, offset of the payload, CRCs, digests, path.

Nearly all entries of checkpoints of sidestream are of this kind. A plain tuple takes a third of the time of the
records. The garbage collector stops tracking a tuple that holds only numbers, strings and bytes.
"""


class Entries(Mapping[str, Entry]):
    """Entries by FQN. Some are stored as rows, which ``found`` has as they are."""

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
    """Return the entries as they are stored, some of them as rows."""
    return entries.found if isinstance(entries, Entries) else entries


def all_parts(entries: Mapping[str, Entry]) -> set[str]:
    """Return the FQNs of the parts of all composite tensors."""
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
    """The description of a checkpoint, without its payloads.

    ``entries`` is keyed by FQN, in the order of the saved state dict. ``files`` maps each data file to its size.
    ``digest`` names the algorithm of the digests, if the chunks have digests. ``save_id`` is empty for a checkpoint of
    another writer, such as stock DCP. ``metadata`` is the metadata of the user: a dict, as a node, or None. ``planner``
    is the one whose rules named the entries. The rules of DCP convert all keys to strings, drop empty dicts, and save
    tied tensors one by one. ``planner_data`` is data for a planner other than the default one of DCP.
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
    """The number of ranks that wrote it, each with its own part of the manifest. 0 for a manifest in one piece."""
    parts: tuple[Any, ...] = ()
    """The markers of the ranks, if they saved independently."""
    sidecars: Mapping[str, TensorEntry] = field(default_factory=dict)
    """The files that the user added, by name. Each is one chunk of bytes, a whole file, which is also in ``files``."""
    file_crcs: Mapping[str, int] = field(default_factory=dict)
    """The CRC-32 of each of ``files``, as far as it is known."""
    containers: Mapping[str, str] = field(default_factory=dict)
    """The types of dicts in the state of objects that are not plain dicts (``container_kind``), by FQN."""

    checked: bool = True
    """False for a file that has no checksums at all, not even of its plain values."""

    @property
    def own(self) -> bool:
        return bool(self.save_id)

    @property
    def name(self) -> str:
        """The name of its file, or of its root if ranks have parts of it."""
        return manifest_name(self.save_id)

    def part_name(self, rank: int) -> str:
        """Return the file name of a rank's part of it."""
        return part_name(self.save_id, rank)

    @property
    def stored(self) -> Mapping[str, Entry | Row]:
        """The entries as they are stored, some of them as rows."""
        return stored(self.entries)

    def parts_of(self, fqn: str) -> list[str]:
        """Return the FQNs of the parts of a composite tensor, and of the parts of these, in order."""
        found: list[str] = []
        entry = self.entries.get(fqn)
        for part in entry.parts if isinstance(entry, CompositeEntry) else ():
            name = f"{fqn}.{part}"
            found += [name, *self.parts_of(name)]
        return found

    @property
    def exact(self) -> bool:
        """Whether paths and ties are those of the state dict that was saved."""
        return self.own and self.planner == "sidestream"


def manifest_name(save_id: str) -> str:
    return f"manifest-{save_id}"


def part_name(save_id: str, rank: int) -> str:
    """Return the file name of a rank's part of the manifest of a save."""
    return f"{manifest_name(save_id)}.{rank}"


def name_of(*dims: tuple[int, ...]) -> str:
    """Return a dict key for offsets, sizes or a shape that have not been checked yet.

    The hash of a tuple of integers is the same in every process, so a file can hold thousands of tuples with the same
    hash (for example, -1 and -2 have the same hash), which would make a dict slow. The hash of a string depends on a
    secret.
    """
    return repr(dims)


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
"""The dtypes of a checkpoint, by the names of torch: element size in bytes, and the storage class if there is one.

``torch.save`` writes a dtype that once had a typed storage with the name of that storage (``_rebuild_tensor_v2``). It
writes later dtypes as untyped storage and the name of the dtype (``_rebuild_tensor_v3``). Dtypes that torch cannot
serialize (``SUB_BYTE_DTYPES``) are left out, and also quantized ones, which consist of more than bytes.
"""

SUB_BYTE_DTYPES = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8))
"""Dtypes whose elements need less than a byte, and take one byte each in memory. Torch neither serializes nor copies
them."""

SAVED_DTYPES = frozenset(DTYPES) | SUB_BYTE_DTYPES
"""The dtypes of tensors in checkpoints of sidestream."""

STORAGE_DTYPES = {storage: name for name, (_, storage) in DTYPES.items() if storage is not None}


def itemsize(dtype: str) -> int:
    """Return the bytes of an element. Raises ``KeyError`` for a dtype that a checkpoint cannot hold."""
    return 1 if dtype in SUB_BYTE_DTYPES else DTYPES[dtype][0]


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements, as torch computes them."""
    strides = []
    following = 1
    for dim in reversed(shape):
        strides.append(following)
        following *= max(dim, 1)
    return tuple(reversed(strides))


def node_of_bytes(raw: bytes | bytearray) -> str:
    """Return the base64 string of a ``Node`` for bytes, which are encoded in slices."""
    slices = (raw[at : at + SLICE_BYTES] for at in range(0, len(raw), SLICE_BYTES))
    return "".join([base64.b64encode(one).decode() for one in slices])


def name_problem(fqn: str, path: tuple[Key, ...]) -> str | None:
    """Return text about a name or a path that every reader refuses, and what to do. None if it is accepted."""
    if len(fqn) > MAX_FQN_CHARS:
        what = f"a name of {len(fqn)} characters, and {MAX_FQN_CHARS} are the most that are read: use shorter keys"
    elif len(path) > MAX_PATH_DEPTH:
        what = f"nested deeper than {MAX_PATH_DEPTH} levels, the most that are read: use fewer levels"
    elif len(fqn) > 2 * MAX_INTEGER_BYTES and any(map(_is_long, path)):
        what = f"an integer of more than {MAX_INTEGER_BYTES} bytes as a key, the most that are read: use shorter keys"
    else:
        return None
    return f"{fqn[:_SHOWN_CHARS]}: {what}, or another name with names="


def _is_long(key: Key) -> bool:
    return isinstance(key, DictKey) and type(key.value) is int and key.value.bit_length() >= 8 * MAX_INTEGER_BYTES


def shape_problem(dtype: str, shape: tuple[int, ...]) -> str | None:
    """Return text about a shape that every reader refuses. None if it is accepted."""
    extent = math.prod(max(dim, 1) for dim in shape) * itemsize(dtype)
    if len(shape) <= MAX_RANK and extent <= MAX_SIZE and all(dim >= 0 for dim in shape):
        return None
    return (
        f"the shape {str(shape)[:_SHOWN_CHARS]}: at most {MAX_RANK} dimensions are read, and at most {MAX_SIZE} bytes "
        "where each 0 counts as 1: reshape() it"
    )


def written_dtype(dtype: str) -> str:
    """Return the dtype for a tensor of ``dtype`` in items and ``.metadata``, which stock torch has to read."""
    return "uint8" if dtype in SUB_BYTE_DTYPES else dtype
