"""Loading: what ``strict=`` lets pass, what is told meanwhile, and what is read."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from keywords import for_load
from safetensors.torch import save_file
from states import assert_same, model_and_optimizer

import sidestream
from sidestream import errors
from sidestream._layout.flatten import StateDicts, leaves_of
from sidestream._load.reader import Reader, Wanted
from sidestream._storage import ReadRange
from sidestream._storage.store import coalesce

STATE = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3)}, "step": 5, "extra": {"k": 1}}


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    await sidestream.save(STATE, tmp_path / "c")
    return tmp_path / "c"


class Reads:
    """Every ``preadv`` of a data file: how many bytes, and the addresses that they went to."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self.addresses: set[int] = set()

    def __call__(self, descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = self.real(descriptor, buffers, offset, flags)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            self.nbytes.append(count)
            self.addresses |= {ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers}
        return count

    real = staticmethod(os.preadv)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads = Reads()
    monkeypatch.setattr(os, "preadv", reads)
    return reads


# --- strict= ----------------------------------------------------------------------------------------------------------


async def test_partial_leaves_what_was_not_saved(saved: Path) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 7)
    target: dict[str, Any] = {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(3), "new": torch.full((2,), 7.0)}}
    target |= {"scheduler": scheduler, "step": 0, "epoch": 3, "extra": {"k": 0, "deep": {"n": None}}}
    with pytest.raises(errors.MissingKeysError):
        await sidestream.load(target, saved, allow_cast=True, allow_unexpected=True)
    report = await sidestream.load(target, saved, allow_missing=True)
    assert set(report.missing) == {"model.new", "scheduler", "epoch", "extra.deep.n"}
    assert target["model"]["new"].tolist() == [7.0, 7.0]
    assert_same(STATE["model"]["w"], target["model"]["w"])
    assert (target["step"], target["epoch"], target["extra"]) == (5, 3, {"k": 1, "deep": {"n": None}})
    assert scheduler.step_size == 7
    assert "model.new" not in report.loaded


async def test_partial_modules_keep_their_other_parameters(tmp_path: Path) -> None:
    old = torch.nn.Sequential(torch.nn.Linear(2, 2))
    await sidestream.save({"m": old}, tmp_path / "c")
    new = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    bias = new[1].bias.detach().clone()
    for atomic in (False, True):
        report = await sidestream.load(
            {"m": new}, tmp_path / "c", allow_missing=True, options=sidestream.LoadOptions(atomic=atomic)
        )
        assert torch.equal(new[0].weight, old[0].weight)
        assert torch.equal(new[1].bias, bias)
        assert "m.1.num_batches_tracked" in report.missing
        assert len(report.missing) == 5


