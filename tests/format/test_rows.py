"""Rows and the general code give the same verdict on every manifest."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sidestream._format.manifest import parse_manifest, write_manifest
from sidestream._format.records import (
    BLOCK_BYTES,
    Chunk,
    CompositeEntry,
    DictKey,
    EmptyEntry,
    Entry,
    Manifest,
    TensorEntry,
    ValueEntry,
    stored,
)
from sidestream._format.rows import Rows
from sidestream._format.validate import validate

FILES = {"__0_0.distcp": 4 << 20, "__0_1.distcp": 1 << 20}
KEYS: list[tuple[Any, ...]] = [("a",), ("m", "w"), ("o", DictKey(0), "e"), ("l", 3), ("n", DictKey(None))]


def tensor(path: tuple[Any, ...], shape: tuple[int, ...], file: str, at: int, digests: bool) -> TensorEntry:
    numel = 1
    for dim in shape:
        numel *= dim
    blocks = -(-4 * numel // BLOCK_BYTES)
    content = bytes(32 * blocks) if digests else None
    chunk = Chunk((0,) * len(shape), shape, file, at, 4 * numel + 600, at + 300, b"\1\2\3\4" * blocks, digests=content)
    return TensorEntry(path, "float32", shape, (chunk,))


def manifest(digests: bool = False, *, composite: bool = False) -> Manifest:
    """Tensors of every kind that is a row, two that are tied, one in two chunks, and what is no tensor. ``composite``:
    and tensors that consist of others."""
    entries: dict[str, Entry] = {}
    shapes: list[tuple[int, ...]] = [(256,), (3, 4), (), (0, 5), (300_000,)]
    at = 0
    for path, shape in zip(KEYS, shapes, strict=True):
        fqn = ".".join(str(key.value) if isinstance(key, DictKey) else str(key) for key in path)
        entries[fqn] = tensor(path, shape, "__0_0.distcp", at, digests)
        at += 1_300_000 if shape == (300_000,) else 10_000
    entries["tied"] = TensorEntry(("tied",), "float32", (256,), entries["a"].chunks)  # type: ignore[union-attr]
    halves = [tensor(("cut",), (5,), "__0_1.distcp", at, digests).chunks[0] for at in (0, 1000)]
    cut = (halves[0], Chunk((5,), (5,), *(getattr(halves[1], name) for name in _REST)))
    entries["cut"] = TensorEntry(("cut",), "float32", (10,), cut)
    entries["value"] = ValueEntry(("value",), "__0_1.distcp", 5000, 100, {"tuple": [1, 2]})
    entries["empty"] = EmptyEntry(("empty",))
    if composite:
        entries["sum"] = CompositeEntry(("sum",), "sparse_coo", "float32", (4, 4), None, ("indices", "values"), True)
        entries["sum.indices"] = tensor(("sum", "indices"), (2, 3), "__0_1.distcp", 6000, digests)
        entries["sum.values"] = tensor(("sum", "values"), (3,), "__0_1.distcp", 8000, digests)
        entries["low"] = replace(tensor(("low",), (9,), "__0_1.distcp", 10_000, digests), dtype="int4")
        entries["wrapper"] = CompositeEntry(("wrapper",), "a.B", "int8", (4,), (1,), ("inner",), {"dict": [["k", 1]]})
        entries["wrapper.inner"] = tensor(("wrapper", "inner"), (4,), "__0_1.distcp", 12_000, digests)
    return Manifest("0" * 32, entries, FILES, 7, 1, "blake3" if digests else None)


_REST = ("file", "item_offset", "item_bytes", "payload_offset", "crcs", "transform", "digests")


def written(one: Manifest) -> list[bytes]:
    return list(write_manifest(one, "2.13"))


def verdict(raw: bytes) -> object:
    """The entries, or the error with its text."""
    try:
        found = parse_manifest(raw)
        assert isinstance(found, Manifest)
        validate(found)
    except Exception as error:
        return type(error), str(error)
    return {fqn: (type(entry), repr(entry)) for fqn, entry in found.entries.items()}


def without_rows(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> object:
    with monkeypatch.context() as patch:
        patch.setattr(Rows, "read", lambda self, line: None)
        return verdict(raw)


@pytest.mark.parametrize("digests", [False, True])
def test_a_sound_manifest(digests: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b"".join(written(manifest(digests)))
    found = parse_manifest(raw)
    assert isinstance(found, Manifest)
    rows = [fqn for fqn, entry in stored(found.entries).items() if isinstance(entry, tuple)]
    assert rows == ["a", "m.w", "o.0.e", "l.3", "n.None", "tied"]
    assert dict(found.entries) == manifest(digests).entries
    assert verdict(raw) == without_rows(raw, monkeypatch)


ODD: list[Any] = [-1, 0, 1, 1.0, True, None, "", "a", [], [1], {}, 1 << 63, 1 << 70, "AQIDBA", "__0_1.distcp", 5000]


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a parsed line."""
    yield path
    if isinstance(node, (list, dict)):
        for key in range(len(node)) if isinstance(node, list) else list(node):
            yield from places(node[key], (*path, key))


