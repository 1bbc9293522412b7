"""The manifests of checkpoints and files of other writers, in each of the forms in which they describe themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import BinaryIO

from .._format.checksum import crc32
from .._format.marker import METADATA_NAME
from .._format.records import (
    Chunk,
    Entry,
    Manifest,
    OpaqueEntry,
    TensorEntry,
    ValueEntry,
)
from .._format.safetensors import INDEX_NAME, PREFIX_BYTES, SUFFIX
from .._format.validate import check_item
from .._runtime.threads import collected, io_threads, paced, pause_point
from .._storage import PIECE_BYTES, RangeSource, ReadRange
from ..errors import (
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    allocating,
)
from .dcp_metadata import read_dcp_metadata, with_opaque_entries
from .file_kinds import HEAD_BYTES, other_kind, part_of_checkpoint
from .items import SourceFile, located, read_item, read_value, unpack_chunk
from .rank_files import Replica, is_rank_file, merge_ranks, rank_files
from .safetensors import Header, header_bytes, locate_shards, manifest_of_headers, parse_header, parse_index, shards_of
from .torch_zip.file import read_torch_file
from .torch_zip.zip import other_zip
from .transforms import require

_ONE_OF_MANY = re.compile(rf"(?!shard-)(.+)-[0-9]{{5}}-of-([0-9]{{5}}){re.escape(SUFFIX)}")

MOST_JSON_BYTES = 100_000_000
_ONLY_DATA = (
    ". Of a file of torch.save only data is read: load it with torch.load, and save its tensors and plain values"
)


def is_foreign(sizes: Mapping[str, int]) -> bool:
    """Return whether a directory without ``.metadata`` is a checkpoint of another writer: of stock DCP with ranks that
    did not communicate, or of safetensors files. A directory with a manifest is always an attempt of sidestream. Called
    in a worker thread."""
    ours = any(collected(name.startswith("manifest-") for name in sizes))
    return not ours and any(name.endswith(SUFFIX) or is_rank_file(name) for name in sizes)


async def read_foreign_manifest(source: RangeSource, sizes: Mapping[str, int]) -> Manifest:
    """Return the manifest of the checkpoint in ``source``, whose files have these ``sizes``. It is not validated yet.

    Raises ``CorruptCheckpointError``, ``UnsafeObjectError``, ``UnsupportedCheckpointError``, ``MissingExtraError``.
    """
    threads = io_threads()
    ranks = [] if METADATA_NAME in sizes else await threads.run(rank_files, sizes)
    if METADATA_NAME in sizes:
        manifest = await _read_metadata(source, METADATA_NAME, sizes)
    elif ranks:
        manifest = await _read_ranks(source, ranks, sizes)
    else:
        manifest = await _read_safetensors(source, sizes)
    return await threads.run(_with_files, manifest, sizes)


async def _read_metadata(source: RangeSource, name: str, sizes: Mapping[str, int]) -> Manifest:
    threads = io_threads()
    raw = await source.read_metadata(name, sizes[name])
    try:
        manifest = await threads.run(_stock_metadata, raw)
    except CorruptCheckpointError as error:
        error.file = error.file or name
        raise
    shards = await threads.run(_present_shards, manifest, sizes)
    if not shards:
        return manifest
    headers = {file: await _read_header(source, file, start, sizes[file]) for file, start in shards}
    return await threads.run(locate_shards, manifest, headers)


def _stock_metadata(raw: bytearray) -> Manifest:
    """Check the paths in ``planner_data``. DCP makes the FQN from the path by joining its steps with dots. Tensors are
    found by name, so if the two differ the path was altered."""
    manifest = read_dcp_metadata(raw)
    for fqn, entry in paced(manifest.entries.items()):
        if ".".join(map(str, entry.path)) != fqn:
            raise CorruptCheckpointError(
                f"the path of {fqn!r} in planner_data does not match its name: {ascii(entry.path)[:200]}", fqn=fqn
            )
    return manifest


def _present_shards(manifest: Manifest, sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the shard files that are present. ``validate`` reports a shard file that is missing or whose name is not
    plain."""
    return [(file, start) for file, start in shards_of(manifest, sizes).items() if file in sizes]


