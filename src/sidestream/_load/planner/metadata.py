"""A validated manifest as the ``Metadata`` that DCP's load planners ask for. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..._format.records import Chunk, DictKey, Key, Manifest, OpaqueEntry, TensorEntry, ValueEntry
from ..._layout.values import decode_value
from ..._runtime.threads import politely, run_sliced
from ..._runtime.torch_probes import dtype_from_name, storage_info
from ...errors import UnsupportedCheckpoint

__all__ = ["chunks_by_place", "metadata_of"]

_VERSION = "1.0.0"


def metadata_of(manifest: Manifest, url: str) -> Metadata:
    """In a worker thread. Empty dicts are not in it: DCP does not know them. Raises ``UnsupportedCheckpoint``."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, object] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for fqn, entry in politely(manifest.entries.items()):
        if isinstance(entry, TensorEntry | OpaqueEntry):
            described[fqn] = _tensor(fqn, entry)
            for number, chunk in enumerate(entry.chunks):
                places[MetadataIndex(fqn, torch.Size(chunk.offsets), number)] = _place(chunk)
        elif isinstance(entry, ValueEntry):
            described[fqn] = BytesStorageMetadata()
            places[MetadataIndex(fqn)] = _place(entry)
        else:
            continue
        paths[fqn] = tuple(map(_step, entry.path))
    noted = paths if manifest.planner_data is None else run_sliced(decode_value(manifest.planner_data, "planner_data"))
    meta = StorageMeta(checkpoint_id=url, save_id=manifest.save_id or None)
    return Metadata(described, noted, places, meta, _VERSION)


def _tensor(fqn: str, entry: TensorEntry | OpaqueEntry) -> TensorStorageMetadata:
    try:
        properties = TensorProperties(dtype=dtype_from_name(entry.dtype))
    except KeyError:
        raise UnsupportedCheckpoint(f"{fqn!r} has dtype {entry.dtype}, which this torch does not know") from None
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


def _place(item: Chunk | ValueEntry) -> object:
    return storage_info(item.file, item.item_offset, item.item_bytes, [item.transform] if item.transform else [])


def _step(key: Key) -> str | int:
    """DCP turns every dict key into a string."""
    return str(key.value) if isinstance(key, DictKey) else key


def chunks_by_place(manifest: Manifest, fqns: set[str]) -> Mapping[tuple[str, tuple[int, ...]], Chunk]:
    """The chunks of some tensors, by FQN and offsets."""
    entries = ((fqn, manifest.entries.get(fqn)) for fqn in fqns)
    return {
        (fqn, chunk.offsets): chunk
        for fqn, entry in entries
        if isinstance(entry, TensorEntry)
        for chunk in entry.chunks
    }
