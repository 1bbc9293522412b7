"""Runs of small items are sealed as the general code seals one item after the other."""

from __future__ import annotations

import io
import random

import pytest
import torch

from sidestream._format.shard import PAGE_BYTES, Sealer, ShardLayout

KIB = 1 << 10


def layout_of(payloads: list[bytes], window_bytes: int = 1 << 20) -> ShardLayout:
    looks = [("uint8", (len(payload),)) for payload in payloads]
    (shard,) = ShardLayout.lay_out(looks, 1 << 30, window_bytes)
    return shard


def sealed(shard: ShardLayout, payloads: list[bytes], *, general: bool) -> tuple[bytes, list[bytes]]:
    """The file and the checksums. A digest of each block, here an empty one, is made by the general
    code alone."""
    raw = random.Random(5).randbytes(shard.nbytes)  # memory of an earlier save
    file = bytearray(raw)
    for item, payload in zip(shard.items, payloads, strict=True):
        file[item.payload_offset : item.trailer_offset] = payload
    sealer = Sealer(shard, (lambda block: b"") if general else None)
    for window in shard.windows:
        view = memoryview(file)[window.start : window.end]
        for _ in sealer.seal(view, window, wait=lambda changed: None):
            pass
    return bytes(file), sealer.sums.crcs


@pytest.mark.parametrize("seed", range(20))
def test_a_run_is_sealed_as_item_after_item(seed: int) -> None:
    choice = random.Random(seed)
    sizes = [0, 1, 63, 64, 4 * KIB, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 300 * KIB, 3 << 20]
    weights = [1, 8, 8, 8, 8, 2, 2, 2, 1, 0.2]
    payloads = [choice.randbytes(size) for size in choice.choices(sizes, weights, k=choice.choice([1, 5, 129, 700]))]
    shard = layout_of(payloads)
    file, crcs = sealed(shard, payloads, general=False)
    assert (file, crcs) == sealed(shard, payloads, general=True)
    for item, payload in zip(shard.items, payloads, strict=True):
        tensor = torch.load(io.BytesIO(file[item.item_offset : item.end]))
        assert bytes(tensor.tolist()) == payload


def test_gaps_before_a_payload_on_a_page_are_zeros() -> None:
    payloads = [b"a" * 100, b"b" * (64 * KIB), b"c" * 100]
    shard = layout_of(payloads)
    file, _ = sealed(shard, payloads, general=False)
    assert shard.items[1].payload_offset % PAGE_BYTES == 0
    assert not any(file[shard.items[0].end : shard.items[1].item_offset])
    assert not any(file[shard.items[-1].end :])


def test_checksums_of_a_run_are_those_of_its_payloads() -> None:
    import zlib

    payloads = [random.Random(n).randbytes(1 + n) for n in range(300)]
    _, crcs = sealed(layout_of(payloads), payloads, general=False)
    assert crcs == [zlib.crc32(payload).to_bytes(4, "little") for payload in payloads]
