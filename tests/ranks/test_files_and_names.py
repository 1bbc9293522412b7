"""Sidecar files of ranks that save together, and loads of ranks under other names."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import sidestream

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
