"""Tensors that are read directly into their places: small neighbours together, large ones in pieces."""

from __future__ import annotations

import asyncio
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from between_pauses import calls_between_pauses
from hypothesis import given
from hypothesis import strategies as st
from late import late

import sidestream
from sidestream._format.records import Entries
from sidestream._layout import match as matching
from sidestream._layout.ranges import DirectReads
from sidestream._load.new_tensors import new_tensors
from sidestream._load.ranges import DirectBatch, direct_batches
from sidestream._load.reader import Reader
from sidestream._runtime import threads
from sidestream._runtime.threads import Stop
from sidestream._storage.jobs import Scratch
from sidestream.errors import CorruptCheckpointError, DeadlineExceededError, UnsupportedTensorError


def state() -> dict[str, torch.Tensor]:
    """Sizes around all limits: a span of small neighbours, a call of 1 MiB, a block, a batch of 16 MiB."""
    sizes = [
        1,
        3,
        256,
        *[300] * 400,
        1 << 14,
        (1 << 14) + 1,
        1 << 17,
        1 << 18,
        (1 << 18) + 1,
        3 << 20,
        (1 << 22) + 7,
        (1 << 23) + 5,
    ]
    return {f"t{number}": torch.arange(size, dtype=torch.float32) + number for number, size in enumerate(sizes)}


def zeros() -> dict[str, torch.Tensor]:
    return {fqn: torch.zeros_like(tensor) for fqn, tensor in state().items()}


@pytest.mark.parametrize("verify", ["always", "manifest"])
@pytest.mark.parametrize("digest", [None, "blake3"])
async def test_all_sizes(tmp_path: Path, verify: str, digest: str | None) -> None:
    await sidestream.save(state(), tmp_path / "step", options=sidestream.SaveOptions(digest=digest))
    target = zeros()
    report = await sidestream.load(target, tmp_path / "step", options=sidestream.LoadOptions(verify=verify))
    assert all(torch.equal(target[fqn], tensor) for fqn, tensor in state().items())
    assert report.nbytes == sum(tensor.nbytes for tensor in target.values())
    assert report.loaded == tuple(target)
    assert not report.unverified


async def test_an_altered_tensor_among_small_neighbours(tmp_path: Path) -> None:
    """It is named, and so is all that was written, and nothing else was. Neighbours are checked before any of them is
    written."""
    await sidestream.save(state(), tmp_path / "step")
    (file,) = (tmp_path / "step").glob("*.distcp")
    raw = bytearray(file.read_bytes())
    at = raw.index(state()["t200"].numpy().tobytes())
    raw[at + 5] ^= 1
    file.write_bytes(raw)
    target = zeros()
    with pytest.raises(CorruptCheckpointError, match="t200: its bytes") as caught:
        await sidestream.load(target, tmp_path / "step")
    assert (caught.value.fqn, caught.value.offset) == ("t200", at)
    assert "t0" in caught.value.written
    assert not {"t199", "t200"} & {*caught.value.written}
    untouched = [fqn for fqn in target if fqn not in caught.value.written]
    assert untouched
    assert not any(target[fqn].any() for fqn in untouched)


async def test_what_is_not_as_in_the_file_takes_the_other_road(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.arange(64).reshape(8, 8).to(torch.complex64)
    saved = {
        name: base.clone() for name in ("plain", "turned", "conjugated", "wider", "tied", "again", "part", "parameter")
    }
    saved["again"] = saved["tied"]
    await sidestream.save(saved, tmp_path / "step")
    tied = torch.zeros(8, 8, dtype=torch.complex64)
    target = {
        "plain": torch.zeros(8, 8, dtype=torch.complex64),
        "turned": torch.zeros(8, 8, dtype=torch.complex64).t(),
        "conjugated": torch.zeros(8, 8, dtype=torch.complex64).conj(),
        "wider": torch.zeros(8, 8, dtype=torch.complex128),
        "tied": tied,
        "again": tied,
        "part": torch.zeros(8, 16, dtype=torch.complex64)[:, ::2],
        "parameter": torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64)),
    }
    plans = []
    plan_of = matching.LoadPlan
    monkeypatch.setattr(matching, "LoadPlan", lambda **fields: plans.append(plan_of(**fields)) or plans[-1])
    await sidestream.load(target, tmp_path / "step", allow_cast=True)
    assert all(torch.equal(tensor, base.to(tensor.dtype)) for tensor in target.values())
    assert target["parameter"]._version > 0
    (plan,) = plans
    assert set(plan.direct.tensors) == {"plain", "parameter"}


