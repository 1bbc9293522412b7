"""Tensors that consist of others: what ranks save of them together, and who reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _composites import equal, low, replicas, sparse
from rewritten import rewritten
from torch.testing._internal.two_tensor import TwoTensor

import sidestream
from sidestream.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from conftest import Groups


@pytest.fixture(scope="module")
def saved(groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("composites")
    groups.run("saved_composites", 3, directory)
    return directory


@pytest.mark.parametrize("world", [2, 3])
def test_loaded_by_ranks(world: int, groups: Groups, saved: Path) -> None:
    groups.run("loaded_composites", world, saved, saved_by=3)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
async def test_loaded_by_one_process(saved: Path, tmp_path: Path) -> None:
    allow = [TwoTensor]
    copied = await sidestream.convert(saved / "step1", tmp_path / "converted", format="dcp")
    assert copied.tensors
    for place in (saved / "step1", tmp_path / "converted"):
        assert (await sidestream.verify(place)).ok
        opened = await sidestream.open_checkpoint(place, safe_globals=allow)
        state = await opened.state_dict()
        own = state.pop("own")
        assert torch.equal(state.pop("rows"), torch.arange(70.0).reshape(10, 7) + 1)
        equal(state, replicas(1))
        equal(own, {f"rank{rank}": sparse(10 * rank + 1) for rank in range(3)})
    assert opened.info("coo").kind == "sparse_coo"


def test_stock_reads_the_parts(saved: Path) -> None:
    one, other = sparse(1), sparse(21)
    target = {
        "coo": {"indices": torch.zeros(2, one._nnz(), dtype=torch.int64), "values": torch.zeros(one._nnz())},
        "two": [{"a": torch.zeros(10, 7), "b": torch.zeros(10, 7)}],
        "low": torch.zeros(8, dtype=torch.uint8),
        "own": {"rank2": {"values": torch.zeros(other._nnz())}},
    }
    dcp.load(target, checkpoint_id=saved / "step1", no_dist=True)
    assert torch.equal(target["coo"]["indices"], one.indices())
    assert torch.equal(target["coo"]["values"], one.values())
    assert torch.equal(target["two"][0]["b"], torch.arange(70.0).reshape(10, 7) + 2)
    assert torch.equal(target["low"], low(1).view(torch.uint8))
    assert torch.equal(target["own"]["rank2"]["values"], other.values())


def test_the_manifest_has_a_version_that_old_readers_refuse(saved: Path) -> None:
    (root,) = (path for path in (saved / "step1").glob("manifest-*") if "." not in path.name)
    head, *lines = (json.loads(line) for line in root.read_bytes().splitlines())
    assert head["sidestream"] == 4
    found = {line[2]: line[1] for line in lines if line[0] == "composite"}
    assert found["coo"] == ["sparse_coo", "float32", [8, 8], None, ["indices", "values"], True]
    assert found.keys() == {"coo", "csr", "two.0", "big", "own.rank0", "own.rank1", "own.rank2"}


def lacking(lines: list[Any]) -> None:
    """Let a composite tensor consist of parts that have no entries."""
    (line,) = (line for line in lines[1:] if line[2:3] == ["two.0"])
    line[1][4] = ["a", "absent"]


def unversioned(lines: list[Any]) -> None:
    lines[0]["sidestream"] = 2


@pytest.mark.parametrize("change", [lacking, unversioned])
async def test_damaged_manifests(
    change: Callable[[list[Any]], None], groups: Groups, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "step1", tmp_path / "damaged")
    rewritten(tmp_path / "damaged", change)
    with pytest.raises(CorruptCheckpointError, match="damaged: "):
        await sidestream.open_checkpoint(tmp_path / "damaged")
    for failures in groups.run("damaged_composites", 2, tmp_path).results:
        assert {kind for _, kind, _ in failures} == {"CorruptCheckpointError"}


def test_a_large_replica_is_cut(saved: Path) -> None:
    """Its parts are written by all ranks, as any replica."""
    sizes = [sum(one.stat().st_size for one in (saved / "step1").glob(f"__{rank}_*")) for rank in range(3)]
    assert sum(sizes) < 43e6, "each is written once"
    assert min(sizes) > 10e6, sizes


def test_what_ranks_do_not_agree_on(groups: Groups, tmp_path: Path) -> None:
    first, second = groups.run("refused_composites", 2, tmp_path).results
    assert first == second
    (over, *_) = first.pop("over")
    assert over[1] == "UnsupportedTensorError"
    assert "m.x: ranks that save together cannot save a DTensor over the wrapper subclass TwoTensor" in over[2]
    assert 'save what to_local() returns under a name of this rank, such as {f"rank{rank}": ...}' in over[2]
    (long, *_) = first.pop("long")
    assert long[1] == "InvalidOptionError"
    assert "a name of 5004 characters, and 4096 are the most that are read" in long[2]
    (dimensions, *_) = first.pop("dimensions")
    assert dimensions[1] == "UnsupportedTensorError"
    assert "m.x: cannot save a tensor of the shape (1, 1, " in dimensions[2]
    texts = {name: text for name, ((rank, kind, text),) in first.items() if (rank, kind) == (0, "InvalidOptionError")}
    assert texts.keys() == first.keys()
    assert "m.x: a float32 of shape (10, 7) to some ranks, a torch.testing" in texts["kinds"]
    assert "m.x: a sparse_coo (coalesced) of float32 and shape (3, 3) to some ranks, a sparse_csr" in texts["layouts"]
    assert "m.x: a sparse_coo (not coalesced) of float32 and shape (2, 2) to some" in texts["context"]
    assert "m.x.indices: a int64 of shape (2, 4) to some ranks, a int64 of shape (2, 5) to others" in texts["elements"]
    assert "m.x: a torch.testing" in texts["dict"]
    assert "to some ranks, others have m.x.a in it; rename one of them" in texts["dict"]
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".group")} == {"instead"}


def test_loaded_by_ranks_from_one_process(groups: Groups, tmp_path: Path) -> None:
    groups.run("loaded_of_one_process", 2, tmp_path)
