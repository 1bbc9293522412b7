"""Readers of the safetensors format: a header of JSON, then the bare elements of each tensor.

Stock DCP writes it in two ways: as shard files beside a ``.metadata`` that does not describe their layout, and as
directories in the manner of Hugging Face, which have only the headers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from .._format.records import MAX_RANK, Chunk, Entry, Manifest, OpaqueEntry, TensorEntry, itemsize
from .._format.safetensors import DTYPES, INDEX_NAME
from .._runtime.pauses import collected, paced
from ..errors import CorruptCheckpointError, UnsupportedCheckpointError

_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors package


class TensorSlice(NamedTuple):
    """A tensor of a file, which may be the box at ``offsets`` of a larger one. Its bytes begin at byte ``start`` of the
    file."""

    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    nbytes: int


Header = Mapping[str, TensorSlice]


def header_bytes(prefix: bytes | bytearray, available: int, file: str) -> int:
    """Return the length of the header, from the bytes before it. Raises ``CorruptCheckpointError`` if ``available``
    bytes cannot hold it."""
    nbytes = int.from_bytes(prefix, "little")
    if nbytes > min(available, _MOST_HEADER_BYTES):
        raise CorruptCheckpointError(
            f"{file} is not a safetensors file: it announces a header of {nbytes} bytes. (Stock DCP writes such files "
            "from state dicts that hold more than tensors.)",
            file=file,
        )
    return nbytes


def parse_header(raw: bytes | bytearray, start: int, file_bytes: int, file: str) -> Header:
    """Return the tensors of a file by name. Their elements lie between byte ``start`` and ``file_bytes``, the end of
    the file.

    Raises ``CorruptCheckpointError`` if the header is malformed, or if the last tensor does not end at the end of the
    file. Raises ``UnsupportedCheckpointError`` for an unknown dtype.
    """
    try:
        content = _parse_json(raw)
        extra = content.pop("__metadata__", {})
        sharding = _parse_json(extra.get("DCP_SHARDING_INFO", "{}"))
        slices = collected((name, _slice(name, one, sharding, start, file)) for name, one in content.items())
        header = dict(slices)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, (CorruptCheckpointError, UnsupportedCheckpointError)):
            raise
        raise CorruptCheckpointError(
            f"{file}: its safetensors header is malformed ({type(error).__name__})", file=file
        ) from None
    end = max((one.start + one.nbytes for one in header.values()), default=start)
    if end != file_bytes:
        raise CorruptCheckpointError(
            f"{file} has {file_bytes} bytes, its safetensors header accounts for {end}", file=file
        )
    return header


def _slice(name: str, described: Any, sharding: Any, start: int, file: str) -> TensorSlice:
    spelled, shape = described["dtype"], _numbers(described["shape"])
    if spelled not in DTYPES:
        raise UnsupportedCheckpointError(
            f"{name!r} in {file} has dtype {spelled!a:.40}, which this version does not read"
        )
    dtype = DTYPES[spelled]
    if spelled == "F4" and shape and shape[-1] % 2 == 0:
        shape = (*shape[:-1], shape[-1] // 2)
    begin, end = _numbers(described["data_offsets"])
    if end - begin != math.prod(shape) * itemsize(dtype):
        raise CorruptCheckpointError(
            f"{file}: {name!r} has {end - begin} bytes, which do not fit its shape", file=file, fqn=name
        )
    offsets = _numbers(sharding[name]["saved_offsets"]) if sharding else (0,) * len(shape)
    if len(offsets) != len(shape):
        raise ValueError
    return TensorSlice(dtype, offsets, shape, start + begin, end - begin)


def _numbers(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > MAX_RANK:
        raise ValueError
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError
    return tuple(value)


def _parse_json(raw: str | bytes | bytearray) -> dict[str, Any]:
    text = (
        raw if isinstance(raw, str) else raw.decode()
    )  # for bytes that look like UTF-16, loads() would import a codec
    content = json.loads(text, object_pairs_hook=_without_repetition)
    if not isinstance(content, dict):
        raise TypeError
    return content


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError
    return content


# --- shards beside a .metadata --------------------------------------------------------------------------------------


def shards_of(manifest: Manifest, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files of a stock checkpoint that hold safetensors, and the offset of these in each file. Byte items
    come before them.

    In ``.metadata``, the tensors of such a file have their bare sizes, and all have one offset.

    Raises ``CorruptCheckpointError`` if the offsets differ, and ``UnsupportedCheckpointError`` for shards that were
    written through a compressor: ``.metadata`` then has a transform for every tensor, although none is compressed.
    """
    found: dict[str, int] = {}
    ends: dict[str, tuple[bool, int]] = {}  # of files with compressed items: whether all have bare sizes, and their end
    for fqn, entry in paced(manifest.entries.items()):
        if not isinstance(entry, TensorEntry):
            continue
        for chunk in entry.chunks:
            bare = chunk.item_bytes == math.prod(chunk.sizes) * entry.itemsize
            if chunk.transform:
                all_bare, end = ends.get(chunk.file, (True, 0))
                ends[chunk.file] = (all_bare and bare, max(end, chunk.item_offset + chunk.item_bytes))
            elif bare and found.setdefault(chunk.file, chunk.item_offset) != chunk.item_offset:
                raise CorruptCheckpointError(
                    f"{fqn!r} in {chunk.file!r} has a size or an offset that does not fit the others in the file",
                    fqn=fqn,
                )
    for file, (all_bare, end) in ends.items():
        if all_bare and end != sizes.get(file):
            raise UnsupportedCheckpointError(f"{file!r} was written as safetensors through a compressor")
    return found


