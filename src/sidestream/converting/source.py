"""What is converted: a checkpoint directory, a ``torch.save`` file or a safetensors file, told in one way."""

from __future__ import annotations

import asyncio
import io
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from .._threads import Deadline, io_threads, politely
from ..catalog import read_manifest
from ..errors import CheckpointNotFound, Corrupt, SidestreamError
from ..foreign import Located, locate_tensor, read_values
from ..foreign_manifest import read_safetensors_file
from ..format.dtypes import itemsize
from ..format.records import Chunk, EmptyEntry, Key, Manifest, Node, TensorEntry, ValueEntry
from ..format.safetensors import SUFFIX
from ..format.torch_file import FileTensor, FileValue, read_torch_file
from ..format.validate import validate
from ..plan.checks import Piece, foreign_pieces
from ..plan.ranges import ForeignPayload
from ..plan.values import encode_value
from ..storage import EVERYDAY, Location, ReadRange, Store, Where, locate_directory

__all__ = [
    "FILE_SUFFIXES",
    "TORCH_SUFFIXES",
    "Source",
    "SourceTensor",
    "SourceValue",
    "file_size",
    "open_file",
    "open_source",
]

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
FILE_SUFFIXES = (SUFFIX, *TORCH_SUFFIXES)
"""What the names of single files end with."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the source.

    ``straight`` is the tensor as one dimension, if its bytes can be read from anywhere to anywhere; ``entry`` is it as
    it was saved, and ``located`` what the zips say of that, if it is another writer's. ``checks`` are to be made
    before, where checksums cover more than a piece. Tensors of one ``identity`` are tied.
    """

    path: tuple[Key, ...]
    entry: TensorEntry
    straight: TensorEntry | None
    located: Located | None
    identity: object
    checks: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceValue:
    """A plain value as data; None stands for an empty dict if ``empty``."""

    path: tuple[Key, ...]
    node: Node
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    store: Store
    directory: str
    url: str
    entries: Mapping[str, SourceTensor | SourceValue]
    own: bool = False
    unverified: frozenset[str] = field(default_factory=frozenset)


async def open_source(url: str | os.PathLike[str], deadline: Deadline, where: Where = EVERYDAY) -> Source:
    """Raises ``CheckpointNotFound``, and what opening a checkpoint raises; reads no payload of a tensor."""
    location = locate_directory(url, where)
    nbytes = await file_size(location, deadline)
    if nbytes is not None:
        return await open_file(location, nbytes, deadline)
    manifest = await read_manifest(location.store, location.name, location.url, deadline)
    return await _of_manifest(location, manifest, deadline)


async def file_size(location: Location, deadline: Deadline) -> int | None:
    """Of the file that stands there; None if there is a directory. Raises ``CheckpointNotFound`` if there is neither.

    Where nothing is listed, names that end as those of files do are taken for files."""
    store, name = location.store, location.name
    try:
        if not store.lists:
            is_file = name.endswith(FILE_SUFFIXES)
            return await store.size(name, deadline=deadline) if is_file else None
        try:
            await store.sizes(name, deadline=deadline)
        except FileNotFoundError:
            return (await store.sizes(".", deadline=deadline))[name]  # a link is no file, whatever it leads to
    except (FileNotFoundError, KeyError):
        raise CheckpointNotFound(f"there is no checkpoint and no file at {location.url}") from None
    return None


async def open_file(location: Location, nbytes: int, deadline: Deadline) -> Source:
    """``open_source`` of a single file, by its name."""
    name, parent = location.name, replace(location, name=".")
    try:
        if name.endswith(SUFFIX):
            manifest = await read_safetensors_file(parent.store, ".", name, {name: nbytes}, deadline)
            await io_threads().run(validate, manifest, deadline=deadline)
            return await _of_manifest(parent, manifest, deadline)
        return await _open_torch_file(parent, name, nbytes, deadline)
    except SidestreamError as error:
        error.args = (f"{location.url}: {error.args[0]}", *error.args[1:])
        raise


async def _of_manifest(location: Location, manifest: Manifest, deadline: Deadline) -> Source:
    entries: dict[str, SourceTensor | SourceValue] = {}
    unverified = set()
    wanted = {fqn: one for fqn, one in manifest.entries.items() if isinstance(one, ValueEntry)}
    values = await read_values(location.store, location.name, manifest, wanted, deadline)
    for fqn, entry in manifest.entries.items():
        if isinstance(entry, EmptyEntry):
            entries[fqn] = SourceValue(entry.path, None, empty=True)
        elif isinstance(entry, ValueEntry):
            entries[fqn] = SourceValue(entry.path, encode_value(values[fqn], fqn))
        elif manifest.own:
            identity = (entry.dtype, entry.chunks)
            entries[fqn] = SourceTensor(entry.path, entry, _straight(entry), None, identity)
        else:
            entries[fqn] = await _foreign_tensor(location, fqn, entry, deadline)
            if any(chunk.payload_offset is not None for chunk in entry.chunks):
                unverified.add(fqn)
    return Source(location.store, location.name, location.url, entries, manifest.own, frozenset(unverified))


