"""The layouts of files that sidestream plans, for one process and for the ranks of a group, which plan them together.

In the steady state the ranks only send digests of their plans to rank 0, which confirms them. The planning runs in the
threads of the stagers, which wait for each other. It does not need the caller's event loop, so code there may block at
a fence meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from .._format.checksum import crc32
from .._format.dcp import Described, described, metadata_end, places_of_rank
from .._format.manifest import marker_of, root_body, write_root
from .._format.marker import METADATA_NAME
from .._format.records import Manifest, part_name
from .._format.shard import BlockSums
from .._format.shared import PartName, Root, Shared, write_part
from .._group import Operation, this_process
from .._layout.names import renamed_state
from .._layout.save_layout import SavePlan
from .._layout.sharded.assign import Assignment, RankReport
from .._layout.sharded.rank_layout import RankPlan
from .._layout.sharded.rank_table import Row, local_table
from .._runtime.threads import Stop, collected, pause_point
from .._runtime.torch_probes import TORCH_VERSION
from .._staging import Captured, PlanCache
from ..errors import InvalidOptionError, SidestreamError
from ..options import SaveOptions
from .operation import RankReceipt, join_pieces, split_pieces
from .running import Save

_KEPT = 4
_LISTED = 10
_OWN_NAME = 'give what belongs to a rank a name of its own, such as {"rng": {f"rank{rank}": ...}}'

_log = logging.getLogger("sidestream")


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
    """The agreements that were used last, by digests of the state dicts of all ranks. Saves in several threads use
    them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, Agreement] = {}
        self.warned: list[Set[str]] = []
        """The names of tensors about which rank 0 has logged a warning."""

    @property
    def known(self) -> dict[str, Agreement]:
        """The agreements that are kept now, in a copy that other saves do not change."""
        with self._lock:
            return dict(self._kept)

    def put(self, agreement: Agreement) -> None:
        """Keep ``agreement`` as the one that was used last."""
        with self._lock:
            self._kept.pop(agreement.id, None)
            self._kept[agreement.id] = agreement
            while len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of this rank, and the agreement behind it. ``known_layout`` is the digest of the layout of this rank
    whose places rank 0 has. ``fragments`` are these places on rank 0, in a copy that other saves do not change."""

    plan: RankPlan
    agreement: Agreement
    known_layout: str | None
    fragments: Mapping[int, tuple[str, bytes]]
    containers: Mapping[str, str]


class AgreedLayout:
    """The layout of a save of ranks that plan together. Each rank writes its own part of the manifest."""

    _planned: Planned
    """Set by ``lay_out``."""

    def __init__(self, save: Save, options: SaveOptions) -> None:
        assert save.operation is not None
        self._save = save
        self._options = options
        self._operation = save.operation

    def lay_out(self, plans: PlanCache, budget_bytes: int, captured: Captured) -> RankPlan:
        """Return the plan of this rank. Called in the stager's thread. Raises ``Stopped`` if another rank has
        failed."""
        operation, options = self._operation, self._options
        captured = renamed_state(captured, options.names, options.dtype, self._save.location.url, others=True)
        table = local_table(plans, captured)
        values = table.encode_values()
        agreements = _agreements(operation)
        known = agreements.known  # what other saves drop while this one is planned stays usable
        rank0 = _Rank0Planning(self._save, known)
        part = {
            "terms": _terms_of(self._save),
            "held": table.held.digest,
            "table": table.held.table,
            "values": values.digest,
            "knows": list(known),
        }
        answer = json.loads(self._exchange("plan", json.dumps(part).encode(), rank0.look_up))
        agreement = None
        if answer["detail"]:
            rows, digests = table.held.raw_rows if answer["rows"] else b"", json.dumps(dict(values.digests)).encode()
            # Replicas are compared in the first save of a state dict, not in each one: it takes time for each tensor.
            replicas = b"" if answer["agreement"] in known else table.replica_digests().tobytes()
            detail = join_pieces(rows, table.held.raw_boxes, digests, replicas)
            raw = self._exchange("assign", detail, rank0.agree)
            if raw:
                agreement = rank0.made or Agreement(answer["agreement"], Assignment.unpack(raw))
        if agreement is None:
            agreement = known[answer["agreement"]]
        agreements.put(agreement)
        plan = RankPlan.of(plans, budget_bytes, operation.rank, table, values, agreement.id, agreement.assignment)
        self._planned = Planned(plan, agreement, answer["layout"], rank0.fragments, captured.containers)
        operation.first = answer["first"]
        operation.step = "write"
        return plan

    def _exchange(self, step: str, part: bytes, decide: Callable[[Sequence[bytes]], bytes | Sequence[bytes]]) -> bytes:
        """Do one step with the other ranks. Blocks."""
        reasons = self._save.reasons
        reasons.change("ranks")
        try:
            return self._operation.exchange(step, part, decide)
        finally:
            reasons.change("copies")

    # --- the layout, when all is written ---

    def receipt(self, plan: RankPlan, written: Sequence[BlockSums], stop: Stop) -> RankReceipt:
        """Return the receipt of this rank, and write its part of the manifest to storage. So rank 0 need not receive
        the part."""
        save, operation = self._save, self._operation
        receipt, part = _make_part(self._planned, written, save)
        if part:
            name = part_name(save.save_id, operation.rank)
            # Before the receipt is sent, so that rank 0 commits only what is there.
            save.transaction.put(name, part, stop)
        return receipt

    def pack(self, receipt: RankReceipt) -> bytes:
        content: bytes = receipt.content
        return content

    def unpack(self, rank: int, content: bytes) -> _Content:
        """Return what ``rank`` has packed, with the places of its tensors. New places are kept for the next save if
        they are valid for it."""
        planned = self._planned
        head, chunks, values = split_pieces(content, 3)
        facts: dict[str, Any] = json.loads(head)
        # Rank 0 keeps the places of each rank, so that a rank whose plan has not changed sends none. They are kept by
        # the digest of the layout, and a save uses those that it found when it was planned: another save may replace
        # them meanwhile.
        if facts["new"] and facts["stable"]:
            planned.agreement.fragments[rank] = (facts["layout"], chunks)
        elif not facts["new"]:
            layout, chunks = planned.fragments.get(rank, ("", b""))
            if layout != facts["layout"]:
                raise SidestreamError(f"rank {rank} relies on places of its tensors that rank 0 does not have")
        return _Content(PartName(*facts["part"]), chunks, values, facts["containers"])

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        """Return the root of the manifest, and ``.metadata``. The latter has 100 MB if 512 ranks save 2,000 tensors. So
        it is returned as the pieces that the ranks have sent, which are not joined."""
        agreement = self._planned.agreement
        assert agreement.shared is not None
        contents: list[_Content] = [receipt.content for receipt in receipts]
        containers = {fqn: kind for content in contents for fqn, kind in content.containers.items()}
        about = replace(about_save(self._save, receipts), containers=containers)
        root = Root(about, agreement.shared, tuple(content.part for content in contents))
        raw = b"".join(write_root(root, TORCH_VERSION, agreement.body))
        places = [content.chunks for content in contents] + [content.values for content in contents]
        marker = marker_of(about, raw, self._save.order.saved_at)
        return {
            **self._save.sidecar_files(),
            about.name: [raw],
            METADATA_NAME: [agreement.head, *places, *metadata_end(marker)],
        }


class _Rank0Planning:
    """The part of rank 0 in the two exchanges of the planning. Each rank has one; only that of rank 0 is called."""

    def __init__(self, save: Save, agreements: Mapping[str, Agreement]) -> None:
        self._save = save
        self.agreements = agreements
        self.name = ""
        self.tables: list[str] = []
        self.known = False
        self.made: Agreement | None = None
        self.fragments: Mapping[int, tuple[str, bytes]] = {}

    def look_up(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        """Compare the terms of all ranks, and look up the agreement for their state dicts. Called on rank 0."""
        sent = [json.loads(part) for part in parts]
        _check_terms(sent)
        # Here, before any rank is asked to write, and under a name that no other save has: a rank that does not find it
        # later knows that its storage is not that of rank 0.
        self._save.make_attempt()
        self.name = hashlib.blake2b("".join(one["held"] for one in sent).encode(), digest_size=16).hexdigest()
        self.tables = [one["table"] for one in sent]
        self.known = all(self.name in one["knows"] for one in sent)
        detail = not self.known or len({(one["table"], one["values"]) for one in sent}) > 1
        if self.known:
            self.fragments = dict(self.agreements[self.name].fragments)
        process = this_process()
        first = {table: rank for rank, table in reversed(list(enumerate(self.tables)))}
        return [
            json.dumps(
                {
                    "agreement": self.name,
                    "first": process,
                    "detail": detail,
                    "rows": detail and first[table] == rank,
                    "layout": self.fragments[rank][0] if rank in self.fragments else None,
                }
            ).encode()
            for rank, table in enumerate(self.tables)
        ]

    def agree(self, parts: Sequence[bytes]) -> bytes | Sequence[bytes]:
        """Compare the plain values of all ranks, and assign the tensors to ranks if there is no agreement yet. Called
        on rank 0."""
        details = [split_pieces(part, 4) for part in parts]
        tables: dict[str, Sequence[Row]] = {}
        for table, (rows, *_) in zip(self.tables, details, strict=True):
            if table not in tables:
                tables[table] = Row.parse_all(rows)
        _compare_values([tables[table] for table in self.tables], [json.loads(values) for _, _, values, _ in details])
        if self.known:
            return b""
        self._compare_replicas(self.tables, tables, [replicas for *_, replicas in details])
        ranks = [RankReport(table, boxes) for table, (_, boxes, *_) in zip(self.tables, details, strict=True)]
        shared, assignments = Assignment.of_ranks(ranks, tables)
        body, head = root_body(shared), described(shared)
        self.made = Agreement(self.name, assignments[0], shared, body, head)
        return [assignment.pack() for assignment in assignments]

    def _compare_replicas(
        self, table_of: Sequence[str], tables: Mapping[str, Sequence[Row]], digests: Sequence[bytes]
    ) -> None:
        """Log a warning for small tensors of one name that differ between ranks, once for each set of names. The save
        continues: the buffers of a DDP model differ too, and it does not matter which of them is saved."""
        assert self._save.operation is not None
        differ = _differing_replicas(table_of, tables, digests)
        warned = _agreements(self._save.operation).warned
        if differ and differ.keys() not in warned:
            warned.append(differ.keys())
            more = f" and {len(differ) - _LISTED} more" if len(differ) > _LISTED else ""
            _log.warning(
                "%s: tensors differ between ranks, and one of each is saved: %s%s; %s",
                self._save.location.url, _listed(differ), more, _OWN_NAME,
            )  # fmt: skip


def _agreements(operation: Operation) -> _Agreements:
    if operation.group.plans is None:
        operation.group.plans = _Agreements()
    found: _Agreements = operation.group.plans
    return found


def _terms_of(save: Save) -> dict[str, Any]:
    """Return the options of a save that have to be the same on all ranks, by their names in errors."""
    exports = ", ".join(url.rpartition("/")[2] for url in save.order.exports)
    return {
        "target": save.location.name,
        "durability": save.order.durability,
        "digest": save.order.digest,
        "exports": exports,
    }


def _check_terms(sent: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``InvalidOptionError`` if the ``"terms"`` of the ranks differ. Called on rank 0."""
    for name in sent[0]["terms"]:
        said = {one["terms"][name]: rank for rank, one in reversed(list(enumerate(sent)))}
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
        raise InvalidOptionError(
            f"{len(differ)} plain values differ between ranks, and one of each could be saved: {_listed(differ)}; "
            f"{_OWN_NAME}"
        )


