"""The layouts of files that sidestream has planned, for one process and for the ranks of a group."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._format.checksum import crc32, join_blocks, unpack_crcs
from .._format.dcp.described import Described, describe
from .._format.dcp.shared import places_of_chunks, places_of_values, shared_metadata
from .._format.manifest import metadata_line, write_root
from .._format.marker import METADATA_NAME, Marker, manifest_name
from .._format.records import Chunk, Manifest, TensorEntry
from .._format.shard import BlockSums, checksums_of
from .._format.shared import PartName, Root, part_name, write_part
from .._layout.save_layout import SavePlan
from .._layout.sharded.rank_layout import RankPlan
from .._runtime.threads import gathered, io_threads, run_sliced
from .._runtime.torch_probes import TORCH_VERSION
from .._storage import BytesBody
from ..errors import SidestreamError
from .group_planning import Planned, Planning
from .operation import RankReceipt, SaveOrder

__all__ = ["AgreedLayout", "NativeLayout", "commit_files", "sidecar_files", "with_sidecars"]


def commit_files(manifest: Manifest, saved_at: int = 0, described: Described | None = None) -> dict[str, list[bytes]]:
    """Return the files of the manifest and of the marker for ``manifest``. If ``described`` is given, it has the
    entries in place of ``manifest``. Called in a worker thread."""
    described = run_sliced(describe(manifest.entries)) if described is None else described
    raw = described.manifest(manifest, TORCH_VERSION)
    return {
        manifest_name(manifest.save_id): [raw],
        METADATA_NAME: [described.metadata(_marker(manifest, raw, saved_at))],
    }


def _marker(manifest: Manifest, raw: bytes, saved_at: int) -> Marker:
    last = metadata_line(manifest)
    return Marker(
        manifest.save_id, len(raw), crc32(raw), manifest.step, manifest.generation, saved_at, len(last), crc32(last)
    )


class NativeLayout:
    """The layout of a save by one process. The content of its receipt is a function that returns the CRCs of the files,
    and describes the entries."""

    def __init__(self, order: SaveOrder) -> None:
        self._order = order

    async def receipt(self, plan: SavePlan, written: Sequence[BlockSums]) -> RankReceipt:
        names = {name: self._order.transaction.committed_name(name) for name in plan.files}
        files = {names[name]: nbytes for name, nbytes in plan.files.items()}
        return RankReceipt(files, lambda: (_file_crcs(plan, written, names), run_sliced(plan.describe(written, names))))

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        crcs, described = receipts[0].content()
        about = _about(self._order, [replace(receipts[0], crcs=crcs)])
        files = commit_files(about, self._order.saved_at, described)
        return {**sidecar_files(self._order), **files}


def _file_crcs(plan: SavePlan | RankPlan, sums: Sequence[BlockSums], names: Mapping[str, str]) -> dict[str, int]:
    """Return the CRC of each data file, by its name in the checkpoint. Called in a worker thread."""
    crcs = {names[plan.values_file]: crc32(plan.values)} if plan.values else {}
    for number, (layout, of_shard) in enumerate(zip(plan.shards, sums, strict=True)):
        crcs[names[plan.shard_file(number)]] = of_shard.whole(layout)
    return crcs


def _about(order: SaveOrder, receipts: Sequence[RankReceipt]) -> Manifest:
    """Return the manifest of a save without its entries."""
    files = {name: nbytes for receipt in receipts for name, nbytes in receipt.files.items()}
    crcs = {name: crc for receipt in receipts for name, crc in receipt.crcs.items()}
    about = Manifest(
        order.save_id, {}, files, order.step, order.generation, order.digest, order.metadata, file_crcs=crcs
    )
    return with_sidecars(about, order)


def sidecar_files(order: SaveOrder) -> dict[str, list[bytes]]:
    """Return the sidecar files, under the names that they have on this store."""
    return {order.transaction.sidecar_name(name): [content] for name, content in order.sidecars.items()}


def with_sidecars(manifest: Manifest, order: SaveOrder) -> Manifest:
    """Return ``manifest`` with the sidecar files and their checksums. Called in a worker thread."""
    digest = order.digest if manifest.digest is not None else None
    sidecars: dict[str, TensorEntry] = {}
    files, file_crcs = dict(manifest.files), dict(manifest.file_crcs)
    for name, content in order.sidecars.items():
        file, nbytes = order.transaction.sidecar_name(name), len(content)
        crcs, digests = checksums_of(content, digest)
        chunk = Chunk((0,), (nbytes,), file, 0, nbytes, 0, crcs, digests=digests)
        sidecars[name] = TensorEntry((name,), "uint8", (nbytes,), (chunk,))
        files[file], file_crcs[file] = nbytes, join_blocks(list(unpack_crcs(crcs)), nbytes)
    return replace(manifest, files=files, sidecars=sidecars, file_crcs=file_crcs)


@dataclass(frozen=True, slots=True)
class _Content:
    """The description of the files of one rank, for rank 0.

    ``part`` is the name and the checksum of its part of the manifest. ``chunks`` and ``values`` are the places of its
    tensors and values, as ``.metadata`` has them. The places of tensors are only sent if they are ``new`` to rank 0.
    ``layout`` is the digest of these places. ``stable`` says that they are valid for the next save too."""

    part: PartName
    layout: str
    new: bool
    stable: bool
    chunks: bytes
    values: bytes


class AgreedLayout:
    """The layout of a save of ranks that have planned together. Each rank writes its own part of the manifest."""

    def __init__(self, order: SaveOrder, planning: Planning) -> None:
        self._order = order
        self._planning = planning

    @property
    def _planned(self) -> Planned:
        assert self._planning.planned is not None
        return self._planning.planned

    async def receipt(self, plan: RankPlan, written: Sequence[BlockSums]) -> RankReceipt:
        """Return the receipt of this rank, and write its part of the manifest to storage. So rank 0 need not receive
        the part."""
        order, operation = self._order, self._planning.operation
        made = await io_threads().run(_make_part, self._planned, written, order)
        receipt, part = made
        if part:
            name = part_name(manifest_name(order.save_id), operation.rank)
            await order.transaction.put(name, BytesBody(part))
        return receipt

    def pack(self, receipt: RankReceipt) -> bytes:
        content: _Content = receipt.content
        facts = {"new": content.new, "stable": content.stable, "layout": content.layout, "part": list(content.part)}
        head = json.dumps(facts).encode()
        sizes = struct.pack("<3Q", len(head), len(content.chunks), len(content.values))
        return sizes + head + content.chunks + content.values

    def unpack(self, rank: int, content: bytes) -> _Content:
        """Return what ``rank`` has packed, with the places of its tensors. New places are kept for the next save if
        they are valid for it."""
        planned = self._planned
        head, chunks_bytes, values_bytes = struct.unpack_from("<3Q", content)
        start = struct.calcsize("<3Q")
        facts: dict[str, Any] = json.loads(content[start : start + head])
        middle = start + head + chunks_bytes
        chunks, values = content[start + head : middle], content[middle : middle + values_bytes]
        if facts["new"] and facts["stable"]:
            planned.agreement.fragments[rank] = (facts["layout"], chunks)
        elif not facts["new"]:
            layout, chunks = planned.fragments.get(rank, ("", b""))
            if layout != facts["layout"]:
                raise SidestreamError(f"rank {rank} relies on places of its tensors that rank 0 does not have")
        return _Content(PartName(*facts["part"]), facts["layout"], facts["new"], facts["stable"], chunks, values)

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        """Return the root of the manifest, and ``.metadata``. The latter has 100 MB if 512 ranks save 2,000 tensors. So
        it is returned as the pieces that the ranks have sent, which are not joined."""
        agreement = self._planned.agreement
        assert agreement.shared is not None
        contents: list[_Content] = [receipt.content for receipt in receipts]
        about = _about(self._order, receipts)
        root = Root(about, agreement.shared, tuple(content.part for content in contents))
        raw = b"".join(write_root(root, TORCH_VERSION, agreement.body))
        places = [content.chunks for content in contents] + [content.values for content in contents]
        marker = _marker(about, raw, self._order.saved_at)
        return {
            **sidecar_files(self._order),
            manifest_name(about.save_id): [raw],
            METADATA_NAME: list(shared_metadata(agreement.head, places, marker)),
        }


def _make_part(planned: Planned, sums: Sequence[BlockSums], order: SaveOrder) -> tuple[RankReceipt, bytes]:
    """Return the receipt of this rank, and its part of the manifest. Called in a worker thread."""
    plan = planned.plan
    names = {name: order.transaction.committed_name(name) for name in plan.files}
    chunks = gathered(plan.chunks(sums, names))
    values = [
        (row, fqn, names[plan.values_file], offset, nbytes, node)
        for row, fqn, offset, nbytes, node in plan.value_places
    ]
    lines = write_part(
        [(row, chunk) for row, _, chunk in chunks],
        [(row, file, offset, nbytes, node) for row, _, file, offset, nbytes, node in values],
    )
    part = b"".join(gathered(lines))
    # On object storage names contain the id of the save, so the places are new in each save.
    stable = all(name == published for name, published in names.items())
    new = not stable or planned.known_layout != plan.layout.digest
    content = _Content(
        PartName(len(part), crc32(part)),
        plan.layout.digest,
        new,
        stable,
        run_sliced(places_of_chunks((fqn, chunk) for _, fqn, chunk in chunks)) if new else b"",
        places_of_values((fqn, file, offset, nbytes) for _, fqn, file, offset, nbytes, _ in values),
    )
    crcs = _file_crcs(plan, sums, names)
    return RankReceipt({names[name]: nbytes for name, nbytes in plan.files.items()}, content, crcs), part
