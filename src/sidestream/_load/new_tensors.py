"""New memory for tensors that the target does not have. Each item of a checkpoint is read once, and tensors that were
tied are tied again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from .._format.records import Entry, ForeignPayload, TensorEntry, row_major_strides, stored
from .._layout.ranges import Box, DirectReads
from .._runtime.threads import collected, pause_point
from .._runtime.torch_probes import dtype_from_name
from ..errors import allocating
from .reader import Wanted

_ALIGN_BYTES = 64  # as torch aligns its own memory


@dataclass(frozen=True, slots=True)
class NewTensors:
    """Tensors in new memory, by FQN, and the reads that fill them. ``direct`` has the tensors that are read directly,
    and ``wanted`` the others."""

    tensors: dict[str, torch.Tensor]
    wanted: list[Wanted]
    direct: DirectReads = field(default_factory=DirectReads)


def new_tensors(
    entries: Mapping[str, Entry],
    fqns: Iterable[str],
    device: torch.device | None = None,
    dtypes: Mapping[str, str] = MappingProxyType({}),
    *,
    direct: bool = False,
) -> NewTensors:
    """Allocate memory for tensors that have none yet. Called in a worker thread. Raises ``OutOfMemoryError``.

    Tied tensors (one item in the file) share memory. Views of one storage share memory too, and their storage is read
    once, as a whole. ``dtypes`` are the dtypes of those tensors that are converted; these do not share memory with
    others. With ``direct``, tensors are read directly into their memory where that is possible."""
    new = NewTensors({}, [])
    shared: dict[object, torch.Tensor] = {}
    storages: dict[tuple[str, int], list[str]] = {}
    rows = stored(entries) if direct and device is None else {}
    for fqn in fqns:
        pause_point()
        row = rows.get(fqn)
        if isinstance(row, tuple) and fqn not in dtypes:
            dtype, shape, _, file, start, _, payload, *_ = row
            # Tied tensors are one item in the file. The first of them is read, and the others get the same tensor, so
            # that they are tied again.
            place = (dtype, shape, file, start, payload)
            if place not in shared and new.direct.add([(fqn, tensor := _new(fqn, shape, dtype, device), row)]):
                shared[place] = tensor
            if place in shared:
                new.tensors[fqn] = shared[place]
                continue
        entry = entries[fqn]
        assert isinstance(entry, TensorEntry)
        dtype = dtypes.get(fqn, entry.dtype)
        opened = dtype == entry.dtype and len(entry.chunks) == 1 and entry.chunks[0].foreign is not None
        if opened and 0 not in entry.shape:
            storages.setdefault((entry.chunks[0].file, entry.chunks[0].item_offset), []).append(fqn)
            continue
        identity = _identity(entry) or fqn
        if dtype != entry.dtype:
            identity = (identity, dtype)
        if identity not in shared:
            shared[identity] = _new(fqn, entry.shape, dtype, device)
            new.wanted.append(Wanted(fqn, entry, Box.whole(entry.shape), shared[identity]))
        new.tensors[fqn] = shared[identity]
    for views in storages.values():
        pause_point()
        _add_views(new, entries, views, device)
    return new


def tensors_in(
    entries: Mapping[str, Entry], dtypes: Mapping[str, torch.dtype], memory: Callable[[int], Any]
) -> NewTensors:
    """Return tensors in these dtypes, side by side in one buffer that ``memory`` returns, and the reads that fill
    them. Called in a worker thread."""
    new, end = NewTensors({}, []), 0
    starts = {}
    for fqn, dtype in dtypes.items():
        pause_point()
        entry = entries[fqn]
        assert isinstance(entry, TensorEntry)
        starts[fqn] = entry, end
        end += -(-math.prod(entry.shape) * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
    buffer = memory(end) if end else None
    for fqn, (entry, start) in starts.items():
        pause_point()
        count = math.prod(entry.shape)
        if count and buffer is not None:
            flat = torch.frombuffer(buffer, dtype=dtypes[fqn], count=count, offset=start)
        else:
            flat = torch.empty(0, dtype=dtypes[fqn])
        new.tensors[fqn] = tensor = flat.reshape(entry.shape)
        new.wanted.append(Wanted(fqn, entry, Box.whole(entry.shape), tensor))
    return new


def _add_views(new: NewTensors, entries: Mapping[str, Entry], fqns: list[str], device: torch.device | None) -> None:
    """Add the tensors of one storage. If they are all the same view, only its elements are kept."""
    views = [entry for fqn in fqns if isinstance(entry := entries[fqn], TensorEntry)]
    first = views[0]
    # There are two cases for tensors of one storage in a file of another writer. All are the same view: only its
    # elements are read. They differ: the whole storage is read once, and each is a view of it, as it was when it was
    # saved.
    if all(collected(one.dtype == first.dtype and one.chunks == first.chunks for one in views)):
        tensor = _new(fqns[0], first.shape, first.dtype, device)
        new.tensors.update(dict.fromkeys(fqns, tensor))
        new.wanted.append(Wanted(fqns[0], first, Box.whole(first.shape), tensor))
        return
    (chunk,) = first.chunks
    assert chunk.foreign is not None
    nbytes = chunk.foreign.payload_bytes
    raw = ForeignPayload(chunk.foreign.crc, nbytes)
    storage = TensorEntry(first.path, "uint8", (nbytes,), (replace(chunk, offsets=(0,), sizes=(nbytes,), foreign=raw),))
    memory = _new(fqns[0], storage.shape, storage.dtype, device)
    new.wanted.append(Wanted(fqns[0], storage, Box.whole(storage.shape), memory))
    for fqn, view in zip(fqns, views, strict=True):
        pause_point()
        dtype = dtype_from_name(view.dtype)
        elements = memory[: nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        payload = view.chunks[0].foreign
        assert payload is not None
        strides = row_major_strides(view.shape) if payload.strides is None else payload.strides
        new.tensors[fqn] = elements.as_strided(view.shape, strides, payload.first_element)


def _identity(entry: TensorEntry) -> object:
    """Return a key that is equal for entries of the same bytes; None if the place of the bytes is not known."""
    if not entry.chunks or entry.chunks[0].payload_offset is None:
        return None
    first = entry.chunks[0]
    if len(entry.chunks) == 1 and first.sizes == entry.shape and first.foreign is None:
        return entry.dtype, entry.shape, first.file, first.item_offset, first.payload_offset
    return entry.dtype, entry.chunks


def _new(fqn: str, shape: Sequence[int], dtype: str, device: torch.device | None) -> torch.Tensor:
    with allocating(f"memory for {fqn}"):
        return torch.empty(shape, dtype=dtype_from_name(dtype), device=device)