def mutated(lines: list[bytes], chance: random.Random) -> bytes:
    """The manifest with one to three places changed, in the head, too: a value, a type, a length, an order, a byte."""
    found = list(lines)
    for _ in range(chance.randint(1, 3)):
        number = chance.choice([0, *range(1, len(found)), *range(1, 7)])
        try:
            line = json.loads(found[number])
        except ValueError:
            continue
        *at, key = chance.choice([place for place in places(line) if place])
        holder = line
        for step in at:
            holder = holder[step]
        kind = chance.randrange(5)
        if kind == 0 and type(holder[key]) is int:
            holder[key] += chance.choice([-1, 1, 4, -300, 10_000, -10_000])
        elif kind == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == 2:
            del holder[key]
        elif kind == 3 and type(holder[key]) is int:
            holder[key] = float(holder[key])
        else:
            holder[key] = chance.choice(ODD)
        found[number] = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    if chance.random() < 0.1:
        raw = bytearray(b"".join(found))
        raw[chance.randrange(len(raw))] = chance.choice(b'[]{},:"0 1eE-\\\n')
        return bytes(raw)
    return b"".join(found)


@pytest.mark.parametrize("composite", [False, True])
@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("count", [3_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_mutations(digests: bool, composite: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = written(manifest(digests, composite=composite))
    sound = 0
    for seed in range(count):
        raw = mutated(lines, random.Random(seed))
        with_rows = verdict(raw)
        assert with_rows == without_rows(raw, monkeypatch), (seed, raw)
        sound += isinstance(with_rows, dict)
    assert count // 50 < sound < count  # some changes do no harm


def test_rows_beside_composite_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b"".join(written(manifest(composite=True)))
    found = parse_manifest(raw)
    assert isinstance(found, Manifest)
    rows = [fqn for fqn, entry in stored(found.entries).items() if isinstance(entry, tuple)]
    assert rows[-4:] == ["sum.indices", "sum.values", "low", "wrapper.inner"]
    assert dict(found.entries) == manifest(composite=True).entries
    assert verdict(raw) == without_rows(raw, monkeypatch)


def test_types_that_compare_equal_are_not_taken_from_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.0 and true have the hash of 1, and a string may look like a list."""
    head, line, *_ = written(manifest())
    for other in ("[256.0]", '"[256]"', "[true]"):
        text = (
            line.decode().replace("[256]", other, 1).replace('"a"', '"b"').replace(",0,1624,300,", ",5000,1624,5300,")
        )
        assert text != line.decode()
        again = head.replace(f'"entries":{len(manifest().entries)}'.encode(), b'"entries":2') + line + text.encode()
        found = verdict(again)
        assert isinstance(found, tuple), other
        assert found == without_rows(again, monkeypatch)
