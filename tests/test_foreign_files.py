"""Files that are not checkpoints: the error names the kind of file and what to do with it."""

from __future__ import annotations

import asyncio
import gzip
import io
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save, save_file

import sidestream
from sidestream import errors

WEIGHTS = {"w": torch.arange(3.0)}


def older(protocol: int) -> bytes:
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    return buffer.getvalue()


def newer() -> bytes:
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer)
    return buffer.getvalue()


def script() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), buffer)
    return buffer.getvalue()


def zip_of(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")
    return buffer.getvalue()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("w"), io.BytesIO())
    return buffer.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 548105171\n"

FILES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "TorchScript": ("m.pt", script, r"TorchScript program .*torch\.jit\.load it"),
    "exported": (
        "m.pt",
        lambda: zip_of("m/archive_format", "m/models/model.json"),
        r"exported program .*torch\.export",
    ),
    "npz": ("m.pt", lambda: zip_of("a.npy", "b.npy"), "holds NumPy arrays"),
    "other zip": ("m.bin", lambda: zip_of("word/document.xml"), r"a zip file that torch\.save did not write"),
    "text": ("notes.pt", lambda: b"learning rate: 0.1\n", "a text file"),
    "long text": ("notes.pt", lambda: "grün ".encode() * 200, "a text file"),
    "HTML": ("m.bin", lambda: b"<!DOCTYPE html><title>404</title>", "an HTML page"),
    "Git LFS": ("m.bin", lambda: POINTER, "git lfs pull"),
    "gzip": ("m.pt", lambda: gzip.compress(newer()), "compressed with gzip"),
    "tar": ("m.pt", tar, "a tar archive"),
    "pickle": ("m.pt", lambda: pickle.dumps({"w": 1}), "a plain pickle"),
    "numpy": ("m.pt", lambda: b"\x93NUMPY\x01\x00" + bytes(100), r"torch\.from_numpy"),
    "HDF5": ("m.pt", lambda: b"\x89HDF\r\n\x1a\n" + bytes(100), "h5py"),
    "misnamed safetensors": ("m.pt", lambda: save(WEIGHTS), r"a safetensors file: .*ends in \.safetensors"),
    "misnamed zip": ("m.safetensors", newer, r"it is a zip file; if torch\.save wrote it, .*ends in \.pt"),
    "text as safetensors": ("m.safetensors", lambda: POINTER, "git lfs pull"),
    "before zips as safetensors": (
        "m.safetensors",
        lambda: older(2),
        r"before torch 1\.6: rename it so that its name ends in \.pt",
    ),
}


@pytest.mark.parametrize("kind", FILES)
async def test_what_a_file_is_and_what_to_do(kind: str, tmp_path: Path) -> None:
    name, content, says = FILES[kind]
    path = tmp_path / name
    path.write_bytes(content())
    for refuses in (
        sidestream.load({"w": torch.zeros(3)}, path),
        sidestream.open_checkpoint(path),
        sidestream.verify(path),
        sidestream.convert(path, tmp_path / "out"),
    ):
        with pytest.raises(errors.UnsupportedCheckpointError, match=says) as refused:
            await refuses
        assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", [".metadata", "__0_1.distcp", "manifest"])
async def test_one_file_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    await sidestream.save({"w": torch.ones(3), "step": 1}, tmp_path / "c")
    path = next((tmp_path / "c").glob(f"{name}*"))
    with pytest.raises(
        errors.UnsupportedCheckpointError, match="one file of a checkpoint: use the path of the directory"
    ):
        await sidestream.open_checkpoint(path)


async def test_a_pointer_of_git_lfs_in_a_directory(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(POINTER)
    with pytest.raises(errors.UnsupportedCheckpointError, match=r"model-00002-of-00002\.safetensors .*git lfs pull"):
        await sidestream.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.pt", lambda: newer()[:-40]),
        ("begin.pt", lambda: b"\xff" + newer()[1:]),
        ("zeros.pt", lambda: bytes(1000)),
        ("short.pt", lambda: b"\x80"),
        ("empty.pt", lambda: b""),
        ("renamed.pt", lambda: newer().replace(b"data.pkl", b"data.pk1")),
        ("cut.safetensors", lambda: save(WEIGHTS)[:-1]),
        ("empty.safetensors", lambda: b""),
    ],
)
async def test_damage_is_damage(name: str, content: Callable[[], bytes], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content())
    with pytest.raises(errors.CorruptCheckpointError, match=name):
        await sidestream.open_checkpoint(tmp_path / name)
    assert not (await sidestream.verify(tmp_path / name)).ok


class FailingFileSystem(MemoryFileSystem):
    """Every second read fails."""

    cachable = False
    reads = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.reads += 1
        if self.reads % 2 == 0:
            raise OSError(5, "the disk of the server is broken")
        content: bytes = super().cat_file(path, start, end, **options)
        return content


async def test_a_read_that_fails_is_not_damage() -> None:
    """``zipfile`` takes an ``OSError`` during its search for the end record for a sign of damage."""
    filesystem = FailingFileSystem()
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(1 << 18)}, buffer)
    filesystem.pipe_file("/models/m.pt", buffer.getvalue())
    storage = sidestream.Storage(filesystem=filesystem, policy=sidestream.StorePolicy(retries=0))
    with pytest.raises(errors.StorageError, match="broken"):
        await sidestream.open_checkpoint("memory://models/m.pt", storage=storage)


async def test_more_files_at_a_time_than_the_shared_pool_has_threads(tmp_path: Path) -> None:
    """A thread that parses a file waits for threads that read it, and must not take their place."""
    paths = [tmp_path / f"{index}.pt" for index in range(24)]
    for path in paths:
        path.write_bytes(newer())
    opened = await asyncio.gather(*(sidestream.open_checkpoint(path, timeout_s=60) for path in paths))
    assert all(list(one) == ["w"] for one in opened)
