"""The opening of a checkpoint by the ranks of a group, and the checks that they all load the same checkpoint."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._format.records import Manifest, ValueEntry
from .._format.shared import RankPart, Root
from .._format.validate import check_composites, check_patterns, validate
from .._group import Operation
from .._layout.match import LoadPlan
from .._layout.ranges import Box
from .._runtime.threads import collected, io_threads, pause_point
from .._storage import Location, RangeSource
from ..errors import StorageNotSharedError, UnexpectedKeysError, listed
from .open.manifest import naming, open_root, read_parts


@dataclass(frozen=True, slots=True)
class ManifestOutline:
    """The description of a checkpoint that a rank of a group compares with its template. If several ranks have saved
    the checkpoint, ``manifest`` lacks the places of the bytes, because each rank reads only the parts that it needs."""

    manifest: Manifest
    _root: Manifest | Root

    async def read_needed(
        self, source: RangeSource, plan: LoadPlan, values: Mapping[str, ValueEntry], url: str
    ) -> Manifest:
        """Return the part of the manifest that ``plan`` needs, with the ``values`` that it needs, validated. Only the
        parts of those ranks are read that have written needed bytes. ``url`` is for errors."""
        root = self._root
        if isinstance(root, Manifest):
            return root
        rows, ranks = await io_threads().run(_needed, root, plan, values)
        with naming(url):
            parts = await read_parts(source, root, sorted(ranks))
            return await io_threads().run(_join, root, parts, rows)


async def open_outline(location: Location) -> tuple[RangeSource, ManifestOutline]:
    """Open the checkpoint at ``location``. The caller closes the source. Raises what ``open_root`` raises."""
    source, root = await open_root(location)
    try:
        with naming(location.url):
            known = root if isinstance(root, Manifest) else await io_threads().run(_outline, root)
    except BaseException:
        await source.aclose()
        raise
    return source, ManifestOutline(known, root)


def _outline(root: Root) -> Manifest:
    manifest = root.join({}, ())
    check_composites(manifest)
    return manifest


def _needed(root: Root, plan: LoadPlan, values: Iterable[str]) -> tuple[set[int], set[int]]:
    numbers = dict(collected((row.fqn, number) for number, row in enumerate(root.shared.rows)))
    rows: set[int] = set()
    ranks: set[int] = set()
    known: dict[tuple[int, Box | None], frozenset[int]] = {}
    wanted: list[tuple[str, Box | None]] = [(one.fqn, one.box) for one in plan.local.values()]
    wanted += [(fqn, None) for fqn in plan.new]
    for fqn, box in wanted:
        pause_point()
        number = numbers[plan.names.saved_name(fqn)]
        rows.add(number)
        pattern = root.shared.rows[number].pattern
        if (pattern, box) not in known:
            known[pattern, box] = frozenset(
                one.rank
                for one in root.shared.patterns[pattern]
                if box is None or Box(one.offsets, one.sizes).overlap(box) or 0 in box.sizes
            )
        ranks |= known[pattern, box]
    for fqn in values:
        ranks.add(root.shared.rows[numbers[plan.names.saved_name(fqn)]].pattern)
    return rows, ranks


def _join(root: Root, parts: Mapping[int, RankPart], rows: set[int]) -> Manifest:
    manifest = root.join(parts, rows)
    check_patterns(root, rows)
    validate(manifest, partly=True)
    return manifest


async def agree_on(
    operation: Operation, manifest: Manifest, plan: LoadPlan, url: str, replaced: Callable[[], Awaitable[bool]]
) -> None:
    """Check that all ranks have opened the same checkpoint as rank 0, and that every unexpected entry of one rank is
    requested by another rank.

    Raises ``Stopped``, and ``UnexpectedKeysError`` on rank 0. If the checkpoints differ, raises
    ``StorageNotSharedError`` on the ranks whose checkpoint was ``replaced`` since they opened it. If there are no such
    ranks, raises it on rank 0."""
    unexpected, asked = await io_threads().run(_masks, manifest, plan)
    part = {"unexpected": _text(unexpected), "asked": _text(asked)}
    known = {"save_id": manifest.save_id, "entries": len(manifest.entries)}

    async def decide(parts: Sequence[bytes]) -> bytes:
        received = [json.loads(one) for one in parts]
        for rank, one in enumerate(received):
            if {name: one[name] for name in known} != known:
                return f"rank {rank} reads another checkpoint at this URL than rank 0".encode()
        _check_unexpected(manifest, received)
        return b""

    different = await operation.aexchange("match", json.dumps({**known, **part}).encode(), decide)
    if not different:
        return

    async def refuse(_: Sequence[bytes]) -> bytes:
        raise StorageNotSharedError(2, different.decode(), url)

    # Rank 0 has found that the ranks have opened different checkpoints. There are two reasons. A save has replaced the
    # checkpoint between the two looks: a rank whose marker has changed since raises, and all start over. Or the storage
    # is not shared: then no marker has changed, and rank 0 raises for all.
    if await replaced():
        await refuse(())
    await operation.aexchange("match again", b"", refuse)  # rank 0 raises: storage is not shared


def _masks(manifest: Manifest, plan: LoadPlan) -> tuple[int, int]:
    """Return the unexpected and the requested entries as sets of bits, by the position of the entry."""
    found = set(plan.findings.unexpected or ())
    outside = set(plan.not_requested)
    bits = bytearray(len(manifest.entries) // 8 + 1), bytearray(len(manifest.entries) // 8 + 1)
    for position, fqn in enumerate(manifest.entries):
        pause_point()
        if fqn in found:
            bits[0][position // 8] |= 1 << position % 8
        elif fqn not in outside:
            bits[1][position // 8] |= 1 << position % 8
    unexpected, asked = (int.from_bytes(one, "little") for one in bits)
    return unexpected, asked


def _text(mask: int) -> str:
    return base64.b64encode(mask.to_bytes(mask.bit_length() // 8 + 1, "little")).decode()


def _check_unexpected(manifest: Manifest, received: Sequence[Mapping[str, Any]]) -> None:
    unexpected = asked = 0
    for one in received:
        unexpected |= int.from_bytes(base64.b64decode(one["unexpected"]), "little")
        asked |= int.from_bytes(base64.b64decode(one["asked"]), "little")
    rest = unexpected & ~asked
    if rest:
        lines = [
            f"{fqn}: in the checkpoint, not in the target of any rank"
            for position, fqn in enumerate(manifest.entries)
            if rest >> position & 1
        ]
        raise UnexpectedKeysError(
            f"the target does not fit the checkpoint (nothing was changed):\n  {listed(lines)}"
            "\n  allow_unexpected=True, or patterns of names, leaves out what the target lacks",
            lines,
        )