async def _read_ranks(source: RangeSource, names: list[str], sizes: Mapping[str, int]) -> Manifest:
    parts = [await _read_metadata(source, name, sizes) for name in names]
    manifest, replicas = await io_threads().run(merge_ranks, parts)
    for replica in replicas:
        for item in (replica.first, replica.other):
            place = item if isinstance(item, ValueEntry) else item[1]
            check_item(sizes, replica.fqn, place.file, place.item_offset, place.item_bytes)
        if not await agree(source, replica):
            raise CorruptCheckpointError(
                f"{replica.fqn}: the ranks saved different values of it, so it has none as a whole; load this "
                "checkpoint with torch.distributed.checkpoint, on as many ranks",
                fqn=replica.fqn,
            )
    return manifest


async def _read_safetensors(source: RangeSource, sizes: Mapping[str, int]) -> Manifest:
    threads = io_threads()
    index = None
    if INDEX_NAME in sizes:
        nbytes = sizes[INDEX_NAME]
        raw = await source.read_file(INDEX_NAME, nbytes, most_bytes=MOST_JSON_BYTES)
        index = await threads.run(parse_index, raw)
        files = await threads.run(_files_of_index, index, sizes)
    else:
        files = await threads.run(_files_without_index, sizes)
    headers = {file: await _read_header(source, file, 0, sizes[file]) for file in files}
    return await threads.run(manifest_of_headers, headers, index)


def _files_of_index(index: Mapping[str, str], sizes: Mapping[str, int]) -> list[str]:
    files = sorted(set(index.values()))
    for file in paced(files):
        if file not in sizes:
            raise CorruptCheckpointError(
                f"{file!r} is listed in {INDEX_NAME} but is missing from the directory", file=file
            )
    return files


def _files_without_index(sizes: Mapping[str, int]) -> list[str]:
    """Return the files of a directory without an index. The index is written last; if it is missing, the names of the
    files say how many there should be. Ranks (shards in the names of stock DCP) need not each have a part of every
    file."""
    files = sorted(name for name in paced(sizes) if name.endswith(SUFFIX))
    checked: set[tuple[str, str]] = set()
    for name in files:
        pause_point()
        match = _ONE_OF_MANY.fullmatch(name)
        if match is None or (match[1], match[2]) in checked:
            continue
        checked.add((match[1], match[2]))
        missing = next((one for one in _wanted(match[1], match[2]) if one not in sizes), None)
        if missing is not None:
            raise CorruptCheckpointError(
                f"{name} is one of {int(match[2])} files, and {missing} is missing", file=missing
            )
    return files


def _wanted(stem: str, count: str) -> Iterator[str]:
    """Return the expected names in order. The search for a missing name ends after at most as many steps as there are
    files."""
    return (f"{stem}-{number:05d}-of-{count}{SUFFIX}" for number in paced(range(1, int(count) + 1)))


async def _read_header(source: RangeSource, file: str, start: int, file_bytes: int) -> Header:
    prefix = bytearray(PREFIX_BYTES)
    begin = start + PREFIX_BYTES
    try:
        if start < 0 or begin > file_bytes:
            raise CorruptCheckpointError(
                f"{file} has {file_bytes} bytes, too few for safetensors at {start}", file=file
            )
        await source.read(file, [ReadRange(start, memoryview(prefix))])
        nbytes = header_bytes(prefix, file_bytes - begin, file)
        with allocating(f"reading the header of {file}"):
            raw = bytearray(nbytes)
        await source.read(file, [ReadRange(begin, memoryview(raw))])
        return await io_threads().run(parse_header, raw, begin + len(raw), file_bytes, file)
    except CorruptCheckpointError as error:
        what = await find_other_kind(source, file, file_bytes)
        if what is None or start:
            raise
        raise UnsupportedCheckpointError(f"{file} is not a safetensors file: {what}") from error


