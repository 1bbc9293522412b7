"""Tensors over memory maps of the files of a checkpoint."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Mapping
from mmap import mmap

import torch

from ..._format.records import Entry, Manifest, TensorEntry
from ..._runtime.memory_maps import pieces, populate_read
from ..._runtime.threads import collected, io_threads, pause_point
from ..._runtime.torch_probes import dtype_from_name
from ..._storage import RangeSource
from ...errors import StorageError

_PAGE_BYTES = 4096


async def map_tensors(source: RangeSource, manifest: Manifest, fqns: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return mapped tensors for those of ``fqns`` whose elements are in one piece of a file, in the layout that torch
    needs. Tied tensors are one tensor.

    Nothing is read or verified. Raises ``CorruptCheckpointError``, ``FileNotFoundError``.
    """
    entries = await io_threads().run(_mappable, manifest.entries, fqns)
    files = {}
    for file in await io_threads().run(_files, entries):
        files[file] = await source.map(file, manifest.files[file])
    return await io_threads().run(_over, entries, files)


def make_present(tensors: Mapping[str, torch.Tensor]) -> None:
    """Make all pages of mapped tensors present, so that no request waits for the disk. Called in a worker thread.
    Raises ``StorageError`` if one cannot be read."""
    for fqn, tensor in tensors.items():
        pause_point()
        start = tensor.data_ptr() & -_PAGE_BYTES
        for offset, nbytes in pieces(tensor.data_ptr() + tensor.nbytes - start):
            number = populate_read(start + offset, nbytes)
            if number == errno.EINVAL:  # Linux before 5.14, or another system: a page that cannot be read is fatal here
                flat = tensor.view(-1).view(torch.uint8)
                (flat[::_PAGE_BYTES].sum(), flat[-1].item())
                break
            if number:
                raise StorageError(number, f"{fqn}: a page of its file cannot be read ({os.strerror(number)})")


def _mappable(entries: Mapping[str, Entry], fqns: Iterable[str]) -> dict[str, TensorEntry]:
    found = {}
    for fqn in fqns:
        pause_point()
        entry = entries[fqn]
        assert isinstance(entry, TensorEntry)
        if not math.prod(entry.shape) or len(entry.chunks) != 1:
            continue
        (chunk,) = entry.chunks
        row_major = chunk.foreign is None or chunk.foreign.strides is None
        start = chunk.payload_offset if row_major and not chunk.transform else None
        if start is not None and start % entry.itemsize == 0:
            found[fqn] = entry
    return found


def _files(entries: Mapping[str, TensorEntry]) -> list[str]:
    return list(dict.fromkeys(collected(entry.chunks[0].file for entry in entries.values())))


def _over(entries: Mapping[str, TensorEntry], files: Mapping[str, mmap]) -> dict[str, torch.Tensor]:
    """Return tensors over the mapped files. Each tensor keeps its file mapped."""
    shared: dict[object, torch.Tensor] = {}
    tensors = {}
    for fqn, entry in entries.items():
        pause_point()
        (chunk,) = entry.chunks
        identity = (entry.dtype, chunk)
        if identity not in shared:
            offset = chunk.payload_offset
            assert offset is not None
            flat = torch.frombuffer(
                files[chunk.file], dtype=dtype_from_name(entry.dtype), count=math.prod(entry.shape), offset=offset
            )
            shared[identity] = flat.reshape(entry.shape)
        tensors[fqn] = shared[identity]
    return tensors
