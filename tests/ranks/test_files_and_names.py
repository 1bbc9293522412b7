"""Sidecar files of ranks that save together, and saves and loads of ranks under other names."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

import sidestream
from sidestream._load.target import StateTarget

if TYPE_CHECKING:
    from conftest import Groups


async def test_the_files_of_rank_0_and_a_load_with_names(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("with_files", 2, tmp_path).results
    assert results == [[[0, "StorageError"]]] * 2
    opened = await sidestream.open_checkpoint(tmp_path / "step")
    assert await opened.file("rank") == b"0"
    assert opened.files == {"rank": 1}
    assert (await sidestream.verify(tmp_path / "step")).ok
    assert not (tmp_path / "none").exists()
    (manifest,) = (path for path in (tmp_path / "step").glob("manifest-*") if "." not in path.name)
    head = json.loads(manifest.read_bytes().partition(b"\n")[0])
    assert len(head["files"]) == 4
    assert head["file_crcs"] == {name: zlib.crc32((tmp_path / "step" / name).read_bytes()) for name in head["files"]}
    assert list(tmp_path.glob(".*.partial")) == []


async def test_ranks_save_under_other_names_and_with_other_dtypes(
    groups: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = groups.run("saved_as", 2, tmp_path).results
    assert results == [[[1, "KeyCollisionError"]]] * 2
    assert not (tmp_path / "none").exists()
    torch.manual_seed(3)
    whole, replica = torch.randn(601, 1001), torch.randn(200, 300)
    expected = {
        "weights.a": whole.bfloat16(),
        "weights.b": whole.bfloat16(),
        "model.columns": whole.half(),
        "model.replica": replica,
        "rank.0": whole[0],
        "rank.1": whole[1].double(),
    }
    for number in range(2):
        checkpoint = await sidestream.open_checkpoint(tmp_path / f"step{number}")
        found = {name: await checkpoint.tensor(name) for name in checkpoint}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        assert (await checkpoint.verify()).ok
        files = sum(one.stat().st_size for one in (tmp_path / f"step{number}").glob("*.distcp"))
        assert files < 2 * whole.numel() * 2 + 1_000_000  # the tied tensor once
        stock = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        dcp.load(stock, checkpoint_id=tmp_path / f"step{number}", no_dist=True)
        assert all(torch.equal(stock[name], tensor) for name, tensor in expected.items())
    tied = torch.zeros_like(whole, dtype=torch.bfloat16)
    monkeypatch.setattr(StateTarget, "_aside", None)  # nothing is read for a comparison
    await sidestream.load({"weights": {"a": tied, "b": tied}}, tmp_path / "step0")
    assert torch.equal(tied, expected["weights.a"])
