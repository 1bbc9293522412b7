"""The manifest, and ``.metadata`` as stock DCP reads it, from DCP's metadata and the receipts of all ranks."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from .._format.manifest import marker_of, write_manifest
from .._format.marker import METADATA_NAME, with_marker
from .._format.records import Chunk, Entry, Manifest, Node, TensorEntry, ValueEntry
from .._format.validate import validate
from .._layout.values import encode_value
from .._runtime.threads import collected, pause_point
from .._runtime.torch_probes import TORCH_VERSION, dtype_from_name, dtype_name, storage_info
from ..errors import InvalidOptionError, UnsafeObjectError

__all__ = [
    "PackedReceipt",
    "Receipt",
    "TensorReceipt",
    "ValueReceipt",
    "as_stock",
    "complete",
    "files_of_commit",
]

_VERSION = "1.0.0"
_PROTOCOL = 3
_PROPERTIES = 5


@dataclass(frozen=True, slots=True)
class Receipt:
    """The place of an item that a rank has written, in ``file``, which has ``file_bytes`` and the CRC-32
    ``file_crc``."""

    file: str
    file_bytes: int
    file_crc: int
    item_offset: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class TensorReceipt(Receipt):
    """The place of a tensor whose payload is not transformed."""

    payload_offset: int
    crcs: bytes
    dtype: str


@dataclass(frozen=True, slots=True)
class ValueReceipt(Receipt):
    """The place of the bytes that a planner made of a value. ``node`` is the value as plain data."""

    node: Node


@dataclass(frozen=True, slots=True)
class PackedReceipt(Receipt):
    """The place of an item that went through ``transforms``."""

    transforms: tuple[str, ...]
    dtype: str | None = None


_Receipts = Mapping[tuple[str, tuple[int, ...] | None], Receipt]


def complete(metadata: Metadata, results: Iterable[Iterable[WriteResult]], url: str, save_id: str) -> Metadata:
    """Return ``metadata`` with the place of every item, and with the dtypes that were written. A planner may have
    converted tensors."""
    places = {result.index: result.storage_data for each in results for result in each}
    written = ((index.fqn, getattr(receipt, "dtype", None)) for index, receipt in places.items())
    by_fqn = {fqn: dtype for fqn, dtype in written if dtype is not None}
    described = {
        fqn: replace(one, properties=replace(one.properties, dtype=dtype_from_name(by_fqn[fqn])))
        if isinstance(one, TensorStorageMetadata) and fqn in by_fqn
        else one
        for fqn, one in metadata.state_dict_metadata.items()
    }
    return replace(
        metadata,
        state_dict_metadata=described,
        storage_data=places,
        storage_meta=StorageMeta(checkpoint_id=url, save_id=save_id),
        version=_VERSION,
    )


def as_stock(metadata: Metadata) -> Metadata:
    """Return ``metadata`` with the places as objects of stock DCP, and without objects of classes of sidestream."""
    return replace(metadata, storage_data={index: _info(one) for index, one in metadata.storage_data.items()})


def files_of_commit(metadata: Metadata, about: Manifest, saved_at: int) -> dict[str, bytes]:
    """Return the manifest and ``.metadata``. ``about`` is the manifest without entries. Called in a worker thread.

    A manifest cannot describe the payloads of items that went through an extension. So a checkpoint with such items has
    no manifest, and is read like one of stock DCP.

    Raises ``InvalidOptionError``, ``UnsafeObjectError``, and what ``validate`` raises.
    """
    if any(isinstance(receipt, PackedReceipt) for receipt in metadata.storage_data.values()):
        return {METADATA_NAME: _pickled(metadata)}
    receipts: _Receipts = {_place(index): receipt for index, receipt in metadata.storage_data.items()}
    manifest = _manifest(metadata, receipts, about)
    validate(manifest)
    raw = b"".join(collected(write_manifest(manifest, TORCH_VERSION)))
    return {about.name: raw, METADATA_NAME: with_marker(_pickled(metadata), marker_of(about, raw, saved_at))}


def _pickled(metadata: Metadata) -> bytes:
    """Pickle ``metadata`` as every supported version of torch reads it."""
    content = io.BytesIO()
    # This protocol has no frames, whose lengths would have to be changed. So the marker is appended as an attribute.
    pickler = pickle.Pickler(content, _PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduced}
    pickler.dump(as_stock(metadata))
    return content.getvalue()


def _reduced(properties: Any) -> tuple[Any, ...]:
    """Return what a pickler writes: five properties. Torch 2.15 adds a sixth, and earlier versions read exactly
    five."""
    make, args, state, *_ = properties.__reduce_ex__(_PROTOCOL)
    return make, args, state[:_PROPERTIES]


def _manifest(metadata: Metadata, receipts: _Receipts, about: Manifest) -> Manifest:
    noted = metadata.planner_data
    paths = noted if type(noted) is dict else {}
    entries: dict[str, Entry] = {}
    for fqn, described in metadata.state_dict_metadata.items():
        pause_point()
        path = paths[fqn] if _is_path(paths.get(fqn)) else (fqn,)
        if isinstance(described, TensorStorageMetadata):
            chunks = tuple(_chunk(fqn, one.offsets, one.sizes, described, receipts) for one in described.chunks)
            dtype = dtype_name(described.properties.dtype)
            entries[fqn] = TensorEntry(path, dtype, tuple(described.size), chunks)
        else:
            where = receipts.get((fqn, None))
            if not isinstance(where, ValueReceipt):
                raise _left_out(fqn)
            entries[fqn] = ValueEntry(path, where.file, where.item_offset, where.item_bytes, where.node)
    own = None if noted is None or _only_paths(metadata) else _planner_data(noted)
    return replace(about, entries=entries, planner="dcp", planner_data=own)


def _chunk(
    fqn: str,
    offsets: Sequence[int],
    sizes: Sequence[int],
    described: TensorStorageMetadata,
    receipts: _Receipts,
) -> Chunk:
    where = receipts.get((fqn, tuple(offsets)))
    if not isinstance(where, TensorReceipt):
        raise _left_out(fqn)
    dtype = dtype_name(described.properties.dtype)
    if where.dtype != dtype:
        raise InvalidOptionError(
            f"{fqn}: the planner wrote parts of it as {dtype} and as {where.dtype}; nothing was saved"
        )
    place = where.file, where.item_offset, where.item_bytes, where.payload_offset, where.crcs
    return Chunk(tuple(offsets), tuple(sizes), *place)


def _only_paths(metadata: Metadata) -> bool:
    """Return whether the planner data has the path of each FQN, as DCP's own planner adds it, and nothing else."""
    noted = metadata.planner_data
    if type(noted) is not dict or not noted.keys() <= metadata.state_dict_metadata.keys():
        return False
    return all(collected(map(_is_path, noted.values())))


def _is_path(path: object) -> bool:
    return type(path) is tuple and bool(path) and all(type(step) in (str, int) for step in path)


def _planner_data(noted: object) -> Node:
    try:
        return encode_value(noted, "planner_data")
    except UnsafeObjectError as error:
        raise UnsafeObjectError(f"what the planner adds to the metadata has to be plain data: {error}") from error


def _left_out(fqn: str) -> InvalidOptionError:
    return InvalidOptionError(f"{fqn}: the planner's metadata has it, and no rank wrote all of it; nothing was saved")


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...] | None]:
    return index.fqn, None if index.offset is None else tuple(index.offset)


def _info(receipt: Receipt) -> object:
    return storage_info(receipt.file, receipt.item_offset, receipt.item_bytes, getattr(receipt, "transforms", ()))
