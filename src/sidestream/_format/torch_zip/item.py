"""Readers of an item of a foreign shard file, a ``torch.save`` zip: the place of a tensor's payload, or a value as
data.

Only the directory of the zip and the pickle are read, and for a value the storages of tensors inside it. No read is
larger than the item, whatever its headers claim.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import BinaryIO, Literal

from ..._runtime.steps import Steps, at_once
from ...errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedCheckpointError
from ..pickles.machine import Global, Limits, PickledCall
from ..pickles.tensors import TENSOR_GLOBALS, StoredTensor, read_tensor
from ..pickles.unpickle import decode
from ..pickles.values import ValueBudget, node_of, value_globals
from ..records import Node
from .zip import TorchZip

__all__ = ["Records", "TensorPayload", "check_value_item", "open_tensor_item", "open_value_item"]

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

    ``strides`` and ``storage_offset`` count elements. ``payload_offset`` counts bytes from the beginning of the item.
    Every element lies within the ``payload_bytes``. ``crc32`` is their checksum in the zip, which has not been
    compared.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    payload_offset: int
    payload_bytes: int
    crc32: int


def open_tensor_item(source: BinaryIO, item_bytes: int, records: Records = "needed") -> TensorPayload:
    """Find the tensor of an item. ``source`` is seekable and holds only the item, of ``item_bytes``.

    The payload is not read. With ``records="all"``, the checksums of all other records are compared. Raises
    ``CorruptCheckpointError``, ``UnsafeObjectError`` with the name of a type that is not part of a tensor, and
    ``UnsupportedCheckpointError`` with the kind of a tensor that is not dense (quantized, sparse, a subclass).
    """
    archive = TorchZip(source, item_bytes)
    pickled = archive.read("data.pkl", _TENSOR_PICKLE_BYTES)
    try:
        tensor = read_tensor(at_once(decode(pickled, TENSOR_GLOBALS, _TENSOR_LIMITS)))
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
    return TensorPayload(
        tensor.dtype,
        tensor.shape,
        tensor.strides,
        tensor.storage_offset,
        archive.payload_offset(record),
        tensor.storage_bytes,
        archive.info(record).CRC,
    )


def open_value_item(
    source: BinaryIO, item_bytes: int, allow: Set[str] = frozenset(), budget: ValueBudget | None = None
) -> Steps[Node]:
    """Return the value of an item as a ``Node``. ``source`` is seekable and holds only the item, of ``item_bytes``.

    The size of the ``Node`` is taken from ``budget``, which grows in proportion to ``item_bytes``, or from a budget for
    this value alone. The checksums of the bytes have been verified. Raises ``CorruptCheckpointError``, and
    ``UnsafeObjectError`` with the name of a type that is neither data nor in ``allow``.
    """
    archive = TorchZip(source, item_bytes)
    pickled = archive.read("data.pkl", item_bytes)
    value = yield from decode(pickled, value_globals(allow))
    budget = ValueBudget() if budget is None else budget
    budget.grant(len(pickled), item_bytes)
    payloads: dict[str, bytes] = {}

    def read_payload(tensor: StoredTensor) -> bytes:
        record = _record(archive, tensor)
        if record not in payloads:
            payloads[record] = archive.read(record, item_bytes)
        return payloads[record]

    return (yield from node_of(value, budget, read_payload, allow))


class _AnyName:
    """An allow-list of all names for ``decode``, which never imports or calls anything."""

    def __contains__(self, name: object) -> bool:
        return True


def _other_kind(pickled: bytes) -> str | None:
    """Return the kind of tensor that the pickle of an item rebuilds, for tensors that are not dense. None if it is not
    a tensor."""
    try:
        root = at_once(decode(pickled, _AnyName(), _TENSOR_LIMITS))
    except CorruptCheckpointError:
        return None
    if isinstance(root, PickledCall) and root.function == _SUBCLASS and len(root.args) > 1:
        kind = root.args[1]
        name = ascii(kind.name[:200])[1:-1] if isinstance(kind, Global) else "unknown"
        return f"a tensor of the subclass {name}"
    return _OTHER_KINDS.get(root.function) if isinstance(root, PickledCall) else None


def check_value_item(source: BinaryIO, item_bytes: int, allow: Set[str] = frozenset()) -> Steps[None]:
    """Raise ``UnsafeObjectError`` if the pickle of an item names a type that is neither data nor in ``allow``.

    This is cheaper than ``open_value_item`` but incomplete: a pickle with very many opcodes is not examined.
    """
    archive = TorchZip(source, item_bytes)
    try:
        yield from decode(archive.read("data.pkl", item_bytes), value_globals(allow), Limits(opcodes=_CHECKED_OPCODES))
    except CorruptCheckpointError:
        return


def _record(archive: TorchZip, tensor: StoredTensor) -> str:
    record = f"data/{tensor.key}"
    found = archive.info(record).file_size
    if found != tensor.storage_bytes:
        raise CorruptCheckpointError(f"malformed tensor: its record has {found} bytes, not {tensor.storage_bytes}")
    return record