async def test_cast_converts_into_the_dtype_of_the_target(tmp_path: Path) -> None:
    large, half = torch.randn(900, 1000), torch.randn(5, 6).half()
    await sidestream.save(
        {"large": large, "half": half, "ints": torch.arange(4), "same": torch.ones(2)}, tmp_path / "c"
    )
    shared = torch.zeros(900, 1000, dtype=torch.bfloat16)
    for atomic in (False, True):
        target = {
            "large": shared.zero_(),
            "half": torch.zeros(6, 5, dtype=torch.float64).t(),
            "ints": torch.zeros(4),
            "same": torch.zeros(2),
        }
        with pytest.raises(errors.DtypeMismatchError, match=r"float64 in the target, float16 saved \(allow_cast=True"):
            await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(atomic=atomic))
        assert not shared.any()
        report = await sidestream.load(
            target, tmp_path / "c", allow_cast=True, options=sidestream.LoadOptions(atomic=atomic)
        )
        assert report.cast == ("large", "half", "ints")
        assert torch.equal(target["large"], large.bfloat16())
        assert torch.equal(target["half"], half.double())
        assert target["ints"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert report.nbytes == large.nbytes + half.nbytes + 4 * 8 + 2 * 4


@pytest.mark.parametrize("writer", ["torch", "safetensors"])
async def test_tied_tensors_that_another_writer_saved_once_are_read_once(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied, target = torch.arange(100.0), torch.zeros(100)
    file, options = tmp_path / f"saved.{writer}", sidestream.LoadOptions()
    if writer == "torch":
        torch.save({"a": tied, "b": tied}, file)
    else:
        save_file({"a": tied}, file)
        options = sidestream.LoadOptions(names={"b": "a"})
    read: list[int] = []
    read_all = Reader.read

    async def count(self: Reader, wanted: list[Wanted], **more: Any) -> None:
        read.append(len(wanted))
        await read_all(self, wanted, **more)

    monkeypatch.setattr(Reader, "read", count)
    report = await sidestream.load({"a": target, "b": target}, file, options=options)
    assert torch.equal(target, tied)
    assert read == [1]
    assert report.unverified == (() if writer == "torch" else ("a", "b"))


async def test_cast_never_drops_a_part_of_a_number(tmp_path: Path) -> None:
    await sidestream.save({"f": torch.randn(3), "c": torch.randn(3, dtype=torch.complex64)}, tmp_path / "c")
    for name, dtype in (("f", torch.int32), ("c", torch.float32)):
        target = torch.zeros(3, dtype=dtype)
        with pytest.raises(errors.DtypeMismatchError, match=f"{name}: .* torch does not convert"):
            await sidestream.load({name: target}, tmp_path / "c", allow_cast=True)
        assert not target.any()


async def test_a_cast_module(tmp_path: Path) -> None:
    model, _ = model_and_optimizer()
    await sidestream.save({"m": model}, tmp_path / "c")
    other, _ = model_and_optimizer(seed=3)
    report = await sidestream.load({"m": other.bfloat16()}, tmp_path / "c", allow_cast=True)
    assert torch.equal(other[1].weight, model[1].weight.bfloat16())
    assert other[3].weight is other[0].weight
    assert "m.1.weight" in report.cast


async def test_unexpected_keys_are_ignored_when_asked(tmp_path: Path, saved: Path) -> None:
    target = {"model": {"w": torch.zeros(3, 4)}}
    report = await sidestream.load(target, saved, allow_unexpected=True)
    assert report.unexpected == ("model.b",)
    assert report.not_requested == ("step", "extra.k")
    assert_same(STATE["model"]["w"], target["model"]["w"])
    await sidestream.save({"m": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))}, tmp_path / "two")
    report = await sidestream.load(
        {"m": torch.nn.Sequential(torch.nn.Linear(2, 2))}, tmp_path / "two", allow_unexpected=True
    )
    assert report.unexpected == ("m.1.weight", "m.1.bias")
    assert report.loaded == ("m.0.weight", "m.0.bias")


async def test_a_strict_load_reports_that_nothing_was_let_pass(saved: Path) -> None:
    report = await sidestream.load({"step": 0}, saved)
    assert report.missing == report.cast == report.unexpected == ()


@pytest.mark.parametrize("wrong", [{"strict": "partial"}, {"strict": None}, {"allow_missing": 3}, {"allow_cast": [""]}])
async def test_tolerances_are_checked(wrong: dict[str, Any], saved: Path) -> None:
    with pytest.raises(errors.InvalidOptionError, match=f"{next(iter(wrong))}="):
        await sidestream.load({"step": 0}, saved, **wrong)


