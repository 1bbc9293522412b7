"""Checkpoints of ranks that saved their parts separately: each part has a marker in ``__<rank>.metadata``, which names
the save and the number of ranks, and a manifest. Only earlier versions wrote them. A checkpoint can be read when all
parts of one save exist.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ..._foreign.manifests import agree
from ..._foreign.rank_files import Replica, merge_ranks, ranks_among
from ..._format.checksum import crc32
from ..._format.manifest import parse_manifest
from ..._format.marker import TAIL_BYTES, Marker, damaged, find_attribute
from ..._format.records import Manifest, ValueEntry
from ..._format.shared import Root
from ..._runtime.tasks import in_parallel
from ..._runtime.threads import chunked, collected, io_threads, pause_point
from ..._storage import RangeSource
from ...errors import CorruptCheckpointError, IncompleteCheckpointError

PART_ATTRIBUTE = "sidestream_part"
_ID = re.compile(r"[0-9a-f]{16}")
_SHOWN = 20
_MOST_RANKS = 10_000_000
_MOST_MISSING = 1 << 16
_MANY = 1024


@dataclass(frozen=True, slots=True)
class PartMarker:
    """The part of ``rank``, one of ``world_size``, in the save to which the callers gave ``save_id``. ``id`` is in the
    names of the files of the part. Length and CRC-32 are those of its manifest. ``saved_at`` as in ``Marker``."""

    save_id: str
    rank: int
    world_size: int
    id: str
    manifest_bytes: int
    manifest_crc: int
    saved_at: int = 0


def part_metadata_name(rank: int) -> str:
    """Return the name that stock DCP uses."""
    return f"__{rank}.metadata"


def part_manifest_name(rank: int, part_id: str) -> str:
    return f"__{rank}-{part_id}.manifest"


def find_part_marker(tail: bytes, rank: int) -> PartMarker | None:
    """Return the marker in the tail of the file of ``rank``. None if another writer made the file. Raises
    ``CorruptCheckpointError``."""
    file = part_metadata_name(rank)
    fields = find_attribute(tail, PART_ATTRIBUTE, file)
    if fields is None:
        return None
    try:
        marker = PartMarker(**fields)
        numbers = (marker.rank, marker.world_size, marker.manifest_bytes, marker.manifest_crc, marker.saved_at)
        valid = all(type(number) is int and number >= 0 for number in numbers) and type(marker.save_id) is str
        if not valid or not marker.rank < marker.world_size <= _MOST_RANKS or _ID.fullmatch(marker.id) is None:
            raise ValueError
    except (TypeError, ValueError):
        raise damaged(file) from None
    if marker.rank != rank:
        raise CorruptCheckpointError(f"{file} is the part of rank {marker.rank}: was it renamed?", file=file)
    return marker


def whole(found: Mapping[int, PartMarker | None]) -> list[PartMarker]:
    """Return the parts of a checkpoint, by rank. ``found`` has the marker of each part that exists, or None for a part
    of another writer. At least one marker is not None.

    Raises ``IncompleteCheckpointError`` unless all parts of one save are present, and no others."""
    # The save with the most parts counts as the one that is meant. A part of another save beside it is named in the
    # error, and never taken for one of this.
    counts = Counter((one.save_id, one.world_size) for one in found.values() if one is not None)
    (save_id, world), _ = max(counts.items(), key=lambda item: (item[1], item[0]))
    mine = {
        rank: one
        for rank, one in found.items()
        if one is not None and (one.save_id, one.world_size) == (save_id, world)
    }
    rest = sorted(found.keys() - mine.keys())
    others = dict(collected((rank, _description(found[rank], save_id)) for rank in rest))
    there = sum(rank < world for rank in found)
    if there == world and not others:
        return [mine[rank] for rank in range(world)]
    problems = []
    missing = missing_ranks(found, world)
    if missing:
        problems.append(f"the parts of {_ranks(missing, world - there)} are missing")
    by_text = _by_text(others)
    for other, ranks in by_text.items():
        problems.append(f"{_ranks(ranks, len(ranks))}: {other}")
    raise IncompleteCheckpointError(
        f"the save {save_id!r} of {world} ranks, each by itself, is not whole: {'; '.join(problems)}",
        save_id=save_id,
        missing=missing,
        others={rank: "" if (one := found[rank]) is None else one.save_id for rank in others},
    )


def missing_ranks(found: Container[int], world: int) -> list[int]:
    """Return the ranks without a part. At most 65,536 are returned, because a file of a few bytes can claim millions of
    ranks."""
    missing: list[int] = []
    for ranks in chunked(range(world), _MANY):
        missing += [rank for rank in ranks if rank not in found]
        if len(missing) >= _MOST_MISSING:
            break
        pause_point()
    return missing[:_MOST_MISSING]


def _by_text(others: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, text in others.items():
        found.setdefault(text, []).append(rank)
        pause_point()
    return dict(islice(found.items(), _SHOWN))


def _description(one: PartMarker | None, save_id: str) -> str:
    if one is None:
        return "another writer's part"
    if one.save_id == save_id:
        return f"a part of a save of {one.world_size} ranks with the same id"
    return f"a part of the save {one.save_id!r}"


def _ranks(ranks: Sequence[int], count: int) -> str:
    """Return the first of ``count`` ranks as text."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {count - _SHOWN} more" if count > _SHOWN else "")
    return f"rank {shown}" if count == 1 else f"ranks {shown}"


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
        if not await agree(source, replica):
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
            if first.is_stored:
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
    raw = await source.read_file(name, nbytes)

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