@pytest.mark.parametrize("verify", ["always", "manifest"])
@pytest.mark.parametrize("digest", [None, "blake3"])
async def test_what_is_read_as_a_whole(tmp_path: Path, verify: Any, digest: Any) -> None:
    """Into new memory, and into memory from which the target is changed at the end."""
    saved = {**state(), "empty": torch.zeros(0, 3), "scalar": torch.tensor(5.0), "n": 7, "none": {}}
    saved["tied"] = saved["t200"]
    await sidestream.save(saved, tmp_path / "step", options=sidestream.SaveOptions(digest=digest))
    read = await (await sidestream.open_checkpoint(tmp_path / "step", verify=verify)).state_dict()
    target: dict[str, Any] = {fqn: torch.zeros_like(one) for fqn, one in saved.items() if isinstance(one, torch.Tensor)}
    target |= {"tied": target["t200"], "n": 0, "none": {}}
    report = await sidestream.load(
        target, tmp_path / "step", options=sidestream.LoadOptions(verify=verify, atomic=True)
    )
    for found in (read, target):
        assert found.keys() == saved.keys()
        tensors = {fqn: one for fqn, one in saved.items() if isinstance(one, torch.Tensor)}
        assert all(torch.equal(found[fqn], tensor) for fqn, tensor in tensors.items())
        assert found["tied"].data_ptr() == found["t200"].data_ptr()
        assert (found["n"], found["none"]) == (7, {})
    assert report.nbytes == sum(one.nbytes for fqn, one in tensors.items() if fqn != "tied")
    assert not report.unverified


async def test_an_altered_tensor_of_what_is_read_as_a_whole(tmp_path: Path) -> None:
    await sidestream.save(state(), tmp_path / "step")
    (file,) = (tmp_path / "step").glob("*.distcp")
    raw = bytearray(file.read_bytes())
    at = raw.index(state()["t200"].numpy().tobytes())
    raw[at + 5] ^= 1
    file.write_bytes(raw)
    checkpoint = await sidestream.open_checkpoint(tmp_path / "step")
    target = zeros()
    for read in (
        checkpoint.state_dict(),
        sidestream.load(target, tmp_path / "step", options=sidestream.LoadOptions(atomic=True)),
    ):
        with pytest.raises(CorruptCheckpointError, match="t200: its bytes") as caught:
            await read
        assert (caught.value.fqn, caught.value.offset, caught.value.written) == ("t200", at, ())
    assert not any(tensor.any() for tensor in target.values())
    (damage,) = (await checkpoint.verify()).damaged
    assert (damage.fqn, damage.offset) == ("t200", at)


async def test_of_a_selection_what_can_be_read_straight_is(tmp_path: Path) -> None:
    saved = {"a": torch.arange(3.0), "b": [torch.arange(4.0), 1], 'q"x': torch.arange(5.0)}
    saved["c"] = saved["a"]
    saved['q"y'] = saved["a"]  # its line is parsed by the general code
    await sidestream.save(saved, tmp_path / "step")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "step")
    entries = checkpoint._manifest.entries
    new = new_tensors(entries, ["a", "b.0", "c", 'q"x', 'q"y'], direct=True)
    assert set(new.direct.tensors) == {"a", "b.0"}
    assert [one.fqn for one in new.wanted] == ['q"x']
    assert new.tensors["a"] is new.tensors["c"] is new.tensors['q"y']
    assert not new_tensors(entries, ["a"], torch.device("meta")).tensors["a"].is_cpu
    read = await checkpoint.state_dict(select=["b.*", "c"])
    assert set(read) == {"b", "c"}
    assert read["b"][1] == 1
    assert torch.equal(read["c"], saved["a"])