def locate_shards(manifest: Manifest, headers: Mapping[str, Header]) -> Manifest:
    """Return the manifest with the places of the tensors in these files. Raises ``CorruptCheckpointError`` if a header
    contradicts the manifest."""
    entries: dict[str, Entry] = {}
    for fqn, entry in paced(manifest.entries.items()):
        entries[fqn] = entry
        if isinstance(entry, TensorEntry) and any(chunk.file in headers for chunk in entry.chunks):
            chunks = [_locate(fqn, entry.dtype, chunk, headers.get(chunk.file)) for chunk in entry.chunks]
            entries[fqn] = replace(entry, chunks=tuple(chunks))
    return replace(manifest, entries=entries)


def _locate(fqn: str, dtype: str, chunk: Chunk, header: Header | None) -> Chunk:
    if header is None:
        return chunk
    found = header.get(fqn)
    if found is None or (found.dtype, found.offsets, found.sizes) != (dtype, chunk.offsets, chunk.sizes):
        has = "nothing" if found is None else f"a {found.dtype} of shape {found.sizes} at {found.offsets}"
        raise CorruptCheckpointError(
            f"{chunk.file} has {has} for {fqn}, .metadata says {dtype} {chunk.sizes} at {chunk.offsets} (stock DCP "
            "writes only one of several chunks that a rank has of a tensor)",
            file=chunk.file,
            fqn=fqn,
        )
    return replace(chunk, item_offset=found.start, item_bytes=found.nbytes, payload_offset=found.start)


# --- directories without a .metadata --------------------------------------------------------------------------------


def parse_index(raw: bytes | bytearray) -> dict[str, str]:
    """Return the file of each tensor. Raises ``CorruptCheckpointError``."""
    try:
        files = _parse_json(raw)["weight_map"]
        if not all(isinstance(file, str) for file in files.values()):
            raise TypeError
        return dict(files)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{INDEX_NAME} is malformed ({type(error).__name__})", file=INDEX_NAME) from None


def manifest_of_headers(headers: Mapping[str, Header], index: Mapping[str, str] | None) -> Manifest:
    """Return the checkpoint that the files form together. With an ``index``, it has only the tensors in the index. One
    that its file lacks is damaged, and the others are read.

    The shape of a tensor ends where its last slice ends. Raises ``CorruptCheckpointError`` if the files contradict each
    other.
    """
    entries: dict[str, Entry] = {}
    for file, header in headers.items():
        for fqn, found in paced(header.items()):
            if index is not None and index.get(fqn) != file:
                continue
            chunk = Chunk(found.offsets, found.sizes, file, found.start, found.nbytes, payload_offset=found.start)
            shape = tuple(offset + size for offset, size in zip(found.offsets, found.sizes, strict=True))
            entry = entries.get(fqn, TensorEntry((fqn,), found.dtype, shape, ()))
            assert isinstance(entry, TensorEntry)
            if entry.dtype != found.dtype or len(entry.shape) != len(shape):
                raise CorruptCheckpointError(
                    f"{fqn!r} has another dtype or rank in {file} than in other files", file=file, fqn=fqn
                )
            reached = tuple(map(max, entry.shape, shape))
            entries[fqn] = replace(entry, shape=reached, chunks=(*entry.chunks, chunk))
    for fqn, file in paced((index or {}).items()):
        if fqn not in entries:
            why = CorruptCheckpointError(f"it is in {INDEX_NAME}, but not in {file}, which that names", file=file)
            entries[fqn] = OpaqueEntry((fqn,), "", (), (), why)
    return Manifest(save_id="", entries=entries, files={})
