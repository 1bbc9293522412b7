"""Sidecar files (``files=``): committed, verified, copied and read back with the checkpoint."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from keywords import for_save

import sidestream
from sidestream import Checkpointer, open_checkpoint
from sidestream._format.records import Chunk, Manifest, TensorEntry
from sidestream._format.validate import validate
from sidestream._storage import id_of
from sidestream.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    InvalidOptionError,
    MissingKeysError,
    StorageError,
)

STATE = {"weight": torch.arange(24.0).reshape(4, 6), "step": 3}
LARGE = bytes(range(256)) * (3 << 12)  # 3 MiB, so several blocks


def sources(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(LARGE)
    return {"config.json": b'{"layers": 2}', "tokenizer.json": path, "empty": b""}


async def check(url: Any, **options: Any) -> None:
    opened = await open_checkpoint(url, **options)
    assert opened.files == {"config.json": 13, "tokenizer.json": len(LARGE), "empty": 0}
    assert await opened.file("config.json") == b'{"layers": 2}'
    assert await opened.file("tokenizer.json") == LARGE
    assert await opened.file("empty") == b""
    assert set(opened) == set(STATE)
    report = await sidestream.verify(url, **options)
    assert report.ok, report


@pytest.mark.parametrize("options", [{}, {"digest": "blake3"}, {"writer": "process"}, {"streaming": True}])
async def test_files_are_read_back_and_stock_dcp_does_not_mind_them(tmp_path: Path, options: dict[str, Any]) -> None:
    await sidestream.save(STATE, tmp_path / "step", files=sources(tmp_path), **for_save(**options))
    assert (tmp_path / "step" / "config.json").read_bytes() == b'{"layers": 2}'
    await check(tmp_path / "step")
    target = {"weight": torch.zeros(4, 6), "step": 0}
    dcp.load(target, checkpoint_id=tmp_path / "step")
    assert torch.equal(target["weight"], STATE["weight"])


async def test_files_of_a_run_go_with_its_steps_and_a_blocking_save_has_them(tmp_path: Path) -> None:
    async with Checkpointer(tmp_path / "run") as run:
        await run.save(STATE, step=1, files=sources(tmp_path))
        await run.save(STATE, step=2)
        assert (await open_checkpoint(tmp_path / "run" / "step-2")).files == {}
        await check(tmp_path / "run" / "step-1")
    await asyncio.to_thread(
        sidestream.blocking.save, STATE, tmp_path / "blocking", files={"config.json": b"{}", "again": b"x"}
    )
    assert (await open_checkpoint(tmp_path / "blocking")).files == {"config.json": 2, "again": 1}


async def test_files_on_object_storage_carry_the_id_of_the_save(tmp_path: Path) -> None:
    filesystem = fsspec.filesystem("memory")
    url = "memory://sidecars/step"
    await sidestream.save(STATE, url, files=sources(tmp_path))
    save_id = (await open_checkpoint(url)).save_id
    names = {name.rpartition("/")[2] for name in filesystem.ls("/sidecars/step", detail=False)}
    assert f"file-{save_id}.config.json" in names
    await check(url)
    with pytest.raises(CheckpointExistsError):
        await sidestream.save(STATE, url, files={"config.json": b"other"})
    assert {name.rpartition("/")[2] for name in filesystem.ls("/sidecars/step", detail=False)} == names
    await sidestream.copy(url, tmp_path / "copied")
    await check(tmp_path / "copied")


async def test_a_copy_and_a_replacement(tmp_path: Path) -> None:
    await sidestream.save(STATE, tmp_path / "step", files=sources(tmp_path))
    await sidestream.copy(tmp_path / "step", tmp_path / "copied")
    await check(tmp_path / "copied")
    await sidestream.save(STATE, tmp_path / "step", files={"config.json": b"new"}, overwrite=True)
    opened = await open_checkpoint(tmp_path / "step")
    assert opened.files == {"config.json": 3}
    assert await opened.file("config.json") == b"new"
    assert not (tmp_path / "step" / "tokenizer.json").exists()


async def test_a_conversion_takes_them_along_or_says_that_it_does_not(tmp_path: Path) -> None:
    files = {**sources(tmp_path), "x.safetensors": b"not a tensor"}
    await sidestream.save({"weight": STATE["weight"]}, tmp_path / "step", files=files)
    names = {"config.json", "tokenizer.json", "empty"}
    assert (await sidestream.convert(tmp_path / "step", tmp_path / "dcp")).left_out == ()
    converted = await open_checkpoint(tmp_path / "dcp")
    assert converted.files.keys() == names | {"x.safetensors"}
    assert await converted.file("tokenizer.json") == LARGE
    report = await sidestream.convert(tmp_path / "step", tmp_path / "hf", format="safetensors")
    assert report.left_out == ("x.safetensors",)
    assert names < {path.name for path in (tmp_path / "hf").iterdir()}
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == LARGE
    report = await sidestream.convert(tmp_path / "step", tmp_path / "model.pt")
    assert set(report.left_out) == names | {"x.safetensors"}
    (tmp_path / "step" / "tokenizer.json").write_bytes(b"x" * len(LARGE))
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json"):
        await sidestream.convert(tmp_path / "step", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("digest", [None, "blake3"])
async def test_damage_is_found(tmp_path: Path, digest: Any) -> None:
    await sidestream.save(
        STATE, tmp_path / "step", files=sources(tmp_path), options=sidestream.SaveOptions(digest=digest)
    )
    path = tmp_path / "step" / "tokenizer.json"
    raw = bytearray(LARGE)
    raw[2 << 20] ^= 1
    path.write_bytes(raw)
    report = await sidestream.verify(tmp_path / "step")
    assert [(one.file, one.offset) for one in report.damaged] == [("tokenizer.json", 2 << 20)]
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json"):
        await (await open_checkpoint(tmp_path / "step")).file("tokenizer.json")
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json"):
        await sidestream.copy(tmp_path / "step", tmp_path / "copied")
    path.write_bytes(LARGE[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json"):
        await open_checkpoint(tmp_path / "step")
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json"):
        await open_checkpoint(tmp_path / "step")


async def test_a_file_may_change_once_staged_is_done(tmp_path: Path) -> None:
    files = sources(tmp_path)
    pending = sidestream.async_save(STATE, tmp_path / "step", files=files)
    await pending.staged
    files["tokenizer.json"].write_bytes(b"changed")
    await pending
    await check(tmp_path / "step")


@pytest.mark.parametrize(
    "name",
    ["", ".hidden", "a/b", "..", "__0_0.distcp", "manifest-1", ".metadata", "x.metadata", "file-1", "\x1b", "n" * 201],
)
async def test_a_name_that_cannot_be_one_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidOptionError, match="plain file name"):
        await sidestream.save(STATE, tmp_path / "step", files={name: b""})
    with pytest.raises(InvalidOptionError, match="plain file name"):
        async with Checkpointer(tmp_path / "run") as run:
            run.async_save(STATE, step=1, files={name: b""})
    assert not (tmp_path / "step").exists()


async def test_what_is_no_regular_file_is_refused_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate((64 << 20) + 1)
    before = set(tmp_path.iterdir())
    wrong: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "link", StorageError, "link"),
        (tmp_path / "pipe", InvalidOptionError, "regular file"),
        (tmp_path, StorageError, "directory"),
        (tmp_path / "large", InvalidOptionError, "64 MiB"),
        (tmp_path / "missing", StorageError, "missing"),
        (7, InvalidOptionError, "bytes or a path"),
    ]
    for source, error, match in wrong:
        with pytest.raises(error, match=match):
            await sidestream.save(STATE, tmp_path / "step", files={"config.json": source})
        assert set(tmp_path.iterdir()) == before
    with pytest.raises(InvalidOptionError, match="mapping"):
        await sidestream.save(STATE, tmp_path / "step", files=["config.json"])  # type: ignore[arg-type]


async def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    await sidestream.save(STATE, tmp_path / "step", files={"config.json": b"{}"})
    with pytest.raises(MissingKeysError, match=r"config\.json"):
        await (await open_checkpoint(tmp_path / "step")).file("weight")


def sidecar(file: str, nbytes: int, crcs: bytes) -> TensorEntry:
    return TensorEntry((file,), "uint8", (nbytes,), (Chunk((0,), (nbytes,), file, 0, nbytes, 0, crcs),))


@pytest.mark.parametrize(
    ("files", "sidecars"),
    [
        ({"a": 5}, {"a": sidecar("a", 4, b"1234")}),
        ({"a": 4}, {"a": sidecar("a", 4, b"12345678")}),
        ({"a": 4}, {"a": sidecar("a", 4, b"1234"), "b": sidecar("a", 4, b"1234")}),
        ({"a": 4}, {"b": sidecar("b", 4, b"1234")}),
        ({"a": 4}, {"../a": sidecar("a", 4, b"1234")}),
        ({"../a": 4}, {"a": sidecar("../a", 4, b"1234")}),
    ],
)
def test_a_manifest_whose_sidecars_are_no_whole_files_is_corrupt(
    files: dict[str, int], sidecars: dict[str, TensorEntry]
) -> None:
    validate(Manifest("0" * 32, {}, {"a": 4}, sidecars={"a": sidecar("a", 4, b"1234")}))
    with pytest.raises(CorruptCheckpointError):
        validate(Manifest("0" * 32, {}, files, sidecars=sidecars))


def test_a_sidecar_file_on_object_storage_belongs_to_its_save() -> None:
    assert id_of(f"file-{'0a' * 16}.config.json") == "0a" * 16
    assert id_of("file-config.json") is None
