"""What we write, held against the readers of others: zipfile, torch.load, pickle, zlib."""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import random
import sys
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import assert_same, filled, raw_bytes

from sidestream._foreign.torch_zip.file import open_value_item
from sidestream._format import checksum
from sidestream._format.dcp import Described
from sidestream._format.frame import frame_tensor, frame_value
from sidestream._format.manifest import parse_manifest, write_manifest
from sidestream._format.marker import TAIL_BYTES, Marker, find_marker
from sidestream._format.records import (
    BLOCK_BYTES,
    DTYPES,
    Chunk,
    DictKey,
    EmptyEntry,
    Manifest,
    Node,
    TensorEntry,
    ValueEntry,
    node_of_bytes,
)
from sidestream._format.shard import PAGE_BYTES, Sealer, ShardLayout, Window
from sidestream._format.shared import line_of, value_line_of
from sidestream._format.values import node_bytes, pickle_node
from sidestream._layout.values import decode_value, encode_value
from sidestream._runtime.threads import Deadline, Stop, time_limit, wait_for_change
from sidestream.errors import (
    ClosedError,
    CorruptCheckpointError,
    DeadlineExceededError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*ComplexHalf support is experimental.*:UserWarning"),
]
SHAPES = [(3, 4), (), (0,), (2, 0, 3), (70_000,), (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_framed_tensor_is_what_torch_load_and_zipfile_expect(name: str, shape: tuple[int, ...]) -> None:
    tensor = filled(shape, getattr(torch, name))
    payload = bytes(raw_bytes(tensor))
    frame = frame_tensor(name, shape)
    assert frame.payload_bytes == len(payload) == math.prod(shape) * DTYPES[name][0]
    item = frame.header + payload + frame.trailer(zlib.crc32(payload))
    assert len(item) == frame.item_bytes
    assert zipfile.ZipFile(io.BytesIO(item)).testzip() is None
    for weights_only in (True, False):
        assert_same(tensor, torch.load(io.BytesIO(item), weights_only=weights_only))


def test_a_wrong_checksum_is_seen_by_zipfile() -> None:
    frame = frame_tensor("uint8", (4,))
    item = frame.header + b"abcd" + frame.trailer(zlib.crc32(b"abcx"))
    assert zipfile.ZipFile(io.BytesIO(item)).testzip() == "archive/data/0"


@pytest.mark.parametrize("nbytes", [(1 << 32) - 2, (1 << 32) - 1, 1 << 32, 5 << 30])
def test_more_than_four_gibibytes(nbytes: int, tmp_path: Path) -> None:
    frame = frame_tensor("uint8", (nbytes,))
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(frame.header)
        file.seek(len(frame.header) + nbytes)
        file.write(frame.trailer(1))
    (record,) = (info for info in zipfile.ZipFile(path).infolist() if info.filename == "archive/data/0")
    assert (record.file_size, record.CRC) == (nbytes, 1)
    assert torch.load(path, mmap=True, weights_only=True).shape == (nbytes,)


@pytest.mark.parametrize(
    "value",
    [
        7,
        1 << 200,
        (1 << 8191) - 1,
        -(1 << 8190),
        "x",
        None,
        (1, [2.5]),
        {"a": {1: b"\xff"}},
        torch.Size([1]),
        {1},
        (torch.arange(3),),
        torch.device("cuda:0"),
        torch.device("cpu"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_are_what_torch_load_expects_and_what_we_read(value: object) -> None:
    node = json.loads(json.dumps(encode_value(value, "v")))
    item = frame_value(*pickle_node(node))
    assert zipfile.ZipFile(io.BytesIO(item)).testzip() is None
    assert_same(value, torch.load(io.BytesIO(item), weights_only=False))
    assert_same(value, decode_value(node, "v"))
    assert open_value_item(io.BytesIO(item), len(item)) == node


@pytest.mark.parametrize(
    "value",
    [np.arange(6, dtype=">i2").reshape(2, 3), np.float32(3.5), np.zeros((0, 2), "?"), (OrderedDict(a=1, b=(2,)),)],
    ids=repr,
)
def test_arrays_and_ordered_dicts_that_we_write_are_what_we_read(value: Any) -> None:
    node = json.loads(json.dumps(encode_value(value, "v")))
    item = frame_value(*pickle_node(node))
    loaded = torch.load(io.BytesIO(item), weights_only=False)
    assert repr(loaded) == repr(value)
    assert open_value_item(io.BytesIO(item), len(item)) == node


@pytest.mark.parametrize(
    "content", [{"dtype": "<i2", "shape": [3], "data": "AAAA"}, {"dtype": "|O8", "shape": [1], "data": "AAAAAAAAAAA="}]
)
def test_arrays_that_make_no_sense(content: dict[str, Any]) -> None:
    item = frame_value(*pickle_node({"ndarray": content}))
    with pytest.raises((CorruptCheckpointError, UnsafeObjectError)):
        open_value_item(io.BytesIO(item), len(item))


@pytest.mark.parametrize("nbytes", [0, 1, (3 << 18) - 1, 3 << 18, (3 << 18) + 1, (3 << 19) + 2])
def test_what_is_encoded_in_slices_is_the_same(nbytes: int) -> None:
    raw = random.Random(nbytes).randbytes(nbytes)
    node: Node = {"tuple": [{"bytes": node_of_bytes(raw)}, raw.decode("latin-1") * 2, '"\ud83d\\' * (nbytes // 2)]}
    content = ["value", ["a.distcp", 0, nbytes, node], "v", ["v"]]
    assert node_of_bytes(raw) == base64.b64encode(raw).decode()
    assert node_bytes(node_of_bytes(raw)) == raw
    assert value_line_of(content, 1 << 30) == line_of(content)
    texts = pickle.loads(pickle_node(node)[0])
    assert texts == (raw, *node["tuple"][1:])


@pytest.mark.parametrize("long", ["", "x" * (3 << 19)], ids=["short strings", "a long string"])
def test_a_value_of_many_numbers_is_encoded_without_a_call_for_each(long: str) -> None:
    numbers: list[Node] = [*range(100_000), 2.5, True, None]
    pairs: list[Node] = [[number, str(number)] for number in range(0 if long else 100_000)]
    node: Node = {"tuple": [{"list": numbers}, {"dict": pairs}, [], {}, long]}
    content = ["value", ["a.distcp", 0, 1 << 30, node], "v", ["v"]]
    expected = line_of(content)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        line = value_line_of(content, 1 << 30)
    finally:
        sys.setprofile(None)
    assert line == expected
    assert calls < 1000


@pytest.mark.parametrize("cut", [2, 3])
def test_padding_before_the_end_is_damage(cut: int) -> None:
    digits = node_of_bytes(bytes(3 << 20))
    with pytest.raises(CorruptCheckpointError):
        node_bytes(digits[: (1 << 20) - cut] + "=" * cut + digits)


@pytest.mark.parametrize(
    "node", [{"complex": [1]}, {"size": ["x"]}, {"dtype": "nope"}, {"device": "!"}, {"bytes": "*"}, {"who": 1}, [1], {}]
)
def test_damaged_values(node: object) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^v: "):
        decode_value(node, "v")  # type: ignore[arg-type]


SIZES = st.lists(st.integers(0, 300_000) | st.integers(1 << 20, 5 << 20), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 3), st.randoms(use_true_random=False))
def test_layout_and_sealing(sizes: list[int], window_blocks: int, random) -> None:  # type: ignore[no-untyped-def]
    """Items in order, aligned, apart; windows without holes, cut where they may be; sealed by threads in any order the
    image is the same, and no old byte is left in it."""
    looks = [("uint8", (size,)) for size in sizes]
    for shard in ShardLayout.lay_out(looks, shard_bytes=4 << 20, window_bytes=window_blocks * BLOCK_BYTES):
        assert shard.nbytes % PAGE_BYTES == 0
        check_windows(shard, window_blocks * BLOCK_BYTES)
        end = 0
        for placed in shard.items:
            assert placed.item_offset >= end
            align = PAGE_BYTES if placed.frame.payload_bytes >= 65_536 else 64
            assert placed.payload_offset % align == 0
            end = placed.item_offset + placed.frame.item_bytes
        assert end <= shard.nbytes
        images = []
        for old in (b"\xaa", b"\x55"):
            image = bytearray(old * shard.nbytes)
            for number, placed in enumerate(shard.items):
                content = bytes([number + 1]) * placed.frame.payload_bytes
                image[placed.payload_offset : placed.trailer_offset] = content
            sealer = Sealer(shard)
            windows = list(shard.windows)
            random.shuffle(windows)
            seal_in_threads(sealer, image, windows)
            for number, placed in enumerate(shard.items):
                content = bytes([number + 1]) * placed.frame.payload_bytes
                blocks = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
                assert sealer.sums.crcs[number] == checksum.pack_crcs([zlib.crc32(block) for block in blocks])
            assert sealer.sums.whole(shard) == zlib.crc32(image)
            images.append(image)
        assert images[0] == images[1]
        for placed in shard.items:
            item = bytes(images[0][placed.item_offset : placed.item_offset + placed.frame.item_bytes])
            assert zipfile.ZipFile(io.BytesIO(item)).testzip() is None


def waiting(stop: Stop | None = None, timeout_s: float = 60.0) -> Callable[[threading.Condition], None]:
    deadline = Deadline.after(timeout_s)

    def wait(changed: threading.Condition) -> None:
        with time_limit(deadline):
            wait_for_change(changed, Stop() if stop is None else stop, "checksums of the windows before")

    return wait


def check_windows(shard: ShardLayout, window_bytes: int) -> None:
    assert [window.start for window in shard.windows] == [0, *(window.end for window in shard.windows[:-1])]
    assert shard.windows[-1].end == shard.nbytes
    for window in shard.windows:
        assert window.start % PAGE_BYTES == 0
        largest = max(placed.frame.item_bytes for placed in shard.items)
        assert window.end - window.start <= max(window_bytes, min(largest, window_bytes)) + 3 * PAGE_BYTES
        for placed in shard.items:
            if placed.item_offset < window.start < placed.end:
                assert (window.start - placed.payload_offset) % BLOCK_BYTES == 0
                assert placed.payload_offset < window.start < placed.trailer_offset
        touched = [
            number for number, one in enumerate(shard.items) if one.item_offset < window.end and one.end > window.start
        ]
        assert touched == list(range(window.first, window.last))


def seal_in_threads(sealer: Sealer, image: bytearray, windows: list[Window]) -> None:
    def seal(window: Window) -> None:
        view = memoryview(image)[window.start : window.end]
        for _ in sealer.seal(view, window, wait=waiting()):
            pass

    with ThreadPoolExecutor(len(windows)) as pool:
        list(pool.map(seal, windows))


def test_a_trailer_does_not_wait_for_ever() -> None:
    (shard,) = ShardLayout.lay_out([("uint8", (3 << 20,))], shard_bytes=1 << 30, window_bytes=1 << 20)
    last = shard.windows[-1]
    view = memoryview(bytearray(last.end - last.start))
    with pytest.raises(DeadlineExceededError, match="checksums of the windows before"):
        list(Sealer(shard).seal(view, last, wait=waiting(timeout_s=0.01)))
    stop = Stop()
    stop.set()
    with pytest.raises(ClosedError):
        list(Sealer(shard).seal(view, last, wait=waiting(stop)))


def test_a_trailer_that_waits_is_stopped() -> None:
    (shard,) = ShardLayout.lay_out([("uint8", (3 << 20,))], shard_bytes=1 << 30, window_bytes=1 << 20)
    last = shard.windows[-1]
    view = memoryview(bytearray(last.end - last.start))
    stop, waits = Stop(), threading.Event()

    def wait(changed: threading.Condition) -> None:
        waits.set()
        waiting(stop)(changed)

    with ThreadPoolExecutor(1) as pool:
        sealed = pool.submit(list, Sealer(shard).seal(view, last, wait=wait))
        assert waits.wait(60)
        stop.set()
        with pytest.raises(ClosedError):
            sealed.result(60)


@given(st.binary(max_size=2000), st.binary(max_size=2000))
def test_checksums_combine(first: bytes, second: bytes) -> None:
    joined = checksum.combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second) == checksum.crc32(first + second)


@given(st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1), st.integers(0, 1 << 62))
def test_both_ways_to_combine_checksums_agree(first: int, second: int, second_bytes: int) -> None:
    """That of isal, and that where isal is not installed, also for more bytes than fit into 32 bits."""
    assert checksum.combine(first, second, second_bytes) == checksum._combined(first, second, second_bytes)


def test_checksums_of_blocks_join() -> None:
    raw = bytes(range(256)) * (BLOCK_BYTES * 3 // 256) + b"tail"
    blocks = [zlib.crc32(raw[at : at + BLOCK_BYTES]) for at in range(0, len(raw), BLOCK_BYTES)]
    assert len(blocks) == checksum.block_count(len(raw)) == 4
    assert checksum.join_blocks(blocks, len(raw)) == zlib.crc32(raw)
    assert checksum.unpack_crcs(checksum.pack_crcs(blocks)) == tuple(blocks)


def example() -> Manifest:
    chunk = Chunk((0, 0), (2, 3), "__0_1.distcp", 0, 700, 320, b"abcd")
    return Manifest(
        save_id="ab" * 16,
        entries={
            "a.0": TensorEntry(("a", 0), "bfloat16", (2, 3), (chunk,)),
            "a.tied": TensorEntry(("a", "tied"), "bfloat16", (2, 3), (chunk,)),
            "7.x": ValueEntry((DictKey(7), "x"), "__0_0.distcp", 0, 500, {"tuple": [1, None]}),
            "e": EmptyEntry(("e",)),
        },
        files={"__0_0.distcp": 500, "__0_1.distcp": 4096},
        step=3,
        generation=2,
    )


def test_manifest_round_trip_and_damage() -> None:
    raw = b"".join(write_manifest(example(), "2.13.0"))
    assert parse_manifest(raw) == example()
    for at in range(len(raw)):
        with pytest.raises(CorruptCheckpointError):
            parse_manifest(raw[:at])
    with pytest.raises(UnsupportedCheckpointError, match="upgrade"):
        parse_manifest(raw.replace(b'"sidestream":1', b'"sidestream":5'))


@given(st.integers(0, 600), st.integers(0, 255))
def test_an_altered_manifest_parses_or_is_corrupt(at: int, byte: int) -> None:
    raw = bytearray(b"".join(write_manifest(example(), "2.13.0")))
    raw[at % len(raw)] = byte
    with suppress(CorruptCheckpointError, UnsupportedCheckpointError):
        parse_manifest(bytes(raw))


def test_metadata_is_what_dcp_unpickles_and_the_marker_stands_in_its_tail() -> None:
    manifest = example()
    marker = Marker(manifest.save_id, 123, 456, 3, 2)
    raw = Described.of(manifest.entries).metadata(marker)
    metadata = pickle.loads(raw)
    assert set(metadata.state_dict_metadata) == {"a.0", "a.tied", "7.x"}
    tensor = metadata.state_dict_metadata["a.0"]
    assert (tensor.properties.dtype, tensor.size) == (torch.bfloat16, torch.Size([2, 3]))
    assert metadata.planner_data == {"a.0": ("a", 0), "a.tied": ("a", "tied"), "7.x": ("7", "x")}
    places = {
        index.fqn: (info.relative_path, info.offset, info.length) for index, info in metadata.storage_data.items()
    }
    assert places["a.0"] == places["a.tied"] == ("__0_1.distcp", 0, 700)
    assert b"float8" not in raw, "only the dtypes in use: older versions of torch lack some"
    assert find_marker(raw[-TAIL_BYTES:]) == find_marker(raw) == marker
    assert find_marker(pickle.dumps({"stock": 1}, protocol=4)) is None


@given(st.integers(1, 250), st.integers(0, 255))
def test_a_damaged_marker_is_never_another_one(back: int, byte: int) -> None:
    marker = Marker("ab" * 16, 123, 456, 3, 2)
    raw = bytearray(Described.of({}).metadata(marker))
    raw[-min(back, len(raw))] = byte
    try:
        found = find_marker(bytes(raw[-TAIL_BYTES:]))
    except CorruptCheckpointError:
        return
    assert found is None or found == marker
