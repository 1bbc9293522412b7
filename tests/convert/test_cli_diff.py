"""``sidestream diff`` compares exactly: every bit of tensors and values, their types, and nothing but those."""

from __future__ import annotations

import io
import json
import math
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_cli import sidestream_

import sidestream
from sidestream_cli.look import differences
from sidestream_cli.values import value_differences

OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
MANY = 10**5000  # more digits than Python converts to a string


def changed(kind: Any, position: int) -> Any:
    array = np.zeros(5000, dtype=kind)
    array[position] = 1
    return array


DIFFERENT: list[tuple[str, Any, Any, str, str]] = [
    ("int", 1, 2, "", "1 against 2"),
    ("int and float", 1, 1.0, "", "int 1 against float 1.0"),
    ("int and bool", 1, True, "", "int 1 against bool True"),
    ("zeros", 0.0, -0.0, "", "0.0 against -0.0"),
    ("floats", 1.0, 1.0 + 1e-9, "", "1.0 against 1.000000001"),
    ("neighbours", 0.1, math.nextafter(0.1, 1), "", "0.1 against 0.10000000000000002"),
    ("NaNs", math.nan, OTHER_NAN, "", "nan (0x7ff8000000000000) against nan (0x7ff8000000000001)"),
    ("complex", complex(0, 1), complex(-0.0, 1), "", "1j against (-0+1j)"),
    ("None", None, False, "", "NoneType None against bool False"),
    ("long ints", MANY, MANY + 1, "", "000 (16610 bits) against 0x31e208010365...000000000001 (16610 bits)"),
    ("middle of ints", -MANY, -MANY ^ 1 << 8000, "", "the lowest bit that differs is bit 8000"),
    ("bytes", b"abc", bytearray(b"abc"), "", "bytes b'abc' against bytearray bytearray(b'abc')"),
    ("text", "a" * 5000 + "b", "a" * 5000 + "c", "", "aaab' against 'aaaaaaaaaaaaaaac', from character 4985 on"),
    ("list", [1, [2, 3]], [1, [2, 4]], "[1][1]", "3 against 4"),
    ("length", [1, 2], [1, 2, 3], "", "2 elements against 3"),
    ("list and tuple", (1, [2]), (1, (2,)), "[1]", "list [2] against tuple (2)"),
    ("dict", {"a": {"b": 1}}, {"a": {"b": 2}}, "['a']['b']", "1 against 2"),
    ("key", {"a": 1, "b": 2}, {"a": 1}, "['b']", "only in the first"),
    ("kind of key", {1: "x"}, {True: "x"}, "[1]", "only in the first"),
    ("set", {1, 2}, {1, 3}, "", "2 only in the first"),
    ("kind of element", {1}, {True}, "", "1 only in the first"),
    ("kind of dict", {"a": 1}, OrderedDict(a=1), "", "dict {'a': 1} against OrderedDict {'a': 1}"),
    ("tensor", (torch.zeros(5000),), (torch.from_numpy(changed("f4", 2500)),), "[0][2500]", "0.0 against 1.0"),
    ("5th digit", (torch.tensor([1.00001]),), (torch.tensor([1.00002]),), "[0][0]", "1.00001"),
    ("many", (torch.zeros(9, 9),), (torch.ones(9, 9),), "[0][0][0]", "the first of 81 elements that differ"),
    ("0 dimensions", (torch.tensor(1),), (torch.tensor(2),), "[0]", "1 against 2"),
    ("-0.0", (torch.zeros(2),), (-torch.zeros(2),), "[0][0]", "0.0 against -0.0"),
    ("dtype", (torch.zeros(2),), (torch.zeros(2).half(),), "[0]", "float32 [2] against float16 [2]"),
    ("shape", (torch.zeros(2),), (torch.zeros(2, 1),), "[0]", "float32 [2] against float32 [2, 1]"),
    ("requires no sum", (torch.empty(0, 2),), (torch.empty(2, 0),), "[0]", "[0, 2] against float32 [2, 0]"),
    ("array", np.zeros(5000), changed("f8", 2500), "[2500]", "0.0 against 1.0"),
    ("9th digit", np.array([1.0]), np.array([1.0 + 1e-9]), "[0]", "1.0 against 1.000000001"),
    ("kind of array", np.zeros(2, "<i4"), np.zeros(2, "<i8"), "", "int32 [2] against int64 [2]"),
    ("order of bytes", np.zeros(2, "<i4"), np.zeros(2, ">i4"), "", "int32 [2] against >i4 [2]"),
    ("number of numpy", np.float64(1), 1.0, "", "float64 float64 1.0 against float 1.0"),
    ("torch.Size", torch.Size([1, 2]), torch.Size([1, 3]), "", "torch.Size([1, 2]) against torch.Size([1, 3])"),
    ("torch.dtype", torch.float16, torch.bfloat16, "", "torch.float16 against torch.bfloat16"),
    ("device", torch.device("cpu"), torch.device("cuda", 0), "", "device(type='cpu') against device(type='cuda'"),
    ("BytesIO", (io.BytesIO(b"abc"),), (io.BytesIO(b"abd"),), "[0]", "b'abc' against b'abd'"),
]
SAME: list[tuple[str, Any, Any]] = [
    ("order of a dict", ({"a": 1, "b": 2},), ({"b": 2, "a": 1},)),
    ("order of a set", {"a", "b", "c", 1, 2, 8, 16}, {16, 8, 2, 1, "c", "b", "a"}),
    ("NaN", (math.nan, {math.nan}), (math.nan, {float("nan")})),
    ("NaN in a tensor", (torch.tensor([math.nan]),), (torch.tensor([math.nan]),)),
    ("NaN as a key", {math.nan: 1}, {float("nan"): 1}),
    ("strides", (torch.arange(6).reshape(3, 2).t(),), (torch.arange(6).reshape(3, 2).t().contiguous(),)),
    ("conjugate", (torch.tensor([1j]).conj(),), (torch.tensor([complex(0, -1)]),)),
    ("long ints", MANY, MANY + 0),
    ("frozensets", frozenset({frozenset({1, 2})}), frozenset({frozenset({2, 1})})),
    ("no elements", (torch.empty(0, 3), np.zeros((0, 2))), (torch.empty(0, 3), np.zeros((0, 2)))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "path", "what"), [row[1:] for row in DIFFERENT], ids=[r[0] for r in DIFFERENT]
)
def test_different(one: Any, other: Any, path: str, what: str) -> None:
    first = next(value_differences(one, other))
    assert first.path == path
    assert what in first.what
    assert list(value_differences(other, one))
    assert next(value_differences([1, {"a": one}], [1, {"a": other}])).path == f"[1]['a']{path}"


