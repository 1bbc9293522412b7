"""The planning of a save by all ranks. In the steady state the ranks only send digests to rank 0, which confirms them.

All of this runs in the threads of the stagers, which wait for each other. It needs no event loop, so code on the loop
may block at a fence meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import json
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._format.dcp.shared import described
from .._format.manifest import root_body
from .._format.shared import Shared
from .._group import Operation, this_process
from .._layout.sharded.assign import Assignment, RankReport, assign
from .._layout.sharded.rank_layout import EncodedValues, RankPlan, encode_values, lay_out_rank
from .._layout.sharded.rank_table import LocalTable, Row, local_table, parse_rows
from .._runtime.threads import run_sliced
from .._staging import Captured, PlanCache
from .._storage import FreeSpace
from ..errors import InvalidOptionError, NoSpaceError

__all__ = ["Agreement", "Planned", "Planning", "Terms", "check_terms"]

_KEPT = 4
_LISTED = 10


@dataclass(slots=True)
class Agreement:
    """The plan of the ranks for state dicts of the same structure. Rank 0 has all of it. Each other rank has its own
    part.

    ``fragments`` has for each rank the digest of its layout and the places of its tensors, from the last save whose
    files had the same names as those of the next save. A save uses the fragments that it found when it was planned."""

    id: str
    assignment: Assignment
    shared: Shared | None = None
    body: bytes = b""
    head: bytes = b""
    fragments: dict[int, tuple[str, bytes]] = field(default_factory=dict)


class _Agreements:
    """The agreements that were used last, by digests of the state dicts of all ranks."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Agreement] = OrderedDict()

    @property
    def ids(self) -> list[str]:
        return list(self._known)

    def get(self, name: str) -> Agreement:
        self._known.move_to_end(name)
        return self._known[name]

    def put(self, agreement: Agreement) -> None:
        self._known[agreement.id] = agreement
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of a save that have to be the same on all ranks."""

    target: str
    durability: str
    digest: str | None
    planner: bool = False
    """Whether the caller has passed a planner."""
    exports: str = ""
    """The names of the exports, which all ranks write together."""

    def pack(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "durability": self.durability,
            "digest": self.digest,
            "planner": self.planner,
            "exports": self.exports,
        }


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of this rank, and the agreement behind it. ``known_layout`` is the digest of the layout of this rank
    whose places rank 0 has. ``fragments`` are these places on rank 0, in a copy that other saves do not change."""

    plan: RankPlan
    agreement: Agreement
    known_layout: str | None
    fragments: Mapping[int, tuple[str, bytes]]
    first: Mapping[str, Any]
    """The process of rank 0."""


@dataclass(slots=True)
class Planning:
    """The planning of one save. ``prepare`` makes the attempt on rank 0 before other ranks write into it. ``free``
    returns the file system on which this rank writes, and the free space there."""

    operation: Operation
    terms: Terms
    prepare: Callable[[], None]
    free: Callable[[], FreeSpace | None] = lambda: None
    planned: Planned | None = None

    def lay_out(self, plans: PlanCache, budget_bytes: int, captured: Captured) -> RankPlan:
        """Return the plan of this rank. Called in the stager's thread. Raises ``Stopped`` if another rank has
        failed."""
        operation = self.operation
        table = run_sliced(local_table(plans, captured))
        values = run_sliced(encode_values(table))
        agreements = _agreements(operation)
        heard: _Heard = _Heard(agreements)
        part = {**self.terms.pack(), "held": table.held.digest, "table": table.held.table, "values": values.digest}
        part["knows"] = agreements.ids
        part["space"] = self.free(), table.held.most_bytes + values.nbytes
        answer = json.loads(
            operation.exchange("plan", json.dumps(part).encode(), lambda parts: self._first(heard, parts))
        )
        agreement = None
        if answer["detail"]:
            detail = _pack_detail(table, values, rows=bool(answer["rows"]))
            raw = operation.exchange("assign", detail, lambda parts: self._second(heard, parts))
            if raw:
                agreement = heard.made or Agreement(answer["agreement"], Assignment.unpack(raw))
                agreements.put(agreement)
        if agreement is None:
            agreement = agreements.get(answer["agreement"])
        plan = run_sliced(
            lay_out_rank(plans, budget_bytes, operation.rank, table, values, agreement.id, agreement.assignment)
        )
        if answer["tight"]:
            operation.exchange("space", json.dumps(plan.nbytes).encode(), heard.check_space)
        self.planned = Planned(plan, agreement, answer["layout"], heard.fragments, answer["first"])
        operation.step = "write"
        return plan

    def _first(self, heard: _Heard, parts: Sequence[bytes]) -> Sequence[bytes]:
        """Compare the terms of all ranks, and look up the agreement for their state dicts. Called on rank 0."""
        told = [json.loads(part) for part in parts]
        check_terms(told)
        self.prepare()
        heard.name = hashlib.blake2b("".join(one["held"] for one in told).encode(), digest_size=16).hexdigest()
        heard.tables = [one["table"] for one in told]
        heard.places = _places([one["space"] for one in told], self.terms.target)
        heard.known = all(heard.name in one["knows"] for one in told)
        detail = not heard.known or len({(one["table"], one["values"]) for one in told}) > 1
        if heard.known:
            heard.fragments = dict(heard.agreements.get(heard.name).fragments)
        process = this_process()
        first = {table: rank for rank, table in reversed(list(enumerate(heard.tables)))}
        return [
            json.dumps(
                {
                    "agreement": heard.name,
                    "first": process,
                    "detail": detail,
                    "tight": any(place.tight for place in heard.places),
                    "rows": detail and first[table] == rank,
                    "layout": heard.fragments[rank][0] if rank in heard.fragments else None,
                }
            ).encode()
            for rank, table in enumerate(heard.tables)
        ]

    def _second(self, heard: _Heard, parts: Sequence[bytes]) -> bytes | Sequence[bytes]:
        """Compare the plain values of all ranks, and assign the tensors to ranks if there is no agreement yet. Called
        on rank 0."""
        details = [_unpack_detail(part) for part in parts]
        tables: dict[str, Sequence[Row]] = {}
        for table, (rows, _, _) in zip(heard.tables, details, strict=True):
            if table not in tables:
                tables[table] = run_sliced(parse_rows(rows))
        _compare_values([tables[table] for table in heard.tables], [values for _, _, values in details])
        if heard.known:
            return b""
        ranks = [RankReport(table, boxes) for table, (_, boxes, _) in zip(heard.tables, details, strict=True)]
        shared, assignments = run_sliced(assign(ranks, tables))
        body, head = run_sliced(root_body(shared)), run_sliced(described(shared))
        heard.made = Agreement(heard.name, assignments[0], shared, body, head)
        return [assignment.pack() for assignment in assignments]


