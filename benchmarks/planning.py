"""What planning costs rank 0, by the number of ranks: W ranks with T sharded tensors each, simulated in one process.

``python benchmarks/planning.py [--ranks 64,128,256,512] [--tensors 2000] [--stock 64] [--json FILE]``

Every rank's table is made as that rank would make it; what rank 0 does with them is timed: the first plan,
``.metadata`` and the root of the manifest, and the same for a save that looks like the last one. A reading rank parses
the root and the parts that it needs, in a world of the same size. Stock DCP plans the same items beside it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidestream._format.checksum import crc32
from sidestream._format.dcp import described, metadata_end, places_of_rank
from sidestream._format.frame import frame_tensor
from sidestream._format.manifest import parse_manifest, root_body, write_root
from sidestream._format.marker import Marker
from sidestream._format.records import Chunk, Manifest
from sidestream._format.shared import PartName, RankPart, Root, Shared, write_part
from sidestream._layout.sharded.assign import Assignment, RankReport
from sidestream._layout.sharded.rank_table import Item, Row, _pack_boxes, _pack_rows
from sidestream._runtime.torch_probes import TORCH_VERSION

SHAPES = [(4096, 4096), (11008, 4096), (4096, 11008), (4096,), (32000, 4096), (1024, 4096), (128256, 512), (8192, 1024)]
SAVE_ID = "0" * 32


def rows_of(tensors: int) -> list[Row]:
    return [
        Row("tensor", f"model.layers.{n // 8}.block.{n % 8}.weight", ("model", f"layers.{n // 8}.block.{n % 8}.weight"),
            "bfloat16", SHAPES[n % len(SHAPES)])
        for n in range(tensors)
    ]  # fmt: skip


def box_of(shape: tuple[int, ...], rank: int, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As FSDP cuts it: rows, torch.chunk's way."""
    size = -(-shape[0] // world)
    start = min(size * rank, shape[0])
    return (start, *(0,) * (len(shape) - 1)), (min(size, shape[0] - start), *shape[1:])


def told_of(rows: Sequence[Row], rank: int, world: int) -> RankReport:
    items = []
    for number, row in enumerate(rows):
        box = box_of(row.shape, rank, world)
        if box[1][0]:
            items.append(Item(number, box, number, (0,) * len(row.shape)))
    return RankReport("table", _pack_boxes(len(rows), items))


def chunks_of(rows: Sequence[Row], rank: int, world: int) -> list[tuple[int, str, Chunk]]:
    found, position = [], 0
    for number, row in enumerate(rows):
        offsets, sizes = box_of(row.shape, rank, world)
        if sizes[0]:
            frame = frame_tensor(row.dtype, sizes)
            place = f"__{rank}_1.distcp", position, frame.item_bytes, position + len(frame.header)
            blocks = -(-math.prod(sizes) * 2 // (1 << 20))
            found.append((number, row.fqn, Chunk(offsets, sizes, *place, b"\1\2\3\4" * blocks)))
            position += -(-frame.item_bytes // 4096) * 4096
    return found


def timed(seconds: dict[str, float], name: str, started: float) -> float:
    now = time.perf_counter()
    seconds[name] = seconds.get(name, 0.0) + now - started
    return now


def commit(shared: Shared, head: bytes, body: bytes, places: list[bytes], parts: Sequence[PartName]) -> list[bytes]:
    files = {f"__{rank}_1.distcp": 1 << 40 for rank in range(len(parts))}
    root = Root(Manifest(SAVE_ID, {}, files), shared, tuple(parts))
    raw = b"".join(write_root(root, TORCH_VERSION, body))
    marker = Marker(SAVE_ID, len(raw), crc32(raw))
    return [raw, head, *places, *metadata_end(marker)]  # a store is given the pieces


def ours(world: int, tensors: int) -> dict[str, float]:
    rows = rows_of(tensors)
    raw_rows = _pack_rows(rows)
    told = [told_of(rows, rank, world) for rank in range(world)]
    seconds: dict[str, float] = {}
    gc.collect()
    start = time.perf_counter()
    tables = {"table": Row.parse_all(raw_rows)}
    shared, assignments = Assignment.of_ranks(told, tables)
    packed = [assignment.pack() for assignment in assignments]
    start = timed(seconds, "first plan", start)
    head, body = described(shared), root_body(shared)
    timed(seconds, "first files", start)
    chunks = [chunks_of(rows, rank, world) for rank in range(world)]
    start = time.perf_counter()
    raw_parts = [b"".join(write_part([(row, chunk) for row, _, chunk in one], [])) for one in chunks]
    places = [places_of_rank(((fqn, chunk) for _, fqn, chunk in one), ())[0] for one in chunks]
    seconds["each rank's share"] = (time.perf_counter() - start) / world
    parts = [PartName(len(raw), crc32(raw)) for raw in raw_parts]
    start = time.perf_counter()
    raw, *metadata = commit(shared, head, body, places, parts)
    start = timed(seconds, "first files", start)
    first = seconds["first plan"] + seconds["first files"]
    digests = [hashlib.blake2b(one.boxes, digest_size=16).hexdigest() for one in told]
    messages = [json.dumps({"target": "x", "durability": "fsync", "digest": None, "held": digest, "table": "table",
                            "values": "v", "knows": ["a"]}).encode() for digest in digests]  # fmt: skip
    start = time.perf_counter()
    heard = [json.loads(message) for message in messages]
    name = hashlib.blake2b("".join(one["held"] for one in heard).encode(), digest_size=16).hexdigest()
    assert len({(one["table"], one["values"]) for one in heard}) == 1
    answers = [json.dumps({"agreement": name, "detail": False, "rows": False, "layout": digest}) for digest in digests]
    timed(seconds, "steady plan", start)
    assert len(answers) == len(packed) == world
    start = time.perf_counter()
    commit(shared, head, body, places, parts)
    timed(seconds, "steady files", start)
    start = time.perf_counter()
    root = parse_manifest(raw)
    assert isinstance(root, Root)
    found = root.join({world // 2: RankPart.parse(raw_parts[world // 2])}, set(range(tensors)))
    timed(seconds, "reading rank", start)
    assert len(found.entries) == tensors
    size = {"root MB": len(raw) / 1e6, ".metadata MB": sum(map(len, metadata)) / 1e6}
    return {"ranks": world, "first": first, **seconds, **size}


def stock(world: int, tensors: int) -> dict[str, float]:
    import pickle

    import torch
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    rows = rows_of(tensors)
    plans = []
    for rank in range(world):
        items = []
        for row in rows:
            offsets, sizes = box_of(row.shape, rank, world)
            if sizes[0]:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), torch.Size(row.shape))
                index = MetadataIndex(row.fqn, torch.Size(offsets))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        plans.append(pickle.dumps(SavePlan(items)))
    seconds: dict[str, float] = {}
    gc.collect()
    start = time.perf_counter()
    received = [pickle.loads(plan) for plan in plans]
    start = timed(seconds, "unpickle", start)
    placed, metadata = create_default_global_save_plan(received)
    start = timed(seconds, "global plan", start)
    metadata.storage_data = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", n, 1) for rank, plan in enumerate(placed)
        for n, item in enumerate(plan.items)
    }  # fmt: skip
    raw = pickle.dumps(metadata)
    start = timed(seconds, ".metadata", start)
    pickle.loads(raw)
    timed(seconds, "reading rank", start)
    first = seconds["unpickle"] + seconds["global plan"] + seconds[".metadata"]
    return {"ranks": world, "first": first, **seconds, ".metadata MB": len(raw) / 1e6}


def growth(rows: Sequence[dict[str, float]], name: str) -> float:
    """The exponent p of ``seconds = c * ranks ** p``, by least squares on logarithms."""
    points = [(math.log(row["ranks"]), math.log(max(row[name], 1e-6))) for row in rows]
    if len(points) < 2:
        return math.nan
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def show(title: str, rows: Sequence[dict[str, float]]) -> None:
    names = list(rows[0])
    print(f"\n{title}\n" + " | ".join(f"{name:>17}" for name in names))
    for row in rows:
        print(" | ".join(f"{row[name]:17.3f}" if name != "ranks" else f"{row[name]:17.0f}" for name in names))
    print("grows with ranks to the power of: " + ", ".join(f"{name} {growth(rows, name):.2f}" for name in names[1:]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="64,128,256,512")
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--stock", default="64")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"tensors": arguments.tensors}
    results["sidestream"] = [ours(int(world), arguments.tensors) for world in arguments.ranks.split(",")]
    show(f"sidestream, {arguments.tensors} tensors, seconds on rank 0", results["sidestream"])
    if arguments.stock:
        results["stock"] = [stock(int(world), arguments.tensors) for world in arguments.stock.split(",")]
        show(f"stock DCP, {arguments.tensors} tensors, seconds on rank 0", results["stock"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
