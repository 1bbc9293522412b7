"""What a ``LoadPlanner`` of torch asks for: the ``Metadata`` that it is given, the targets and the values of its items.

Planners receive a validated manifest as the ``Metadata`` of DCP. They request tensors, which are read into their
targets, and values, which they receive as bytes. By default these bytes are made again from data, and are not the bytes
in the checkpoint. Nothing is unpickled.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

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
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from .._foreign.items import read_as_saved, read_values
from .._format.records import (
    Chunk,
    DictKey,
    Key,
    Manifest,
    OpaqueEntry,
    TensorEntry,
    ValueEntry,
)
from .._layout.names import castable
from .._layout.ranges import Box
from .._layout.values import Allowed, decode_value
from .._load.reader import Wanted
from .._runtime.threads import by_size, io_threads, paced
from .._runtime.torch_probes import check_tensor, dtype_from_name, dtype_name, storage_info
from .._storage import RangeSource
from ..errors import (
    CorruptCheckpointError,
    DtypeMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
)
from ..options import Trust

__all__ = ["in_batches", "metadata_of", "read_bytes", "targets_of", "values_of"]


_VERSION = "1.0.0"
_BATCH_BYTES = 1 << 30  # limits the memory of planners that make a tensor for each item


@dataclass(frozen=True, slots=True)
class ReadTargets:
    """The tensors of some items. ``names`` maps the name of each tensor during the read to its FQN in the
    checkpoint."""

    targets: list[tuple[ReadItem, torch.Tensor]]
    wanted: list[Wanted]
    names: dict[str, str]

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Add the FQN in the checkpoint to errors that are raised in this context."""
        try:
            yield
        except CorruptCheckpointError as error:
            error.fqn = self.names.get(error.fqn or "", error.fqn)
            raise

    def commit(self, planner: LoadPlanner) -> None:
        """Pass the tensors, which have been read, to ``commit_tensor`` of the planner."""
        for item, target in self.targets:
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)
            planner.commit_tensor(item, target)


def targets_of(items: Iterable[ReadItem], planner: LoadPlanner, manifest: Manifest, url: str) -> ReadTargets:
    """Ask the planner for the target of each item. Raises ``MissingKeysError``, ``ShapeMismatchError``,
    ``DtypeMismatchError``, ``UnsupportedTensorError``, ``UnsupportedCheckpointError``."""
    items = list(items)
    fqns = {item.storage_index.fqn for item in items}
    chunks = _chunks_by_place(manifest, fqns)
    found = ReadTargets([], [], {})
    for item in items:
        fqn, entry = item.storage_index.fqn, manifest.entries.get(item.storage_index.fqn)
        chunk = chunks.get((fqn, tuple(item.storage_index.offset or ())))
        if isinstance(entry, OpaqueEntry):
            raise UnsupportedCheckpointError(
                f"{fqn}: in {url} it is a quantized tensor or a tensor subclass, which this version does not read; "
                "load it with DCP's own FileSystemReader, or leave it out of the state dict"
            )
        if not isinstance(entry, TensorEntry) or chunk is None:
            raise _missing(url, item)
        # The planner's tensor may require gradients, and reading into it does not go through autograd. ``commit``
        # counts the version for each of them.
        target = planner.resolve_tensor(item).detach()
        if entry.written_dtype == dtype_name(target.dtype):
            entry = replace(entry, dtype=entry.written_dtype)  # as stock DCP reads it
        _check_target(item, entry, target)
        name, number = fqn, len(found.names)
        # Two items may be rows of one tensor, and the reader needs a name for each. Errors get the true name back
        # (``naming``).
        while name in found.names or (name != fqn and name in fqns):
            name, number = f"{fqn} (part {number})", number + 1
        found.names[name] = fqn
        offsets = tuple(map(sum, zip(chunk.offsets, item.storage_offsets, strict=True)))
        box = Box(offsets, tuple(item.lengths))
        found.targets.append((item, target))
        found.wanted.append(Wanted(name, replace(entry, chunks=(chunk,)), box, target))
    return found


def values_of(items: Iterable[ReadItem], manifest: Manifest, url: str) -> dict[str, ValueEntry]:
    """Return the values that the items request, by FQN. Raises ``MissingKeysError``."""
    entries: dict[str, ValueEntry] = {}
    for item in items:
        entry = manifest.entries.get(item.storage_index.fqn)
        if not isinstance(entry, ValueEntry):
            raise _missing(url, item)
        entries[item.storage_index.fqn] = entry
    return entries


