"""What saving and loading cost in requests, bytes and memory, as the proxy and the kernel count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _processes import Children, children
from _proxy import Lane
from _servers import Bucket, Endpoint
from _states import PART_BYTES
from keywords import for_save

import sidestream

ENGINES = ["obstore", "fsspec"]
ROW_BYTES = 256 << 10
BLOCK_BYTES = 1 << 20
"""What checksums are kept of."""


@pytest.fixture(scope="module")
def child() -> Iterator[Children]:
    with children() as running:
        yield running


def where(engine: str, seaweed: Endpoint, lane: Lane) -> dict[str, Any]:
    policy = sidestream.StorePolicy(engine=engine, part_bytes=PART_BYTES)
    return {"storage": sidestream.Storage(seaweed.at(lane.port), policy=policy)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("rows", "requests"), [(slice(8, 24), 1), (slice(40, 41), 1), (slice(3, 55), 1), (slice(0, 64), 2)], ids=str
)
async def test_a_slice_costs_little_more_than_its_bytes(
    rows: slice, requests: int, engine: str, seaweed: Endpoint, lane: Lane, prefix: str
) -> None:
    """Of a tensor among others: one request of 16 MiB at most each, and no more than whole blocks."""
    weight = torch.arange(64 * ROW_BYTES // 4, dtype=torch.int32).view(64, -1)
    state = {"before": torch.ones(300_000), "weight": weight, "behind": torch.ones(300_000)}
    url = seaweed.url(prefix)
    await sidestream.save(state, url, storage_options=seaweed.options)

    opened = await sidestream.open_checkpoint(url, **where(engine, seaweed, lane))
    opening = Counter(lane.operations)
    assert opening["GetObject"] <= 2, opening
    assert sum(opening.values()) <= 4, opening

    lane.log.clear()
    found = await opened.tensor("weight", rows)
    assert torch.equal(found, weight[rows])
    start, end = rows.start * ROW_BYTES, rows.stop * ROW_BYTES
    blocks = (-(-end // BLOCK_BYTES) - start // BLOCK_BYTES) * BLOCK_BYTES
    received = sum(exchange.received for exchange in lane.log)
    assert lane.operations == ["GetObject"] * len(lane.log)
    assert len(lane.log) <= requests
    assert received <= 1.05 * blocks
    if (start % BLOCK_BYTES, end % BLOCK_BYTES) == (0, 0):
        assert received <= 1.05 * found.nbytes


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_small_save_is_a_handful_of_requests(
    engine: str, seaweed: Endpoint, lane: Lane, bucket: Bucket, prefix: str
) -> None:
    """A look at the target, values, tensors, manifest, marker; s3fs asks for a directory in several ways."""
    state = {"weight": torch.ones(1000), "step": 3}
    await sidestream.save(state, seaweed.url(prefix), **for_save(**where(engine, seaweed, lane)))
    counted = Counter(lane.operations)
    assert counted["PutObject"] == 4
    assert set(counted) == {"PutObject", "ListObjects"}
    assert counted["ListObjects"] <= 3
    assert [exchange.name for exchange in lane.log][-1] == ".metadata"
    assert sum(bucket.keys(prefix).values()) == sum(exchange.sent for exchange in lane.log)


@pytest.mark.parametrize("engine", ENGINES)
async def test_nothing_is_sent_twice(engine: str, seaweed: Endpoint, lane: Lane, bucket: Bucket, prefix: str) -> None:
    state = {f"layers.{index}": torch.full((1 << 20,), float(index)) for index in range(8)}
    await sidestream.save(state, seaweed.url(prefix), **for_save(**where(engine, seaweed, lane)))
    content = sum(exchange.sent for exchange in lane.of("PutObject", "UploadPart"))
    assert content == sum(bucket.keys(prefix).values())
    assert all(exchange.sent <= PART_BYTES for exchange in lane.of("UploadPart"))


@pytest.mark.parametrize("engine", ENGINES)
async def test_every_upload_carries_a_checksum(engine: str, seaweed: Endpoint, lane: Lane, prefix: str) -> None:
    """Which the server compares: one that was cut off cannot pass for whole."""
    state = {f"layers.{index}": torch.full((1 << 20,), float(index)) for index in range(3)}
    await sidestream.save(state, seaweed.url(prefix), **for_save(**where(engine, seaweed, lane)))
    uploads = lane.of("PutObject", "UploadPart")
    assert len(uploads) >= 5
    for exchange in uploads:
        assert any(name.startswith("x-amz-checksum-crc") for name in exchange.headers), exchange


@pytest.mark.parametrize("engine", ENGINES)
def test_a_save_needs_little_memory_beyond_staging(
    engine: str, seaweed: Endpoint, child: Children, prefix: str
) -> None:
    policy = {"engine": engine}
    told = child.run(work="memory", run=seaweed.url(prefix), options=seaweed.options, policy=policy, mib=200)
    assert told.exit == 0, told
    assert told.get("extra_bytes") is not None, told
    print(f"{engine}: {told.get('extra_bytes') / (1 << 20):.0f} MiB")
    assert told.get("extra_bytes") <= 64 << 20