def _differing_replicas(
    table_of: Sequence[str], tables: Mapping[str, Sequence[Row]], sent: Sequence[bytes]
) -> dict[str, tuple[int, int]]:
    """Return the names of the tensors that differ, each with two ranks. ``sent`` has the digests of each rank. If many
    ranks with the same table differ, only the first of them are compared."""
    distinct: dict[str, dict[bytes, int]] = {}
    for rank, (table, digests) in enumerate(zip(table_of, sent, strict=True)):
        of_table = distinct.setdefault(table, {})
        if digests and len(of_table) < _LISTED:
            of_table.setdefault(digests, rank)
    first: dict[str, tuple[int, int]] = {}
    differ: dict[str, tuple[int, int]] = {}
    several = sum(map(len, distinct.values())) > 1
    for table, of_table in distinct.items() if several else ():
        for raw, rank in of_table.items():
            for row, digest in zip(tables[table], array("Q", raw), strict=True):
                pause_point()
                if digest and first.setdefault(row.fqn, (rank, digest))[1] != digest:
                    differ.setdefault(row.fqn, (first[row.fqn][0], rank))
    return differ


def _listed(differ: Mapping[str, tuple[int, int]]) -> str:
    shown = [f"{fqn} (ranks {one} and {other})" for fqn, (one, other) in islice(differ.items(), _LISTED)]
    return ", ".join(shown)


