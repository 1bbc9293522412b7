"""New memory for tensors that have no place yet: each item of a checkpoint is read once, and what was tied is tied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from .._format.records import Entry, ForeignPayload, TensorEntry
from .._runtime.threads import Steps, gathered, sliced
from .._runtime.torch_probes import dtype_from_name
from ..errors import allocating
from .reader import Wanted, whole

__all__ = ["NewTensors", "new_tensors"]


@dataclass(frozen=True, slots=True)
class NewTensors:
    """Tensors in new memory, by FQN, and the reads that fill all of them."""

    tensors: dict[str, torch.Tensor]
    wanted: list[Wanted]


@sliced
def new_tensors(
    entries: Mapping[str, Entry],
    fqns: Iterable[str],
    device: torch.device | None = None,
    dtypes: Mapping[str, str] = MappingProxyType({}),
) -> Steps[NewTensors]:
    """Allocate memory for tensors that have none yet. Tied tensors (one item in the file) share memory, and so do
    several views of one storage, which is read once, as a whole. ``dtypes``: what some are converted to, each by
    itself. Called in a worker thread. Raises ``OutOfMemoryError``."""
    new = NewTensors({}, [])
    shared: dict[object, torch.Tensor] = {}
    storages: dict[tuple[str, int], list[str]] = {}
    for fqn in fqns:
        yield
        entry = entries[fqn]
        assert isinstance(entry, TensorEntry)
        dtype = dtypes.get(fqn, entry.dtype)
        told = dtype == entry.dtype and len(entry.chunks) == 1 and entry.chunks[0].told is not None
        if told and 0 not in entry.shape:
            storages.setdefault((entry.chunks[0].file, entry.chunks[0].item_offset), []).append(fqn)
            continue
        located = entry.chunks and entry.chunks[0].payload_offset is not None
        identity = (entry.dtype, entry.chunks, dtype) if located else fqn
        if identity not in shared:
            shared[identity] = _new(fqn, entry, device, dtype)
            new.wanted.append(Wanted(fqn, entry, whole(entry), shared[identity]))
        new.tensors[fqn] = shared[identity]
    for views in storages.values():
        yield
        _add_views(new, entries, views, device)
    return new


@sliced
def _add_views(
    new: NewTensors, entries: Mapping[str, Entry], fqns: list[str], device: torch.device | None
) -> Steps[None]:
    """Add the tensors of one storage. If they are all the same view, only its elements are kept."""
    views = [entry for fqn in fqns if isinstance(entry := entries[fqn], TensorEntry)]
    first = views[0]
    if all(gathered(one.dtype == first.dtype and one.chunks == first.chunks for one in views)):
        tensor = _new(fqns[0], first, device)
        new.tensors.update(dict.fromkeys(fqns, tensor))
        new.wanted.append(Wanted(fqns[0], first, whole(first), tensor))
        return
    (chunk,) = first.chunks
    assert chunk.told is not None
    nbytes = chunk.told.payload_bytes
    told = ForeignPayload(chunk.told.crc, nbytes)
    storage = TensorEntry(first.path, "uint8", (nbytes,), (replace(chunk, offsets=(0,), sizes=(nbytes,), told=told),))
    memory = _new(fqns[0], storage, device)
    new.wanted.append(Wanted(fqns[0], storage, whole(storage), memory))
    for fqn, view in zip(fqns, views, strict=True):
        yield
        dtype = dtype_from_name(view.dtype)
        elements = memory[: nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        payload = view.chunks[0].told
        assert payload is not None
        strides = torch.empty(view.shape, device="meta").stride() if payload.strides is None else payload.strides
        new.tensors[fqn] = elements.as_strided(view.shape, strides, payload.first_element)


def _new(fqn: str, entry: TensorEntry, device: torch.device | None, dtype: str | None = None) -> torch.Tensor:
    with allocating(f"memory for {fqn}"):
        return torch.empty(entry.shape, dtype=dtype_from_name(dtype or entry.dtype), device=device)
