"""Items that another writer (stock DCP) wrote: what only the zips themselves say."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import BinaryIO, TypeAlias

import torch

from ._threads import Deadline, io_threads
from .errors import Corrupt, UnsafeObject
from .format.records import Chunk, Manifest, Node, TensorEntry, ValueEntry
from .format.torch_item import open_tensor_item, open_value_item
from .plan.ranges import ForeignPayload
from .storage import ReadRange, Store

__all__ = ["Located", "locate_tensor", "read_nodes"]

Located: TypeAlias = tuple[TensorEntry, dict[Chunk, ForeignPayload]]
"""A tensor whose chunks know where their payload begins, and what else the zips say about it."""

_END_BYTES = 64 << 10
_MAX_VALUE_BYTES = 64 << 20


async def read_nodes(
    store: Store, directory: str, manifest: Manifest, entries: Mapping[str, ValueEntry], deadline: Deadline
) -> dict[str, Node]:
    """The plain values behind ``entries``: our manifest has them; other writers pickled them, which is decoded as data.

    Raises ``UnsafeObject``, naming the FQN, for what is more than data.
    """
    if manifest.own:
        return {fqn: entry.node for fqn, entry in entries.items()}
    return {fqn: await _read_node(store, directory, fqn, entry, deadline) for fqn, entry in entries.items()}


async def _read_node(store: Store, directory: str, fqn: str, entry: ValueEntry, deadline: Deadline) -> Node:
    if entry.item_bytes > _MAX_VALUE_BYTES:
        raise Corrupt(f"{fqn}: a plain value of {entry.item_bytes} bytes", file=entry.file, fqn=fqn)
    raw = bytearray(entry.item_bytes)
    await store.read(f"{directory}/{entry.file}", [ReadRange(entry.item_offset, memoryview(raw))], deadline=deadline)
    try:
        return await io_threads().run(open_value_item, io.BytesIO(raw), entry.item_bytes, deadline=deadline)
    except (Corrupt, UnsafeObject) as error:
        error.args = (f"{fqn}: {error.args[0]}",)
        if isinstance(error, Corrupt):
            error.file, error.fqn, error.offset = entry.file, fqn, entry.item_offset
        raise


async def locate_tensor(store: Store, directory: str, fqn: str, entry: TensorEntry, deadline: Deadline) -> Located:
    """Open the zip of each chunk that another writer wrote, to see where its payload begins and how it is laid out."""
    chunks: list[Chunk] = []
    payloads: dict[Chunk, ForeignPayload] = {}
    for chunk in entry.chunks:
        ends = await _read_ends(store, f"{directory}/{chunk.file}", chunk, deadline)
        payload = await io_threads().run(open_tensor_item, ends, chunk.item_bytes, deadline=deadline)
        if payload.dtype != entry.dtype or tuple(payload.shape) != chunk.sizes:
            raise Corrupt(
                f"{chunk.file} has a {payload.dtype} of shape {tuple(payload.shape)} for {fqn}, .metadata says "
                f"{entry.dtype} {chunk.sizes}",
                file=chunk.file,
                fqn=fqn,
                offset=chunk.item_offset,
            )
        located = replace(chunk, payload_offset=chunk.item_offset + payload.payload_offset)
        plain = payload.storage_offset == 0 and torch.empty(chunk.sizes, device="meta").stride() == payload.strides
        payloads[located] = ForeignPayload(
            payload.crc32, payload.payload_bytes, None if plain else tuple(payload.strides), payload.storage_offset
        )
        chunks.append(located)
    return replace(entry, chunks=tuple(chunks)), payloads


async def _read_ends(store: Store, name: str, chunk: Chunk, deadline: Deadline) -> BinaryIO:
    """The zip without its payload: its records stand before it, its directory behind it."""
    if chunk.item_bytes <= 4 * _END_BYTES:
        raw = bytearray(chunk.item_bytes)
        await store.read(name, [ReadRange(chunk.item_offset, memoryview(raw))], deadline=deadline)
        return io.BytesIO(raw)
    head, tail = bytearray(_END_BYTES), bytearray(_END_BYTES)
    at = chunk.item_bytes - _END_BYTES
    ranges = [ReadRange(chunk.item_offset, memoryview(head)), ReadRange(chunk.item_offset + at, memoryview(tail))]
    await store.read(name, ranges, deadline=deadline)
    return io.BufferedReader(_Ends(bytes(head), bytes(tail), chunk.item_bytes))


class _Ends(io.RawIOBase):
    """A file of which only head and tail are there. Whoever reads what lies between finds zeros, and no zip."""

    def __init__(self, head: bytes, tail: bytes, nbytes: int) -> None:
        self._head, self._tail, self._nbytes, self._position = head, tail, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._nbytes)[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        start = self._position
        end = min(start + len(buffer), self._nbytes)
        tail_at = self._nbytes - len(self._tail)
        if start < len(self._head):
            end = min(end, len(self._head))
            piece = self._head[start:end]
        elif start >= tail_at:
            piece = self._tail[start - tail_at : end - tail_at]
        else:
            end = min(end, tail_at)
            piece = bytes(max(0, min(end - start, _END_BYTES)))
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)
