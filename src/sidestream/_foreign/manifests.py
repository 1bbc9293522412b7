"""Manifests that are put together from other files: those of other writers, in each of the forms in which they describe
themselves, and those of ranks that saved their parts separately. The latter can be read when all parts of one save
exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from .._format.checksum import crc32
from .._format.manifest import parse_manifest
from .._format.marker import (
    METADATA_NAME,
    TAIL_BYTES,
    Marker,
    PartMarker,
    find_part_marker,
    missing_ranks,
    part_manifest_name,
    part_metadata_name,
    whole,
)
from .._format.records import (
    MAX_MANIFEST_BYTES,
    Chunk,
    Entry,
    Manifest,
    OpaqueEntry,
    TensorEntry,
    ValueEntry,
    is_stored,
)
from .._format.safetensors import INDEX_NAME, PREFIX_BYTES, SUFFIX
from .._format.shared import Root
from .._format.validate import check_item
from .._layout.ranges import PIECE_BYTES
from .._runtime.tasks import in_parallel
from .._runtime.threads import collected, io_threads, paced, pause_point
from .._storage import RangeSource, ReadRange
from ..errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    allocating,
)
from .dcp_metadata import read_dcp_metadata, with_opaque_entries
from .file_kinds import HEAD_BYTES, other_kind, part_of_checkpoint
from .items import MAX_VALUE_BYTES, SourceFile, located, read_item, unpack_chunk
from .rank_files import Replica, is_rank_file, merge_ranks, rank_files, ranks_among
from .safetensors import Header, header_bytes, locate_shards, manifest_of_headers, parse_header, parse_index, shards_of
from .torch_zip.file import read_torch_file
from .torch_zip.zip import other_zip
from .transforms import require

__all__ = [
    "FILE_SUFFIXES",
    "MOST_METADATA_BYTES",
    "TORCH_SUFFIXES",
    "check_sizes",
    "is_foreign",
    "is_whole",
    "read_apart",
    "read_file",
    "read_file_manifest",
    "read_foreign_manifest",
    "read_own_manifest",
    "read_part",
    "read_part_markers",
]


async def read_part_markers(source: RangeSource, names: Mapping[str, int]) -> dict[int, PartMarker | None]:
    """Return the marker of the part of each rank that is among the files ``names``; None for a part of another writer.
    Raises ``CorruptCheckpointError``."""
    ranks = await io_threads().run(ranks_among, names)
    found: dict[int, PartMarker | None] = dict.fromkeys(ranks)

    async def read(rank: int) -> None:
        tail = await source.read_tail(part_metadata_name(rank), TAIL_BYTES)
        found[rank] = find_part_marker(tail, rank)

    await in_parallel(ranks, read)
    return found


async def is_whole(source: RangeSource, names: Mapping[str, int]) -> bool:
    """Return whether the files are a checkpoint in parts that sidestream wrote. Raises ``IncompleteCheckpointError``
    and ``CorruptCheckpointError``."""
    ranks = await io_threads().run(ranks_among, names)
    first = {part_metadata_name(rank): 0 for rank in ranks[:1]}
    for one in (await read_part_markers(source, first)).values():
        if one is not None and one.world_size != len(ranks):  # reading the others would not change that
            missing = await io_threads().run(missing_ranks, frozenset(ranks), one.world_size)
            raise IncompleteCheckpointError(
                f"the save {one.save_id!r} of {one.world_size} ranks, each by itself, is not whole: there are parts of "
                f"{len(ranks)} ranks",
                save_id=one.save_id,
                missing=missing,
            )
    markers = await read_part_markers(source, names)
    return any(markers.values()) and bool(await io_threads().run(whole, markers))


async def read_apart(
    source: RangeSource, sizes: Mapping[str, int], markers: Mapping[int, PartMarker | None]
) -> Manifest:
    """Return the manifest of the checkpoint that the parts form, not validated yet. Raises
    ``IncompleteCheckpointError`` and ``CorruptCheckpointError``."""
    found = await io_threads().run(whole, markers)
    read: dict[int, Manifest] = {}

    async def work(marker: PartMarker) -> None:
        read[marker.rank] = await read_part(source, sizes, marker)

    await in_parallel(found, work)
    parts = [read[marker.rank] for marker in found]
    manifest, replicas, files = await io_threads().run(_merged, parts)
    for replica in replicas:
        if not await _agree(source, replica):
            raise _differ(replica.fqn)
    return replace(
        manifest,
        save_id=found[0].save_id,
        files=files,
        file_crcs={name: crc for part in parts for name, crc in part.file_crcs.items()},
        metadata=parts[0].metadata,
        planner="dcp",
        parts=tuple(found),
    )


def _merged(parts: Sequence[Manifest]) -> tuple[Manifest, list[Replica], dict[str, int]]:
    """Merge the parts. Also returns the items that remain to be compared byte by byte, and the files of all parts.
    Raises ``CorruptCheckpointError`` if the checksums of the parts differ."""
    manifest, replicas = merge_ranks(parts)
    files = dict(collected(named for part in parts for named in part.files.items()))
    left = []
    for replica in replicas:
        pause_point()
        first, other = replica.first, replica.other
        if isinstance(first, ValueEntry) and isinstance(other, ValueEntry):
            if first.node != other.node:
                raise _differ(replica.fqn)
            if is_stored(first.node):
                left.append(replica)
        elif isinstance(first, ValueEntry) or isinstance(other, ValueEntry) or first[1].crcs != other[1].crcs:
            raise _differ(replica.fqn)
    return manifest, left, files


def _differ(fqn: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{fqn}: the ranks saved different values of it, so it has none as a whole; give what belongs to a rank a name "
        "of its own, or load this checkpoint with torch.distributed.checkpoint, on as many ranks",
        fqn=fqn,
    )


async def read_part(source: RangeSource, sizes: Mapping[str, int], marker: PartMarker) -> Manifest:
    """Return the manifest of the part of one rank. Raises ``CorruptCheckpointError``."""

    def belongs(manifest: Manifest | Root) -> bool:
        return isinstance(manifest, Manifest) and manifest.save_id[: len(marker.id)] == marker.id

    name = part_manifest_name(marker.rank, marker.id)
    manifest = await read_own_manifest(source, name, marker, sizes.get(name, 0), belongs)
    assert isinstance(manifest, Manifest)
    await io_threads().run(check_sizes, manifest.files, sizes)
    return manifest


async def read_own_manifest(
    source: RangeSource, name: str, marker: Marker | PartMarker, nbytes: int, belongs: Callable[[Manifest | Root], bool]
) -> Manifest | Root:
    """Return the manifest in the file ``name``, which has ``nbytes`` and to which ``marker`` points, not validated yet.
    ``belongs`` returns whether a manifest is that of the save of the marker. Raises ``CorruptCheckpointError``."""
    if nbytes != marker.manifest_bytes:
        raise CorruptCheckpointError(f"{name} has {nbytes} bytes, the marker says {marker.manifest_bytes}", file=name)
    raw = await read_file(source, name, nbytes)

    def parse() -> Manifest | Root:
        if crc32(raw) != marker.manifest_crc:
            raise CorruptCheckpointError(f"{name} was altered: its checksum is not the one in the marker", file=name)
        manifest = parse_manifest(raw)
        if not belongs(manifest):
            raise CorruptCheckpointError(f"{name} belongs to another save than the marker", file=name)
        return manifest

    return await io_threads().run(parse)


def check_sizes(saved: Mapping[str, int], found: Mapping[str, int]) -> None:
    """Raise ``CorruptCheckpointError`` for a file that is missing or does not have the size that was saved. Called in a
    worker thread."""
    for file, nbytes in saved.items():
        pause_point()
        if found.get(file) != nbytes:
            raise CorruptCheckpointError(f"{file} has {found.get(file, 0)} bytes, but {nbytes} were saved", file=file)


_ONE_OF_MANY = re.compile(rf"(?!shard-)(.+)-[0-9]{{5}}-of-([0-9]{{5}}){re.escape(SUFFIX)}")

MOST_METADATA_BYTES = 1 << 30
MOST_JSON_BYTES = 100_000_000
_PAGE_BYTES = 4096
_EMPTY_PAGE = bytes(_PAGE_BYTES)
_MOST_EMPTY_PAGES = 4096
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
    raw = await read_file(source, name, sizes[name], most_bytes=MOST_METADATA_BYTES)
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
    for fqn, entry in manifest.entries.items():
        pause_point()
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
        if not await _agree(source, replica):
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
        raw = await read_file(source, INDEX_NAME, nbytes, most_bytes=MOST_JSON_BYTES)
        index = await threads.run(parse_index, raw)
        files = await threads.run(_files_of_index, index, sizes)
    else:
        files = await threads.run(_files_without_index, sizes)
    headers = {file: await _read_header(source, file, 0, sizes[file]) for file in files}
    return await threads.run(manifest_of_headers, headers, index)


def _files_of_index(index: Mapping[str, str], sizes: Mapping[str, int]) -> list[str]:
    files = sorted(set(index.values()))
    for file in files:
        pause_point()
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


async def read_file(source: RangeSource, file: str, nbytes: int, *, most_bytes: int = MAX_MANIFEST_BYTES) -> bytearray:
    """Read a whole file that describes other files and whose size is known, in pieces.

    Raises ``CorruptCheckpointError`` before reading if the file is larger than ``most_bytes``, and while reading if
    most of it is empty, because a sparse file can have any size without using space. Raises ``OutOfMemoryError``.
    """
    name = source.path_of(file)
    if nbytes > most_bytes:
        raise CorruptCheckpointError(f"{name} has {nbytes} bytes, more than the limit of {most_bytes}", file=name)
    content = _Content(name)
    for start in range(0, nbytes, PIECE_BYTES):
        with allocating(f"reading {name}"):
            piece = bytearray(min(PIECE_BYTES, nbytes - start))
        read = ReadRange(start, memoryview(piece), partial(content.take, piece))
        await source.read(file, [read])
    return content.raw


class _Content:
    """The bytes read from a file. The memory grows with the bytes that arrive and not with the size that the file
    claims."""

    def __init__(self, name: str) -> None:
        self.raw = bytearray()
        self._name = name
        self._pages = self._empty = 0

    def take(self, piece: bytearray) -> None:
        """Take bytes as they arrive. Called in a thread of the store."""
        for start in range(0, len(piece), _PAGE_BYTES):
            pause_point()
            self._pages += 1
            self._empty += piece[start : start + _PAGE_BYTES] == _EMPTY_PAGE
        if self._empty > max(_MOST_EMPTY_PAGES, self._pages // 2):
            raise CorruptCheckpointError(
                f"{self._name} consists mostly of zeros: it is sparse or damaged", file=self._name
            )
        self.raw += piece


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


async def _agree(source: RangeSource, replica: Replica) -> bool:
    """Return whether two ranks wrote the same item. For tensors the checksums are compared, if the files have them."""
    first, other = replica.first, replica.other
    if isinstance(first, ValueEntry) and isinstance(other, ValueEntry):
        return await _same_value(source, replica.fqn, first, other)
    if isinstance(first, ValueEntry) or isinstance(other, ValueEntry):
        return False
    one = await _digest(source, replica.fqn, *first)
    return one == await _digest(source, replica.fqn, *other)


async def _same_value(source: RangeSource, fqn: str, first: ValueEntry, other: ValueEntry) -> bool:
    if max(first.item_bytes, other.item_bytes) > MAX_VALUE_BYTES:
        raise CorruptCheckpointError(f"{fqn}: a plain value of {first.item_bytes} bytes", file=first.file, fqn=fqn)
    items = [await read_item(source, entry) for entry in (first, other)]
    return first.transform == other.transform and items[0] == items[1]


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