def commit_files(manifest: Manifest, saved_at: int, described: Described | None = None) -> dict[str, list[bytes]]:
    """Return the files of the manifest and of the marker for ``manifest``. If ``described`` is given, it has the
    entries in place of ``manifest``. Called in a worker thread."""
    described = Described.of(manifest.entries) if described is None else described
    raw = described.manifest(manifest, TORCH_VERSION)
    return {
        manifest.name: [raw],
        METADATA_NAME: [described.metadata(marker_of(manifest, raw, saved_at))],
    }


class NativeLayout:
    """The layout of a save by one process. The content of its receipt is a function that returns the CRCs of the files,
    and describes the entries."""

    def __init__(self, save: Save, options: SaveOptions) -> None:
        self._save = save
        self._options = options

    def lay_out(self, plans: PlanCache, budget_bytes: int, captured: Captured) -> SavePlan:
        """Return the plan of the save. Called in the stager's thread."""
        options = self._options
        captured = renamed_state(captured, options.names, options.dtype, self._save.location.url, others=False)
        return SavePlan.of(plans, budget_bytes, captured)

    def receipt(self, plan: SavePlan, written: Sequence[BlockSums], stop: Stop) -> RankReceipt:
        names = {name: self._save.transaction.committed_name(name) for name in plan.files}
        files = {names[name]: nbytes for name, nbytes in plan.files.items()}

        def content() -> tuple[dict[str, int], Described, Mapping[str, str]]:
            return _file_crcs(plan, written, names), plan.describe(written, names), plan.containers

        # A function: the commit calls it in the worker thread that writes the files. The description of 100,000 tensors
        # must not be made on the loop.
        return RankReceipt(files, content)

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        crcs, described, containers = receipts[0].content()
        about = replace(about_save(self._save, [replace(receipts[0], crcs=crcs)]), containers=containers)
        files = commit_files(about, self._save.order.saved_at, described)
        return {**self._save.sidecar_files(), **files}


