"""Readers of ``torch.save`` files as data: whole files, and the items of foreign shard files, which are such files.

Of an item only the directory of the zip and the pickle are read, and for a value the storages of tensors inside it. No
read is larger than the item, whatever its headers claim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import BinaryIO, Literal

from ..._format.records import (
    MAX_FQN_CHARS,
    MAX_RANK,
    SPARSE_PARTS,
    Chunk,
    CompositeEntry,
    DictKey,
    EmptyEntry,
    Entry,
    ForeignPayload,
    Key,
    Manifest,
    Node,
    OpaqueEntry,
    TensorEntry,
    ValueEntry,
    itemsize,
    row_major_strides,
)
from ..._runtime.pauses import pause_point
from ...errors import CorruptCheckpointError, KeyCollisionError, UnsafeObjectError, UnsupportedCheckpointError
from ..pickles.tensors import TENSOR_GLOBALS, TENSOR_REBUILDERS, DtypeNames, StoredTensor, read_tensor
from ..pickles.unpickle import Global, Limits, Pairs, Persistent, PickledCall, decode
from ..pickles.values import DICTS, FILE_GLOBALS, ValueBudget, node_of, pairs_of, value_globals
from .legacy import LegacyFile, read_legacy
from .zip import TorchZip, is_older

_TENSOR_PICKLE_BYTES = 1 << 16
_TENSOR_LIMITS = Limits(integer_bytes=9)

_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_OTHER_KINDS = {
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
}
_CHECKED_OPCODES = 1 << 18

Records = Literal["needed", "all"]


@dataclass(frozen=True, slots=True)
class TensorPayload:
    """A tensor, and the record with its elements.

    ``payload_offset`` counts bytes from the beginning of the item. Every element lies within the payload. Its checksum
    in the zip has not been compared.
    """

    dtype: str
    shape: tuple[int, ...]
    payload_offset: int
    foreign: ForeignPayload


def open_tensor_item(source: BinaryIO, item_bytes: int, records: Records = "needed") -> TensorPayload:
    """Find the tensor of an item. ``source`` is seekable and holds only the item, of ``item_bytes``.

    The payload is not read. With ``records="all"``, the checksums of all other records are compared. Raises
    ``CorruptCheckpointError``, ``UnsafeObjectError`` with the name of a type that is not part of a tensor, and
    ``UnsupportedCheckpointError`` with the kind of a tensor that is not dense (quantized, sparse, a subclass).
    """
    archive = TorchZip(source, item_bytes)
    pickled = archive.read("data.pkl", _TENSOR_PICKLE_BYTES)
    try:
        tensor = read_tensor(decode(pickled, TENSOR_GLOBALS, _TENSOR_LIMITS))
    except UnsafeObjectError:
        kind = _other_kind(pickled)
        if kind is None:
            raise
        raise UnsupportedCheckpointError(
            f"it was saved as {kind}, which this version does not read; load it with torch.distributed.checkpoint, or "
            "save plain tensors"
        ) from None
    record = _record(archive, tensor)
    if records == "all":
        archive.check(but=record)
    foreign = _foreign_payload(tensor, archive.info(record).CRC)
    return TensorPayload(tensor.dtype, tensor.shape, archive.payload_offset(record), foreign)


def _foreign_payload(tensor: StoredTensor, crc: int | None) -> ForeignPayload:
    plain = not tensor.storage_offset and tensor.strides == row_major_strides(tensor.shape)
    return ForeignPayload(crc, tensor.storage_bytes, None if plain else tensor.strides, tensor.storage_offset)


def open_value_item(
    source: BinaryIO, item_bytes: int, allow: Set[str] = frozenset(), budget: ValueBudget | None = None
) -> Node:
    """Return the value of an item as a ``Node``. ``source`` is seekable and holds only the item, of ``item_bytes``.

    The size of the ``Node`` is taken from ``budget``, which grows in proportion to ``item_bytes``, or from a budget for
    this value alone. The checksums of the bytes have been verified. Raises ``CorruptCheckpointError``, and
    ``UnsafeObjectError`` with the name of a type that is neither data nor in ``allow``.
    """
    archive = TorchZip(source, item_bytes)
    pickled = archive.read("data.pkl", item_bytes)
    value = decode(pickled, value_globals(allow))
    budget = ValueBudget() if budget is None else budget
    budget.grant(len(pickled), item_bytes)
    payloads = _Payloads(_ZipFile(value, len(pickled), archive))
    return node_of(value, budget, payloads.read, allow)


class _AnyName:
    """An allow-list of all names for ``decode``, which never imports or calls anything."""

    def __contains__(self, name: object) -> bool:
        return True


def _other_kind(pickled: bytes) -> str | None:
    """Return the kind of tensor that the pickle of an item rebuilds, for tensors that are not dense. None if it is not
    a tensor."""
    try:
        root = decode(pickled, _AnyName(), _TENSOR_LIMITS)
    except CorruptCheckpointError:
        return None
    if isinstance(root, PickledCall) and root.function == _SUBCLASS and len(root.args) > 1:
        kind = root.args[1]
        name = ascii(kind.name[:200])[1:-1] if isinstance(kind, Global) else "unknown"
        return f"a tensor of the subclass {name}"
    return _OTHER_KINDS.get(root.function) if isinstance(root, PickledCall) else None


def check_value_item(source: BinaryIO, item_bytes: int, allow: Set[str] = frozenset()) -> None:
    """Raise ``UnsafeObjectError`` if the pickle of an item names a type that is neither data nor in ``allow``.

    This is cheaper than ``open_value_item`` but incomplete: a pickle with very many opcodes is not examined.
    """
    archive = TorchZip(source, item_bytes)
    try:
        decode(archive.read("data.pkl", item_bytes), value_globals(allow), Limits(opcodes=_CHECKED_OPCODES))
    except CorruptCheckpointError:
        return


def _record(archive: TorchZip, tensor: StoredTensor) -> str:
    record = f"data/{tensor.key}"
    found = archive.info(record).file_size
    if found != tensor.storage_bytes:
        raise CorruptCheckpointError(f"malformed tensor: its record has {found} bytes, not {tensor.storage_bytes}")
    return record


_MOST_PICKLE_BYTES = 256 << 20
_MOST_VALUE_BYTES = 64 << 20
_MOST_VALUES_BYTES = 1 << 30
_SPARSE = "torch._utils._rebuild_sparse_tensor"
_OPAQUE = {
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the meta device",
}
_ZIP_GLOBALS = DtypeNames(
    FILE_GLOBALS.names
    | _OPAQUE.keys()
    | {f"torch.Q{kind}Storage" for kind in ("Int8", "Int32", "UInt8", "UInt4x2", "UInt2x4")}
    | {f"torch.per_{what}" for what in ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric")}
    | {"torch.per_channel_affine_float_qparams"}
)
_TENSORS = TENSOR_REBUILDERS | _OPAQUE.keys() | {_SPARSE, _SUBCLASS, "torch._utils._rebuild_parameter_with_state"}
_NAME_CHARS_A_BYTE = 16  # a name repeats the keys of all enclosing containers, which are in the pickle once


def read_torch_file(source: BinaryIO, file_bytes: int, name: str) -> Manifest:
    """Return the manifest of the file ``name``, of ``file_bytes``. It is not validated yet. Payloads of tensors are
    read only inside of tuples and sets.

    Raises ``CorruptCheckpointError``, ``UnsafeObjectError`` for objects that are more than data, ``KeyCollisionError``,
    and ``UnsupportedCheckpointError`` for a file that does not hold a dict, or holds a tensor with more elements than
    its storage (an expanded one).
    """
    source.seek(0)
    older = is_older(source.read(32))
    storages = read_legacy(source, file_bytes) if older else _read_zip(source, file_bytes)
    root = storages.root
    budget = ValueBudget()
    budget.grant(storages.pickle_bytes, min(file_bytes, _MOST_VALUES_BYTES))
    payloads = _Payloads(storages)
    if pairs_of(root) is None:
        raise UnsupportedCheckpointError("the file holds something else than a dict")
    found: dict[str, Entry] = {}
    for path, value, composite in _with_parts(_leaves((), root)):
        pause_point()
        fqn = ".".join(str(key.value) if isinstance(key, DictKey) else str(key) for key in path)
        if fqn in found or len(fqn) > MAX_FQN_CHARS:
            raise KeyCollisionError(f"two entries of the file are named {fqn[:200]!r}, or this name is too long")
        budget.spend_part()  # containers may be shared, so a small pickle may have very many leaves
        budget.spend_bytes(len(fqn) // _NAME_CHARS_A_BYTE)
        try:
            found[fqn] = composite or _leaf(payloads, path, value, budget, name)
        except (CorruptCheckpointError, UnsafeObjectError, UnsupportedCheckpointError) as error:
            error.within(fqn).about(fqn=fqn)
            raise
    return Manifest("", found, {name: file_bytes}, checked=not older)


@dataclass(frozen=True, slots=True)
class _ZipFile:
    """The object of a zip, the bytes of its pickle, and its storages."""

    root: object
    pickle_bytes: int
    archive: TorchZip

    def locate(self, stored: StoredTensor) -> tuple[int, int]:
        """Return the offset and the CRC-32 of a storage. Raises ``CorruptCheckpointError``."""
        record = _record(self.archive, stored)
        return self.archive.payload_offset(record), self.archive.info(record).CRC

    def payload(self, stored: StoredTensor, most_bytes: int) -> bytes:
        """Return the bytes of a storage. Raises ``CorruptCheckpointError`` if it is larger than ``most_bytes``."""
        return self.archive.read(_record(self.archive, stored), most_bytes)


def _read_zip(source: BinaryIO, file_bytes: int) -> _ZipFile:
    archive = TorchZip(source, file_bytes)
    pickled = archive.read("data.pkl", _MOST_PICKLE_BYTES)
    root = decode(pickled, _ZIP_GLOBALS)
    return _ZipFile(root, len(pickled), archive)


class _Payloads:
    """The storages of a file, of which some that were read last are kept. Many tensors may refer to one storage, of
    which each has a few bytes."""

    def __init__(self, storages: _ZipFile | LegacyFile) -> None:
        self.locate = storages.locate
        self._read = storages.payload
        self._kept: dict[tuple[str, int], bytes] = {}
        self._kept_bytes = 0

    def read(self, stored: StoredTensor) -> bytes:
        """Return the bytes of a storage. Raises ``CorruptCheckpointError`` if it is too large for a value."""
        which = (stored.key, stored.storage_bytes)
        found = self._kept.get(which)
        if found is None:
            if self._kept_bytes > _MOST_VALUE_BYTES:
                self._kept.clear()
                self._kept_bytes = 0
            found = self._kept[which] = self._read(stored, _MOST_VALUE_BYTES)
            self._kept_bytes += len(found)
        return found


def _leaf(payloads: _Payloads, path: tuple[Key, ...], value: object, budget: ValueBudget, file: str) -> Entry:
    if isinstance(value, PickledCall) and value.function in TENSOR_REBUILDERS:
        stored = read_tensor(value)
        if math.prod(stored.shape) * itemsize(stored.dtype) > stored.storage_bytes:
            raise UnsupportedCheckpointError("an expanded tensor; save tensor.contiguous()")
        start, crc = payloads.locate(stored)
        offsets = (0,) * len(stored.shape)
        foreign = _foreign_payload(stored, crc)
        chunk = Chunk(offsets, stored.shape, file, start, stored.storage_bytes, start, foreign=foreign)
        return TensorEntry(path, stored.dtype, stored.shape, (chunk,))
    if isinstance(value, PickledCall) and value.function in _OPAQUE:
        return _opaque(path, value)
    pairs = pairs_of(value)
    if pairs is not None and not len(pairs):
        return EmptyEntry(path)
    return ValueEntry(path, file, 0, 0, node_of(value, budget, payloads.read))


def _opaque(path: tuple[Key, ...], call: PickledCall) -> OpaqueEntry:
    """Return the entry of a tensor that is listed and not read."""
    why = UnsupportedCheckpointError(
        f"it was saved as {_OPAQUE[call.function]}, which this version does not read; load it with torch.load, or save "
        "plain tensors"
    )
    match call.args:
        case (Persistent(("storage", Global(kind), *_)), _, tuple(shape), *_):  # quantized
            dtype = kind.removeprefix("torch.").removesuffix("Storage").lower()
        case (Global(name), tuple(shape), *_):  # meta
            dtype = name.removeprefix("torch.")
        case _:
            return OpaqueEntry(path, "", (), (), why)
    if len(shape) > MAX_RANK or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise CorruptCheckpointError("malformed tensor: its shape is impossible")
    return OpaqueEntry(path, dtype, shape, (), why)


def _with_parts(
    leaves: Iterator[tuple[tuple[Key, ...], object]],
) -> Iterator[tuple[tuple[Key, ...], object, CompositeEntry | None]]:
    """Yield the leaves, tensors without their attributes, and sparse tensors as composite tensors and their parts.
    Raises ``CorruptCheckpointError``."""
    for path, leaf in leaves:
        value = _bare(leaf)
        if not isinstance(value, PickledCall) or value.function != _SPARSE:
            yield path, value, None
            continue
        layout, parts, shape, coalesced = _sparse(value)
        names = SPARSE_PARTS[layout]
        dtype = read_tensor(parts[-1]).dtype
        yield path, None, CompositeEntry(path, layout, dtype, shape, None, names, coalesced)
        for name, part in zip(names, parts, strict=True):
            yield (*path, name), part, None


def _bare(value: object) -> object:
    """Return a tensor or parameter that was saved with attributes without these."""
    match value:
        case PickledCall("torch._utils._rebuild_parameter_with_state", (tensor, *_)):
            return tensor
        case PickledCall(
            "torch._tensor._rebuild_from_type_v2",
            (Global(rebuild), Global("torch.Tensor" | "torch.nn.parameter.Parameter"), tuple(args), *_),
        ):
            return PickledCall(rebuild, args)
    return value


def _sparse(call: PickledCall) -> tuple[str, Sequence[object], tuple[int, ...], bool | None]:
    """Return layout, parts and shape of a sparse tensor, and whether one of layout COO is coalesced."""
    layout, parts, rest = "", [], []
    match call.args:
        case (PickledCall("torch.serialization._get_layout", (str(name),)), tuple(content)):
            layout = name.removeprefix("torch.")
            count = len(SPARSE_PARTS.get(layout, ()))
            parts, rest = list(content[:count]), list(content[count:])
    match rest:
        case [PickledCall("torch.Size", (tuple(shape),)), *flags] if parts and flags in ([], [False], [True]):
            if all(type(size) is int and size >= 0 for size in shape):
                return layout, parts, shape, flags == [True] if layout == "sparse_coo" else None
    raise CorruptCheckpointError("malformed tensor: it does not rebuild a sparse tensor")


def _leaves(path: tuple[Key, ...], value: object) -> Iterator[tuple[tuple[Key, ...], object]]:
    """Yield path and value of each leaf, as DCP flattens a state dict: dicts, and lists of tensors or containers."""
    pairs = pairs_of(value)
    if pairs is not None and len(pairs):
        keys = [_key(key) for key in pairs.flat[::2]]
        if all(key is not None for key in keys):
            for key, inner in zip(keys, pairs.flat[1::2], strict=True):
                assert key is not None
                yield from _leaves((*path, key), inner)
            return
    if path and isinstance(value, list) and any(_holds(item) for item in value):
        for index, inner in enumerate(value):
            yield from _leaves((*path, index), inner)
        return
    if not path:
        if len(pairs or ()):
            raise UnsupportedCheckpointError("the file holds a dict with keys that are not strings or numbers")
        return
    yield path, value


def _key(key: object) -> Key | None:
    if isinstance(key, str):
        return key
    return DictKey(key) if key is None or isinstance(key, int | float) else None


def _holds(value: object) -> bool:
    """Return whether a list with this element is flattened. Only the kind decides. A list may refer to one object many
    times, and a look at the content of each would take too long."""
    if isinstance(value, PickledCall):
        return value.function in _TENSORS or value.function in DICTS
    return isinstance(value, list | Pairs)
