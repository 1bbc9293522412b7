"""A single file as a checkpoint: one of ``torch.save``, or of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO

import torch

from ..._format.file_kinds import part_of_checkpoint
from ..._format.records import Chunk, EmptyEntry, Entry, ForeignPayload, Manifest, TensorEntry, ValueEntry
from ..._format.safetensors.read import SUFFIX
from ..._format.torch_zip.file import FileTensor, FileValue, read_torch_file
from ..._format.torch_zip.zip import other_zip
from ..._runtime.threads import Deadline, politely
from ..._storage import Store
from ...errors import Corrupt, UnsafeObject, UnsupportedCheckpoint
from .manifests import find_other_kind, read_safetensors_file
from .values import StoreFile

__all__ = ["FILE_SUFFIXES", "TORCH_SUFFIXES", "read_file_manifest"]

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
FILE_SUFFIXES = (SUFFIX, *TORCH_SUFFIXES)
"""What the names of single files end with."""


async def read_file_manifest(store: Store, name: str, nbytes: int, deadline: Deadline) -> Manifest:
    """Of a file at the root of ``store``; not yet validated. Everything in it is data, and no payload is read.

    Raises ``Corrupt``, ``UnsafeObject``, ``UnsupportedCheckpoint``, ``KeyCollision``."""
    if name.endswith(SUFFIX):
        return await read_safetensors_file(store, ".", name, {name: nbytes}, deadline)
    reader = StoreFile(store, name, nbytes, deadline)

    def read(file: BinaryIO) -> Manifest:
        try:
            found = read_torch_file(file, nbytes)
        except (Corrupt, UnsafeObject, UnsupportedCheckpoint) as error:
            what = other_zip(file, nbytes)
            if what is None:
                raise
            raise UnsupportedCheckpoint(f"{name} cannot be read as a torch.save file: {what}") from error
        return Manifest("", _entries(found, name), {name: nbytes})

    try:
        return await reader.run(read, 1 << 16)
    except (Corrupt, UnsupportedCheckpoint) as error:
        if part_of_checkpoint(name):
            raise UnsupportedCheckpoint(
                f"{name} is one file of a checkpoint: use the path of the directory that contains it"
            ) from error
        what = await find_other_kind(store, name, nbytes, deadline)
        if what is not None:
            raise UnsupportedCheckpoint(f"{name} cannot be read as a torch.save file: {what}") from error
        raise


def _entries(found: Mapping[str, FileTensor | FileValue], name: str) -> dict[str, Entry]:
    return {
        fqn: _tensor(one, name)
        if isinstance(one, FileTensor)
        else EmptyEntry(one.path)
        if one.empty
        else ValueEntry(one.path, name, 0, 0, one.node)
        for fqn, one in politely(found.items())
    }


def _tensor(one: FileTensor, name: str) -> TensorEntry:
    stored = one.stored
    row_major = torch.empty(stored.shape, device="meta").stride() == stored.strides
    whole = row_major and not stored.storage_offset
    payload = ForeignPayload(one.crc, stored.storage_bytes, None if whole else stored.strides, stored.storage_offset)
    offsets = (0,) * len(stored.shape)
    chunk = Chunk(offsets, stored.shape, name, one.start, stored.storage_bytes, one.start, told=payload)
    return TensorEntry(one.path, stored.dtype, stored.shape, (chunk,))