@dataclass(slots=True)
class _Heard:
    """The results of the first step of planning, for the second one, on rank 0."""

    agreements: _Agreements
    name: str = ""
    tables: list[str] = field(default_factory=list)
    known: bool = False
    places: Sequence[_SharedPlace] = ()
    made: Agreement | None = None
    fragments: Mapping[int, tuple[str, bytes]] = field(default_factory=dict)

    def check_space(self, parts: Sequence[bytes]) -> bytes:
        """On rank 0: do the files of all ranks fit, now that their sizes are known? Raises ``NoSpaceError``."""
        sizes = [int(json.loads(part)) for part in parts]
        for place in self.places:
            needed = sum(sizes[rank] for rank in place.ranks)
            if needed > place.free:
                ranks = ", ".join(map(str, place.ranks[:_LISTED])) + (", ..." if len(place.ranks) > _LISTED else "")
                raise NoSpaceError(
                    errno.ENOSPC,
                    f"{needed} bytes are needed by ranks {ranks} together, and {place.free} are free: free space, or "
                    "write elsewhere",
                    place.target,
                )
        return b""


@dataclass(frozen=True, slots=True)
class _SharedPlace:
    """A file system that several ranks write to. ``most_bytes``: what they write there at most."""

    ranks: tuple[int, ...]
    free: int
    most_bytes: int
    target: str

    @property
    def tight(self) -> bool:
        """Whether the exact sizes have to be known."""
        return self.most_bytes > self.free


def _places(told: Sequence[Any], target: str) -> list[_SharedPlace]:
    """``told``: what each rank says of its file system (or None), and what it writes at most."""
    ranks: dict[tuple[str, int], list[int]] = {}
    for rank, (free, _) in enumerate(told):
        if free is not None:
            ranks.setdefault((free[0], free[1]), []).append(rank)
    return [
        _SharedPlace(tuple(some), min(told[one][0][2] for one in some), sum(told[one][1] for one in some), target)
        for some in ranks.values()
        if len(some) > 1
    ]


def _agreements(operation: Operation) -> _Agreements:
    if operation.group.plans is None:
        operation.group.plans = _Agreements()
    found: _Agreements = operation.group.plans
    return found


def check_terms(told: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``InvalidOptionError`` if the terms of the ranks differ. Called on rank 0."""
    for name in ("target", "durability", "digest", "planner", "exports"):
        said = {one[name]: rank for rank, one in reversed(list(enumerate(told)))}
        if len(said) > 1:
            (one, rank), (other, another) = list(said.items())[:2]
            raise InvalidOptionError(
                f"ranks that save together have to say the same: {name} is {one!r} on rank {rank} and {other!r} on "
                f"rank {another}"
            )


def _compare_values(tables: Sequence[Sequence[Row]], digests: Sequence[Mapping[str, str]]) -> None:
    """Raise ``InvalidOptionError`` if ranks have different plain values under one name, because only one of them could
    be saved."""
    first: dict[str, tuple[int, str]] = {}
    differ: dict[str, tuple[int, int]] = {}
    for rank, (rows, values) in enumerate(zip(tables, digests, strict=True)):
        for number, digest in values.items():
            fqn = rows[int(number)].fqn
            known = first.setdefault(fqn, (rank, digest))
            if known[1] != digest:
                differ.setdefault(fqn, (known[0], rank))
    if differ:
        shown = [f"{fqn} (ranks {one} and {other})" for fqn, (one, other) in list(differ.items())[:_LISTED]]
        raise InvalidOptionError(
            f"{len(differ)} plain values differ between ranks, and one of each could be saved: {', '.join(shown)}; "
            'give what belongs to a rank a name of its own, such as {"rng": {f"rank{rank}": ...}}'
        )


def _pack_detail(table: LocalTable, values: EncodedValues, *, rows: bool) -> bytes:
    pieces = (table.held.raw_rows if rows else b"", table.held.raw_boxes, json.dumps(dict(values.digests)).encode())
    return struct.pack("<3Q", *map(len, pieces)) + b"".join(pieces)


def _unpack_detail(raw: bytes) -> tuple[bytes, bytes, Mapping[str, str]]:
    rows, boxes, values = struct.unpack_from("<3Q", raw)
    start = struct.calcsize("<3Q")
    middle, end = start + rows, start + rows + boxes
    return raw[start:middle], raw[middle:end], json.loads(raw[end : end + values])
