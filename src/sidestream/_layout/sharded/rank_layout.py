"""The plan of one rank's part of a save. It is for the assignment of the rank what ``save_layout`` is for one
process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..._format.records import Chunk, Node
from ..._format.shard import BlockSums, ShardLayout
from ..._format.values import ValueItems
from ..._runtime.pauses import collected, pause_point
from ..._runtime.torch_probes import view_key
from ..._staging import PlanCache
from ..ranges import narrowed
from ..save_layout import SHARD_BYTES, PlannedFiles, converted_to, images_of, window_bytes_for
from .assign import Assignment
from .rank_table import Box, EncodedValues, LocalTable


class _Place(NamedTuple):
    """An item of the layout: its row among the rows of all ranks, its FQN, its box, and its place."""

    row: int
    fqn: str
    box: Box
    shard: int
    item: int


class _Source(NamedTuple):
    """The elements ``start`` to ``start + sizes`` of a local tensor."""

    tensor: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype | None
    """The dtype to which they are converted. None: they keep their dtype."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The places of this rank's items. It is cached as long as nothing changes, and refers to no tensors."""

    shards: tuple[ShardLayout, ...]
    sources: tuple[_Source, ...]
    places: tuple[_Place, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class RankPlan(PlannedFiles):
    """The plan of one rank, like ``SavePlan``."""

    layout: RankLayout
    value_places: tuple[tuple[int, str, int, int, Node], ...]
    """Row among the rows of all ranks, FQN, offset, length, node."""

    @classmethod
    def of(
        cls,
        plans: PlanCache,
        budget_bytes: int,
        rank: int,
        table: LocalTable,
        values: EncodedValues,
        agreement: str,
        assignment: Assignment,
    ) -> RankPlan:
        """Plan the files of this rank. Equal assignments have an equal ``agreement``."""
        total = sum(source.nbytes for source in table.sources)
        window_bytes = window_bytes_for(total, budget_bytes)
        key = ("rank", agreement, window_bytes, table.key)
        # The agreement stands for the assignment, which rank 0 makes only once for the same tables. In a steady run
        # nothing below is computed again but the values.
        layout = plans.get(key, lambda: _lay_out(table, assignment, window_bytes))
        tensors = collected(narrowed(table.sources[one.tensor], one.start, one.sizes) for one in layout.sources)
        items = ValueItems()
        places: list[tuple[int, str, int, int, Node]] = []
        for number in assignment.values:
            node = values.nodes[number]
            row = number if assignment.places is None else assignment.places[number]
            fqn = table.held.rows[number].fqn
            places.append((row, fqn, *items.add(fqn, node), node))
        items.check()
        images = images_of(layout.shards, tensors, [source.dtype for source in layout.sources])
        return cls(rank, layout.shards, images, items.content(), layout, tuple(places))

    def chunks(self, sums: Sequence[BlockSums], names: Mapping[str, str]) -> Iterator[tuple[int, str, Chunk]]:
        """Yield row among the rows of all ranks, FQN and chunk. ``sums`` has the checksums of each shard, and ``names``
        the names of the files in the checkpoint."""
        for row, fqn, (offsets, sizes), shard, item in self.layout.places:
            crcs, digests, _ = sums[shard]
            placed, file = self.shards[shard].items[item], names[self.shard_file(shard)]
            yield row, fqn, placed.chunk(offsets, sizes, file, crcs[item], digests[item] if digests else None)


def _lay_out(table: LocalTable, assignment: Assignment, window_bytes: int) -> RankLayout:
    rows, items = table.held.rows, table.held.items
    sources: list[_Source] = []
    looks: list[tuple[str, tuple[int, ...]]] = []
    known: dict[tuple[object, ...], int] = {}
    taken: list[tuple[int, Box, int]] = []  # row of the table, box, number of the source
    for number, item in enumerate(items):
        pause_point()
        offsets, sizes, start = *item.box, item.start
        if number in assignment.pieces:
            first, count = assignment.pieces[number]
            if not count:
                continue
            offsets, sizes = (offsets[0] + first, *offsets[1:]), (count, *sizes[1:])
            start = (start[0] + first, *start[1:])
        tensor, dtype = table.sources[item.tensor], rows[item.row].dtype
        identity: tuple[object, ...] = (*view_key(tensor), start, sizes, dtype)
        # An item is one box of one tensor. A local tensor that is also saved by itself is not tied to the larger one,
        # because readers raise an error for an item with two shapes.
        identity = (*identity, rows[item.row].shape, offsets)
        if not tensor.numel():
            identity = (number,)
        if identity not in known:
            known[identity] = len(sources)
            sources.append(_Source(item.tensor, start, sizes, converted_to(tensor, dtype)))
            looks.append((dtype, sizes))
        taken.append((item.row, (offsets, sizes), known[identity]))
    shards = tuple(ShardLayout.lay_out(looks, SHARD_BYTES, window_bytes))
    where = [(shard, item) for shard, layout in enumerate(shards) for item in range(len(layout.items))]
    placed = (
        _Place(row if assignment.places is None else assignment.places[row], rows[row].fqn, box, *where[source])
        for row, box, source in taken
    )
    places = tuple(collected(placed))
    layout = [(place, shards[place.shard].items[place.item].item_offset) for place in places]
    digest = hashlib.blake2b(repr(layout).encode(), digest_size=16).hexdigest()
    return RankLayout(shards, tuple(sources), places, digest)