def _file_crcs(plan: SavePlan | RankPlan, sums: Sequence[BlockSums], names: Mapping[str, str]) -> dict[str, int]:
    """Return the CRC of each data file, by its name in the checkpoint. Called in a worker thread."""
    crcs = {names[plan.values_file]: crc32(plan.values)} if plan.values else {}
    for number, (layout, of_shard) in enumerate(zip(plan.shards, sums, strict=True)):
        crcs[names[plan.shard_file(number)]] = of_shard.whole(layout)
    return crcs


def about_save(save: Save, receipts: Sequence[RankReceipt]) -> Manifest:
    """Return the manifest of a save without its entries."""
    files = {name: nbytes for receipt in receipts for name, nbytes in receipt.files.items()}
    crcs = {name: crc for receipt in receipts for name, crc in receipt.crcs.items()}
    about = Manifest(
        save.save_id,
        {},
        files,
        save.order.step,
        save.order.generation,
        save.order.digest,
        save.order.metadata,
        file_crcs=crcs,
    )
    return save.with_sidecars(about)


class _Content(NamedTuple):
    """The description of the files of one rank, on rank 0: the name and the checksum of its part of the manifest, and
    the places of its tensors and values, as ``.metadata`` has them."""

    part: PartName
    chunks: bytes
    values: bytes
    containers: Mapping[str, str]


def _make_part(planned: Planned, sums: Sequence[BlockSums], save: Save) -> tuple[RankReceipt, bytes]:
    """Return the receipt of this rank, and its part of the manifest. Called in a worker thread.

    The content of the receipt is what ``unpack`` reads. The places of tensors are only sent if they are ``new`` to rank
    0. ``layout`` is the digest of these places. ``stable`` says that they are valid for the next save too."""
    plan = planned.plan
    names = {name: save.transaction.committed_name(name) for name in plan.files}
    chunks = collected(plan.chunks(sums, names))
    values = [
        (row, fqn, names[plan.values_file], offset, nbytes, node)
        for row, fqn, offset, nbytes, node in plan.value_places
    ]
    lines = write_part(
        [(row, chunk) for row, _, chunk in chunks],
        [(row, file, offset, nbytes, node) for row, _, file, offset, nbytes, node in values],
    )
    part = b"".join(collected(lines))
    # On object storage names contain the id of the save, so the places are new in each save.
    stable = all(name == published for name, published in names.items())
    new = not stable or planned.known_layout != plan.layout.digest
    layout, name = plan.layout.digest, PartName(len(part), crc32(part))
    facts = {"new": new, "stable": stable, "layout": layout, "part": name, "containers": planned.containers}
    places = places_of_rank(
        [(fqn, chunk) for _, fqn, chunk in chunks] if new else [],
        [(fqn, file, offset, nbytes) for _, fqn, file, offset, nbytes, _ in values],
    )
    content = join_pieces(json.dumps(facts).encode(), *places)
    crcs = _file_crcs(plan, sums, names)
    return RankReceipt({names[name]: nbytes for name, nbytes in plan.files.items()}, content, crcs), part
