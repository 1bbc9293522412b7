"""Checkpoints whose ranks saved independently. Each rank has a part, which names the save and the number of ranks.

The marker of a part is the last attribute in ``__<rank>.metadata``, like the marker of a whole checkpoint in
``.metadata``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from .._runtime.steps import Steps, chunked, collected
from ..errors import CorruptCheckpointError, IncompleteCheckpointError
from .marker import find_attribute, last_attribute

__all__ = [
    "PART_ATTRIBUTE",
    "PartMarker",
    "find_part_marker",
    "missing_ranks",
    "part_attribute",
    "part_manifest_name",
    "part_metadata_name",
    "whole",
]

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


def part_attribute(marker: PartMarker) -> bytes:
    return last_attribute(PART_ATTRIBUTE, asdict(marker))


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
        raise CorruptCheckpointError(f"the commit marker in {file} is damaged", file=file) from None
    if marker.rank != rank:
        raise CorruptCheckpointError(f"{file} is the part of rank {marker.rank}: was it renamed?", file=file)
    return marker


def whole(found: Mapping[int, PartMarker | None]) -> Steps[list[PartMarker]]:
    """Return the parts of a checkpoint, by rank. ``found`` has the marker of each part that exists, or None for a part
    of another writer. At least one marker is not None.

    Raises ``IncompleteCheckpointError`` unless all parts of one save are present, and no others."""
    counts = Counter((one.save_id, one.world_size) for one in found.values() if one is not None)
    (save_id, world), _ = max(counts.items(), key=lambda item: (item[1], item[0]))
    mine = {
        rank: one
        for rank, one in found.items()
        if one is not None and (one.save_id, one.world_size) == (save_id, world)
    }
    rest = sorted(found.keys() - mine.keys())
    others = dict((yield from collected((rank, _description(found[rank], save_id)) for rank in rest)))
    there = sum(rank < world for rank in found)
    if there == world and not others:
        return [mine[rank] for rank in range(world)]
    problems = []
    missing = yield from missing_ranks(found, world)
    if missing:
        problems.append(f"the parts of {_ranks(missing, world - there)} are missing")
    by_text = yield from _by_text(others)
    for other, ranks in by_text.items():
        problems.append(f"{_ranks(ranks, len(ranks))}: {other}")
    raise IncompleteCheckpointError(
        f"the save {save_id!r} of {world} ranks, each by itself, is not whole: {'; '.join(problems)}",
        save_id=save_id,
        missing=missing,
        others={rank: "" if found[rank] is None else _id_of(found[rank]) for rank in others},
    )


def missing_ranks(found: Container[int], world: int) -> Steps[list[int]]:
    """Return the ranks without a part. At most 65,536 are returned, because a file of a few bytes can claim millions of
    ranks."""
    missing: list[int] = []
    for ranks in chunked(range(world), _MANY):
        missing += [rank for rank in ranks if rank not in found]
        if len(missing) >= _MOST_MISSING:
            break
        yield
    return missing[:_MOST_MISSING]


def _by_text(others: Mapping[int, str]) -> Steps[dict[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for rank, text in others.items():
        found.setdefault(text, []).append(rank)
        yield
    return dict(islice(found.items(), _SHOWN))


def _id_of(one: PartMarker | None) -> str:
    return "" if one is None else one.save_id


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
