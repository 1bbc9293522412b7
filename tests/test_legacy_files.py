"""Files that ``torch.save`` wrote before torch 1.6, which are no zips."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import sidestream
from sidestream.errors import CorruptCheckpointError, SidestreamError, UnsafeObjectError, UnsupportedCheckpointError


def legacy(content: object, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    return buffer.getvalue()


def content() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.arange(12.0)
    return {
        "model": torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5)).state_dict(),
        "base": base,
        "view": base[3:9].view(2, 3),
        "transposed": base.view(3, 4).t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "half": torch.ones(3).half(),
        "bf16": torch.ones(3).bfloat16(),
        "flags": torch.tensor([True, False]),
        "complex": torch.ones(2, dtype=torch.complex64),
        "late": torch.ones(3, dtype=torch.uint16),  # a dtype without a class of storages
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "pair": (1, torch.full((2,), 3.0)),
        "names": ["a", "b"],
        7: None,
    }


def as_python_2(raw: bytes) -> bytes:
    """The same file with the strings of Python 2."""
    stream = io.BytesIO(raw)
    written, done = bytearray(), 0
    for _ in range(5):
        ends = [(op, arg, position) for op, arg, position in pickletools.genops(stream)]
        for (op, arg, position), (_, _, end) in zip(ends, [*ends[1:], (None, None, stream.tell())], strict=True):
            text = arg.encode() if op.name == "BINUNICODE" else None
            written += raw[position:end] if text is None else b"U" + bytes([len(text)]) + text
        done = stream.tell()
    return bytes(written) + raw[done:]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
async def test_everything_in_it_is_read(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(legacy(content(), protocol))
    found = await (await sidestream.open_checkpoint(path)).state_dict()
    assert_same(found, content())
    assert found["view"].data_ptr() == found["base"].data_ptr() + 12  # of one storage, as it was saved
    target = {"base": torch.zeros(12), "view": torch.zeros(2, 3), "transposed": torch.zeros(4, 3), "lr": 0.0}
    await sidestream.load(target, path, allow_unexpected=True)
    assert_same(target, {name: content()[name] for name in target})


async def test_the_strings_of_python_2(tmp_path: Path) -> None:
    raw = as_python_2(legacy({"weight": torch.arange(3.0), "nested": {"bias": torch.ones(2)}, "text": "a"}))
    assert b"X" not in raw[:200]
    (tmp_path / "old.pth").write_bytes(raw)
    found = await (await sidestream.open_checkpoint(tmp_path / "old.pth")).state_dict()
    assert_same(found, {"weight": torch.arange(3.0), "nested": {"bias": torch.ones(2)}, "text": "a"})


async def test_an_ordered_dict_of_python_2(tmp_path: Path) -> None:
    class Pairs:
        def __reduce__(self) -> Any:
            import collections

            return collections.OrderedDict, ([["weight", torch.arange(3.0)], ["bias", torch.ones(2)]],)

    (tmp_path / "old.pth").write_bytes(legacy(Pairs()))
    found = await (await sidestream.open_checkpoint(tmp_path / "old.pth")).state_dict()
    assert_same(found, {"weight": torch.arange(3.0), "bias": torch.ones(2)})


async def test_a_tensor_of_torch_0_3(tmp_path: Path) -> None:
    raw = legacy({"weight": torch.arange(6.0).view(2, 3).t()})
    older = raw.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor")
    tail = older.index(b"\x89", older.index(b"_rebuild_tensor"))  # requires_grad, and the hooks after it
    older = older[:tail] + older[older.index(b"t", older.index(b"R", tail)) :].replace(b"tq\x0cRq\rs.", b"tRs.")
    (tmp_path / "old.pth").write_bytes(older)
    found = await (await sidestream.open_checkpoint(tmp_path / "old.pth")).state_dict()
    assert_same(found, {"weight": torch.arange(6.0).view(2, 3).t()})


async def test_many_tensors_whose_pickle_is_larger_than_the_first_read(tmp_path: Path) -> None:
    state = {f"layer.{number:06}.{'x' * 60}": torch.full((2,), float(number)) for number in range(9_000)}
    raw = legacy(state)
    assert raw.index(b"x" * 60 + b"q") < 1 << 20 < raw.rindex(b"x" * 60)
    (tmp_path / "many.pt").write_bytes(raw)
    assert_same(await (await sidestream.open_checkpoint(tmp_path / "many.pt")).state_dict(), state)


async def test_nothing_of_it_is_verified_and_a_conversion_says_so(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(legacy(content()))
    report = await sidestream.verify(tmp_path / "old.pt")
    assert report.ok
    assert report.verified == ()
    assert {"base", "lr", "model.0.weight"} <= set(report.unverified)
    converted = await sidestream.convert(tmp_path / "old.pt", tmp_path / "new")
    assert "base" in converted.unverified
    assert_same(await (await sidestream.open_checkpoint(tmp_path / "new")).state_dict(), content())
    assert (await sidestream.verify(tmp_path / "new")).ok
    await sidestream.copy(tmp_path / "old.pt", tmp_path / "copied.pt")
    assert (tmp_path / "copied.pt").read_bytes() == (tmp_path / "old.pt").read_bytes()


async def test_what_is_more_than_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "module.pt").write_bytes(legacy({"module": torch.nn.Linear(2, 2)}))
    with pytest.raises(UnsafeObjectError):
        await sidestream.open_checkpoint(tmp_path / "module.pt")
    (tmp_path / "tensor.pt").write_bytes(legacy(torch.ones(2)))
    with pytest.raises(UnsupportedCheckpointError, match="something else than a dict"):
        await sidestream.open_checkpoint(tmp_path / "tensor.pt")


async def test_a_big_endian_file_and_a_view_of_torch_0_4_are_refused(tmp_path: Path) -> None:
    raw = legacy({"w": torch.arange(3.0)})
    assert raw.count(b"\x88s") == raw.count(b"\x88") == 1 or b"little_endian" in raw
    at = raw.index(b"little_endian") + len(b"little_endian")
    (tmp_path / "big.pt").write_bytes(raw[:at] + raw[at:].replace(b"\x88", b"\x89", 1))
    with pytest.raises(UnsupportedCheckpointError, match="big-endian"):
        await sidestream.open_checkpoint(tmp_path / "big.pt")
    view = raw.replace(b"K\x03Ntq", b"K\x03K\x01tq", 1)
    assert view != raw
    (tmp_path / "view.pt").write_bytes(view)
    with pytest.raises(UnsupportedCheckpointError, match=r"torch 0\.4"):
        await sidestream.open_checkpoint(tmp_path / "view.pt")


async def test_a_file_that_is_cut_off_or_altered_is_corrupt(tmp_path: Path) -> None:
    raw = legacy({"w": torch.arange(300.0), "b": torch.ones(2)})
    for cut in (40, 200, len(raw) - 1200, len(raw) - 1):
        (tmp_path / "cut.pt").write_bytes(raw[:cut])
        with pytest.raises(CorruptCheckpointError):
            await sidestream.open_checkpoint(tmp_path / "cut.pt")
    _, end = last_pickle(raw)
    altered = bytearray(raw)
    altered[end] ^= 1  # the number of elements before the first storage
    (tmp_path / "altered.pt").write_bytes(altered)
    with pytest.raises(CorruptCheckpointError, match="elements where"):
        await sidestream.open_checkpoint(tmp_path / "altered.pt")


async def test_mutations_are_read_or_refused(tmp_path: Path) -> None:
    chance = random.Random(7)
    raw = legacy({"w": torch.arange(30.0), "b": torch.ones(2), "lr": 0.1, "deep": {"x": [torch.ones(1), 2]}})
    path = tmp_path / "mutated.pt"
    refused = 0
    for _ in range(400):
        mutated = bytearray(raw)
        for _ in range(chance.randrange(1, 4)):
            mutated[chance.randrange(16, len(mutated))] = chance.randrange(256)
        path.write_bytes(mutated)
        try:
            await (await sidestream.open_checkpoint(path)).state_dict()
        except SidestreamError:
            refused += 1
    assert refused > 100


def last_pickle(raw: bytes) -> tuple[object, int]:
    stream = io.BytesIO(raw)
    for _ in range(3):
        pickle.load(stream)
    for _ in range(2):
        for _ in pickletools.genops(stream):
            pass
    return None, stream.tell()


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected.detach())
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            assert_same(found[key], one)
    elif isinstance(expected, tuple | list):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected
