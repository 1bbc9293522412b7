"""Tensors that consist of others, and dtypes of less than a byte: saved, verified, loaded in place and made anew."""

from __future__ import annotations

import base64
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from keywords import for_save
from rewritten import rewritten
from stock import stock_load
from subclasses import CONTEXT, Activation, Int8, Kernel, differ, int8
from torch.testing._internal.two_tensor import TwoTensor

import sidestream
from sidestream._format.manifest import parse_manifest, write_manifest
from sidestream._format.records import CompositeEntry, Manifest, TensorEntry
from sidestream._format.validate import validate
from sidestream.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    DtypeMismatchError,
    InvalidOptionError,
    KeyCollisionError,
    KindMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    StateMismatchError,
    UnexpectedKeysError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)

ALLOW = [TwoTensor, Int8, Kernel, Activation]
SUB_BYTE = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)]


def two(plus: float) -> TwoTensor:
    return TwoTensor(torch.arange(6.0).reshape(2, 3) + plus, torch.ones(2, 3) * plus)


def sparse(plus: float, nonzero: int = 2) -> dict[str, torch.Tensor]:
    dense = torch.zeros(4, 6)
    dense.reshape(-1)[: 3 * nonzero : 3] = torch.arange(1.0, nonzero + 1) + plus
    uncoalesced = torch.sparse_coo_tensor(
        [[1] * nonzero, [2] * nonzero], [plus] * nonzero, (4, 4), check_invariants=True
    )
    with warnings.catch_warnings(action="ignore"):  # torch calls them a beta, once
        return {
            "coo": dense.to_sparse(),
            "uncoalesced": uncoalesced,
            "hybrid": dense.reshape(4, 3, 2).to_sparse(2),
            "csr": dense.to_sparse_csr(),
            "int32": torch.sparse_csr_tensor(
                torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), [plus, 2.0], (2, 2)
            ),
            "csc": dense.to_sparse_csc(),
            "bsr": dense.to_sparse_bsr((2, 3)),
            "bsc": dense.to_sparse_bsc((2, 3)),
            "empty": torch.zeros(3, 3).to_sparse(),
        }


def low(name: str, plus: int, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.uint8) + plus).reshape(shape).view(getattr(torch, name))


def state(plus: int, nonzero: int = 2) -> dict[str, Any]:
    return {
        "model": {"two": two(plus), "int8": int8((3, 8), plus), "plain": torch.ones(3) * plus},
        "sparse": sparse(plus, nonzero),
        "list": [TwoTensor(two(plus), two(plus + 1)), low("int4", plus), {"n": plus}],
        "low": {name: low(name, plus) for name in SUB_BYTE},
        "strided": low("uint3", plus).t(),
        "step": plus,
    }


# --- there and back ---