async def find_other_kind(source: RangeSource, file: str, nbytes: int) -> str | None:
    """Return what kind of file this is, and what to do with it, if it could not be read as its name suggests. Return
    None if the kind is unknown. Only the beginning of the file is read."""
    head = bytearray(min(nbytes, HEAD_BYTES))
    await source.read(file, [ReadRange(0, memoryview(head))])
    return other_kind(bytes(head), file)


def _with_files(manifest: Manifest, sizes: Mapping[str, int]) -> Manifest:
    manifest = with_opaque_entries(manifest)
    used = set(collected(file for entry in manifest.entries.values() for file in _files(entry)))
    return replace(manifest, files={name: nbytes for name, nbytes in paced(sizes.items()) if name in used})


def _files(entry: Entry) -> Iterator[str]:
    if isinstance(entry, TensorEntry | OpaqueEntry):
        yield from (chunk.file for chunk in entry.chunks)
    elif isinstance(entry, ValueEntry):
        yield entry.file


# --- a single file as a checkpoint: one of torch.save, or of safetensors ---

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
FILE_SUFFIXES = (SUFFIX, *TORCH_SUFFIXES)
"""The endings of the names of single files that can be read."""


async def read_file_manifest(source: RangeSource, name: str, nbytes: int) -> Manifest:
    """Return the manifest of one file. It is not validated yet. Everything in the file is taken as data, and no payload
    is read.

    Raises ``CorruptCheckpointError``, ``UnsafeObjectError``, ``UnsupportedCheckpointError``, ``KeyCollisionError``."""
    if name.endswith(SUFFIX):
        header = await _read_header(source, name, 0, nbytes)
        manifest = await io_threads().run(manifest_of_headers, {name: header}, None)
        return replace(manifest, files={name: nbytes})
    reader = SourceFile(source, name, nbytes)

    def read(file: BinaryIO) -> Manifest:
        try:
            return read_torch_file(file, nbytes, name)
        except (CorruptCheckpointError, UnsafeObjectError, UnsupportedCheckpointError) as error:
            what = other_zip(file, nbytes)
            if what is None and isinstance(error, UnsafeObjectError):
                raise error.reworded(lambda text: text + _ONLY_DATA) from error
            if what is None:
                raise
            raise UnsupportedCheckpointError(f"{name} cannot be read as a torch.save file: {what}") from error

    try:
        return await reader.run(read, 1 << 16)
    except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
        if part_of_checkpoint(name):
            raise UnsupportedCheckpointError(
                f"{name} is one file of a checkpoint: use the path of the directory that contains it"
            ) from error
        what = await find_other_kind(source, name, nbytes)
        if what is not None:
            raise UnsupportedCheckpointError(f"{name} cannot be read as a torch.save file: {what}") from error
        raise


async def agree(source: RangeSource, replica: Replica) -> bool:
    """Return whether two ranks wrote the same item. For tensors the checksums are compared, if the files have them."""
    first, other = replica.first, replica.other
    if isinstance(first, ValueEntry) and isinstance(other, ValueEntry):
        items = [await read_value(source, replica.fqn, entry) for entry in (first, other)]
        return first.transform == other.transform and items[0] == items[1]
    if isinstance(first, ValueEntry) or isinstance(other, ValueEntry):
        return False
    one = await _digest(source, replica.fqn, *first)
    return one == await _digest(source, replica.fqn, *other)


async def _digest(source: RangeSource, fqn: str, entry: TensorEntry, chunk: Chunk) -> object:
    if chunk.transform:
        require()
        raw = await read_item(source, chunk)
        _, found = await io_threads().run(unpack_chunk, fqn, entry, chunk, raw)
        return found.chunks[0].foreign
    if chunk.payload_offset is None:
        found = (await located(source, {fqn: replace(entry, chunks=(chunk,))}))[fqn]
        return found.chunks[0].foreign
    crc = 0
    for start in range(0, chunk.item_bytes, PIECE_BYTES):
        nbytes = min(PIECE_BYTES, chunk.item_bytes - start)
        part = replace(chunk, item_offset=chunk.item_offset + start, item_bytes=nbytes)
        crc = await io_threads().run(crc32, await read_item(source, part), crc)
    return crc