@pytest.mark.parametrize(("one", "other"), [row[1:] for row in SAME], ids=[r[0] for r in SAME])
def test_the_same(one: Any, other: Any) -> None:
    assert list(value_differences(one, other)) == []


def test_what_is_said_is_bounded() -> None:
    """The description of a difference stays short for long, wide and deep values."""
    deep: Any = 1
    for _ in range(60):
        deep = [deep, deep, deep, deep, {"k" * 99: deep}]
    wide = {f"{'key' * 99}{number}": "x" * 5000 for number in range(5000)}
    values = [deep, wide, "x" * (1 << 20), -MANY, set(range(9999)), torch.zeros(9, 9), np.zeros(9), b"x" * 9999]
    for value in values:
        for found in value_differences([value], [1.5]):
            assert len(found.path) + len(found.what) < 300
    for number in (1, 1 << 2000):
        found = next(value_differences({"k" * 5000: number}, {"k" * 5000: number << 500}))
        assert len(found.path) + len(found.what) < 400


def test_between_checkpoints(tmp_path: Path) -> None:
    """``diff`` compares a checkpoint of stock DCP with one of sidestream, and names the first three places in a
    value."""
    number = 10**2000
    state = {"w": torch.arange(4), "v": {"x": (1.0, number, {"a": [1, 2], "b": {3}}), "same": ({"a": 1, "b": 2},)}}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    state["v"]["same"] = ({"b": 2, "a": 1},)  # type: ignore[index]
    sidestream.blocking.save(state, tmp_path / "ours")
    assert sidestream_("diff", tmp_path / "stock", tmp_path / "ours").strip() == "no differences"
    state["v"]["x"] = (1.5, number + 1, {"b": {4}, "a": [1, 0]})  # type: ignore[index]
    sidestream.blocking.save(state, tmp_path / "changed")
    shown = sidestream_("diff", tmp_path / "stock", tmp_path / "changed", code=1)
    assert "another value: [0]: 1.0 against 1.5; [1]: 0x" in shown.replace("\n", "")
    found = json.loads(sidestream_("diff", tmp_path / "ours", tmp_path / "changed", "--json", code=1))
    assert [one["name"] for one in found] == ["v.x"]
    assert [one["path"] for one in found[0]["inside"]] == ["[0]", "[1]", "[2]['a'][1]"]
    assert found[0]["more"]


@pytest.mark.parametrize(
    ("one", "other", "largest"),
    [
        (torch.tensor([1, 2**62]), torch.tensor([1, 2**62 + 1]), 1.0),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), 2.0**64),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([2**64 - 3], dtype=torch.uint64), 2.0),
        (torch.tensor([0, 2**63], dtype=torch.uint64), torch.tensor([1, 2**63], dtype=torch.uint64), 1.0),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 3.0]), 2.0),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.5]), 0.5),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 2j]), 3.0),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn), 1.0),
        (torch.tensor(5), torch.tensor(3), 2.0),
        (torch.tensor([1], dtype=torch.uint8).view(torch.bits8), torch.zeros(1).byte().view(torch.bits8), math.inf),
    ],
    ids=lambda value: "" if isinstance(value, float) else str(value.dtype).removeprefix("torch."),
)  # fmt: skip
def test_the_largest_difference(one: torch.Tensor, other: torch.Tensor, largest: float, tmp_path: Path) -> None:
    for name, tensor in (("a", one), ("b", other)):
        sidestream.blocking.save({"w": tensor, "same": torch.ones(2)}, tmp_path / name)
    assert differences(str(tmp_path / "a"), str(tmp_path / "a")) == []
    found = differences(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [(each.name, each.what, each.largest) for each in found] == [("w", "changed", largest)]
