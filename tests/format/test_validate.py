from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hangs import processor_budget

from sidestream._format import validate as limits
from sidestream._format.cover import find_overlap
from sidestream._format.records import BLOCK_BYTES, Chunk, DictKey, EmptyEntry, Entry, Manifest, TensorEntry, ValueEntry
from sidestream._format.validate import validate
from sidestream.errors import CorruptCheckpointError, IncompleteTensorError, UnsupportedCheckpointError

FILE = "__0_0.distcp"


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], at: int = 0, length: int = 1000) -> Chunk:
    return Chunk(offsets, sizes, FILE, at, length)


def tensor(shape: tuple[int, ...], *chunks: Chunk, dtype: str = "float32") -> TensorEntry:
    return TensorEntry(("w",), dtype, shape, chunks)


def manifest(*entries: Entry, size: int = 1 << 40) -> Manifest:
    return Manifest("", {f"e{index}": entry for index, entry in enumerate(entries)}, {FILE: size})


def boxes(shape: tuple[int, ...], *parts: tuple[tuple[int, ...], tuple[int, ...]]) -> Manifest:
    chunks = [chunk(offsets, sizes, index << 20, 1 << 20) for index, (offsets, sizes) in enumerate(parts)]
    return manifest(tensor(shape, *chunks))


def test_sound_manifests() -> None:
    validate(manifest())
    validate(boxes((), ((), ())))
    validate(boxes((0,)))
    validate(boxes((0, 3), ((0, 0), (0, 3))))
    validate(boxes((4, 3), ((0, 0), (4, 3))))
    validate(boxes((4,), ((4,), (0,)), ((0,), (4,))))  # a rank that has nothing of it
    validate(boxes((4,), ((2,), (2,)), ((0,), (2,))))
    validate(boxes((4, 6), *(((row, column), (2, 2)) for row in (0, 2) for column in (0, 2, 4))))
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    validate(boxes((3, 3), *pinwheel))
    value = ValueEntry(("a", 0, DictKey(None)), FILE, 5000, 100)
    validate(manifest(value, EmptyEntry(("b",)), tensor((2,), chunk((0,), (2,)))))


def test_tied_tensors_share_a_range_if_they_are_the_same() -> None:
    first = tensor((2,), chunk((0,), (2,)))
    validate(replace(manifest(first, tensor((2,), chunk((0,), (2,)))), save_id="0" * 32))
    with pytest.raises(
        CorruptCheckpointError, match="overlap in"
    ):  # 500 views of one item are a bomb, not tied weights
        validate(replace(manifest(first, tensor((1,), chunk((0,), (1,)))), save_id="0" * 32))
    with pytest.raises(CorruptCheckpointError, match="overlap in"):  # stock DCP shares nothing
        validate(manifest(first, tensor((2,), chunk((0,), (2,)))))


def test_shapes_that_no_memory_has() -> None:
    with pytest.raises(CorruptCheckpointError, match="impossible shape"):
        validate(manifest(tensor((0, 1 << 62, 1 << 40))))


@pytest.mark.parametrize(("second_at", "second_length"), [(999, 1000), (0, 999), (1, 1000), (100, 10), (0, 1001)])
def test_overlapping_items(second_at: int, second_length: int) -> None:
    first = tensor((2,), chunk((0,), (2,)))
    with pytest.raises(CorruptCheckpointError, match="overlap in") as caught:
        validate(manifest(first, tensor((2,), chunk((0,), (2,), second_at, second_length))))
    assert caught.value.file == FILE
    assert caught.value.fqn in ("e0", "e1")
    validate(manifest(first, tensor((2,), chunk((0,), (2,), 1000, 1000))))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "C:x", "c:", ".hidden", "a\0b", "a\nb", "x" * 256, "\ud800"],
)
def test_file_names(name: str) -> None:
    entry = ValueEntry(("v",), name, 0, 10)
    for files in ({name: 100}, {}):
        with pytest.raises(CorruptCheckpointError, match="not a plain file name") as caught:
            validate(Manifest("", {"v": entry}, files))
        assert caught.value.file == name


def test_items_lie_within_files() -> None:
    for at, length in ((-1, 10), (0, -1), (95, 10), (0, 1 << 62), (1 << 62, 1)):
        with pytest.raises(CorruptCheckpointError, match="lies at") as caught:
            validate(manifest(ValueEntry(("v",), FILE, at, length), size=100))
        assert (caught.value.file, caught.value.fqn) == (FILE, "e0")
    with pytest.raises(CorruptCheckpointError, match="missing"):
        validate(Manifest("", {"v": ValueEntry(("v",), FILE, 0, 1)}, {}))
    with pytest.raises(CorruptCheckpointError, match="impossible size"):
        validate(manifest(size=-1))


def test_payload_lies_within_item() -> None:
    whole = chunk((0,), (200,), 100, 900)
    for offset in (None, 100, 200):
        validate(manifest(tensor((200,), replace(whole, payload_offset=offset))))
    for offset in (99, 201, 0, -5, 1 << 70):
        with pytest.raises(CorruptCheckpointError, match="do not fit"):
            validate(manifest(tensor((200,), replace(whole, payload_offset=offset))))
    with pytest.raises(CorruptCheckpointError, match="do not fit"):
        validate(manifest(tensor((226,), replace(whole, sizes=(226,)))))