async def test_patterns_say_what_may_differ(tmp_path: Path) -> None:
    await sidestream.save({"m": {"a": torch.ones(2), "x1": torch.ones(2), "x2": torch.ones(2)}}, tmp_path / "c")

    def target() -> dict[str, Any]:
        return {"m": {"a": torch.zeros(2).double(), "head.w": torch.zeros(3), "head.b": torch.zeros(3)}}

    tolerant = {"allow_missing": "m.head.*", "allow_unexpected": ["m.x1", "m.x[2-9]"], "allow_cast": ["m.?"]}
    report = await sidestream.load(target(), tmp_path / "c", **tolerant)
    assert set(report.missing) == {"m.head.w", "m.head.b"}
    assert (set(report.unexpected), report.cast) == ({"m.x1", "m.x2"}, ("m.a",))
    for name, less, left in (
        ("allow_missing", ["m.head.w"], "m.head.b"),
        ("allow_unexpected", "m.x1", "m.x2"),
        ("allow_cast", "a", "m.a"),  # a pattern has to match the whole name
    ):
        with pytest.raises(errors.StateMismatchError) as caught:
            await sidestream.load(target(), tmp_path / "c", **{**tolerant, name: less})
        assert len(caught.value.offenders) == 1
        assert left in caught.value.offenders[0]


async def test_a_pattern_for_an_object_of_which_nothing_was_saved(tmp_path: Path) -> None:
    await sidestream.save({"step": 1}, tmp_path / "c")
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()
    for pattern in ("model*", "model.*"):
        target = {"step": 0, "model": model}
        report = await sidestream.load(target, tmp_path / "c", allow_missing=pattern)
        assert set(report.missing) == {"model", "model.weight", "model.bias"}
        assert torch.equal(model.weight, before)
    with pytest.raises(errors.MissingKeysError):
        await sidestream.load({"step": 0, "model": model}, tmp_path / "c", allow_missing="other.*")


async def test_restore_takes_the_same_keywords(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save(STATE, step=1)
        assert checkpoints.restored is None
        target = {"model": {"w": torch.zeros(3, 4).double()}, "new": 1}
        with pytest.raises(errors.StateMismatchError):
            await checkpoints.restore(target)
        tolerant = {"allow_missing": True, "allow_cast": True, "allow_unexpected": True}
        options: dict[str, Any] = {"verify": "manifest", "atomic": True, "timeout_s": 60.0}
        assert (
            await checkpoints.restore(target, **tolerant, **for_load(progress=lambda *now: told.append(now), **options))
            == 1
        )
        report = checkpoints.restored
        assert report is not None
        assert (report.missing, report.cast, report.unexpected) == (("new",), ("model.w",), ("model.b",))
        assert told[-1] == (48, 48)
        for wrong in ({"verify": "no"}, {"timeout_s": 0}, {"strict": "cast"}, {"atomic": 1}):
            with pytest.raises(errors.InvalidOptionError):
                await checkpoints.restore(target, **for_load(**wrong))


# --- progress, and the loop -------------------------------------------------------------------------------------------


async def test_progress_is_told_on_the_loop(tmp_path: Path) -> None:
    state = {f"t{index}": torch.randn(1 << 20) for index in range(10)}
    await sidestream.save(state, tmp_path / "c")
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        assert asyncio.get_running_loop() is not None
        told.append((done, total))

    report = await sidestream.load(state, tmp_path / "c", options=sidestream.LoadOptions(progress=progress))
    assert told[0] == (0, 10 << 22)
    assert told[-1] == (10 << 22, 10 << 22)
    assert told == sorted(told)
    assert len(told) > 3
    assert report.nbytes == 10 << 22
    told.clear()
    await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict(progress=progress)
    assert told[-1] == (10 << 22, 10 << 22)


async def test_an_observer_that_raises_ends_the_load(saved: Path) -> None:
    target = {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(3)}}

    def progress(done: int, total: int) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        await sidestream.load(target, saved, options=sidestream.LoadOptions(progress=progress))
    assert not target["model"]["w"].any()


