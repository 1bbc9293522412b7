"""Ranks that export together: each writes some of the files, and one failure ends the export on all of them."""

from __future__ import annotations

import filecmp
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import _exports
import pytest
import torch
from _s3_server import serving

import sidestream

if TYPE_CHECKING:
    from conftest import Groups


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("world", [2, 3])
async def test_the_files_are_divided_and_have_the_same_bytes(world: int, groups: Groups, tmp_path: Path) -> None:
    results = groups.run("exports", world, tmp_path).results
    assert all(told == results[0][0] for told, _ in results)  # every rank has the whole report
    for rank, (_, wrote) in enumerate(results):
        assert [one[:2] for one in wrote] == [[rank, world]] * 3
        assert all(nbytes > 0 for *_, nbytes in wrote)
    for checkpoint, export, dtype, number in (
        ("step", "hf", torch.bfloat16, 0),
        ("run/step-6.g2", "exports/6", None, 2),
    ):
        report = results[0][0][number]
        assert sum(wrote[number][2] for _, wrote in results) == report[2]
        again = await sidestream.convert(
            tmp_path / checkpoint,
            tmp_path / "alone",
            format="safetensors",
            select="model.*",
            names=sidestream.strip_prefix("model."),
            dtype=dtype,
            options=sidestream.ConvertOptions(max_shard_bytes=_exports.FILE_BYTES),
        )
        found = files_in(tmp_path / export)
        assert found.pop("config.json") == b"{}"
        exported = await sidestream.open_checkpoint(tmp_path / export)
        alone = await sidestream.open_checkpoint(tmp_path / "alone")
        assert set(exported) <= set(alone)
        for name in exported:
            assert torch.equal(await exported.tensor(name), await alone.tensor(name))
        assert set(again.tensors) - set(report[3]) == {"tied"}  # which an export notes in the header
        assert len(found) >= 4
        for path in (tmp_path / "alone").iterdir():
            path.unlink()
        (tmp_path / "alone").rmdir()
    assert list(tmp_path.rglob("*.partial")) == []


async def test_the_bytes_are_those_of_one_process(groups: Groups, tmp_path: Path) -> None:
    """What one process exports from the committed checkpoint."""
    groups.run("exports", 2, tmp_path)
    saved = await (await sidestream.open_checkpoint(tmp_path / "step")).state_dict()
    export = _exports.export_to(tmp_path / "one", 0, dtype=torch.bfloat16)
    await sidestream.save(saved, tmp_path / "copy", export=export, options=sidestream.SaveOptions(streaming=True))
    _, mismatch, errors = filecmp.cmpfiles(
        tmp_path / "hf", tmp_path / "one", [path.name for path in (tmp_path / "one").iterdir()], shallow=False
    )
    assert (mismatch, errors) == ([], [])


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("collides", "KeyCollisionError"),
        ("differs", "InvalidOptionError"),
        ("differs in dtype", "InvalidOptionError"),
        ("cancelled", "CancelledError"),
        ("cancelled before its first step", "CancelledError"),
        ("cancelled while it chooses", "CancelledError"),
        ("cancelled late", "CancelledError"),
    ],
)
def test_a_rank_that_fails(how: str, kind: str, who: int, groups: Groups, tmp_path: Path) -> None:
    results = groups.run("failing_export", 2, tmp_path, how=how, who=who).results
    guilty = 0 if how.startswith("differs") else who  # rank 0 compares
    for rank, told in enumerate(results):
        expected = "CancelledError" if how.startswith("cancelled") and rank == who else [[guilty, kind]]
        assert told == ["committed", True, expected]
    assert not (tmp_path / "hf").exists()
    assert (tmp_path / "again" / "model.safetensors.index.json").exists()
    assert list(tmp_path.glob(".*.partial")) == []


@pytest.mark.parametrize("how", ["dies", "dies written"])
@pytest.mark.parametrize("who", [0, 1])
async def test_a_rank_that_dies(how: str, who: int, groups: Groups, tmp_path: Path) -> None:
    ended = groups.run_any("failing_export", 3, tmp_path, how=how, who=who)
    assert ended.codes == [-signal.SIGKILL if rank == who else 0 for rank in range(3)], ended.said
    for rank, told in enumerate(ended.results):
        if rank != who:
            assert told == ["committed", True, [[who, "RankDied"]]]
    assert (await sidestream.verify(tmp_path / "step")).ok
    assert not (tmp_path / "hf").exists()
    if who:
        assert list(tmp_path.glob(".*.partial")) == []


def test_ranks_that_do_not_all_export_and_a_save_that_fails(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("exports_that_differ", 2, tmp_path).results
    assert results == [[[[0, "InvalidOptionError", True]], "RankFailuresError", "SnapshotLostError"]] * 2
    assert not (tmp_path / "hf").exists()


def test_the_checkpoint_of_another_save_is_not_exported(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("export_of_a_replaced_checkpoint", 2, tmp_path).results
    assert results == [["CheckpointNotFoundError", str(tmp_path / "second")]] * 2
    assert not (tmp_path / "first").exists()


def test_a_step_stays_until_the_ranks_have_exported_it(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("exports_of_a_run_that_prunes", 2, tmp_path).results
    assert results == [[["step-2"] if rank == 0 else [], str(tmp_path / "exports" / "2")] for rank in range(2)]
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-3"]


def test_exports_that_overlap_at_one_step(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("exports_that_overlap", 2, tmp_path).results
    assert results == [[[[1, "InvalidOptionError"]], [3]]] * 2


async def test_object_storage(groups: Groups, tmp_path: Path) -> None:
    with serving() as server:
        url = f"s3://{server.bucket}/ranks"
        results = groups.run("exports_on_storage", 2, tmp_path, url=url, options=server.options).results
        assert results == [[True, "committed"]] * 2
        exported = await sidestream.open_checkpoint(f"{url}/hf", storage_options=server.options)
        saved = await sidestream.open_checkpoint(f"{url}/step", storage_options=server.options)
        for name in exported:
            assert torch.equal(await exported.tensor(name), await saved.tensor(f"model.{name}"))
        names = {key.partition("ranks/")[2] for key in server.objects}
        assert {"hf/config.json", "hf/model.safetensors.index.json"} <= names
        results = groups.run("exports_on_storage", 2, tmp_path, url=url, options=server.options, fails=1).results
        assert results == [[[[1, "CancelledError"]], "committed"], ["CancelledError", "committed"]]
        assert not any("/failed/" in key for key in server.objects)


async def test_directories_that_cannot_be_renamed(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("exports_on_storage", 2, tmp_path, url=str(tmp_path), options=None).results
    assert results == [[True, "committed"]] * 2
    exported = await sidestream.open_checkpoint(tmp_path / "hf")
    saved = await sidestream.open_checkpoint(tmp_path / "step")
    for name in exported:
        assert torch.equal(await exported.tensor(name), await saved.tensor(f"model.{name}"))
    results = groups.run("exports_on_storage", 2, tmp_path, url=str(tmp_path), options=None, fails=1).results
    assert results == [[[[1, "CancelledError"]], "committed"], ["CancelledError", "committed"]]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} >= {"hf", "step", "step-2"}
    assert not (tmp_path / "failed").exists()
    assert list(tmp_path.glob(".*.partial")) == []
