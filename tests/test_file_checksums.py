"""The checksum of each whole file, which is put together from those of its parts, and where it is noted."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import sidestream
from sidestream._format.manifest import parse_manifest
from sidestream._format.shared import Root
from sidestream.dcp import StorageWriter
from sidestream.errors import CorruptCheckpointError


def state() -> dict[str, Any]:
    """Small tensors side by side, some on pages of their own, one of several blocks, one of several windows."""
    sizes = [1, 3, *[300] * 200, 1 << 14, (1 << 14) + 1, 1 << 18, (1 << 20) + 3, 10 << 20, 0, 7]
    return {**{f"t{number}": torch.randn(size) for number, size in enumerate(sizes)}, "n": 3}


def head_of(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(raw.partition(b"\n")[0])
    return found


def check(directory: Path, files: int) -> None:
    (manifest,) = directory.glob("manifest-*")
    head = head_of(manifest.read_bytes())
    assert head["file_crcs"].keys() == head["files"].keys()
    assert len(head["files"]) == files
    assert head["file_crcs"] == {name: zlib.crc32((directory / name).read_bytes()) for name in head["files"]}


@pytest.mark.parametrize("saver", ["thread", "process"])
@pytest.mark.parametrize("digest", [None, "blake3"])
async def test_of_a_save(tmp_path: Path, saver: Any, digest: Any) -> None:
    await sidestream.save(
        state(), tmp_path / "step", files={"notes": b"abc"}, options=sidestream.SaveOptions(writer=saver, digest=digest)
    )
    check(tmp_path / "step", 3)
    assert (await sidestream.verify(tmp_path / "step")).ok


async def test_of_a_state_that_passes_through_little_memory(tmp_path: Path) -> None:
    async with sidestream.AsyncStager(budget_bytes=8 << 20) as stager:
        await sidestream.save(state(), tmp_path / "step", stager=stager)
    check(tmp_path / "step", 2)


async def test_of_a_conversion(tmp_path: Path) -> None:
    await sidestream.save(state(), tmp_path / "step", files={"notes": b"abc"})
    await sidestream.convert(tmp_path / "step", tmp_path / "again")
    check(tmp_path / "again", 3)


async def test_on_object_storage() -> None:
    await sidestream.save(state(), "memory://file-checksums/step")
    files = fsspec.filesystem("memory")
    (manifest,) = (name for name in files.ls("/file-checksums/step", detail=False) if "/manifest-" in name)
    head = head_of(files.cat(manifest))
    assert head["file_crcs"].keys() == head["files"].keys()
    for name, crc in head["file_crcs"].items():
        assert zlib.crc32(files.cat(f"/file-checksums/step/{name}")) == crc


@pytest.mark.parametrize(
    "crcs", [{"other": 1}, {"__0_1.distcp": -1}, {"__0_1.distcp": 1 << 32}, {"__0_1.distcp": "1"}, [1]]
)
async def test_what_is_none(tmp_path: Path, crcs: Any) -> None:
    await sidestream.save(state(), tmp_path / "step")
    (manifest,) = (tmp_path / "step").glob("manifest-*")
    raw = manifest.read_bytes()
    head, _, rest = raw.partition(b"\n")
    changed = json.dumps({**json.loads(head), "file_crcs": crcs}).encode() + b"\n" + rest
    with pytest.raises(CorruptCheckpointError):
        parse_manifest(changed)
    assert not isinstance(parse_manifest(raw), Root)


def test_of_calls_of_dcp(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "step"), no_dist=True)
    check(tmp_path / "step", 2)