@pytest.mark.parametrize(
    "options",
    [{}, {"writer": "process"}, {"streaming": True}, {"digest": "blake3"}],
    ids=["threads", "process", "streaming", "digest"],
)
async def test_all_kinds_come_back_in_place_and_anew(options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("digest"):
        pytest.importorskip("blake3")
    saved = state(2, nonzero=3)
    await sidestream.save(saved, tmp_path / "c", **for_save(**options))
    assert (await sidestream.verify(tmp_path / "c")).ok
    target = state(0, nonzero=2)
    objects = {**target["model"], **target["sparse"]}
    memory = target["model"]["two"].a.data_ptr(), target["model"]["int8"].qdata.data_ptr()
    report = await sidestream.load(target, tmp_path / "c")
    assert differ(saved, target) == []
    assert all(objects[name] is (target["model"] | target["sparse"])[name] for name in objects), "in place"
    assert memory == (target["model"]["two"].a.data_ptr(), target["model"]["int8"].qdata.data_ptr())
    assert "model.two" in report.loaded
    assert "model.two.a" not in report.loaded
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c", safe_globals=ALLOW)
    anew = await checkpoint.state_dict()
    assert differ(saved, anew) == []
    mapped = await checkpoint.state_dict(memory="mapped")
    assert differ(saved, mapped) == []


@pytest.mark.parametrize("nonzero", [1, 2, 5])
async def test_an_atomic_load_changes_everything_or_nothing(nonzero: int, tmp_path: Path) -> None:
    await sidestream.save(state(2, nonzero=2), tmp_path / "c")
    target = state(0, nonzero=nonzero)
    await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(atomic=True))
    assert differ(state(2, nonzero=2), target) == []
    shard = tmp_path / "c" / "__0_1.distcp"
    raw = bytearray(shard.read_bytes())
    raw[-5000] ^= 1
    (manifest,) = (tmp_path / "c").glob("manifest-*")
    places = [json.loads(line) for line in manifest.read_text().splitlines()[1:]]
    last = [content[2][0] for kind, content, *_ in places if kind == "tensor"][-1]
    raw[last[5]] ^= 1
    shard.write_bytes(raw)
    target = state(0, nonzero=nonzero)
    with pytest.raises(CorruptCheckpointError):
        await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(atomic=True))
    assert differ(state(0, nonzero=nonzero), target) == []


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize(("here", "saved"), [(2, 1), (1, 2)])
async def test_another_number_of_sparse_dimensions(here: int, saved: int, atomic: bool, tmp_path: Path) -> None:
    dense = torch.tensor([[1.0, 0, 2], [0, 0, 3]])
    await sidestream.save({"a": torch.ones(3), "s": dense.to_sparse(saved)}, tmp_path / "c")
    inside = torch.ones(2, 3).to_sparse(here)
    target = {"a": torch.zeros(3), "s": inside}
    await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(atomic=atomic))
    assert target["s"] is inside
    assert inside.sparse_dim() == saved
    assert torch.equal(inside.to_dense(), dense)
    assert torch.equal(target["a"], torch.ones(3))