async def _foreign_tensor(location: Location, fqn: str, entry: TensorEntry, deadline: Deadline) -> SourceTensor:
    if any(chunk.transform for chunk in entry.chunks):
        return SourceTensor(entry.path, entry, None, None, fqn)
    located, payloads = await locate_tensor(location.store, location.name, fqn, entry, deadline)
    plain = all(
        payload.strides is None and payload.payload_bytes == math.prod(chunk.sizes) * itemsize(entry.dtype)
        for chunk, payload in payloads.items()
    )
    straight = _straight(located) if plain else None
    checks = tuple(foreign_pieces(fqn, located, payloads)) if straight is not None else ()
    return SourceTensor(entry.path, entry, straight, (located, payloads), fqn, checks)


def _straight(entry: TensorEntry) -> TensorEntry | None:
    """The tensor as one dimension, where every chunk is whole rows; its payloads are row-major anyway."""
    row = math.prod(entry.shape[1:])
    chunks = []
    for chunk in entry.chunks:
        if any(chunk.offsets[1:]) or chunk.sizes[1:] != entry.shape[1:]:
            return None
        first = chunk.offsets[0] * row if chunk.offsets else 0
        chunks.append(replace(chunk, offsets=(first,), sizes=(math.prod(chunk.sizes),)))
    return replace(entry, shape=(math.prod(entry.shape),), chunks=tuple(chunks))


# --- files of torch.save --------------------------------------------------------------------------------------------


async def _open_torch_file(location: Location, name: str, nbytes: int, deadline: Deadline) -> Source:
    reader = _StoreFile(location.store, f"{location.name}/{name}", nbytes, asyncio.get_running_loop(), deadline)

    def read() -> dict[str, SourceTensor | SourceValue]:
        with io.BufferedReader(reader, 1 << 16) as file:
            found = read_torch_file(file, nbytes)
        return dict(politely(_of_file(found, name)))

    entries = await io_threads().run(read, deadline=deadline)
    return Source(location.store, location.name, location.url, entries)


def _of_file(
    found: Mapping[str, FileTensor | FileValue], name: str
) -> Iterator[tuple[str, SourceTensor | SourceValue]]:
    checked: set[int] = set()
    for fqn, one in found.items():
        if isinstance(one, FileValue):
            yield fqn, SourceValue(one.path, one.node, one.empty)
        else:
            yield fqn, _file_tensor(fqn, one, name, checked)


def _file_tensor(fqn: str, one: FileTensor, name: str, checked: set[int]) -> SourceTensor:
    stored, size = one.stored, itemsize(one.stored.dtype)
    plain = torch.empty(stored.shape, device="meta").stride() == stored.strides
    offsets = (0,) * len(stored.shape)
    chunk = Chunk(offsets, stored.shape, name, one.start, stored.storage_bytes, payload_offset=one.start)
    entry = TensorEntry(one.path, stored.dtype, stored.shape, (chunk,))
    payload = ForeignPayload(one.crc, stored.storage_bytes, None if plain else stored.strides, stored.storage_offset)
    identity = (stored.dtype, stored.shape, stored.strides, stored.storage_offset, one.start)
    if not plain:
        return SourceTensor(one.path, entry, None, (entry, {chunk: payload}), identity)
    checks = () if one.start in checked else tuple(foreign_pieces(fqn, entry, {chunk: payload}))
    checked.add(one.start)
    first = one.start + stored.storage_offset * size
    straight = _straight(replace(entry, chunks=(replace(chunk, payload_offset=first),)))
    return SourceTensor(one.path, entry, straight, None, identity, checks)


class _StoreFile(io.RawIOBase):
    """A file of a store for code in a worker thread that reads it bit by bit; the loop does the reading."""

    def __init__(
        self, store: Store, name: str, nbytes: int, loop: asyncio.AbstractEventLoop, deadline: Deadline
    ) -> None:
        self._store, self._name, self._nbytes, self._loop, self._deadline = store, name, nbytes, loop, deadline
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._nbytes)[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        nbytes = max(0, min(len(buffer), self._nbytes - self._position))
        if nbytes:
            into = memoryview(buffer)[:nbytes]
            read = self._store.read(self._name, [ReadRange(self._position, into)], deadline=self._deadline)
            try:
                asyncio.run_coroutine_threadsafe(read, self._loop).result()
            except FileNotFoundError as error:
                raise Corrupt(f"{self._name} was deleted while it was read") from error
        self._position += nbytes
        return nbytes
