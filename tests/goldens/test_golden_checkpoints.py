"""Checkpoints that commit a3c8103 and other programs wrote are read by every later version: complete, equal, and
undamaged for ``verify``."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _golden_checkpoints import CHECKPOINTS, GOLDENS, Golden
from _golden_composites import COMPOSITES, composites, two, unfolded
from _golden_states import blank, differences, model_and_optimizer, plain, training
from torch.testing._internal.two_tensor import TwoTensor

import sidestream

EVERY = pytest.mark.parametrize("golden", GOLDENS.values(), ids=GOLDENS)
STOCK = pytest.mark.parametrize(
    "golden", [one for one in GOLDENS.values() if one.stock], ids=[name for name, one in GOLDENS.items() if one.stock]
)
pytestmark = pytest.mark.filterwarnings("ignore:.*ComplexHalf support is experimental.*:UserWarning")


def contents(golden: Golden) -> dict[Any, Any]:
    return plain(golden.contents())


def in_any_order(state: Any) -> Any:
    """Ranks and parts merge their keys in an order of their own."""
    if isinstance(state, dict):
        return {key: in_any_order(state[key]) for key in sorted(state, key=lambda key: (str(type(key)), key))}
    return [in_any_order(item) for item in state] if type(state) is list else state


@EVERY
async def test_it_is_read_whole(golden: Golden) -> None:
    checkpoint = await sidestream.open_checkpoint(CHECKPOINTS / golden.path)
    assert differences(in_any_order(contents(golden)), in_any_order(await checkpoint.state_dict())) == []
    assert checkpoint.step == golden.step
    if golden.metadata is not None:
        assert checkpoint.metadata == golden.metadata


@EVERY
async def test_it_is_loaded_in_place(golden: Golden) -> None:
    target = blank(contents(golden))
    await sidestream.load(target, CHECKPOINTS / golden.path)
    assert differences(contents(golden), target) == []


@EVERY
async def test_verify_calls_it_good(golden: Golden) -> None:
    report = await sidestream.verify(CHECKPOINTS / golden.path)
    assert report.ok
    assert report.damaged == ()
    assert (not report.unverified) == golden.checked


@STOCK
def test_stock_dcp_reads_it(golden: Golden) -> None:
    saved = {key: item for key, item in contents(golden).items() if isinstance(key, str)}  # dcp.load sorts the keys
    target = blank(saved)
    dcp.load(target, checkpoint_id=CHECKPOINTS / golden.path, no_dist=True)
    assert differences(saved, target) == []


async def test_a_model_and_its_optimizer_are_loaded() -> None:
    model, optimizer = model_and_optimizer(plus=100.0)
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "config": {"lr": 0.0, "layers": [0, 0]}}
    await sidestream.load(state, CHECKPOINTS / "training")
    assert differences(plain(training()), plain(state)) == []
    assert model[3].weight is model[0].weight


async def test_tied_tensors_are_tied_again() -> None:
    state = await (await sidestream.open_checkpoint(CHECKPOINTS / "tensors")).state_dict()
    assert state["tied"][0] is state["tied"][1]["again"]


async def test_the_signature_is_good() -> None:
    report = await sidestream.signing.verify(CHECKPOINTS / "signed", CHECKPOINTS / "signed.pub")
    assert (report.ok, report.digest) == (True, "verified")


async def test_a_run_goes_on_from_its_steps(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINTS / "run", tmp_path / "run")
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        assert await checkpoints.steps() == [1, 2]
        target = blank(contents(GOLDENS["run, step 2"]))
        assert await checkpoints.restore(target) == 2
        assert differences(contents(GOLDENS["run, step 2, generation 2"]), target) == [], "the newest generation"
        assert await checkpoints.read_metadata(1) == {"loss": 1.5}
    async with sidestream.Checkpointer(tmp_path / "run", keep=sidestream.KeepLast(1)) as checkpoints:
        assert (await checkpoints.prune(dry_run=True)).deleted == ("step-1", "step-2")


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("name", ["composites/threads", "composites-of-ranks/ranks"])
async def test_tensors_that_consist_of_others(name: str) -> None:
    url = COMPOSITES.parent / name
    assert (await sidestream.verify(url)).ok
    anew = await (await sidestream.open_checkpoint(url, safe_globals=[TwoTensor])).state_dict()
    own = anew.pop("own", {})
    assert differences(unfolded(own), unfolded({f"rank{rank}": two(rank) for rank in range(len(own))})) == []
    assert differences(unfolded(composites()), unfolded(anew)) == []
    target = {**composites(plus=3), **({"own": {name: two(5) for name in own}} if own else {})}
    assert differences(unfolded(composites()), unfolded(target)) != []
    await sidestream.load(target, url)
    assert differences(unfolded(own), unfolded(target.pop("own", {}))) == []
    assert differences(unfolded(composites()), unfolded(target)) == []
    parts = {"model": {"two": {"a": torch.zeros(4)}}, "int4": torch.zeros(2, 3, dtype=torch.uint8)}
    dcp.load(parts, checkpoint_id=url, no_dist=True)
    assert torch.equal(parts["model"]["two"]["a"], torch.arange(4.0))
    assert parts["int4"].reshape(-1).tolist() == list(range(6))


async def test_a_damaged_copy_is_found(tmp_path: Path) -> None:
    """The check can fail: altering the payload of each kind is detected."""
    for name in ("tensors", "training", "digest", "ranks", "run/step-1"):
        copy = tmp_path / name
        shutil.copytree(CHECKPOINTS / name, copy)
        shard = copy / "__0_1.distcp"
        shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
        assert not (await sidestream.verify(copy)).ok, name


def test_no_recorded_file_was_changed() -> None:
    """``checkpoints/SHA256SUMS`` has the checksum of every file, as ``sha256sum`` writes it."""
    listed = (CHECKPOINTS.parent / "SHA256SUMS").read_text().splitlines()
    recorded = {line.partition("  ")[2]: line.partition("  ")[0] for line in listed}
    files = (path for path in CHECKPOINTS.parent.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    found = {str(path.relative_to(CHECKPOINTS.parent)): path for path in files}
    assert set(found) == set(recorded)
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()} == recorded


def test_they_stay_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINTS.parent.rglob("*") if path.is_file()) < 2_000_000