class Calls:
    """Counts the calls that this thread makes within one step of the loop."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if frame.f_code is asyncio.events.Handle._run.__code__:
            self.now = 0
        elif event in ("call", "c_call"):
            self.now += 1
            self.most = max(self.most, self.now)


@pytest.mark.parametrize("kind", ["tensors", "values"])
async def test_no_step_of_the_loop_handles_every_leaf(kind: str, tmp_path: Path) -> None:
    leaves = 6000
    make = torch.tensor if kind == "tensors" else int
    state = {"part": {f"leaf{index}": make(index) for index in range(leaves)}}
    await sidestream.save(state, tmp_path / "c")
    counted = Calls()
    sys.setprofile(counted)
    try:
        await sidestream.load(state, tmp_path / "c")
        await sidestream.load(state, tmp_path / "c", options=sidestream.LoadOptions(atomic=True))
        await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict()
    finally:
        sys.setprofile(None)
    assert 100 < counted.most < leaves / 2


class Watched(UserDict[str, Any]):
    """A mapping and an object of the user's, neither of which may be met in another thread."""

    def __init__(self, content: dict[str, Any], threads: set[int]) -> None:
        super().__init__(content)
        self.threads = threads

    def __iter__(self) -> Iterator[str]:
        self.threads.add(threading.get_ident())
        return super().__iter__()

    def __setitem__(self, key: str, value: Any) -> None:
        if hasattr(self, "threads"):
            self.threads.add(threading.get_ident())
        super().__setitem__(key, value)


class WatchedObject:
    def __init__(self, content: Any, threads: set[int]) -> None:
        self.content, self.threads = content, threads

    def state_dict(self) -> Any:
        self.threads.add(threading.get_ident())
        return self.content

    def load_state_dict(self, state: Any) -> None:
        self.threads.add(threading.get_ident())
        self.content = state


async def test_what_is_the_users_runs_on_the_thread_of_the_loop(tmp_path: Path) -> None:
    threads: set[int] = set()

    def state(number: int) -> dict[str, Any]:
        inner = WatchedObject({"v": number, "t": torch.full((3,), number)}, threads)
        outer = WatchedObject(Watched({"inner": inner, "list": [1, {"n": number}]}, threads), threads)
        return {"a": Watched({"o": outer, "n": number}, threads), "l": [0, inner, [Watched({"x": number}, threads)]]}

    await sidestream.save(state(4), tmp_path / "c")
    target = state(0)
    await sidestream.load(target, tmp_path / "c")
    assert threads == {threading.get_ident()}
    assert target["a"]["n"] == 4
    assert_same(target["a"]["o"].content, {"inner": {"v": 4, "t": torch.full((3,), 4)}, "list": [1, {"n": 4}]})
    assert target["l"][2][0]["x"] == 4


def test_a_structure_that_changes_meanwhile_is_refused() -> None:
    state_dicts = StateDicts()
    state: dict[str, Any] = {"a": {"b": 1}, "m": torch.nn.Linear(2, 2)}
    list(state_dicts.collect(state))
    assert [leaf.fqn for leaf in leaves_of(state, state_dicts)] == [leaf.fqn for leaf in leaves_of(state)]
    state["other"] = torch.nn.Linear(2, 2)
    with pytest.raises(errors.InvalidOptionError, match="was changed while it was being loaded into"):
        list(leaves_of(state, state_dicts))


def test_asking_yields_now_and_then_and_ends() -> None:
    loop: dict[str, Any] = {f"k{index}": torch.zeros(0) for index in range(5000)}
    loop["self"] = [loop, loop]
    assert len(list(StateDicts().collect(loop))) == 4


# --- what is read -----------------------------------------------------------------------------------------------------


async def test_small_tensors_are_read_together(tmp_path: Path, reads: Reads) -> None:
    state = {f"t{index}": torch.randn(64) for index in range(2000)}
    await sidestream.save(state, tmp_path / "c")
    target = {name: torch.zeros(64) for name in state}
    await sidestream.load(target, tmp_path / "c")
    assert_same(state, target)
    assert len(reads.nbytes) < 10  # of about 1 MiB, and copied from there


async def test_what_lies_between_is_not_read_when_it_is_much(tmp_path: Path, reads: Reads) -> None:
    state = {f"t{index}": torch.randn(30_000) for index in range(20)}
    await sidestream.save(state, tmp_path / "c")
    target = {name: torch.zeros(30_000) for name in list(state)[::2]}
    await sidestream.load(target, tmp_path / "c")
    assert sum(reads.nbytes) < 10 * 120_000 * 1.05


