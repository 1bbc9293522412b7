"""The reading of checkpoints whose ranks saved their parts separately. They can be read when all parts of one save
exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..._format.checksum import crc32
from ..._format.independent_parts import (
    PartMarker,
    find_part_marker,
    missing_ranks,
    part_manifest_name,
    part_metadata_name,
    whole,
)
from ..._format.manifest import parse_manifest
from ..._format.marker import TAIL_BYTES
from ..._format.rank_files import Replica, merge_ranks, ranks_among
from ..._format.records import Manifest, ValueEntry
from ..._format.values import is_stored
from ..._runtime.tasks import in_parallel
from ..._runtime.threads import Steps, gathered, io_threads, run_sliced, sliced
from ..._storage import RangeSource
from ...errors import CorruptCheckpointError, IncompleteCheckpointError
from .manifests import read_file
from .values import agree

__all__ = ["check_sizes", "is_whole", "read_apart", "read_part", "read_part_markers"]


async def read_part_markers(source: RangeSource, names: Mapping[str, int]) -> dict[int, PartMarker | None]:
    """Return the marker of the part of each rank that is among the files ``names``; None for a part of another writer.
    Raises ``CorruptCheckpointError``."""
    ranks = await io_threads().run_sliced(ranks_among, names)
    found: dict[int, PartMarker | None] = dict.fromkeys(ranks)
    queue = iter(ranks)

    async def work() -> None:
        for rank in queue:
            tail = await source.read_tail(part_metadata_name(rank), TAIL_BYTES)
            found[rank] = find_part_marker(tail, rank)

    await in_parallel(work)
    return found


async def is_whole(source: RangeSource, names: Mapping[str, int]) -> bool:
    """Return whether the files are a checkpoint in parts that sidestream wrote. Raises ``IncompleteCheckpointError``
    and ``CorruptCheckpointError``."""
    ranks = await io_threads().run_sliced(ranks_among, names)
    first = {part_metadata_name(rank): 0 for rank in ranks[:1]}
    for one in (await read_part_markers(source, first)).values():
        if one is not None and one.world_size != len(ranks):  # reading the others would not change that
            missing = await io_threads().run_sliced(missing_ranks, frozenset(ranks), one.world_size)
            raise IncompleteCheckpointError(
                f"the save {one.save_id!r} of {one.world_size} ranks, each by itself, is not whole: there are parts of "
                f"{len(ranks)} ranks",
                save_id=one.save_id,
                missing=missing,
            )
    markers = await read_part_markers(source, names)
    return any(markers.values()) and bool(await io_threads().run_sliced(whole, markers))


async def read_apart(
    source: RangeSource, sizes: Mapping[str, int], markers: Mapping[int, PartMarker | None]
) -> Manifest:
    """Return the manifest of the checkpoint that the parts form, not validated yet. Raises
    ``IncompleteCheckpointError`` and ``CorruptCheckpointError``."""
    found = await io_threads().run_sliced(whole, markers)
    read: dict[int, Manifest] = {}
    queue = iter(found)

    async def work() -> None:
        for marker in queue:
            read[marker.rank] = await read_part(source, sizes, marker)

    await in_parallel(work)
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


@sliced
def _merged(parts: Sequence[Manifest]) -> Steps[tuple[Manifest, list[Replica], dict[str, int]]]:
    """Merge the parts. Also returns the items that remain to be compared byte by byte, and the files of all parts.
    Raises ``CorruptCheckpointError`` if the checksums of the parts differ."""
    manifest, replicas = yield from merge_ranks(parts)
    files = dict(gathered(named for part in parts for named in part.files.items()))
    left = []
    for replica in replicas:
        yield
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
    name = part_manifest_name(marker.rank, marker.id)
    if sizes.get(name) != marker.manifest_bytes:
        raise CorruptCheckpointError(
            f"{name} has {sizes.get(name, 0)} bytes, the marker says {marker.manifest_bytes}", file=name
        )
    raw = await read_file(source, name, marker.manifest_bytes)

    def parse() -> Manifest:
        if crc32(raw) != marker.manifest_crc:
            raise CorruptCheckpointError(f"{name} was altered: its checksum is not the one in the marker", file=name)
        manifest = run_sliced(parse_manifest(raw))
        if not isinstance(manifest, Manifest) or manifest.save_id[: len(marker.id)] != marker.id:
            raise CorruptCheckpointError(f"{name} belongs to another save than the marker", file=name)
        check_sizes(manifest.files, sizes)
        return manifest

    return await io_threads().run(parse)


@sliced
def check_sizes(saved: Mapping[str, int], found: Mapping[str, int]) -> Steps[None]:
    """Raise ``CorruptCheckpointError`` for a file that is missing or does not have the size that was saved. Called in a
    worker thread."""
    for file, nbytes in saved.items():
        yield
        if found.get(file) != nbytes:
            raise CorruptCheckpointError(f"{file} has {found.get(file, 0)} bytes, but {nbytes} were saved", file=file)
