"""The assignment of boxes and values to ranks. Rank 0 makes it from the tables of all ranks, for a thousand ranks in
seconds.

The ranks of one program mostly have the same rows, and rows are divided among the ranks in few ways. So rows are read
once for each distinct table. The slow steps are done once for each distinct division (a *pattern*), and not for each
tensor. For each tensor of each rank, bytes are only cut and joined.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..._format.cover import TooIntricateError, find_overlap, volume
from ..._format.records import Key, itemsize
from ..._format.shared import PlacedBox, Shared, SharedRow
from ..._runtime.pauses import collected, paced, pause_point
from ...errors import InvalidOptionError, UnsupportedCheckpointError
from .rank_table import Box, Row, boxes_of, unpack_boxes

_SPLIT_BYTES = 8 << 20
"""A replica is cut into pieces of at least this many bytes, so that the ranks that hold it share the writes."""
_SHOWN_CHARACTERS = 160


class RankReport(NamedTuple):
    """The report of a rank: the digest of its table, and its packed boxes."""

    table: str
    boxes: bytes


@dataclass(frozen=True, slots=True)
class Assignment:
    """The items and values that one rank writes.

    ``places[i]`` is the index of row ``i`` of its table among the rows of all ranks, or -1 for an empty dict that is
    not empty on another rank. ``places`` is None if all indices are the same. ``pieces`` has the items, by number, that
    the rank does not write as a whole: the first row and the number of rows to write, ``(0, 0)`` for none. ``values``
    are the rows whose value it writes.
    """

    places: tuple[int, ...] | None
    pieces: Mapping[int, tuple[int, int]]
    values: tuple[int, ...]

    def pack(self) -> bytes:
        pieces = [[item, *piece] for item, piece in self.pieces.items()]
        return json.dumps([self.places, pieces, self.values], separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> Assignment:
        places, pieces, values = json.loads(raw)
        found = {item: (first, rows) for item, first, rows in pieces}
        return cls(None if places is None else tuple(places), found, tuple(values))

    @staticmethod
    def of_ranks(ranks: Sequence[RankReport], tables: Mapping[str, Sequence[Row]]) -> tuple[Shared, list[Assignment]]:
        """Return the rows of all ranks together, and the assignment of each rank.

        Each box is written once. If several ranks have a box, they share a large one, which is cut along its first
        dimension. A small one is written by the rank with the fewest bytes. Raises ``InvalidOptionError`` if ranks have
        different rows of one name, or do not hold all of a tensor together.
        """
        # Ranks with equal tables form a cohort. In most runs all ranks have the same one, so one table is merged for
        # all of them.
        digests = list(dict.fromkeys(report.table for report in ranks))
        cohorts = [[rank for rank, report in enumerate(ranks) if report.table == digest] for digest in digests]
        boxes = [collected((boxes_of(ranks[rank].boxes) for rank in cohort), 1) for cohort in cohorts]
        world = len(ranks)
        work = _Assigning(
            ranks, [tables[digest] for digest in digests], cohorts, boxes, [0] * world, [{} for _ in ranks],
            [[] for _ in ranks], [digests.index(report.table) for report in ranks],
        )  # fmt: skip
        merged = _merge(work.tables)
        groups, others = _groups(work, merged)
        # The largest first, so that the small ones fill up what these leave uneven.
        by_size = sorted(groups, key=lambda group: -math.prod(group.row.shape) * itemsize(group.row.dtype))
        for group in by_size:
            _place_group(work, group)
        # Values have been compared: all ranks have the same. The first rank that has one writes it.
        for number, where in others:
            work.of_row[number] = min(work.cohorts[table][0] for table, _ in where)
            work.values[work.of_row[number]].append(number)
        rows = collected(
            SharedRow(row.kind, row.fqn, row.path, row.dtype, row.shape, work.of_row.get(number, -1), row.composite)
            for number, (row, _) in enumerate(merged.values())
        )
        return Shared(tuple(rows), tuple(work.placed)), collected(_assignments(work, merged), 1)


class _Holder(NamedTuple):
    """A box on ``rank``: the ``ordinal``-th one of row ``row`` of its table."""

    rank: int
    row: int
    ordinal: int
    box: Box


@dataclass(slots=True)
class _Group:
    """Rows that are divided among the ranks in the same way. ``cohorts``: (table, row) of the first of them."""

    row: Row
    cohorts: tuple[tuple[int, int], ...]
    joined: tuple[bytes, ...]
    members: list[tuple[int, tuple[tuple[int, int], ...]]] = field(default_factory=list)


@dataclass(slots=True)
class _Assigning:
    """The assignment in progress. ``placed`` are the patterns, and ``patterns`` has the number of each. ``of_row`` has
    the pattern of each row that is a tensor, and the rank that writes it of each other one."""

    ranks: Sequence[RankReport]
    tables: Sequence[Sequence[Row]]
    cohorts: Sequence[Sequence[int]]
    boxes: list[list[list[bytes]]]  # by table, rank within it, row
    load: list[int]
    pieces: list[dict[int, tuple[int, int]]]
    values: list[list[int]]
    table_of: list[int]
    bases: dict[int, list[int]] = field(default_factory=dict)
    orders: dict[tuple[int, int], dict[Box, Sequence[_Holder]]] = field(default_factory=dict)
    patterns: dict[tuple[object, ...], int] = field(default_factory=dict)
    placed: list[tuple[PlacedBox, ...]] = field(default_factory=list)
    of_row: dict[int, int] = field(default_factory=dict)
    turn: int = 0


def _merge(tables: Sequence[Sequence[Row]]) -> dict[str, tuple[Row, list[tuple[int, int]]]]:
    """Return each row, with the tables that have it and its index in each. Raises ``InvalidOptionError`` if the tables
    have different rows of one name."""
    merged: dict[str, tuple[Row, list[tuple[int, int]]]] = {}
    for table, rows in enumerate(tables):
        for number, row in enumerate(paced(rows)):
            first, where = merged.setdefault(row.fqn, (row, []))
            # The text of a composite is compared and not its content, for which 1 and True are equal.
            if first[:5] != row[:5] or repr(first.composite) != repr(row.composite):  # 1 and True are equal
                raise InvalidOptionError(
                    f"{row.fqn}: {_described(first)} to some ranks, {_described(row)} to others; rename one of them"
                )
            where.append((table, number))
    _check_composites(merged)
    return _without_shells(merged)


def _check_composites(merged: Mapping[str, tuple[Row, list[tuple[int, int]]]]) -> None:
    """Raise ``InvalidOptionError`` for a composite tensor that is a container to other ranks."""
    # A composite has parts below its name. A rank for which that name is a plain container would add entries to the
    # parts.
    composites = {row.path: (row, where) for row, where in merged.values() if row.composite is not None}
    for row, where in paced(merged.values()) if composites else ():
        for depth in range(1, len(row.path)):
            whole, there = composites.get(row.path[:depth], (None, []))
            if whole is not None and not {table for table, _ in where} <= {table for table, _ in there}:
                raise InvalidOptionError(
                    f"{whole.fqn}: {_described(whole)} to some ranks, others have {row.fqn} in it; rename one of them"
                )


def _without_shells(
    merged: dict[str, tuple[Row, list[tuple[int, int]]]],
) -> dict[str, tuple[Row, list[tuple[int, int]]]]:
    """Return ``merged`` without the empty dicts that are not empty on other ranks. Raises ``InvalidOptionError`` for a
    leaf that is a container on other ranks, and for a dict that is a list on others."""
    containers: dict[tuple[Key, ...], tuple[bool, str]] = {}  # whether it is a list, and the FQN of a leaf in it
    for row, _ in paced(merged.values()):
        # From the inside out, until a container that is known: its own outer containers were entered with it.
        for depth in range(len(row.path) - 1, 0, -1):
            path, is_list = row.path[:depth], type(row.path[depth]) is int
            known, inner = containers.setdefault(path, (is_list, row.fqn))
            if known != is_list:
                raise InvalidOptionError(
                    f"{inner} and {row.fqn}: a list to some ranks is a dict to others; rename one of them"
                )
            if inner != row.fqn:  # the containers around it are known, too
                break
    shells = []
    for fqn, (row, _) in paced(merged.items()):
        if row.path not in containers or row.composite is not None:
            continue
        if row.kind == "empty" and not containers[row.path][0]:
            shells.append(fqn)
        else:
            raise InvalidOptionError(
                f"{fqn}: {_described(row)} to some ranks, others have {containers[row.path][1]} in it; "
                "rename one of them"
            )
    for fqn in shells:
        del merged[fqn]
    return merged


def _described(row: Row) -> str:
    if row.composite is not None:
        one = row.composite
        details = json.dumps([one.strides, one.parts, one.context])[:_SHOWN_CHARACTERS]
        beside = "" if one.strides is None else f" with {details}"
        coalesced = "" if type(one.context) is not bool else " (coalesced)" if one.context else " (not coalesced)"
        return f"a {one.type}{coalesced} of {one.dtype} and shape {one.shape}{beside}"
    return f"a {row.dtype} of shape {row.shape}" if row.kind == "tensor" else f"a {row.kind} at {row.path}"


def _groups(
    work: _Assigning, merged: Mapping[str, tuple[Row, list[tuple[int, int]]]]
) -> tuple[list[_Group], list[tuple[int, list[tuple[int, int]]]]]:
    found: dict[tuple[object, ...], _Group] = {}
    others = []
    for number, (row, where) in enumerate(paced(merged.values())):
        if row.kind != "tensor":
            if row.kind == "value":
                others.append((number, where))
            continue
        joined = tuple(b"".join([each[at] for each in work.boxes[table]]) for table, at in where)
        tables = tuple(table for table, _ in where)
        # The packed boxes are compared as bytes. A model has many tensors that are cut in the same way, and the cover
        # of each group is checked once.
        key = (row.dtype, row.shape, tables, joined)
        group = found.get(key)
        if group is None:
            group = found[key] = _Group(row, tuple(where), joined)
        group.members.append((number, tuple(where)))
    return list(found.values()), others


def _place_group(work: _Assigning, group: _Group) -> None:
    sets: dict[Box, list[_Holder]] = {}
    for holder in paced(_holders(work, group)):
        sets.setdefault(holder.box, []).append(holder)
    _check_cover(group.row, list(sets))
    size = itemsize(group.row.dtype)
    shared = {box: holders for box, holders in sets.items() if len(holders) > 1}
    for box, holders in sets.items():
        if len(holders) == 1:
            work.load[holders[0].rank] += math.prod(box[1]) * size * len(group.members)
    for number, where in group.members:
        pause_point()
        chosen: dict[Box, tuple[PlacedBox, ...]] = {}
        for box, holders in shared.items():
            order = _order(work, box, holders, where, several=len(shared) > 1)
            chosen[box] = _share(work, box, order, size, where)
        if shared:
            work.turn += 1
        key = (id(group), tuple(chosen.values()))
        if key not in work.patterns:
            work.patterns[key] = len(work.placed)
            work.placed.append(
                tuple(
                    one
                    for box, holders in sets.items()
                    for one in chosen.get(box, (PlacedBox(holders[0].rank, box[0], box[1]),))
                )
            )
        work.of_row[number] = work.patterns[key]


def _holders(work: _Assigning, group: _Group) -> Iterator[_Holder]:
    ndim = len(group.row.shape)
    for (table, row), joined in zip(group.cohorts, group.joined, strict=True):
        position = 0
        for rank in work.cohorts[table]:
            end = position + 2
            for ordinal, (after, box) in enumerate(unpack_boxes(joined, ndim, position)):
                yield _Holder(rank, row, ordinal, box)
                end = after
            position = end


def _check_cover(row: Row, boxes: Sequence[Box]) -> None:
    try:
        overlap = find_overlap(boxes)
    except TooIntricateError:
        raise UnsupportedCheckpointError(f"{row.fqn}: it is cut in a way that is too intricate to check") from None
    if overlap:
        first, second = (boxes[index] for index in overlap)
        raise InvalidOptionError(
            f"{row.fqn}: ranks hold boxes of it that overlap without being equal, {first} and {second}: is it one "
            "tensor?"
        )
    if volume(boxes) != math.prod(row.shape):
        raise InvalidOptionError(
            f"{row.fqn}: the ranks that save hold {volume(boxes)} of its {math.prod(row.shape)} elements; save with a "
            "process group that has all ranks of its mesh"
        )


def _order(
    work: _Assigning, box: Box, holders: Sequence[_Holder], where: Sequence[tuple[int, int]], *, several: bool
) -> Sequence[_Holder]:
    """Return ``holders`` in the order in which they get parts of ``box`` to write.

    If a tensor has ``several`` such boxes, the holders take turns. This balances the bytes less well, but leads to few
    patterns. Tied tensors get the same order, so that they are one item."""
    for table, row in where:
        tie = work.tables[table][row].tie
        known = work.orders.get((table, tie), {}).get(box) if tie >= 0 else None
        if known is not None:
            return known
    if several:
        order = [holders[(work.turn + n) % len(holders)] for n in range(len(holders))]
    else:
        # The ranks with the fewest bytes first. Equal loads keep the order of the ranks, so the result depends on
        # nothing but the reports.
        order = sorted(holders, key=lambda holder: work.load[holder.rank])
    for at in where:
        work.orders.setdefault(at, {})[box] = order
    return order


def _share(
    work: _Assigning, box: Box, order: Sequence[_Holder], size: int, where: Sequence[tuple[int, int]]
) -> tuple[PlacedBox, ...]:
    """Divide ``box`` among the holders in ``order``. Returns the boxes to write, and updates ``pieces`` and
    ``load``."""
    nbytes = math.prod(box[1]) * size
    rows = box[1][0] if box[1] else 0
    # A box is cut along whole rows, and into pieces that are worth a write of their own.
    count = max(1, min(len(order), rows, nbytes // _SPLIT_BYTES))
    result = []
    rows_in = dict(where)
    first = 0
    for n, holder in enumerate(order):
        take = 0 if n >= count else rows * (n + 1) // count - rows * n // count
        table = work.table_of[holder.rank]
        item = _base(work, holder.rank, table)[rows_in[table]] + holder.ordinal
        if count == 1 and not n:
            result.append(PlacedBox(holder.rank, *box))
        elif take:
            work.pieces[holder.rank][item] = (first, take)
            offsets, sizes = box
            result.append(PlacedBox(holder.rank, (offsets[0] + first, *offsets[1:]), (take, *sizes[1:])))
        else:
            # A holder with nothing to write is recorded as well: a missing item would mean that it writes all of it.
            work.pieces[holder.rank][item] = (0, 0)
        work.load[holder.rank] += (nbytes // rows * take if rows else nbytes) if count > 1 else (0 if n else nbytes)
        first += take
    return tuple(result)


def _base(work: _Assigning, rank: int, table: int) -> list[int]:
    """Return the number of the first item of each row of a rank's table."""
    if rank not in work.bases:
        rows = work.boxes[table][work.cohorts[table].index(rank)]
        bases, count = [], 0
        for row in rows:
            bases.append(count)
            count += int.from_bytes(row[:2], "little")
        work.bases[rank] = bases
    return work.bases[rank]


def _assignments(work: _Assigning, merged: Mapping[str, tuple[Row, list[tuple[int, int]]]]) -> Iterator[Assignment]:
    numbers = {fqn: number for number, fqn in enumerate(merged)}
    places: list[tuple[int, ...] | None] = []
    for rows in work.tables:
        where = tuple(numbers.get(row.fqn, -1) for row in rows)
        places.append(None if where == tuple(range(len(where))) else where)
    fqns = list(merged)
    own = [{row.fqn: at for at, row in enumerate(rows)} for rows in work.tables]
    for rank in range(len(work.ranks)):
        table = work.table_of[rank]
        values = tuple(own[table][fqns[number]] for number in work.values[rank])
        yield Assignment(places[table], work.pieces[rank], values)
