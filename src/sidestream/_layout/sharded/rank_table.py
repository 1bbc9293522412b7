"""The table of one rank: the rows of its state dict, which other ranks may also have, and the boxes that it holds."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import struct
from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..._format.manifest import parse_composite
from ..._format.records import (
    CompositeEntry,
    DictKey,
    Key,
    Node,
    name_problem,
)
from ..._runtime.pauses import collected, paced, pause_point
from ..._runtime.torch_probes import check_tensor, dtype_name, storage_key, view_key
from ..._staging import Captured, Composite, PlanCache, fingerprint
from ...errors import CorruptCheckpointError, InvalidOptionError, UnsupportedTensorError
from ..composites.entry import composite_entry
from ..flatten import CompositeLeaf, Leaf, check_saved, leaves_of
from ..values import encode_value

_MOST_VALUE_FRAME_BYTES = 4096
_SMALL_BYTES = 64 << 10
"""The largest replica that is compared with those of other ranks."""
_COMPARED_BYTES = 16 << 20
"""How many bytes of replicas are compared in one plan."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


class Row(NamedTuple):
    """A leaf, in the form that all ranks exchange. ``kind`` is ``"tensor"``, ``"value"``, ``"empty"`` or
    ``"composite"``. ``tie`` is the row whose memory this one shares on the rank of the table, or -1. ``composite`` is
    the entry of a composite tensor; its parts have rows of their own."""

    kind: str
    fqn: str
    path: tuple[Key, ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    tie: int = -1
    composite: CompositeEntry | None = None

    @staticmethod
    def parse_all(raw: bytes) -> list[Row]:
        """Decode the rows that ``_pack_rows`` has made on another rank."""
        lines = raw.decode().split("\n") if raw else []
        return collected(_parse_row(json.loads(line)) for line in lines)


class Item(NamedTuple):
    """A box that this rank holds. It is the elements ``start`` to ``start + sizes`` of tensor number ``tensor`` in
    ``LocalTable.sources``."""

    row: int
    box: Box
    tensor: int
    start: tuple[int, ...]


class Held(NamedTuple):
    """The cached part of a table. It depends on the look of the state dict, and not on its contents."""

    rows: tuple[Row, ...]
    items: tuple[Item, ...]
    raw_rows: bytes
    raw_boxes: bytes
    table: str
    """The digest of the rows, without the boxes."""
    digest: str


@dataclass(frozen=True, slots=True)
class EncodedValues:
    """The plain values of this rank, by row of its table. Equal values have equal ``digests``."""

    nodes: Mapping[int, Node]
    digests: Mapping[int, str]
    digest: str
    nbytes: int
    """Of all of them in a file, at most: this rank may write fewer."""


@dataclass(frozen=True, slots=True)
class LocalTable:
    """The table of this rank. ``values`` has the leaf of each plain value by row, and ``sources`` the local tensors."""

    held: Held
    sources: Sequence[torch.Tensor]
    values: dict[int, Leaf]
    key: Hashable

    def encode_values(self) -> EncodedValues:
        """Encode the plain values. Raises ``UnsafeObjectError`` with the FQN."""
        nodes: dict[int, Node] = {}
        digests: dict[int, str] = {}
        nbytes = 0
        for number, leaf in self.values.items():
            pause_point()
            node = nodes[number] = encode_value(leaf.value, leaf.fqn)
            raw = json.dumps(node).encode()
            digests[number] = hashlib.blake2b(raw, digest_size=8).hexdigest()
            nbytes += _MOST_VALUE_FRAME_BYTES + 2 * len(raw)
        digest = hashlib.blake2b("".join(digests.values()).encode(), digest_size=16).hexdigest()
        return EncodedValues(nodes, digests, digest, nbytes)

    def replica_digests(self) -> array[int]:
        """Return a digest for each row: not zero for a small tensor in host memory that this rank has as a
        whole. If there are many, those of the smallest. Equal tensors have equal digests."""
        found = array("Q", bytes(8 * len(self.held.rows)))
        whole: list[tuple[int, int, torch.Tensor]] = []
        for item in paced(self.held.items):
            source, shape = self.sources[item.tensor], self.held.rows[item.row].shape
            plain = source.is_cpu and source.is_contiguous() and not (source.is_conj() or source.is_neg())
            if plain and 0 < source.nbytes <= _SMALL_BYTES and item.box[1] == shape == tuple(source.shape):
                whole.append((source.nbytes, item.row, source))
        left = _COMPARED_BYTES
        for nbytes, row, source in sorted(whole, key=lambda one: one[0]):
            pause_point()
            left -= nbytes
            if left < 0:
                break
            raw = (ctypes.c_char * nbytes).from_address(source.data_ptr())
            found[row] = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") or 1
        return found


def local_table(plans: PlanCache, captured: Captured) -> LocalTable:
    """Make the table of this rank. Raises ``UnsupportedTensorError``, ``KeyCollisionError``, ``UnsafeObjectError`` and
    ``InvalidOptionError`` with the FQN."""
    leaves = collected(leaves_of(captured.root))
    sources: list[torch.Tensor] = []
    shardings: list[Hashable] = []
    composites: dict[str, CompositeEntry] = {}
    for leaf in paced(leaves):
        if isinstance(leaf.value, torch.Tensor):
            sources.append(leaf.value)
        elif isinstance(leaf.value, CompositeLeaf):
            composites[leaf.fqn] = composite_entry(leaf.fqn, leaf.path, leaf.value.form)
        elif isinstance(leaf.value, Composite):
            sharding = leaf.value.sharding
            # A subclass that a ``DTensor`` wraps would need a box for each of its parts, which no layout describes.
            if sharding is None or any(isinstance(part, Composite) for part in leaf.value.parts):
                raise _refused(leaf.fqn, leaf.value)
            sources.extend(leaf.value.tensors())
            shardings.append(sharding.key)
    kinds = tuple([type(leaf.value) for leaf in leaves])
    converted = tuple(captured.dtypes.items())
    described = tuple([json.dumps(entry.content) for entry in composites.values()])
    paths = tuple([leaf.path for leaf in leaves])
    # Everything that the rows and boxes depend on, and no tensor. The fingerprint has the addresses, because ties are a
    # part of the rows.
    key = (paths, kinds, described, tuple(shardings), converted, fingerprint(sources))
    held = plans.get(("table", key), lambda: _hold(leaves, composites, captured))
    values = {number: leaf for number, leaf in enumerate(leaves) if held.rows[number].kind == "value"}
    return LocalTable(held, sources, values, key)


def _refused(fqn: str, composite: Composite) -> UnsupportedTensorError:
    inner = [part.kind for part in composite.parts if isinstance(part, Composite)]
    over = f" over {inner[0]}" if inner else ""
    local = "its local_shards()" if composite.kind == "a ShardedTensor" else "what to_local() returns"
    return UnsupportedTensorError(
        f"{fqn}: ranks that save together cannot save {composite.kind}{over}: save {local} under a name of this rank, "
        'such as {f"rank{rank}": ...}, or a dense tensor'
    )


def _hold(leaves: Sequence[Leaf], composites: Mapping[str, CompositeEntry], captured: Captured) -> Held:
    rows: list[Row] = []
    items: list[Item] = []
    known: dict[tuple[object, ...], int] = {}
    number = 0  # of the next source
    for leaf in leaves:
        pause_point()
        value = leaf.value
        if problem := name_problem(leaf.fqn, leaf.path):
            raise InvalidOptionError(problem)
        if isinstance(value, (torch.Tensor, Composite)):
            parts = [value] if isinstance(value, torch.Tensor) else list(value.tensors())
            row, here = _tensor_row(leaf, parts, number, len(rows), captured)
            identity = tuple(view_key(part) for part in parts if part.numel())
            if identity:
                # Tied tensors of this rank. Rank 0 gives them the same order of holders, so that they become one item
                # on the rank that writes them. Parts without elements prove nothing: all of them have the address 0.
                tie = known.setdefault((identity, row.dtype, row.shape), len(rows))
                row = row._replace(tie=-1 if tie == len(rows) else tie)
            rows.append(row)
            items.extend(here)
            number += len(parts)
        elif leaf.fqn in composites:
            entry = composites[leaf.fqn]
            rows.append(Row(leaf.kind, leaf.fqn, leaf.path, entry.dtype, entry.shape, composite=entry))
        else:
            rows.append(Row(leaf.kind, leaf.fqn, leaf.path))
    raw_rows, raw_boxes = _pack_rows(rows), _pack_boxes(len(rows), items)
    table = hashlib.blake2b(raw_rows, digest_size=16).hexdigest()
    digest = hashlib.blake2b(table.encode() + raw_boxes, digest_size=16).hexdigest()
    return Held(tuple(rows), tuple(items), raw_rows, raw_boxes, table, digest)


def _tensor_row(
    leaf: Leaf, parts: Sequence[torch.Tensor], number: int, row: int, captured: Captured
) -> tuple[Row, list[Item]]:
    copied = captured.held
    for part in parts:
        check_tensor(part, leaf.fqn, held=bool(copied) and storage_key(part) in copied)
    if isinstance(leaf.value, Composite):
        assert leaf.value.sharding is not None
        sharding = leaf.value.sharding
        shape, places, dtype = sharding.shape, sharding.places(), dtype_name(sharding.dtype)
    else:
        shape, dtype = tuple(leaf.value.shape), dtype_name(leaf.value.dtype)
        places = ((0, (0,) * len(shape), shape, (0,) * len(shape)),)
    dtype = captured.dtypes.get(leaf.fqn, dtype)
    check_saved(leaf.fqn, dtype, shape)
    here = []
    # Of a tensor with elements an empty shard is left out. A tensor without elements has empty boxes only, and would
    # have none at all otherwise.
    filled = 0 not in shape
    for which, offsets, sizes, start in places:
        if filled and 0 in sizes:
            continue
        local = parts[which].shape
        # Placements are declared by the program, and the copies are made from them. A declaration that does not fit the
        # local tensor would copy memory behind it.
        if any(at + size > extent for at, size, extent in zip(start, sizes, local, strict=True)):
            raise UnsupportedTensorError(
                f"{leaf.fqn}: its placements say that this rank has {sizes} of {shape}, but the local tensor has the "
                f"shape {tuple(local)}"
            )
        here.append(Item(row, (offsets, sizes), number + which, start))
    return Row("tensor", leaf.fqn, leaf.path, dtype, shape), here


# --- as bytes, for rank 0 -------------------------------------------------------------------------------------------


def _pack_rows(rows: Sequence[Row]) -> bytes:
    lines = (
        json.dumps(
            [row.kind, row.fqn, [{"key": key.value} if isinstance(key, DictKey) else key for key in row.path]]
            + ([row.dtype, row.shape, row.tie] if row.kind == "tensor" else [])
            + ([] if row.composite is None else [row.composite.content]),
            separators=(",", ":"),
        )
        for row in rows
    )
    return "\n".join(collected(lines)).encode()


def _parse_row(line: list[Any]) -> Row:
    kind, fqn, path, *rest = line
    keys = tuple(DictKey(key["key"]) if isinstance(key, dict) else key for key in path)
    if kind == "composite":
        entry = parse_composite(keys, *rest)
        return Row(kind, fqn, keys, entry.dtype, entry.shape, composite=entry)
    if kind != "tensor":
        return Row(kind, fqn, keys)
    dtype, shape, tie = rest
    return Row(kind, fqn, keys, dtype, tuple(shape), tie)


def _pack_boxes(rows: int, items: Sequence[Item]) -> bytes:
    """Encode the boxes of each row: their number, and the boxes. Before them is the offset of each row, so that rank 0
    can separate the rows of a thousand ranks without decoding them."""
    of_row: list[list[Item]] = [[] for _ in range(rows)]
    for item in items:
        of_row[item.row].append(item)
    starts, body = array("I", [0]), bytearray()
    for here in paced(of_row):
        body += struct.pack("<H", len(here))
        for item in here:
            body += struct.pack(f"<{2 * len(item.box[0])}q", *item.box[0], *item.box[1])
        starts.append(len(body))
    return struct.pack("<I", rows) + starts.tobytes() + body


def boxes_of(raw: bytes) -> list[bytes]:
    """Return the packed boxes of each row. Equal boxes have equal bytes."""
    (rows,) = struct.unpack_from("<I", raw)
    starts = array("I", raw[4 : 4 + 4 * (rows + 1)])
    body = raw[4 + 4 * (rows + 1) :]
    if len(starts) != rows + 1 or starts[-1] != len(body):
        raise CorruptCheckpointError("the boxes that a rank has sent are damaged")
    return [body[start:end] for start, end in itertools.pairwise(starts)]


def unpack_boxes(packed: bytes, ndim: int, position: int) -> Iterator[tuple[int, Box]]:
    """Yield the boxes of one rank, which begin at ``position`` of ``packed``, and the end of each."""
    (count,) = struct.unpack_from("<H", packed, position)
    position += 2
    for _ in range(count):
        numbers = struct.unpack_from(f"<{2 * ndim}q", packed, position)
        position += 16 * ndim
        yield position, (numbers[:ndim], numbers[ndim:])
