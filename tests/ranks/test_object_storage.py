"""Ranks where nothing is renamed, and names carry the id of the save: object storage, and ``commit="marker"``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from _s3_server import serving
from keywords import for_load

import sidestream

if TYPE_CHECKING:
    from conftest import Groups


async def test_ranks_save_to_a_bucket(groups: Groups, tmp_path: Path) -> None:
    with serving() as server:
        url = f"s3://{server.bucket}/ranks"
        results = groups.run("object_storage", 2, tmp_path, url=url, options=server.options).results
        assert all(told == results[0] for told in results)
        ids, restored, failures = results[0]
        assert (restored, failures) == (1, [[1, "UnsafeObjectError"]])
        report = await sidestream.verify(f"{url}/run/step-1", storage_options=server.options)
        assert report.ok, report.damaged
        assert report.save_id == ids[1]


async def test_ranks_replace_a_checkpoint_in_a_bucket(groups: Groups, tmp_path: Path) -> None:
    with serving() as server:
        url = f"s3://{server.bucket}/ranks/last"
        where = {"storage": sidestream.Storage(server.options, policy=sidestream.StorePolicy(engine="obstore"))}
        results = groups.run("overwritten_on_storage", 2, tmp_path, url=url, options=server.options).results
        assert all(told == results[0] for told in results)
        ids, failures = results[0]
        assert len(set(ids)) == 3
        assert failures == [[0, "CheckpointExistsError"]]
        target = {"other": torch.zeros(3)}
        report = await sidestream.load(target, url, **for_load(**where))
        assert target["other"].tolist() == [1.0] * 3
        names = {key.rpartition("/")[2] for key in server.objects}
        assert all(report.save_id in name for name in names - {".metadata"})


def test_what_was_saved_to_storage_first_can_be_read_from_a_disk(groups: Groups, tmp_path: Path) -> None:
    groups.run("storage_then_disk", 1, tmp_path)


async def test_ranks_save_without_a_rename(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("marked", 2, tmp_path).results
    assert all(told == results[0] for told in results)
    ids, restored, failures = results[0]
    assert (restored, failures) == (1, [[1, "UnsafeObjectError"]])
    report = await sidestream.verify(tmp_path / "run/step-1")
    assert report.ok, report.damaged
    names = {path.name for path in (tmp_path / "run/step-1").iterdir()}
    assert all(ids[1] in name for name in names - {".metadata"})
    assert not (tmp_path / "bad").exists()