def test_batches_and_spans() -> None:
    """Every byte is read once, in order; a batch has 16 MiB at most, a span 1 MiB."""
    tensors = {fqn: torch.empty(tensor.shape) for fqn, tensor in state().items()}
    payloads, at = [], 100
    for fqn, tensor in tensors.items():
        payloads.append((at, tensor.nbytes, 0, bytes(4 * -(-tensor.nbytes // (1 << 20))), None, fqn))
        at += tensor.nbytes + (40_000 if fqn == "t300" else 700)
    batches = direct_batches({"file": list(reversed(payloads))})
    assert all(batch.nbytes == sum(one[1] for one in batch.payloads) <= 16 << 20 for batch in batches)
    assert sum(batch.nbytes for batch in batches) == sum(tensor.nbytes for tensor in tensors.values())
    reader = Reader(None, "always", direct=DirectReads(tensors))  # type: ignore[arg-type]
    reads = [read for batch in batches for read in reader.direct_reads(batch, Scratch(), Stop())[0]]
    assert len(reads) < 20
    ends = [read.offset + len(read.into) for read in reads]
    assert all(end <= read.offset for end, read in zip(ends, reads[1:], strict=False))
    for offset, nbytes, *_ in payloads:
        covered = sum(
            max(0, min(end, offset + nbytes) - max(read.offset, offset)) for end, read in zip(ends, reads, strict=True)
        )
        assert covered == nbytes
    assert not any(read.offset < 100 + 40_000 and len(read.into) > 1 << 20 and read.arrived for read in reads)


def test_removed_tensors_are_not_read() -> None:
    direct = DirectReads()
    row = ("float32", (2,), 8, "file", 0, 100, 50, bytes(4), None, ("a",))
    for fqn in ("a", "b"):
        assert direct.add([(fqn, torch.zeros(2), row)]) == {fqn}
    direct.remove({"a"})
    (batch,) = direct_batches(direct.payloads)
    assert isinstance(batch, DirectBatch)
    assert [one[-1] for one in batch.payloads] == ["b"] == list(direct.tensors)


async def test_a_read_that_comes_back_late_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load has failed meanwhile, said which tensors it has written, and left them to their owner."""
    monkeypatch.setattr(threads, "_GRACE_S", 0.2)
    saved = {f"t{number}": torch.ones(256) for number in range(200)}
    await sidestream.save(saved, tmp_path / "step")
    hangs, go, left = threading.Event(), threading.Event(), threading.Event()
    preadv = os.preadv

    def hanging(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = preadv(descriptor, buffers, offset, flags)
        if sum(map(len, buffers)) > 100_000:
            hangs.set()
            go.wait(60)
            threading.Timer(0.5, left.set).start()
        return count

    monkeypatch.setattr(os, "preadv", hanging)
    target = {fqn: torch.zeros(256) for fqn in saved}

    async def load(timeout_s: float) -> None:
        await sidestream.load(target, tmp_path / "step", options=sidestream.LoadOptions(timeout_s=timeout_s))

    try:
        error = await late(load, hangs.is_set)
    finally:
        go.set()
    assert isinstance(error, DeadlineExceededError)
    assert error.written == ()
    await asyncio.to_thread(left.wait, 60)
    assert not any(tensor.any() for tensor in target.values())


async def test_storage_that_is_freed_meanwhile(tmp_path: Path) -> None:
    saved = {f"t{number}": torch.ones(256) for number in range(200)}
    await sidestream.save(saved, tmp_path / "step")
    target = {fqn: torch.zeros(256) for fqn in saved}

    def free(done: int, total: int) -> None:
        if not done:
            target["t150"].untyped_storage().resize_(0)

    with pytest.raises(UnsupportedTensorError, match="t150: its storage was freed"):
        await sidestream.load(target, tmp_path / "step", options=sidestream.LoadOptions(progress=free))


async def test_a_tensor_without_memory(tmp_path: Path) -> None:
    await sidestream.save({"a": torch.ones(3)}, tmp_path / "step")
    with pytest.raises(sidestream.errors.SidestreamError):
        await sidestream.load({"a": torch._efficientzerotensor(3)}, tmp_path / "step")


def test_many_views_of_one_array_are_not_compared_in_pairs() -> None:
    columns = torch.zeros(4, 256).unbind(1)
    tiles = [tile for row in torch.zeros(64, 64).split(4) for tile in row.split(4, 1)]
    for views in (columns, tiles):
        assert matching._all_disjoint(views)
        calls = calls_between_pauses(partial(matching._all_disjoint, views))
        assert sum(calls) < 100 * len(views)
        assert max(calls) < 10 * len(views)


SPANS = st.tuples(st.integers(0, 5), st.integers(1, 6))


@given(st.lists(st.tuples(SPANS, SPANS), min_size=2, max_size=6))
def test_views_that_are_held_apart_have_no_element_in_common(spans: list[tuple[tuple[int, int], ...]]) -> None:
    numbers = torch.arange(36).reshape(6, 6)
    views = [numbers[top : top + height, left : left + width] for (top, height), (left, width) in spans]
    views.sort(key=torch.Tensor.data_ptr)
    met = torch.cat([view.reshape(-1) for view in views])
    if matching._all_disjoint(views):
        assert len(met.unique()) == len(met)


async def test_entries_of_tensors_that_are_not_tied_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sidestream.save({f"t{number}": torch.ones(2, 3) for number in range(50)}, tmp_path / "step")
    made: list[str] = []
    make = Entries.__getitem__
    monkeypatch.setattr(Entries, "__getitem__", lambda self, fqn: made.append(fqn) or make(self, fqn))
    target = {f"t{number}": torch.zeros(3, 2).t() for number in range(50)}
    await sidestream.load(target, tmp_path / "step")
    assert all(tensor.all() for tensor in target.values())
    assert len(made) == 2 * 50  # for the match and for the read