async def test_a_run_keeps_them(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            await checkpoints.save(state(step), step=step)
        target = state(0, nonzero=4)
        assert await checkpoints.restore(target) == 2
        assert differ(state(2), target) == []


async def test_large_parts_pass_in_windows(tmp_path: Path) -> None:
    """Parts larger than a window, through a budget that holds a few of them."""
    large = TwoTensor(torch.arange(1 << 21, dtype=torch.float32), torch.arange(1 << 21).float() * 2)
    async with sidestream.AsyncStager(budget_bytes=4 << 20) as stager:
        await sidestream.save({"large": large, "low": low("int2", 0, (1 << 22,))}, tmp_path / "c", stager=stager)
    target = {"large": TwoTensor(torch.zeros(1 << 21), torch.zeros(1 << 21)), "low": low("int2", 9, (1 << 22,))}
    await sidestream.load(target, tmp_path / "c")
    assert torch.equal(target["large"].a, large.a)
    assert torch.equal(target["large"].b, large.b)
    assert torch.equal(target["low"].view(torch.uint8), low("int2", 0, (1 << 22,)).view(torch.uint8))


class Model(torch.nn.Module):
    def __init__(self, plus: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(int8((3, 8), plus), requires_grad=False)
        self.register_buffer("graph", sparse(plus, plus + 1)["coo"])
        self.register_buffer("low", low("int4", plus))
        self.plain = torch.nn.Parameter(torch.ones(2) * plus)


async def test_a_module_keeps_its_parameters(tmp_path: Path) -> None:
    saved, loaded = Model(3), Model(0)
    await sidestream.save({"model": saved}, tmp_path / "c")
    weight = loaded.weight
    await sidestream.load({"model": loaded}, tmp_path / "c")
    assert loaded.weight is weight
    assert differ(dict(saved.state_dict()), dict(loaded.state_dict())) == []


class Moments:
    """A fresh one has no state yet, as an optimizer of 8 bits before its first step."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {"state": {}, "lr": 0.5}

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict


async def test_an_object_without_state_is_handed_new_ones(tmp_path: Path) -> None:
    saved, fresh = Moments(), Moments()
    saved.content["state"] = {0: {"exp_avg": int8((3, 8), 4), "mask": sparse(1)["csr"]}}
    await sidestream.save({"optimizer": saved}, tmp_path / "c")
    with pytest.raises(
        UnsafeObjectError, match=r"optimizer\.state\.0\.exp_avg: a subclasses\.Int8 is made anew only if safe_globals="
    ):
        await sidestream.load({"optimizer": fresh}, tmp_path / "c")
    await sidestream.load({"optimizer": fresh}, tmp_path / "c", options=sidestream.LoadOptions(safe_globals=ALLOW))
    assert differ(saved.content, fresh.content) == []
    again = Moments()
    again.content["state"] = {0: {"exp_avg": int8((3, 8), 0), "mask": sparse(0, 4)["csr"]}}
    await sidestream.load({"optimizer": again}, tmp_path / "c")
    assert differ(saved.content, again.content) == [], "in place, which names no class"


async def test_ties_stay_ties(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    await sidestream.save({"one": TwoTensor(shared, shared), "other": shared}, tmp_path / "c")
    anew = await (await sidestream.open_checkpoint(tmp_path / "c", safe_globals=ALLOW)).state_dict()
    assert anew["one"].a.data_ptr() == anew["one"].b.data_ptr() == anew["other"].data_ptr()


# --- what a checkpoint shows ---


async def test_a_composite_tensor_is_listed_as_one(tmp_path: Path) -> None:
    await sidestream.save({"m": {"two": two(1), "coo": sparse(1)["coo"]}, "x": torch.ones(2)}, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c", safe_globals=ALLOW)
    assert list(checkpoint) == ["m.two", "m.coo", "x"]
    info = checkpoint.info("m.two")
    assert (info.dtype, info.shape, info.nbytes) == (torch.float32, (2, 3), 48)
    assert (info.kind, info.parts) == ("torch.testing._internal.two_tensor.TwoTensor", ("m.two.a", "m.two.b"))
    assert checkpoint.info("m.coo").kind == "sparse_coo"
    assert (checkpoint.info("x").kind, checkpoint.info("x").parts) == ("", ())
    assert differ({"t": two(1)}, {"t": await checkpoint.tensor("m.two")}) == []
    assert torch.equal(await checkpoint.tensor("m.two.a"), two(1).a)
    assert list((await checkpoint.state_dict(select="m.c*"))["m"]) == ["coo"]
    with pytest.raises(MissingKeysError):
        await checkpoint.state_dict(select="m.two.a")
    with pytest.raises(InvalidOptionError, match=r"rows=.*consists of others"):
        await checkpoint.tensor("m.two", slice(0, 1))


async def test_parts_can_be_loaded_by_themselves(tmp_path: Path) -> None:
    await sidestream.save({"two": two(1), "x": torch.ones(2)}, tmp_path / "c")
    target = {"two": {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}, "x": torch.zeros(2)}
    await sidestream.load(target, tmp_path / "c")
    assert torch.equal(target["two"]["a"], two(1).a)
    del target["two"]["b"]
    with pytest.raises(UnexpectedKeysError, match="two: in the checkpoint"):
        await sidestream.load(target, tmp_path / "c")


async def test_renamed(tmp_path: Path) -> None:
    await sidestream.save({"old": {"two": two(1), "coo": sparse(1)["coo"]}}, tmp_path / "c")
    target = {"new": {"two": two(0), "coo": sparse(0, 4)["coo"]}}
    await sidestream.load(
        target, tmp_path / "c", options=sidestream.LoadOptions(names=lambda name: name.replace("new", "old"))
    )
    assert differ({"two": two(1), "coo": sparse(1)["coo"]}, target["new"]) == []


async def test_stock_dcp_reads_the_parts(tmp_path: Path) -> None:
    await sidestream.save(state(2), tmp_path / "c")
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    assert "model.two" not in metadata
    target: dict[str, Any] = {
        "model": {"two": {"a": torch.zeros(2, 3)}, "plain": torch.zeros(3)},
        "sparse.coo.indices": torch.zeros(2, 2, dtype=torch.int64),
        "low": {"int4": torch.zeros(3, 4, dtype=torch.uint8)},
    }
    stock_load(target, tmp_path / "c")
    assert torch.equal(target["model"]["two"]["a"], two(2).a)
    assert torch.equal(target["sparse.coo.indices"], sparse(2)["coo"].indices())
    assert torch.equal(target["low"]["int4"], low("int4", 2).view(torch.uint8))
    untouched = two(0)
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: model\.two"):
        stock_load({"model": {"two": untouched}}, tmp_path / "c")
    assert differ({"t": two(0)}, {"t": untouched}) == []


async def test_inside_the_calls_of_dcp(tmp_path: Path) -> None:
    await sidestream.save({"two": two(2), "low": low("int4", 2)}, tmp_path / "c")
    for kind in ("uint8", "int4"):
        target = {
            "two": {"a": torch.zeros(2, 3)},
            "low": torch.zeros(3, 4, dtype=torch.uint8).view(getattr(torch, kind)),
        }
        dcp.load(target, storage_reader=sidestream.dcp.StorageReader(tmp_path / "c"), no_dist=True)
        assert torch.equal(target["two"]["a"], two(2).a)
        assert torch.equal(target["low"].view(torch.uint8), low("int4", 2).view(torch.uint8))


# --- conversions ---


async def test_copies_and_conversions_to_a_directory(tmp_path: Path) -> None:
    saved = state(2)
    await sidestream.save(saved, tmp_path / "c")
    await sidestream.copy(tmp_path / "c", tmp_path / "copy")
    report = await sidestream.convert(
        tmp_path / "c",
        tmp_path / "converted",
        dtype=torch.float64,
        names=lambda name: name.replace("model.", "net."),
    )
    assert "net.two" in report.tensors
    assert "net.two.a" not in report.tensors
    assert report.cast == ("net.plain",), "not the parts of others"
    for name in ("copy", "converted"):
        assert (await sidestream.verify(tmp_path / name)).ok
    target = state(0)
    await sidestream.load(target, tmp_path / "copy")
    assert differ(saved, target) == []
    found = await (await sidestream.open_checkpoint(tmp_path / "converted", safe_globals=ALLOW)).state_dict()
    assert differ({"two": saved["model"]["two"]}, {"two": found["net.two"]}) == []
    assert differ(saved["low"], found["low"]) == []


@pytest.mark.parametrize("target", ["x.safetensors", "x.pt"])
async def test_files_of_other_formats_hold_plain_tensors_only(target: str, tmp_path: Path) -> None:
    await sidestream.save({"m": {"two": two(1), "low": low("int4", 1)}, "x": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(
        UnsupportedTensorError, match=r"m\.two: it is a torch.*TwoTensor, .* plain tensors only; .*select="
    ):
        await sidestream.convert(tmp_path / "c", tmp_path / target)
    with pytest.raises(UnsupportedTensorError, match=r"m\.low: .* have no dtype int4; .*select="):
        await sidestream.convert(tmp_path / "c", tmp_path / target, select=["m.low"])
    report = await sidestream.convert(tmp_path / "c", tmp_path / target, select="x")
    assert report.left_out == ("m.two", "m.low")


async def test_a_name_that_a_part_has_already(tmp_path: Path) -> None:
    await sidestream.save({"two": two(1), "x": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(KeyCollisionError, match=r"two\.a"):
        await sidestream.convert(tmp_path / "c", tmp_path / "d", names={"x": "two.a"})


@pytest.mark.parametrize("budget", [1 << 30, 4 << 20], ids=["from the snapshot", "from the checkpoint"])
async def test_an_export_leaves_them_out_or_refuses_them(budget: int, tmp_path: Path) -> None:
    saved = {"model": {"two": two(1), "w": torch.ones(1 << 21)}}
    async with sidestream.AsyncStager(budget_bytes=budget) as stager:
        for number, options in enumerate([{}, {"select": "model.w"}]):
            export = sidestream.HF(tmp_path / f"hf{number}", **options)
            pending = sidestream.async_save(saved, tmp_path / f"c{number}", stager=stager, export=export)
            await pending
            if options:
                assert (await pending.exports[0]).tensors == ("model.w",)
            else:
                with pytest.raises(UnsupportedTensorError, match=r"model\.two: it is a .*TwoTensor"):
                    await pending.exports[0]


# --- what is refused before anything is written ---


class Opaque(Int8):
    """Keeps what is no data beside its tensors."""


class Nameless(Int8):
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale", "context"], None


class Empty(Int8):
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [], None


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def of(kind: type[Int8], context: Any = None) -> torch.Tensor:
    plain = int8((2, 4), 0)
    return kind(plain.qdata, plain.scale, context)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a function": (
        lambda: of(Opaque, print),
        UnsafeObjectError,
        r"a test_composite_saves\.Opaque keeps a .*builtin.*save the",
    ),
    "an object": (
        lambda: of(Opaque, {"x": [object()]}),
        UnsafeObjectError,
        r"keeps a builtins\.object .*save the tensors",
    ),
    "a tensor": (
        lambda: of(Opaque, (torch.ones(2),)),
        UnsafeObjectError,
        r"a tensor that its __tensor_flatten__ does not",
    ),
    "no tensor": (lambda: of(Nameless, 3), UnsupportedTensorError, r"lists context, which is not a tensor"),
    "nothing": (lambda: of(Empty), UnsupportedTensorError, r"wraps 0 tensors: save"),
    "jagged": (jagged, UnsupportedTensorError, r"shape is not fixed: save its components"),
    "in a tuple": (
        lambda: (torch.eye(2).to_sparse(),),
        UnsafeObjectError,
        r"sparse_coo inside a tuple; put it into a dict",
    ),
    "low in a tuple": (lambda: (low("int4", 0),), UnsafeObjectError, r"cannot serialize a tensor of dtype int4"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refused_by_name_before_anything_is_written(case: str, tmp_path: Path) -> None:
    make, error, text = REFUSED[case]
    with warnings.catch_warnings(action="ignore"):  # jagged tensors are a prototype
        saved = {"m": {"x": make()}, "w": torch.ones(2)}
    with pytest.raises(error, match=rf"m\.x.*{text}"):
        await sidestream.save(saved, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", [1, -1])
async def test_names_of_parts_do_not_collide(order: int, tmp_path: Path) -> None:
    saved = dict([("two", two(1)), ("two.a", torch.ones(2))][::order])
    with pytest.raises(KeyCollisionError, match=r"two\.a.*stands for two paths"):
        await sidestream.save(saved, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


# --- what does not fit the target ---


async def test_every_difference_is_told_and_nothing_is_changed(tmp_path: Path) -> None:
    await sidestream.save({"m": state(2)["model"], "s": sparse(2), "low": low("int4", 1)}, tmp_path / "c")
    fits: dict[str, Any] = {"m": state(0)["model"], "s": sparse(0), "low": low("int4", 0)}
    cases: list[tuple[str, str, Any, type[StateMismatchError], str]] = [
        (
            "m",
            "two",
            torch.zeros(2, 3),
            KindMismatchError,
            r"m\.two: a plain tensor in the target, a .*TwoTensor in the",
        ),
        ("m", "two", int8((2, 4), 0), KindMismatchError, r"m\.two: a subclasses\.Int8 in the target, a .*TwoTensor"),
        ("m", "plain", two(0), KindMismatchError, r"m\.plain: a .*TwoTensor in the target, a plain tensor in the"),
        ("m", "two", 3, KindMismatchError, r"m\.two: a int in the target, a .*TwoTensor in the checkpoint"),
        ("m", "int8", int8((3, 4), 0), ShapeMismatchError, r"m\.int8: shape \(3, 4\) in the target, \(3, 8\) saved"),
        (
            "m",
            "int8",
            int8((3, 8), 0, {**CONTEXT, "block": [1, 8]}),
            StateMismatchError,
            r"m\.int8: .*beside its tensors in the",
        ),
        (
            "m",
            "int8",
            int8((3, 8), 0, {**CONTEXT, "kernel": Kernel.FAST}),
            StateMismatchError,
            r"m\.int8: .*beside its tensors",
        ),
        ("s", "csr", sparse(0)["csc"], KindMismatchError, r"s\.csr: a sparse_csc in the target, a sparse_csr in the"),
        (
            "s",
            "coo",
            sparse(0)["coo"].double(),
            DtypeMismatchError,
            r"s\.coo: dtype float64 in the target, float32 saved",
        ),
    ]
    for top, name, other, error, text in cases:
        target = {**fits, top: {**fits[top], name: other}}
        with pytest.raises(error, match=text) as raised:
            await sidestream.load(target, tmp_path / "c")
        told = [line for line in raised.value.args[0].splitlines() if line.startswith(f"  {top}.{name}")]
        assert len(told) == 1, "not once more for each part"
    with pytest.raises(DtypeMismatchError, match="low: dtype uint8 in the target, int4 saved"):
        await sidestream.load({**fits, "low": low("int4", 0).view(torch.uint8)}, tmp_path / "c")
    assert differ({"m": state(0)["model"], "s": sparse(0), "low": low("int4", 0)}, fits) == []


async def test_missing_and_spare_ones_are_told_once(tmp_path: Path) -> None:
    await sidestream.save({"m": {"two": two(1), "w": torch.ones(2)}}, tmp_path / "c")
    with pytest.raises(UnexpectedKeysError) as spare:
        await sidestream.load({"m": {"w": torch.zeros(2)}}, tmp_path / "c")
    assert [line.partition(":")[0] for line in spare.value.offenders] == ["m.two"]
    target = {"m": {"two": two(0), "w": torch.zeros(2), "more": two(0)}}
    with pytest.raises(MissingKeysError) as missing:
        await sidestream.load(target, tmp_path / "c")
    assert [line.partition(":")[0] for line in missing.value.offenders] == ["m.more"]
    report = await sidestream.load(target, tmp_path / "c", allow_missing=True)
    assert report.missing == ("m.more",)
    assert differ({"two": two(1), "more": two(0)}, {name: target["m"][name] for name in ("two", "more")}) == []


async def test_sparse_values_are_cast_if_that_is_asked_for(tmp_path: Path) -> None:
    await sidestream.save(sparse(2), tmp_path / "c")
    target = {name: one.double() for name, one in sparse(0, 4).items() if name != "int32"}
    target["int32"] = sparse(0)["int32"].double()
    report = await sidestream.load(target, tmp_path / "c", allow_cast=True)
    assert set(report.cast) == set(target)
    for name, one in sparse(2).items():
        assert torch.equal(target[name].to_dense(), one.double().to_dense()), name


# --- files that lie ---


def entry(lines: list[Any], fqn: str) -> list[Any]:
    return next(line for line in lines[1:] if line[2] == fqn)


LIES: dict[str, Callable[[list[Any]], None]] = {
    "another shape": lambda lines: entry(lines, "coo")[1].__setitem__(2, [3, 3]),
    "coalesced": lambda lines: entry(lines, "uncoalesced")[1].__setitem__(5, True),
    "coalesced is no boolean": lambda lines: entry(lines, "coo")[1].__setitem__(5, 1),
    "another dtype": lambda lines: entry(lines, "csr")[1].__setitem__(1, "float64"),
    "another layout": lambda lines: entry(lines, "csr")[1].__setitem__(2, [6, 4]),
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_is_no_sparse_tensor_is_not_made(lie: str, tmp_path: Path) -> None:
    """Indices out of the shape would make torch read and write memory that is not the tensor's."""
    await sidestream.save(sparse(2, 4), tmp_path / "c")
    rewritten(tmp_path / "c", LIES[lie])
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    with pytest.raises(CorruptCheckpointError, match=r"do not form a tensor of layout|does not say whether"):
        await checkpoint.state_dict()
    target = sparse(0, 4)
    if lie.startswith("coalesced"):
        with pytest.raises(CorruptCheckpointError):
            await sidestream.load(target, tmp_path / "c")
    else:
        with pytest.raises(StateMismatchError):
            await sidestream.load(target, tmp_path / "c")
    assert differ(sparse(0, 4), target) == []


async def test_indices_out_of_the_shape_are_not_loaded_in_place(tmp_path: Path) -> None:
    await sidestream.save({"coo": sparse(2)["coo"]}, tmp_path / "c")
    lying = torch.sparse_coo_tensor([[9, 3], [0, 1]], [1.0, 2.0], (10, 6), is_coalesced=True, check_invariants=False)
    await sidestream.save({"coo": lying}, tmp_path / "d")
    rewritten(tmp_path / "d", lambda lines: entry(lines, "coo")[1].__setitem__(2, [4, 6]))
    target = {"coo": sparse(0)["coo"]}
    with pytest.raises(CorruptCheckpointError, match="coo: its parts do not form a tensor of layout sparse_coo"):
        await sidestream.load(target, tmp_path / "d")
    assert differ({"coo": sparse(0)["coo"]}, target) == []


@pytest.mark.skipif("torchao" in sys.modules, reason="another test has imported torchao")
async def test_no_file_names_a_class_that_is_imported(tmp_path: Path) -> None:
    await sidestream.save({"x": int8((2, 4), 0)}, tmp_path / "c")
    for name, text in (
        ("os.system", "only if safe_globals="),
        ("subclasses.Int8", "only if safe_globals="),
        ("torchao.quantization.Int8Tensor", "import torchao.quantization first"),
    ):
        rewritten(tmp_path / "c", lambda lines, name=name: entry(lines, "x")[1].__setitem__(0, name))
        checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
        with pytest.raises(UnsafeObjectError, match=f"x: a {re.escape(name)}.*{text}"):
            await checkpoint.state_dict()
    assert "torchao" not in sys.modules


async def test_what_a_class_does_not_take_is_a_typed_error(tmp_path: Path) -> None:
    await sidestream.save({"x": int8((2, 4), 0)}, tmp_path / "c")
    rewritten(tmp_path / "c", lambda lines: entry(lines, "x")[1].__setitem__(2, [4, 2]))
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c", safe_globals=ALLOW)
    with pytest.raises(UnsupportedCheckpointError, match=r"x: subclasses\.Int8 makes another tensor"):
        await checkpoint.state_dict()
    rewritten(
        tmp_path / "c", lambda lines: entry(lines, "x")[1].__setitem__(5, {"member": ["subclasses.Kernel", "NO"]})
    )
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c", safe_globals=ALLOW)
    with pytest.raises(UnsafeObjectError, match=r"subclasses\.Kernel\.NO"):
        await checkpoint.state_dict()


def manifest() -> tuple[Manifest, bytes]:
    from sidestream._format.records import Chunk

    chunk = Chunk((0,), (2,), "__0_1.distcp", 0, 700, 320, base64.b64decode("AQIDBA=="))
    parts = {f"x.{name}": TensorEntry(("x", name), "float32", (2,), (chunk,)) for name in ("a", "b")}
    whole = CompositeEntry(
        ("x",), "some.Class", "float32", (2,), (1,), ("a", "b"), {"dict": [["k", {"dtype": "int4"}]]}
    )
    made = Manifest("0" * 32, {"x": whole, **parts}, {"__0_1.distcp": 4096})
    return made, b"".join(write_manifest(made, "2.13"))


def test_the_manifest_has_a_version_of_its_own() -> None:
    made, raw = manifest()
    assert raw.startswith(b'{"sidestream":3,')
    assert parse_manifest(raw) == made
    validate(made)
    with pytest.raises(CorruptCheckpointError, match="unknown kind 'composite'"):
        parse_manifest(raw.replace(b'"sidestream":3', b'"sidestream":1'))
    plain = Manifest(made.save_id, {"x.a": made.entries["x.a"]}, made.files)
    assert b"".join(write_manifest(plain, "2.13")).startswith(b'{"sidestream":1,')


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", ""),
        ("type", "sparse_coo"),
        ("type", "x" * 5000),
        ("dtype", "float33"),
        ("shape", (-1,)),
        ("shape", (1 << 40, 1 << 40)),
        ("strides", None),
        ("strides", (1, 1)),
        ("strides", (-1,)),
        ("strides", (1 << 63,)),
        ("parts", ()),
        ("parts", ("a", "a")),
        ("parts", ("a", "")),
        ("parts", ("a", "c")),
        ("parts", tuple(f"p{n}" for n in range(65))),
        ("path", ("y",)),
    ],
)
def test_a_composite_entry_that_is_none_is_refused(field: str, value: Any) -> None:
    from dataclasses import replace

    made, _ = manifest()
    lying = replace(made, entries={**made.entries, "x": replace(made.entries["x"], **{field: value})})
    with pytest.raises((CorruptCheckpointError, UnsupportedCheckpointError)):
        validate(lying)


async def test_nothing_is_there_after_a_conflict(tmp_path: Path) -> None:
    await sidestream.save(state(1), tmp_path / "c")
    with pytest.raises(CheckpointExistsError):
        await sidestream.save(state(2), tmp_path / "c")
    target = state(0)
    await sidestream.load(target, tmp_path / "c")
    assert differ(state(1), target) == []
