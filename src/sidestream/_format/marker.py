"""Markers: facts about the save in the tail of ``.metadata``, and of ``__<rank>.metadata`` for a rank that saves its
part independently. The marker of a part names the save and the number of ranks.

A marker is the last attribute of DCP's ``Metadata`` object, a string: a CRC-32 in hexadecimal, and JSON. Its place is
fixed, so a reader needs only the last ``TAIL_BYTES`` of the file and does not decode the pickle before them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any
from zlib import crc32

from .._runtime.pauses import chunked, collected, pause_point
from ..errors import CorruptCheckpointError, IncompleteCheckpointError
from .pickles import write as p

__all__ = [
    "ATTRIBUTE",
    "END",
    "END_BYTES",
    "MAX_METADATA_BYTES",
    "METADATA_NAME",
    "PART_ATTRIBUTE",
    "TAIL_BYTES",
    "Marker",
    "PartMarker",
    "attribute_end",
    "find_marker",
    "find_part_marker",
    "is_complete",
    "manifest_name",
    "marker_attribute",
    "missing_ranks",
    "part_manifest_name",
    "part_metadata_name",
    "part_name",
    "whole",
]


METADATA_NAME = ".metadata"
ATTRIBUTE = "sidestream"
TAIL_BYTES = 4096
MAX_METADATA_BYTES = 256 << 10
END = b"ub."  # SETITEMS into the state, BUILD the Metadata, STOP
END_BYTES = len(END)
"""The number of bytes that a save which creates ``.metadata`` in place writes last, when all others are durable."""
_SAVE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Marker:
    """The marker of a save: its id, and length and CRC-32 of ``manifest-<save_id>``. ``step`` is set for a save of a
    run.

    ``saved_at`` is the time when the save began, in seconds since 1970 by the writer's clock, or 0 if it is unknown.
    The last ``metadata_bytes`` of the manifest are the user's metadata, with a CRC-32 of their own."""

    save_id: str
    manifest_bytes: int
    manifest_crc: int
    step: int | None = None
    generation: int = 1
    saved_at: int = 0
    metadata_bytes: int = 0
    metadata_crc: int = 0


def manifest_name(save_id: str) -> str:
    return f"manifest-{save_id}"


def part_name(root: str, rank: int) -> str:
    """Return the file name of a rank's part of a manifest, in the directory of the ``root``."""
    return f"{root}.{rank}"


def marker_attribute(marker: Marker | PartMarker) -> bytes:
    """Return the attribute of ``Metadata`` with a marker and its checksum, and the end of the pickle."""
    content = json.dumps(asdict(marker), separators=(",", ":"))
    name = ATTRIBUTE if isinstance(marker, Marker) else PART_ATTRIBUTE
    return attribute_end(name, f"{crc32(content.encode()):08x}{content}")


def attribute_end(name: str, value: str) -> bytes:
    """Return the end of a pickle whose last attribute is ``name`` with the text ``value``."""
    return p.text(name) + p.text(value) + END


def find_marker(tail: bytes) -> Marker | None:
    """Return the marker in the last ``TAIL_BYTES`` (or all) of a ``.metadata``. None if another writer made the file.

    Raises ``CorruptCheckpointError`` if the marker is damaged, or if the file is cut off.
    """
    fields = find_attribute(tail, ATTRIBUTE, METADATA_NAME)
    if fields is None:
        return None
    try:
        marker = Marker(**fields)
        numbers = [marker.manifest_bytes, marker.manifest_crc, marker.generation, marker.saved_at]
        numbers += [marker.metadata_bytes, marker.metadata_crc]
        numbers += [] if marker.step is None else [marker.step]
        valid = all(type(number) is int and number >= 0 for number in numbers)
        valid = valid and marker.metadata_bytes <= min(marker.manifest_bytes, MAX_METADATA_BYTES)
        if not valid or _SAVE_ID.fullmatch(marker.save_id) is None:
            raise ValueError
    except (TypeError, ValueError):
        raise _damaged(METADATA_NAME) from None
    return marker


def is_complete(tail: bytes) -> bool:
    """Return whether ``tail``, the last ``TAIL_BYTES`` (or all) of a ``.metadata``, has a marker up to its end."""
    return tail.endswith(END) and p.text(ATTRIBUTE) in tail


def find_attribute(tail: bytes, attribute: str, file: str) -> dict[str, Any] | None:
    """Return the fields that ``marker_attribute`` has put at the end of ``file``. None without an attribute of that
    name. Raises ``CorruptCheckpointError``."""
    if not tail.endswith(b"."):
        raise CorruptCheckpointError(f"{file} is cut off: it does not end as a pickle does", file=file)
    name = p.text(attribute)
    # The last one. A value of the user earlier in the pickle may contain the same bytes, but the attribute stands at
    # the very end: the length that follows has to lead exactly to the end of the file.
    at = tail.rfind(name + b"X")
    if at < 0:
        return None
    start = at + len(name) + 5
    length = int.from_bytes(tail[start - 4 : start], "little")
    raw = tail[start : start + length]
    try:
        if start + length + len(END) != len(tail) or not tail.endswith(END):
            raise ValueError
        if int(raw[:8], 16) != crc32(raw[8:]):
            raise ValueError
        fields = json.loads(raw[8:].decode())
        if type(fields) is not dict:
            raise ValueError
    except (ValueError, RecursionError):
        raise _damaged(file) from None
    return fields


def _damaged(file: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the commit marker in {file} is damaged", file=file)


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
        raise _damaged(file) from None
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