async def read_bytes(
    source: RangeSource,
    manifest: Manifest,
    entries: Mapping[str, ValueEntry],
    *,
    allow: Allowed,
    trust: Trust,
) -> dict[str, bytes]:
    """Return for each of ``entries`` bytes from which ``torch.load`` makes the value. With ``trust="pickle"`` these are
    the bytes in the checkpoint. Raises ``UnsafeObjectError``, which says what to pass to ``StorageReader``, and
    ``CorruptCheckpointError``."""
    if trust == "pickle" and not any(entry.inline for entry in entries.values()):
        return {fqn: await read_as_saved(source, entry) for fqn, entry in entries.items()}
    try:
        values = await read_values(source, manifest, entries, allow)
    except UnsafeObjectError as error:
        error.add_note(
            'StorageReader(safe_globals=[...]) takes its type, trust="pickle" hands its bytes to the planner'
        )
        raise
    return await io_threads().run(_saved, values)


def _saved(values: Mapping[str, Any]) -> dict[str, bytes]:
    saved = {}
    for fqn, value in values.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        saved[fqn] = buffer.getvalue()
    return saved


def _check_target(item: ReadItem, entry: TensorEntry, target: torch.Tensor) -> None:
    fqn = item.dest_index.fqn
    check_tensor(target, fqn, "load into")
    if target.shape != torch.Size(item.lengths):
        given = tuple(target.shape)
        raise ShapeMismatchError(f"{fqn}: the planner gave a tensor of shape {given} for {tuple(item.lengths)}", [fqn])
    if dtype_name(target.dtype) != entry.dtype and not castable(entry.dtype, dtype_name(target.dtype)):
        raise DtypeMismatchError(
            f"{fqn}: {entry.dtype} was saved, the target is {dtype_name(target.dtype)}, and a cast would not keep what "
            "the values mean; make the target of the saved kind and convert it afterwards",
            [fqn],
        )


def _missing(url: str, item: ReadItem) -> MissingKeysError:
    index = item.storage_index
    where = "" if index.offset is None else f" at {tuple(index.offset)}"
    return MissingKeysError(f"{url} has no {index.fqn!r}{where}, which the planner asks for", [index.fqn])


def in_batches(items: Iterable[ReadItem]) -> Iterator[list[ReadItem]]:
    return by_size(paced(items), lambda item: math.prod(item.lengths), _BATCH_BYTES // 4)


# --- the metadata for planners ---


def metadata_of(manifest: Manifest, url: str) -> Metadata:
    """Return the metadata of a manifest. Empty dicts and composite tensors are left out, because DCP does not have
    them, and tensors of which only the name is known. Called in a worker thread.

    Raises ``UnsupportedCheckpointError``."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, object] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for fqn, entry in paced(manifest.entries.items()):
        if isinstance(entry, OpaqueEntry) and not entry.dtype:
            continue
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
    noted = paths if manifest.planner_data is None else decode_value(manifest.planner_data, "planner_data")
    meta = StorageMeta(checkpoint_id=url, save_id=manifest.save_id or None)
    return Metadata(described, noted, places, meta, _VERSION)


def _tensor(fqn: str, entry: TensorEntry | OpaqueEntry) -> TensorStorageMetadata:
    try:
        properties = TensorProperties(dtype=dtype_from_name(entry.written_dtype))
    except KeyError:
        raise UnsupportedCheckpointError(f"{fqn!r} has dtype {entry.dtype}, which this torch does not know") from None
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


def _place(item: Chunk | ValueEntry) -> object:
    return storage_info(item.file, item.item_offset, item.item_bytes, [item.transform] if item.transform else [])


def _step(key: Key) -> str | int:
    """Return a step of a path as DCP has it, which turns every dict key into a string."""
    return str(key.value) if isinstance(key, DictKey) else key


def _chunks_by_place(manifest: Manifest, fqns: set[str]) -> Mapping[tuple[str, tuple[int, ...]], Chunk]:
    """Return the chunks of some tensors, by FQN and offsets."""
    entries = ((fqn, manifest.entries.get(fqn)) for fqn in fqns)
    return {
        (fqn, chunk.offsets): chunk
        for fqn, entry in entries
        if isinstance(entry, TensorEntry)
        for chunk in entry.chunks
    }