async def test_rows_are_read_by_blocks(tmp_path: Path, reads: Reads) -> None:
    tensor = torch.randn(20_000, 256)  # 20 blocks
    await sidestream.save({"t": tensor}, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert torch.equal(await checkpoint.tensor("t", slice(5000, 8000)), tensor[5000:8000])
    assert sum(reads.nbytes) <= 3000 * 1024 + (2 << 20)


async def test_rows_are_verified(tmp_path: Path) -> None:
    await sidestream.save({"t": torch.zeros(20_000, 256)}, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.distcp")
    raw = bytearray(shard.read_bytes())
    at = len(raw) // 2
    raw[at] ^= 1
    shard.write_bytes(raw)
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert not (await checkpoint.tensor("t", slice(0, 8000))).any()
    assert not (await checkpoint.tensor("t", slice(-8000, None))).any()
    for rows in (slice(0, 11_000), slice(9500, 10_200), slice(9999, 10_001)):
        with pytest.raises(errors.CorruptCheckpointError) as raised:
            await checkpoint.tensor("t", rows)
        error = raised.value
        assert (error.file, error.fqn) == (shard.name, "t")
        assert error.offset is not None
        assert error.offset <= at < error.offset + (1 << 20)


async def test_atomic_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    state = {"first": torch.ones(2000), "last": torch.ones(1 << 20)}
    await sidestream.save(state, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.distcp")
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    target = {"first": torch.zeros(2000), "last": torch.zeros(1 << 20).double()}
    with pytest.raises(errors.CorruptCheckpointError) as raised:
        await sidestream.load(target, tmp_path / "c", allow_cast=True, options=sidestream.LoadOptions(atomic=True))
    assert raised.value.written == ()
    assert not target["first"].any()
    assert not target["last"].any()
    with pytest.raises(errors.CorruptCheckpointError) as raised:
        await sidestream.load(target, tmp_path / "c", allow_cast=True)
    assert set(raised.value.written) <= set(target)
    assert all(name in raised.value.written or not tensor.any() for name, tensor in target.items())


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=30),
    st.integers(0, 20),
    st.integers(1, 5),
    st.integers(1, 60),
)
def test_runs_hold_every_range_once(pairs: list[tuple[int, int]], gap: int, most: int, most_bytes: int) -> None:
    ranges = [ReadRange(offset, memoryview(bytearray(nbytes))) for offset, nbytes in pairs]
    runs = list(coalesce(ranges, gap_bytes=gap, most=most, most_bytes=most_bytes))
    assert sorted(id(one) for run in runs for one in run) == sorted(id(one) for one in ranges if len(one.into))
    for run in runs:
        assert len(run) <= most
        assert len(run) == 1 or run[-1].offset + len(run[-1].into) - run[0].offset <= most_bytes
        for one, other in pairwise(run):
            assert 0 <= other.offset - one.offset - len(one.into) <= gap


async def test_the_second_name_of_unverified_loads_names_the_first(tmp_path: Path) -> None:
    """Everywhere, before anything is read or written."""
    await sidestream.save({"w": torch.ones(4)}, tmp_path / "c")
    target = {"w": torch.zeros(4)}
    never: Any = "never"
    calls: list[Callable[[], Any]] = [
        lambda: sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(verify=never)),
        lambda: sidestream.open_checkpoint(tmp_path / "c", verify=never),
        lambda: sidestream.convert(tmp_path / "c", tmp_path / "d", options=sidestream.ConvertOptions(verify=never)),
        lambda: sidestream.Checkpointer(tmp_path / "run", load=sidestream.LoadOptions(verify=never)),
        lambda: sidestream.dcp.StorageReader(tmp_path / "c", verify=never),
    ]
    for call in calls:
        with pytest.raises(errors.InvalidOptionError, match="pass verify='manifest'") as refused:
            await call()
        assert "verify='manifest'" in str(refused.value)
    assert target["w"].sum() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(verify="manifest"))
    assert target["w"].sum() == 4
