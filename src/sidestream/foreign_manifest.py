"""What a checkpoint of another writer says about itself, in each of the ways in which stock DCP says it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ._threads import Deadline, io_threads, politely
from .errors import Corrupt
from .foreign import agree
from .format.dcp_metadata import read_dcp_metadata
from .format.marker import METADATA_NAME
from .format.ranks import is_rank_file, merge_ranks, rank_files
from .format.records import Entry, Manifest, TensorEntry, ValueEntry
from .format.safetensors import (
    INDEX_NAME,
    PREFIX_BYTES,
    SUFFIX,
    Header,
    header_bytes,
    locate_shards,
    manifest_of_headers,
    parse_header,
    parse_index,
    shards_of,
)
from .format.validate import check_item
from .storage import ReadRange, Store

__all__ = ["is_foreign", "read_file", "read_foreign_manifest", "read_safetensors_file"]


_MOST_FILE_BYTES = 1 << 32
_ONE_OF_MANY = re.compile(rf"(?!shard-)(.+)-\d{{5}}-of-(\d{{5}}){re.escape(SUFFIX)}")


def is_foreign(sizes: Mapping[str, int]) -> bool:
    """Whether a directory without ``.metadata`` is a checkpoint all the same: stock DCP's of ranks that did not talk to
    each other, or safetensors. One that has a manifest is an attempt of ours, whatever else is in it."""
    ours = any(name.startswith("manifest-") for name in sizes)
    return not ours and any(name.endswith(SUFFIX) or is_rank_file(name) for name in sizes)


async def read_foreign_manifest(store: Store, directory: str, sizes: Mapping[str, int], deadline: Deadline) -> Manifest:
    """Everything about the checkpoint in ``directory``, whose files have these ``sizes``; not yet validated.

    Raises ``Corrupt``, ``UnsafeObject``, ``UnsupportedCheckpoint``, ``MissingExtra``.
    """
    ranks = [] if METADATA_NAME in sizes else rank_files(sizes)
    if METADATA_NAME in sizes:
        manifest = await _read_metadata(store, directory, METADATA_NAME, sizes, deadline)
    elif ranks:
        manifest = await _read_ranks(store, directory, ranks, sizes, deadline)
    else:
        manifest = await _read_safetensors(store, directory, sizes, deadline)
    return await io_threads().run(_with_files, manifest, sizes, deadline=deadline)


async def _read_metadata(
    store: Store, directory: str, name: str, sizes: Mapping[str, int], deadline: Deadline
) -> Manifest:
    raw = await read_file(store, f"{directory}/{name}", sizes[name], deadline)
    try:
        manifest = await io_threads().run(read_dcp_metadata, bytes(raw), deadline=deadline)
    except Corrupt as error:
        error.file = error.file or name
        raise
    shards = await io_threads().run(shards_of, manifest, sizes, deadline=deadline)
    if not shards:
        return manifest
    # a name that is missing, or no name at all, is told when the manifest is validated
    present = {file: start for file, start in shards.items() if file in sizes}
    headers = {
        file: await _read_header(store, directory, file, start, sizes[file], deadline)
        for file, start in present.items()
    }
    return await io_threads().run(locate_shards, manifest, headers, deadline=deadline)


async def _read_ranks(
    store: Store, directory: str, names: list[str], sizes: Mapping[str, int], deadline: Deadline
) -> Manifest:
    parts = [await _read_metadata(store, directory, name, sizes, deadline) for name in names]
    manifest, replicas = await io_threads().run(merge_ranks, parts, deadline=deadline)
    for replica in replicas:
        for item in (replica.first, replica.other):
            place = item if isinstance(item, ValueEntry) else item[1]
            check_item(sizes, replica.fqn, place.file, place.item_offset, place.item_bytes)
        if not await agree(store, directory, replica, deadline):
            raise Corrupt(
                f"{replica.fqn}: the ranks saved different values of it, so it has none as a whole; load this "
                "checkpoint with torch.distributed.checkpoint, on as many ranks",
                fqn=replica.fqn,
            )
    return manifest


async def _read_safetensors(store: Store, directory: str, sizes: Mapping[str, int], deadline: Deadline) -> Manifest:
    index = None
    files = sorted(name for name in sizes if name.endswith(SUFFIX))
    if INDEX_NAME not in sizes:
        _check_all_there(files)
    if INDEX_NAME in sizes:
        raw = await read_file(store, f"{directory}/{INDEX_NAME}", sizes[INDEX_NAME], deadline)
        index = await io_threads().run(parse_index, raw, deadline=deadline)
        files = sorted(set(index.values()))
        missing = [file for file in files if file not in sizes]
        if missing:
            raise Corrupt(f"{missing[0]!r} is in {INDEX_NAME} and not in the directory", file=missing[0])
    headers = {file: await _read_header(store, directory, file, 0, sizes[file], deadline) for file in files}
    return await io_threads().run(manifest_of_headers, headers, index, deadline=deadline)


def _check_all_there(files: Sequence[str]) -> None:
    """Where the index is missing, which comes last, the names say how many files there ought to be. Those of ranks,
    which stock DCP calls shards, need not all have something of every file."""
    for name in files:
        match = _ONE_OF_MANY.fullmatch(name)
        if match is None:
            continue
        count = int(match[2])
        wanted = (f"{match[1]}-{number:05d}-of-{match[2]}{SUFFIX}" for number in range(1, count + 1))
        missing = next((one for one in wanted if one not in files), None)
        if missing is not None:
            raise Corrupt(f"{name} is one of {count} files, and {missing} is not there", file=missing)


async def read_safetensors_file(
    store: Store, directory: str, file: str, sizes: Mapping[str, int], deadline: Deadline
) -> Manifest:
    """One safetensors file as a checkpoint; not yet validated."""
    header = await _read_header(store, directory, file, 0, sizes[file], deadline)
    manifest = await io_threads().run(manifest_of_headers, {file: header}, None, deadline=deadline)
    return replace(manifest, files={file: sizes[file]})


async def _read_header(
    store: Store, directory: str, file: str, start: int, file_bytes: int, deadline: Deadline
) -> Header:
    prefix = bytearray(PREFIX_BYTES)
    begin = start + PREFIX_BYTES
    if start < 0 or begin > file_bytes:
        raise Corrupt(f"{file} has {file_bytes} bytes, too few for safetensors at {start}", file=file)
    await store.read(f"{directory}/{file}", [ReadRange(start, memoryview(prefix))], deadline=deadline)
    raw = bytearray(header_bytes(prefix, file_bytes - begin, file))
    await store.read(f"{directory}/{file}", [ReadRange(begin, memoryview(raw))], deadline=deadline)
    return await io_threads().run(parse_header, raw, begin + len(raw), file_bytes, file, deadline=deadline)


def _with_files(manifest: Manifest, sizes: Mapping[str, int]) -> Manifest:
    used = {file for entry in politely(manifest.entries.values()) for file in _files(entry)}
    return replace(manifest, files={name: nbytes for name, nbytes in politely(sizes.items()) if name in used})


def _files(entry: Entry) -> Iterator[str]:
    if isinstance(entry, TensorEntry):
        yield from (chunk.file for chunk in entry.chunks)
    elif isinstance(entry, ValueEntry):
        yield entry.file


async def read_file(store: Store, name: str, nbytes: int, deadline: Deadline) -> bytearray:
    """A small file, whose size is known. Raises ``Corrupt`` if it claims to be a large one (a sparse file can)."""
    if nbytes > _MOST_FILE_BYTES:
        raise Corrupt(f"{name} has {nbytes} bytes, more than the {_MOST_FILE_BYTES} that are read", file=name)
    raw = bytearray(nbytes)
    await store.read(name, [ReadRange(0, memoryview(raw))], deadline=deadline)
    return raw
