"""Checksums of many items in one go: what comes out is what comes out for each item alone."""

from __future__ import annotations

import base64
import json
import random

import pytest

from sidestream._format.dcp import Template
from sidestream._format.records import BLOCK_BYTES, Chunk, Entry, TensorEntry, ValueEntry
from sidestream._format.shard import BlockSums, ShardLayout

CHOICES = {
    "one block": [1],
    "none": [0],
    "some without a block": [0, 1],
    "some with several": [1, 1, 1, 2, 3],
    "as many as tensors": [0, 2],  # on average one, and none has one
}


def layout_of(blocks: list[int]) -> ShardLayout:
    looks = [("uint8", (max(0, count * BLOCK_BYTES - 5),)) for count in blocks]
    (layout,) = ShardLayout.lay_out(looks, 1 << 50, BLOCK_BYTES)
    return layout


def sums_of(layout: ShardLayout, blocks: list[int], *, digests: bool) -> BlockSums:
    crcs = [random.randbytes(4 * count) for count in blocks]
    windows = [random.getrandbits(32) for _ in layout.windows]
    return BlockSums(crcs, [random.randbytes(32 * count) for count in blocks] if digests else [], windows)


@pytest.mark.parametrize("digests", [False, True], ids=["crcs", "digests"])
@pytest.mark.parametrize("name", CHOICES)
def test_sums_of_a_shard_pass_through_a_message(name: str, digests: bool) -> None:
    blocks = [random.choice(CHOICES[name]) for _ in range(700)]
    layout = layout_of(blocks)
    for _ in range(2):  # the second time the layout knows how to cut
        sums = sums_of(layout, blocks, digests=digests)
        found = BlockSums([b""] * 700, [b""] * 700 if digests else [], [0] * len(layout.windows))
        found.unpack(layout, *sums.pack())
        assert found == sums


def test_sums_that_do_not_fit_are_refused() -> None:
    layout = layout_of([1] * 300)
    packed, _ = sums_of(layout, [1] * 300, digests=False).pack()
    found = BlockSums([b""] * 300, [], [0] * len(layout.windows))
    for wrong in (packed[4:], packed + bytes(4)):
        with pytest.raises(ValueError, match="bytes of checksums"):
            found.unpack(layout, wrong, b"")


@pytest.mark.parametrize("tied", [False, True], ids=["own items", "tied"])
@pytest.mark.parametrize("digests", [False, True], ids=["crcs", "digests"])
@pytest.mark.parametrize("name", CHOICES)
def test_a_template_is_filled_with_the_checksums_of_each(name: str, digests: bool, tied: bool) -> None:
    blocks = [random.choice(CHOICES[name]) for _ in range(2500)]
    layout = layout_of(blocks)
    sums = sums_of(layout, blocks, digests=digests)
    items = [random.randrange(2500) for _ in range(2500)] if tied else list(range(2500))
    chunk = Chunk((0,), (1,), "file", 0, 1, 0)
    entries: dict[str, Entry] = {}
    for number in range(2500):
        entries[f"t{number}"] = TensorEntry((f"t{number}",), "uint8", (1,), (chunk,))
        if number in (0, 7, 8, 2499):
            entries[f"v{number}"] = ValueEntry((f"v{number}",), "file", 0, 0, None)
    values = {fqn: entry for fqn, entry in entries.items() if isinstance(entry, ValueEntry)}
    template = Template.of(entries.items(), {"uint8"}, items)
    lines = b"".join(template.fill(values, [sums]).lines).splitlines()
    tensors = [line for line in lines if line.startswith(b'["tensor"')]
    assert [json.loads(line)[2] for line in lines] == list(entries)
    for line, item in zip(tensors, items, strict=True):
        text = [base64.b64encode(sums.crcs[item])]
        if digests:
            text.append(base64.b64encode(sums.digests[item]))
        assert b',"' + b'","'.join(text) + b'"]]]' in line
