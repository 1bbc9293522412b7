"""Checkpoints that stock DCP wrote rank by rank: one ``__<rank>.metadata`` for each rank, and none for the whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from .._format.records import Chunk, Entry, Manifest, TensorEntry, ValueEntry, name_of
from .._runtime.pauses import collected, paced
from ..errors import CorruptCheckpointError

_NAME = re.compile(r"__(0|[1-9][0-9]{0,6})\.metadata")

Item: TypeAlias = "tuple[TensorEntry, Chunk] | ValueEntry"


@dataclass(frozen=True, slots=True)
class Replica:
    """Two items that two ranks wrote with the same name and box. The checkpoint is consistent only if they are
    equal."""

    fqn: str
    first: Item
    other: Item


def is_rank_file(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def ranks_among(names: Iterable[str]) -> list[int]:
    """Return the ranks that have a file among ``names``, in order."""
    matches = collected(map(_NAME.fullmatch, names), 64)
    return sorted(int(match[1]) for match in matches if match)


def rank_files(names: Iterable[str]) -> list[str]:
    """Return the files of the ranks among ``names``, in order. Raises ``CorruptCheckpointError`` if a rank is
    missing."""
    ranks = ranks_among(names)
    for expected, rank in enumerate(ranks):
        if rank != expected:
            raise CorruptCheckpointError(f"__{expected}.metadata is missing, although there is __{rank}.metadata")
    return [f"__{rank}.metadata" for rank in ranks]


def merge_ranks(parts: Sequence[Manifest]) -> tuple[Manifest, list[Replica]]:
    """Return the checkpoint that the ranks wrote together, and the replicas that a reader has to compare.

    Raises ``CorruptCheckpointError`` with FQN and rank if two ranks have different entries with one name.
    """
    entries: dict[str, Entry] = {}
    boxes: dict[str, dict[str, Chunk]] = {}
    replicas: list[Replica] = []
    for rank, part in enumerate(parts):
        for fqn, entry in paced(part.entries.items()):
            first = entries.setdefault(fqn, entry)
            if _meaning(first) != _meaning(entry):
                raise CorruptCheckpointError(
                    f"{fqn!r} is {_description(first)} for the ranks before, {_description(entry)} for rank {rank}",
                    file=f"__{rank}.metadata",
                    fqn=fqn,
                )
            if isinstance(entry, TensorEntry):
                replicas += _gather(fqn, entry, boxes.setdefault(fqn, {}))
            elif isinstance(entry, ValueEntry) and isinstance(first, ValueEntry) and first is not entry:
                replicas.append(Replica(fqn, first, entry))
    joined = {
        fqn: replace(entry, chunks=tuple(boxes[fqn].values())) if isinstance(entry, TensorEntry) else entry
        for fqn, entry in paced(entries.items())
    }
    return Manifest(save_id="", entries=joined, files={}), replicas


def _gather(fqn: str, entry: TensorEntry, boxes: dict[str, Chunk]) -> list[Replica]:
    """Add the chunks of a rank to ``boxes``, those of the ranks before. Returns the chunks that were there before."""
    found = []
    for chunk in paced(entry.chunks):
        first = boxes.setdefault(name_of(chunk.offsets, chunk.sizes), chunk)
        if first is not chunk:
            found.append(Replica(fqn, (entry, first), (entry, chunk)))
    return found


def _meaning(entry: Entry) -> object:
    shape = (entry.dtype, entry.shape) if isinstance(entry, TensorEntry) else None
    return type(entry), entry.path, shape


def _description(entry: Entry) -> str:
    if isinstance(entry, TensorEntry):
        return f"a {entry.dtype} of shape {entry.shape} at {entry.path}"
    return f"a value at {entry.path}"
