"""Files that are not checkpoints: the error names the kind of file and what to do with it."""

from __future__ import annotations

import asyncio
import collections
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
from states import assert_same

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


# --- what torch.load(weights_only=True) reads ---


SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(),
    "not coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[1, 1], [0, 0]]), torch.tensor([1.0, 2.0]), (2, 2), check_invariants=True
    ),
    "csr": lambda: torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr(),
    "csc": lambda: torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", SPARSE)
async def test_sparse_tensors_in_a_file_of_torch_save(kind: str, zipped: bool, tmp_path: Path) -> None:
    saved = SPARSE[kind]()
    state = {"w": torch.ones(2), "list": [saved], "last": torch.ones(1)}
    torch.save(state, tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)
    checkpoint = await sidestream.open_checkpoint(tmp_path / "f.pt")
    assert set(checkpoint) == {"w", "list.0", "last"}
    found = (await checkpoint.state_dict())["list"][0]
    assert (found.layout, found.shape, found.dtype) == (saved.layout, saved.shape, saved.dtype)
    assert torch.equal(found.to_dense(), saved.to_dense())
    assert saved.layout is not torch.sparse_coo or found.is_coalesced() == saved.is_coalesced()
    target = {"list": [torch.zeros(saved.shape).to_sparse(layout=saved.layout, **blocks(saved))]}
    await sidestream.load(target, tmp_path / "f.pt")
    assert torch.equal(target["list"][0].to_dense(), saved.to_dense())
    assert (await sidestream.verify(tmp_path / "f.pt")).ok
    await sidestream.convert(tmp_path / "f.pt", tmp_path / "c")
    found = await (await sidestream.open_checkpoint(tmp_path / "c")).tensor("list.0")
    assert torch.equal(found.to_dense(), saved.to_dense())
    with pytest.raises(errors.UnsupportedTensorError, match=r"list\.0: .*select="):
        await sidestream.convert(tmp_path / "f.pt", tmp_path / "g.safetensors")
    await sidestream.convert(tmp_path / "f.pt", tmp_path / "g.safetensors", select=["w", "last"])


def blocks(tensor: torch.Tensor) -> dict[str, Any]:
    return {"blocksize": (2, 2)} if tensor.layout in (torch.sparse_bsr, torch.sparse_bsc) else {}


def test_indices_of_a_sparse_tensor_are_checked(tmp_path: Path) -> None:
    outside = torch.sparse_coo_tensor(torch.tensor([[5]]), torch.ones(1), (2,), check_invariants=False)
    torch.save({"w": torch.ones(2), "v": outside}, tmp_path / "f.pt")
    sidestream.blocking.load({"w": torch.zeros(2)}, tmp_path / "f.pt")
    with pytest.raises(errors.CorruptCheckpointError, match="v: its parts do not form a tensor of layout sparse_coo"):
        sidestream.blocking.open_checkpoint(tmp_path / "f.pt").state_dict()


@pytest.mark.parametrize("zipped", [True, False])
async def test_mappings_of_the_standard_library(zipped: bool, tmp_path: Path) -> None:
    milestones = collections.Counter({30: 1, 80: 2})
    lists = collections.defaultdict(list, {"a": [1], "b": []})
    state = {"milestones": milestones, "lists": lists, "empty": collections.Counter(), "tuple": (milestones, 1)}
    torch.save({"w": torch.ones(2), **state}, tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)
    found = await (await sidestream.open_checkpoint(tmp_path / "f.pt")).state_dict()
    plain = {"milestones": dict(milestones), "lists": dict(lists), "empty": {}, "tuple": (dict(milestones), 1)}
    assert_same({"w": torch.ones(2), **plain}, found)
    target = {"milestones": collections.Counter({30: 0, 80: 0}), "w": torch.zeros(2)}
    await sidestream.load(target, tmp_path / "f.pt")
    assert target["milestones"] == milestones
    assert type(target["milestones"]) is collections.Counter
    assert torch.equal(target["w"], torch.ones(2))
    await sidestream.convert(tmp_path / "f.pt", tmp_path / "c")
    assert_same(found, await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict())


OTHERS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "quantized": (lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8), "a quantized tensor"),
    "by channel": (
        lambda: torch.quantize_per_channel(torch.eye(2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        "a quantized tensor",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
    "meta": (lambda: torch.ones(2, device="meta"), "a tensor on the meta device"),
}


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantized and nested tensors
@pytest.mark.parametrize("kind", OTHERS)
async def test_a_tensor_of_another_kind_hides_no_other_name(kind: str, tmp_path: Path) -> None:
    make, called = OTHERS[kind]
    path = tmp_path / "f.pt"
    torch.save({"w": torch.ones(2), "m": {"v": make()}}, path)
    target = {"w": torch.zeros(2)}
    await sidestream.load(target, path)
    assert torch.equal(target["w"], torch.ones(2))
    says = rf"m\.v: it was saved as {called}, .*load it with torch\.load"
    checkpoint = await sidestream.open_checkpoint(path)
    assert set(checkpoint) == {"w", "m.v"}
    assert set(dict(checkpoint)) == {"w", "m.v"}
    for refuses in (
        sidestream.load({"m": {"v": torch.zeros(2, 2)}}, path),
        checkpoint.tensor("m.v"),
        checkpoint.state_dict(),
        sidestream.convert(path, tmp_path / "c"),
    ):
        with pytest.raises(errors.UnsupportedCheckpointError, match=says):
            await refuses
    await sidestream.convert(path, tmp_path / "c", select="w")
    report = await sidestream.verify(path)
    assert report.ok
    assert report.unreadable == ("m.v",)
    torch.load(path, weights_only=True)  # the remedy


async def test_tensors_that_were_saved_with_attributes(tmp_path: Path) -> None:
    parameter, plain = torch.nn.Parameter(torch.ones(2)), torch.ones(3)
    parameter.tensor_model_parallel = plain.tag = "mine"  # type: ignore[attr-defined]
    torch.save({"p": parameter, "t": plain, "l": [plain]}, tmp_path / "f.pt")
    found = await (await sidestream.open_checkpoint(tmp_path / "f.pt")).state_dict()
    assert_same({"p": torch.ones(2), "t": torch.ones(3), "l": [torch.ones(3)]}, found)
