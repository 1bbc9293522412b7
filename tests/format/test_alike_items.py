"""Items that are opened by a comparison with an earlier one, beside ``open_tensor_item`` on the same bytes."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Literal
from zlib import crc32

import pytest
import torch

from sidestream import errors
from sidestream._foreign.torch_zip import ends as module
from sidestream._foreign.torch_zip.ends import Ends, TensorItems
from sidestream._foreign.torch_zip.file import TensorPayload, open_tensor_item

REFUSALS = (errors.CorruptCheckpointError, errors.UnsafeObjectError, errors.UnsupportedCheckpointError)
END_BYTES = 2048

Records = Literal["needed", "all"]
Verdict = TensorPayload | tuple[type[Exception], str]


def item(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def whole(raw: bytes) -> Ends:
    return Ends(raw, b"", len(raw))


def cut(raw: bytes) -> Ends:
    return Ends(raw[:END_BYTES], raw[-END_BYTES:], len(raw))


def verdict(open_item: Callable[[], TensorPayload]) -> Verdict:
    try:
        return open_item()
    except REFUSALS as error:
        return type(error), str(error)


def plainly(ends: Ends, records: Records) -> Verdict:
    return verdict(lambda: open_tensor_item(ends.file(), ends.nbytes, records))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the items that were opened by themselves."""
    sizes: list[int] = []

    def spy(source: object, nbytes: int, records: Records) -> TensorPayload:
        sizes.append(nbytes)
        return open_tensor_item(source, nbytes, records)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "open_tensor_item", spy)
    return sizes


@pytest.mark.parametrize("records", ["needed", "all"])
@pytest.mark.parametrize("form", [whole, cut])
def test_most_items_are_opened_by_a_comparison(
    form: Callable[[bytes], Ends], records: Records, opened: list[int]
) -> None:
    tensors = [torch.randn(64, 96) for _ in range(20)]
    tensors += [torch.randn(96, 64) for _ in range(20)]
    tensors += [torch.randn(3000).bfloat16() for _ in range(20)]
    items = TensorItems(records)
    for tensor in tensors:
        raw = item(tensor)
        payload = items.open(form(raw))
        assert payload == plainly(form(raw), records)
        start = payload.payload_offset
        assert raw[start : start + payload.foreign.payload_bytes] == tensor.view(torch.uint8).numpy().tobytes()
    assert len(opened) == 3  # the first one of each kind
    assert len({items.open(form(item(tensor))).foreign.crc for tensor in tensors}) == len(tensors)


def mutated(raw: bytes, chance: random.Random) -> bytes:
    """Change some bytes, most of them where the zip and the pickle are."""
    changed = bytearray(raw)
    payload = len(raw) // 2
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        at = (
            chance.randrange(len(raw))
            if chance.random() < 0.2
            else chance.choice([chance.randrange(min(900, payload)), len(raw) - 1 - chance.randrange(1200)])
        )
        match chance.randrange(4):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
            case 2:
                width = chance.choice([2, 4, 8])
                value = chance.choice([0, 1, len(raw), len(raw) - at, 2 ** (8 * width) - 1, 64, 128])
                changed[at : at + width] = value.to_bytes(width, "little")[: len(raw) - at]
            case _:
                other = chance.randrange(len(raw) - 16)
                changed[at : at + 16] = changed[other : other + 16][: len(raw) - at]
    return bytes(changed[: len(raw)])


@pytest.mark.parametrize("count", [4_000, pytest.param(200_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("records", ["needed", "all"])
@pytest.mark.parametrize("form", [whole, cut])
def test_mutated_items_have_the_same_verdict(form: Callable[[bytes], Ends], records: Records, count: int) -> None:
    chance = random.Random(f"{count} {records} {form.__name__}")
    samples = [item(torch.randn(4096)) for _ in range(8)]
    items = TensorItems(records)
    items.open(form(samples[0]))
    accepted = 0
    for number in range(count):
        ends = form(mutated(chance.choice(samples), chance))
        expected = plainly(ends, records)
        assert verdict(lambda ends=ends: items.open(ends)) == expected, (number, ends)  # type: ignore[misc]
        accepted += isinstance(expected, TensorPayload)
    assert count // 20 < accepted < count - count // 20


def record(name: str, content: bytes) -> bytes:
    return struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, 0, 0, 0, 0, crc32(content), *[len(content)] * 2, len(name), 0) + (
        name.encode() + content
    )


def overlapping(tensor: torch.Tensor) -> bytes:
    """An item whose payload contains the record of the pickle."""
    with zipfile.ZipFile(io.BytesIO(item(tensor))) as archive:
        pickled = archive.read("archive/data.pkl")
    inner = record("archive/data.pkl", pickled)
    payload = bytes(512) + inner  # beyond the bytes by which items are told apart at once
    payload += bytes(4 * tensor.numel() - len(payload))
    order_at = len(outer := record("archive/data/0", payload))
    raw = outer + record("archive/byteorder", b"little") + bytes(len(payload))
    directory = b""
    for name, content, at in (
        ("archive/data/0", payload, 0),
        ("archive/data.pkl", pickled, len(outer) - len(payload) + 512),
        ("archive/byteorder", b"little", order_at),
    ):
        sizes = [len(content)] * 2
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\x01\x02", 0, 0, 0, 0, 0, 0, crc32(content), *sizes, len(name), 0, 0, 0, 0, 0, at
        )
        directory += name.encode()
    return raw + directory + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 3, 3, len(directory), len(raw), 0)


def test_items_whose_records_overlap_are_opened_by_themselves(opened: list[int]) -> None:
    """Otherwise the payload, which may differ, could contain what describes the tensor."""
    items = TensorItems("needed")
    for shape in ((16, 64), (16, 64), (64, 16)):
        raw = overlapping(torch.zeros(shape))
        assert items.open(whole(raw)).shape == shape
    assert len(opened) == 3


def test_items_that_differ_from_those_of_torch_are_opened_by_themselves(opened: list[int]) -> None:
    """Newer versions of zipfile look for the directory where the locator says, which may be in the elements."""
    raw = item(torch.randn(64, 64))
    at = raw.rindex(b"PK\x06\x07")
    moved = raw[: at + 8] + struct.pack("<Q", 1000) + raw[at + 16 :]
    items = TensorItems("needed")
    for _ in range(2):
        assert verdict(lambda: items.open(whole(moved))) == plainly(whole(moved), "needed")
    assert opened == [len(raw)] * 2
