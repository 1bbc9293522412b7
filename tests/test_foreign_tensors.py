"""Tensors of stock DCP that this version does not read: requesting one raises an error that names it, and everything
else in its checkpoint can be read."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from keywords import for_load
from stock import stock_save
from torch.distributed.checkpoint._extension import ZStandard
from torch.utils import _pytree as pytree

import sidestream
from sidestream import errors
from sidestream._foreign.items import locate
from sidestream._format.records import TensorEntry
from sidestream._load.open.manifest import open_manifest
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage import locate_directory
from sidestream.dcp import StorageReader

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*")

PLAIN = {"other": torch.arange(3.0), "step": 7}


class Scaled(torch.Tensor):
    """A subclass that appears as a tensor of ``dtype`` and consists of two others, like the quantized tensors of
    torchao."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype)  # type: ignore[attr-defined]

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: Any, *_: Any) -> Scaled:
        return Scaled(inner["data_"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run(name: str) -> Any:
            inner = pytree.tree_map_only(Scaled, lambda one: getattr(one, name), args)
            return func(*inner, **(kwargs or {}))

        data = run("data_")
        return Scaled(data, run("scale"), args[0].dtype) if isinstance(data, torch.Tensor) else data


def smaller() -> torch.Tensor:
    """Its item has fewer bytes than a dense tensor of its dtype and shape."""
    return Scaled(torch.ones(64, 64, dtype=torch.int8), torch.ones(64), torch.float32)


def larger() -> torch.Tensor:
    """Its item has room for a dense tensor of its dtype and shape."""
    return Scaled(torch.ones(64, 64), torch.ones(64), torch.float32)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8)


def conjugated() -> torch.Tensor:
    return torch.ones(3, dtype=torch.complex64).conj()


KINDS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "smaller": (smaller, r"a tensor of the subclass test_foreign_tensors\.Scaled"),
    "larger": (larger, r"a tensor of the subclass test_foreign_tensors\.Scaled"),
    "quantized": (quantized, "a quantized tensor"),
    "conjugated": (conjugated, "a lazily conjugated or negated tensor"),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stock(kind: str, path: Path, **options: Any) -> Path:
    stock_save({"m": {"weight": KINDS[kind][0](), "bias": torch.ones(4)}, **PLAIN}, path, **options)
    return path


def target() -> dict[str, Any]:
    return {"other": torch.zeros(3), "step": 0}


async def test_every_other_key_is_read(kind: str, tmp_path: Path) -> None:
    path = stock(kind, tmp_path / "c")
    state = target()
    report = await sidestream.load(state, path)
    assert torch.equal(state["other"], PLAIN["other"])
    assert state["step"] == 7
    assert set(report.not_requested) == {"m.weight", "m.bias"}

    checkpoint = await sidestream.open_checkpoint(path)
    assert set(checkpoint) == {"m.weight", "m.bias", "other", "step"}
    info = checkpoint.info("m.weight")
    assert (info.dtype, info.shape) == (KINDS[kind][0]().dtype, KINDS[kind][0]().shape)
    assert torch.equal(await checkpoint.tensor("m.bias"), torch.ones(4))
    rest = await checkpoint.state_dict(select=["*bias", "other", "st?p"])
    assert torch.equal(rest["m"]["bias"], torch.ones(4))
    assert rest["step"] == 7
    assert "weight" not in rest["m"]


async def test_it_is_refused_by_name_before_anything_is_changed(kind: str, tmp_path: Path) -> None:
    path = stock(kind, tmp_path / "c")
    says = rf"m\.weight: .*{KINDS[kind][1]}"
    shape, dtype = KINDS[kind][0]().shape, KINDS[kind][0]().dtype
    shown = torch.float32 if dtype == torch.qint8 else dtype
    for options in ({}, {"atomic": True}, {"allow_missing": True, "allow_cast": True}):
        state = {"m": {"weight": torch.zeros(shape, dtype=shown), "bias": torch.zeros(4)}, **target()}
        with pytest.raises(errors.UnsupportedCheckpointError, match=says) as refused:
            await sidestream.load(state, path, **for_load(**options))
        assert refused.value.written == ()
        assert not state["m"]["bias"].any()
        assert state["step"] == 0
    checkpoint = await sidestream.open_checkpoint(path)
    for refuses in (checkpoint.tensor("m.weight"), checkpoint.value("m.weight"), checkpoint.state_dict()):
        with pytest.raises(errors.UnsupportedCheckpointError, match=says):
            await refuses
    with pytest.raises(errors.MissingKeysError, match="no name matches x"):
        await checkpoint.state_dict(select="x")


async def test_an_object_that_is_handed_its_part_of_the_checkpoint(tmp_path: Path) -> None:
    class Holder:
        handed: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"bias": torch.zeros(4)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.handed = state

    for kind in ("smaller", "quantized"):
        holder = Holder()
        with pytest.raises(errors.UnsupportedCheckpointError, match=r"m\.weight: "):
            await sidestream.load({"m": holder}, stock(kind, tmp_path / kind))
        assert holder.handed is None


async def test_verify_reports_it_and_finds_damage_in_it(kind: str, tmp_path: Path) -> None:
    path = stock(kind, tmp_path / "c")
    report = await sidestream.verify(path)
    assert (report.ok, report.unverified, report.unreadable) == (True, (), ("m.weight",))
    assert set(report.verified) == {"m.bias", "other", "step"}

    (shard,) = path.glob("*.distcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == "m.weight")
    raw = bytearray(shard.read_bytes())
    raw[raw.index(b"\x80\x02c", place.offset) + 10] ^= 1  # in the pickle; some bytes of a zip are padding
    shard.write_bytes(raw)
    report = await sidestream.verify(path)
    assert [damage.fqn for damage in report.damaged] == ["m.weight"]
    assert report.unreadable == ()


async def test_a_compressed_one(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    path = stock("larger", tmp_path / "c", _extensions=[ZStandard()])
    state = target()
    await sidestream.load(state, path)
    assert state["step"] == 7
    with pytest.raises(errors.UnsupportedCheckpointError, match=r"m\.weight: .*of the subclass"):
        await (await sidestream.open_checkpoint(path)).tensor("m.weight")
    report = await sidestream.verify(path)
    assert (report.ok, report.unreadable) == (True, ("m.weight",))


async def test_verify_finds_damage_in_a_compressed_one(kind: str, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = stock(kind, tmp_path / "c", _extensions=[ZStandard()])
    report = await sidestream.verify(path)
    assert (report.ok, report.unverified, report.unreadable) == (True, (), ("m.weight",))

    (shard,) = path.glob("*.distcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    index, place = next(one for one in metadata.storage_data.items() if one[0].fqn == "m.weight")
    raw = shard.read_bytes()
    content = bytearray(zstandard.ZstdDecompressor().stream_reader(raw[place.offset :][: place.length]).read())
    header = zipfile.ZipFile(io.BytesIO(content)).getinfo("archive/data/0").header_offset
    content[header + 30 + sum(struct.unpack_from("<HH", content, header + 26))] ^= 1  # the first byte of the record
    item = zstandard.ZstdCompressor().compress(bytes(content))
    metadata.storage_data[index] = dataclasses.replace(place, offset=len(raw), length=len(item))
    shard.write_bytes(raw + item)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    report = await sidestream.verify(path)
    assert [damage.fqn for damage in report.damaged] == ["m.weight"]
    assert report.unreadable == ()


async def test_a_metadata_that_claims_more_than_an_item_has_is_damage_of_that_tensor(tmp_path: Path) -> None:
    path = tmp_path / "c"
    stock_save({"w": torch.ones(1000), **PLAIN}, path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 40])
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([1 << 40])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    await sidestream.load(target(), path)
    checkpoint = await sidestream.open_checkpoint(path)
    for refuses in (checkpoint.tensor("w"), checkpoint.state_dict(), checkpoint.state_dict(memory="mapped")):
        with pytest.raises(errors.CorruptCheckpointError, match=r"w: .*has a float32 of shape \(1000,\)"):
            await refuses
    assert [damage.fqn for damage in (await sidestream.verify(path)).damaged] == ["w"]


async def test_convert_and_copy(kind: str, tmp_path: Path) -> None:
    path = stock(kind, tmp_path / "c")
    with pytest.raises(errors.UnsupportedCheckpointError, match=rf"m\.weight: .*{KINDS[kind][1]}.*select"):
        await sidestream.convert(path, tmp_path / "all.pt")
    assert not (tmp_path / "all.pt").exists()
    report = await sidestream.convert(path, tmp_path / "some.pt", select=["other", "*bias"])
    assert set(report.left_out) == {"m.weight", "step"}
    assert torch.equal(torch.load(tmp_path / "some.pt")["m"]["bias"], torch.ones(4))

    copied = await sidestream.copy(path, tmp_path / "copied")
    assert copied.unverified == ("m.weight",)
    found = target()
    dcp.load(found, checkpoint_id=tmp_path / "copied", no_dist=True)
    assert torch.equal(found["other"], PLAIN["other"])


def test_the_command_line(tmp_path: Path) -> None:
    path = str(stock("smaller", tmp_path / "c"))

    def run(*words: str) -> str:
        command = [sys.executable, "-c", "from sidestream_cli import main; main()", *words]
        return warm.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    assert {row["name"] for row in json.loads(run("info", path, "--json"))["entries"]} == {
        "m.weight",
        "m.bias",
        "other",
        "step",
    }
    assert "1 of a kind that this version does not read: m.weight" in run("verify", path)


def test_a_storage_reader(tmp_path: Path) -> None:
    for kind in ("smaller", "quantized"):
        path = stock(kind, tmp_path / kind)
        state = target()
        dcp.load(state, storage_reader=StorageReader(path), no_dist=True)
        assert state["step"] == 7
        asked = {"m": {"weight": torch.zeros(KINDS[kind][0]().shape)}}
        with pytest.raises(BaseException, match=r"m\.weight: .*a quantized tensor or a tensor subclass"):
            dcp.load(asked, storage_reader=StorageReader(path), no_dist=True)


def in_memory(folder: Path) -> str:
    """Copy a checkpoint to a store where a read is a request, and return its URL."""
    store = fsspec.filesystem("memory")
    for file in folder.iterdir():
        store.pipe_file(f"/zips/{folder.parent.name}/{file.name}", file.read_bytes())
    return f"memory://zips/{folder.parent.name}"


@pytest.mark.parametrize("place", [str, in_memory])
@pytest.mark.parametrize("damage", ["", "empty", "pickle", "record"])
async def test_zips_that_are_read_together(tmp_path: Path, place: Callable[[Path], str], damage: str) -> None:
    """One damaged zip among neighbours is the only one that verify finds, and nothing is loaded."""
    state = {name: torch.full((40,), float(number + 1)) for number, name in enumerate("abcdef")}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    described = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(described.read_bytes())
    index, item = next((key, one) for key, one in metadata.storage_data.items() if key.fqn == "c")
    data = tmp_path / "c" / item.relative_path
    raw = bytearray(data.read_bytes())
    at = raw.index(b"/.data/serialization_id", item.offset)
    if damage == "empty":
        metadata.storage_data[index] = dataclasses.replace(item, length=0)
        described.write_bytes(pickle.dumps(metadata))
    elif damage:
        changed = item.offset + 100 if damage == "pickle" else raw.index(b"PK\x07\x08", at) - 1
        raw[changed] ^= 1
        data.write_bytes(raw)
    url = place(tmp_path / "c")
    loaded = {name: torch.zeros(40) for name in state}
    if damage in ("", "record"):  # the random id in a record is not needed
        await sidestream.load(loaded, url)
        assert all(torch.equal(loaded[name], state[name]) for name in state)
    else:
        with pytest.raises(errors.CorruptCheckpointError, match=r"\bc: "):
            await sidestream.load(loaded, url)
        assert not any(one.any() for one in loaded.values())
    report = await sidestream.verify(url)
    assert [one.fqn for one in report.damaged] == (["c"] if damage else [])
    assert len(report.verified) == len(state) - bool(damage)


@pytest.mark.parametrize("place", [str, in_memory])
async def test_zips_of_a_file_that_became_short(tmp_path: Path, place: Callable[[Path], str]) -> None:
    """Zips that cannot be read together are read one by one, and only those that are not there have an error."""
    state = {name: torch.full((40,), float(number + 1)) for number, name in enumerate("abcdef")}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    (data,) = (tmp_path / "c").glob("*.distcp")
    with time_limit(Deadline.after(60)):
        source, manifest = await open_manifest(locate_directory(place(tmp_path / "c")))
        async with aclosing(source):
            tensors = {fqn: one for fqn, one in manifest.entries.items() if isinstance(one, TensorEntry)}
            (last,) = max(tensors.values(), key=lambda one: one.chunks[0].item_offset).chunks
            os.truncate(data, last.item_offset + 10)
            place(tmp_path / "c")
            located, failed = await locate(source, tensors)
    assert failed.keys() == {fqn for fqn, one in tensors.items() if one.chunks == (last,)}
    assert located.keys() == tensors.keys() - failed.keys()
    assert all(isinstance(one, errors.CorruptCheckpointError) and one.__traceback__ is None for one in failed.values())
