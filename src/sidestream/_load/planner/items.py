"""What load planners are given and what they ask for.

They are given a validated manifest as the ``Metadata`` of DCP. They ask for tensors into their targets, and for values
as the bytes that DCP's planners take: these are made again from data and are never those of the checkpoint. Nothing is
unpickled.
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

from ..._format.records import Chunk, DictKey, Key, Manifest, OpaqueEntry, TensorEntry, ValueEntry, written_dtype
from ..._format.torch_zip.zip import TorchZip, is_zip
from ..._format.transforms import unpack
from ..._layout.cast import castable
from ..._layout.objects import Allowed
from ..._layout.ranges import Box
from ..._layout.values import decode_value
from ..._runtime.threads import io_threads, run_sliced, yielding_gil
from ..._runtime.torch_probes import check_tensor, dtype_from_name, dtype_name, storage_info
from ..._storage import RangeSource
from ...errors import (
    CorruptCheckpointError,
    DtypeMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    SidestreamError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
)
from ...options import Trust
from ..foreign.values import read_item, read_values
from ..reader import Wanted

__all__ = ["AskedFor", "in_batches", "metadata_of", "read_bytes", "targets_of", "values_of"]

_VERSION = "1.0.0"
_MAX_BYTES = 1 << 30
_BATCH_BYTES = 1 << 30  # a planner may make a tensor for each item that it is asked for


@dataclass(frozen=True, slots=True)
class AskedFor:
    """The tensors of some items. ``names``: what each is called while it is read, and its FQN in the checkpoint."""

    targets: list[tuple[ReadItem, torch.Tensor]]
    wanted: list[Wanted]
    names: dict[str, str]

    @contextmanager
    def telling(self, url: str) -> Iterator[None]:
        """What is raised while they are read says what it is about."""
        try:
            yield
        except FileNotFoundError as error:
            if isinstance(error, SidestreamError):
                raise
            raise CorruptCheckpointError(f"{url}: {error.filename} is missing") from error
        except CorruptCheckpointError as error:
            error.fqn = self.names.get(error.fqn or "", error.fqn)
            raise

    def commit(self, planner: LoadPlanner) -> None:
        """They have been read."""
        for item, target in self.targets:
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)
            planner.commit_tensor(item, target)


def targets_of(items: Iterable[ReadItem], planner: LoadPlanner, manifest: Manifest, url: str) -> AskedFor:
    """Asks the planner for the target of each item. Raises ``MissingKeysError``, ``ShapeMismatchError``,
    ``DtypeMismatchError``, ``UnsupportedTensorError``, ``UnsupportedCheckpointError``."""
    items = list(items)
    chunks = _chunks_by_place(manifest, {item.storage_index.fqn for item in items})
    found = AskedFor([], [], {})
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
        target = planner.resolve_tensor(item).detach()
        if written_dtype(entry.dtype) == dtype_name(target.dtype):
            entry = replace(entry, dtype=written_dtype(entry.dtype))  # as stock DCP reads it
        _check_target(item, entry, target)
        name = fqn if fqn not in found.names else f"{fqn} (part {len(found.names)})"
        found.names[name] = fqn
        offsets = tuple(map(sum, zip(chunk.offsets, item.storage_offsets, strict=True)))
        box = Box(offsets, tuple(item.lengths))
        found.targets.append((item, target))
        found.wanted.append(Wanted(name, replace(entry, chunks=(chunk,)), box, target))
    return found


def values_of(items: Iterable[ReadItem], manifest: Manifest, url: str) -> dict[str, ValueEntry]:
    """The values that items ask for. Raises ``MissingKeysError``."""
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
    """Return for each of ``entries`` the bytes from which ``torch.load`` makes the value; with ``trust="pickle"`` the
    bytes that were saved. Raises ``UnsafeObjectError``, ``CorruptCheckpointError``."""
    if trust == "pickle" and not any(entry.told for entry in entries.values()):
        return {fqn: await _as_saved(source, entry) for fqn, entry in entries.items()}
    try:
        values = await read_values(source, manifest, entries, allow)
    except UnsafeObjectError as error:
        error.add_note(
            'StorageReader(safe_globals=[...]) takes its type, trust="pickle" hands its bytes to the planner'
        )
        raise
    return await io_threads().run(lambda: {fqn: _saved(value) for fqn, value in values.items()})


async def _as_saved(source: RangeSource, entry: ValueEntry) -> bytes:
    raw = await read_item(source, entry)

    def checked() -> bytes:
        content = run_sliced(unpack(raw, _MAX_BYTES)) if entry.transform else raw
        if is_zip(content):
            TorchZip(io.BytesIO(content), len(content)).check()  # torch compares no checksums
        return bytes(content)

    return await io_threads().run(checked)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


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
    batch: list[ReadItem] = []
    elements = 0
    for item in yielding_gil(items):
        if batch and elements + math.prod(item.lengths) > _BATCH_BYTES // 4:
            yield batch
            batch, elements = [], 0
        batch.append(item)
        elements += math.prod(item.lengths)
    if batch:
        yield batch


# --- what they are given ---


def metadata_of(manifest: Manifest, url: str) -> Metadata:
    """In a worker thread. Empty dicts and composite tensors are not in it: DCP does not know them.

    Raises ``UnsupportedCheckpointError``."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, object] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for fqn, entry in yielding_gil(manifest.entries.items()):
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
        properties = TensorProperties(dtype=dtype_from_name(written_dtype(entry.dtype)))
    except KeyError:
        raise UnsupportedCheckpointError(f"{fqn!r} has dtype {entry.dtype}, which this torch does not know") from None
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


def _place(item: Chunk | ValueEntry) -> object:
    return storage_info(item.file, item.item_offset, item.item_bytes, [item.transform] if item.transform else [])


def _step(key: Key) -> str | int:
    """DCP turns every dict key into a string."""
    return str(key.value) if isinstance(key, DictKey) else key


def _chunks_by_place(manifest: Manifest, fqns: set[str]) -> Mapping[tuple[str, tuple[int, ...]], Chunk]:
    """The chunks of some tensors, by FQN and offsets."""
    entries = ((fqn, manifest.entries.get(fqn)) for fqn in fqns)
    return {
        (fqn, chunk.offsets): chunk
        for fqn, entry in entries
        if isinstance(entry, TensorEntry)
        for chunk in entry.chunks
    }