def test_checksums_match_payload() -> None:
    size = BLOCK_BYTES // 4 + 1
    two = Chunk((0,), (size,), FILE, 0, 1 << 30, 64, bytes(8))
    validate(manifest(tensor((size,), two)))
    validate(manifest(tensor((0,), Chunk((0,), (0,), FILE, 0, 1 << 30, 64, b""))))
    for crcs in (b"", bytes(4), bytes(12), bytes(7)):
        with pytest.raises(CorruptCheckpointError, match="checksums"):
            validate(manifest(tensor((size,), replace(two, crcs=crcs))))


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((4,), [((0,), (3,)), ((2,), (2,))]),
        ((4,), [((0,), (4,)), ((0,), (4,))]),
        ((4,), [((0,), (4,)), ((1,), (1,))]),
        ((4, 4), [((0, 0), (3, 3)), ((2, 2), (2, 2))]),
        ((4, 4), [((0, 0), (4, 4)), ((1, 1), (1, 1))]),
        ((), [((), ()), ((), ())]),
    ],
)
def test_overlapping_chunks(shape: tuple[int, ...], parts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    with pytest.raises(CorruptCheckpointError, match="overlap") as caught:
        validate(boxes(shape, *parts))
    assert caught.value.fqn == "e0"


def test_holes_are_listed_together() -> None:
    holed = tensor((4,), chunk((0,), (3,)))
    with pytest.raises(IncompleteTensorError) as caught:
        validate(manifest(holed, tensor((2,), chunk((0,), (2,), 5000)), tensor((4, 4)), tensor(())))
    assert [line.split(":")[0] for line in caught.value.offenders] == ["e0", "e2", "e3"]
    assert "16 of 16" in caught.value.offenders[1]


def test_chunks_lie_within_the_shape() -> None:
    for offsets, sizes in (((0,), (5,)), ((4,), (1,)), ((-1,), (2,)), ((2,), (-1,)), ((0, 0), (4, 1)), ((0,), (4, 1))):
        with pytest.raises(CorruptCheckpointError, match=r"reaches|dimensions"):
            validate(manifest(tensor((4,), chunk(offsets, sizes))))
    for shape in ((-1,), (1 << 61, 4), (1 << 70,), (1,) * 65):
        with pytest.raises(CorruptCheckpointError, match="impossible shape"):
            validate(manifest(tensor(shape)))


def test_claims_are_bounded_by_the_files() -> None:
    many = tensor((1000,), *(chunk((index,), (1,), 0, 100) for index in range(1000)), dtype="complex128")
    with pytest.raises(CorruptCheckpointError, match="claims more bytes"):
        validate(manifest(many, size=100))


def test_dtypes_names_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="qint8"):
        validate(manifest(tensor((1,), dtype="qint8")))
    for path in ((), ("a",) * 65, (-1,), (True,), ("a" * 5000,)):
        with pytest.raises(CorruptCheckpointError, match="path"):
            validate(manifest(EmptyEntry(path)))
    with pytest.raises(CorruptCheckpointError, match="characters"):
        validate(Manifest("", {"x" * 5000: EmptyEntry(("x",))}, {}))
    for what in ("ENTRIES", "CHUNKS", "FILES"):
        with monkeypatch.context() as patch:
            patch.setattr(limits, f"MAX_{what}", 0)
            with pytest.raises(CorruptCheckpointError, match=f"1 {what.lower()}"):
                validate(boxes((4,), ((0,), (4,))))


def test_cover_agrees_with_counting() -> None:
    generator = random.Random(3)
    for _ in range(500):
        shape = tuple(generator.randint(1, 4) for _ in range(generator.randint(1, 3)))
        parts = []
        for _ in range(generator.randint(1, 5)):
            offsets = tuple(generator.randrange(dim) for dim in shape)
            sizes = tuple(generator.randint(0, dim - start) for dim, start in zip(shape, offsets, strict=True))
            parts.append((offsets, sizes))
        cells = [
            cell
            for offsets, sizes in parts
            for cell in product(*(range(start, start + size) for start, size in zip(offsets, sizes, strict=True)))
        ]
        assert (find_overlap(parts) is None) == (len(cells) == len(set(cells)))


def test_many_chunks_take_little_time() -> None:
    count = 20_000
    with processor_budget(5):
        validate(boxes((count,), *(((row,), (1,)) for row in range(count))))
        validate(boxes((8, count), *(((0, column), (8, 1)) for column in reversed(range(count)))))
        grid = [((row, column, 0), (1, 1, 4)) for row in range(140) for column in range(140)]
        validate(boxes((140, 140, 4), *grid))


def test_what_cannot_be_told_apart_ends_soon() -> None:
    count = 3000
    stairs = [((row, row + 1), (count - row, 1)) for row in range(count)]  # only columns separate these
    crossing = [((0, row), (count, 1)) if row % 2 else ((row, 0), (1, count)) for row in range(count)]
    with processor_budget(10):
        with pytest.raises(IncompleteTensorError):
            validate(boxes((count, count + 1), *stairs))
        with pytest.raises((CorruptCheckpointError, UnsupportedCheckpointError)):
            validate(boxes((count, count), *crossing))
        rings = []
        for depth in range(count):  # a spiral of pinwheels: no straight cut separates any two
            low, high = depth, 4 * count - depth - 1
            rings += [((low, low), (1, high - low)), ((low, high), (high - low, 1))]
            rings += [((high, low + 1), (1, high - low)), ((low + 1, low), (high - low, 1))]
        with pytest.raises(UnsupportedCheckpointError, match="intricate"):
            validate(boxes((4 * count, 4 * count), *rings))
