from __future__ import annotations

import os
import pickle
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hangs import processor_budget
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as LegacyProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from sidestream._foreign.dcp_metadata import read_dcp_metadata
from sidestream._format.records import DTYPES, Chunk, Manifest, OpaqueEntry, TensorEntry, ValueEntry
from sidestream._format.validate import validate
from sidestream.errors import CorruptCheckpointError, SidestreamError, UnsafeObjectError, UnsupportedCheckpointError


def save(state: dict[str, Any], folder: Path, **options: Any) -> Manifest:
    """The validated manifest of what stock DCP writes for ``state``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(single process|TypedStorage|no_dist).*")
        dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    manifest = read_dcp_metadata((folder / ".metadata").read_bytes())
    files = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    manifest = replace(manifest, files=files)
    validate(manifest)
    return manifest


def small_metadata() -> Metadata:
    size = torch.Size([4, 2])
    half = torch.Size([2, 2])
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), half) for row in (0, 2)]
    return Metadata(
        {"w": TensorStorageMetadata(TensorProperties(), size, chunks), "v": BytesStorageMetadata()},
        {"w": ("w",), "v": ("v",)},
        {
            MetadataIndex("w", [2, 0], 1): _StorageInfo("__1_0.distcp", 100, 700),
            MetadataIndex("w", [0, 0], None): _StorageInfo("__0_0.distcp", 100, 700),
            MetadataIndex("v"): _StorageInfo("__0_0.distcp", 0, 100),
        },
        StorageMeta("somewhere", "id"),
        "1.0.0",
    )


def pickled(metadata: Any) -> bytes:
    return pickle.dumps(metadata, protocol=4)


def test_nested_state(tmp_path: Path) -> None:
    state = {
        "model": {
            "w": torch.ones(2, 3),
            "t": torch.ones(3, 2).t(),
            "scalar": torch.tensor(1.0),
            "empty": torch.ones(0, 3),
        },
        "list": [1, torch.ones(2, dtype=torch.bfloat16), {"x": "y"}],
        "step": 3,
        7: {"inner": (1, 2)},
    }
    manifest = save(state, tmp_path)
    assert not manifest.own
    assert manifest.entries["model.w"].path == ("model", "w")
    assert manifest.entries["list.1"].path == ("list", 1)
    assert manifest.entries["list.2.x"].path == ("list", 2, "x")
    assert manifest.entries["7.inner"].path == ("7", "inner")
    scalar, empty, bf16 = (manifest.entries[name] for name in ("model.scalar", "model.empty", "list.1"))
    assert isinstance(scalar, TensorEntry)
    assert isinstance(empty, TensorEntry)
    assert isinstance(bf16, TensorEntry)
    assert (scalar.shape, scalar.chunks[0].offsets, scalar.chunks[0].sizes) == ((), (), ())
    assert empty.shape == (0, 3)
    assert bf16.dtype == "bfloat16"
    assert isinstance(manifest.entries["step"], ValueEntry)


def test_module_and_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    manifest = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    assert {"model.0.weight", "optimizer.state.0.exp_avg", "optimizer.param_groups.0.lr"} <= set(manifest.entries)
    expected = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert list(manifest.entries) == list(expected.state_dict_metadata)
    for index, info in expected.storage_data.items():
        entry = manifest.entries[index.fqn]
        if isinstance(entry, TensorEntry):
            (item,) = entry.chunks
            assert item.offsets == tuple(index.offset)
            assert (item.file, item.item_offset, item.item_bytes) == (info.relative_path, info.offset, info.length)
        else:
            assert isinstance(entry, ValueEntry)
            assert (entry.file, entry.item_offset, entry.item_bytes) == (info.relative_path, info.offset, info.length)
    assert {fqn: entry.path for fqn, entry in manifest.entries.items()} == expected.planner_data


def test_every_dtype(tmp_path: Path) -> None:
    names = [name for name in DTYPES if not name.startswith("bits")]  # stock DCP cannot save those
    state = {name: torch.zeros(16, dtype=torch.uint8).view(getattr(torch, name)) for name in names}
    manifest = save(state, tmp_path)
    assert {fqn: entry.dtype for fqn, entry in manifest.entries.items() if isinstance(entry, TensorEntry)} == {
        name: name for name in state
    }


def test_chunks_are_joined_with_their_locations() -> None:
    manifest = read_dcp_metadata(pickled(small_metadata()))
    weight = manifest.entries["w"]
    assert isinstance(weight, TensorEntry)
    assert weight.chunks == (
        Chunk((0, 0), (2, 2), "__0_0.distcp", 100, 700),
        Chunk((2, 0), (2, 2), "__1_0.distcp", 100, 700),
    )
    assert manifest.entries["v"] == ValueEntry(("v",), "__0_0.distcp", 0, 100)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_other_writers(protocol: int) -> None:
    metadata = small_metadata()
    metadata.planner_data = None
    metadata.storage_meta = StorageMeta(Path("/somewhere"))
    metadata.version = None
    metadata.sidestream = {"save_id": "x", "nested": [1, (2.5, None)]}  # type: ignore[attr-defined]
    metadata.unknown = {"a": 1}  # type: ignore[attr-defined]
    manifest = read_dcp_metadata(pickle.dumps(metadata, protocol))
    assert [entry.path for entry in manifest.entries.values()] == [("w",), ("v",)]
    assert manifest.save_id == ""
    for name in ("storage_meta", "version", "planner_data", "sidestream", "unknown"):
        delattr(metadata, name)
    assert read_dcp_metadata(pickle.dumps(metadata, protocol)) == manifest


def test_legacy_properties() -> None:
    metadata = small_metadata()
    metadata.state_dict_metadata["w"].properties = LegacyProperties(dtype=torch.float16)  # type: ignore[union-attr]
    data = pickled(metadata)
    assert b"_shard" in data
    entry = read_dcp_metadata(data).entries["w"]
    assert isinstance(entry, TensorEntry)
    assert entry.dtype == "float16"


def test_what_is_not_supported() -> None:
    metadata = small_metadata()
    metadata.storage_data[MetadataIndex("w", [0, 0])].transform_descriptors = ["stream.zstd"]
    with pytest.raises(UnsupportedCheckpointError, match="'w'"):
        read_dcp_metadata(pickled(metadata))


def test_a_tensor_of_a_dtype_that_is_not_read_is_opaque() -> None:
    metadata = small_metadata()
    for dtype in (torch.qint8, torch.quint4x2, torch.uint3):
        metadata.state_dict_metadata["w"].properties.dtype = dtype  # type: ignore[union-attr]
        entry = read_dcp_metadata(pickled(metadata)).entries["w"]
        assert isinstance(entry, OpaqueEntry)
        assert entry.dtype == str(dtype).removeprefix("torch.")
    data = pickled(small_metadata()).replace(b"\x8c\x07float32", b"\x8c\x07float97")
    assert isinstance(read_dcp_metadata(data).entries["w"], OpaqueEntry)


def without_location(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex("w", [2, 0])]


def without_value_location(metadata: Metadata) -> None:
    del metadata.storage_data[MetadataIndex("v")]


def chunk_twice(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["w"].chunks  # type: ignore[union-attr]
    chunks.append(chunks[0])


def strange(name: str, value: Any) -> Any:
    def change(metadata: Metadata) -> None:
        setattr(metadata, name, value)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        without_location,
        without_value_location,
        chunk_twice,
        strange("storage_data", None),
        strange("storage_data", [1]),
        strange("storage_data", {"w": 1}),
        strange("storage_data", {MetadataIndex("w", [0, 0]): "x"}),
        strange("storage_data", {MetadataIndex("w", [0, 0]): _StorageInfo("x", "0", 1)}),  # type: ignore[arg-type]
        strange("storage_data", {MetadataIndex("w", [0, 0]): _StorageInfo("x", True, 1)}),
        strange("storage_data", {MetadataIndex("w" * 5000): _StorageInfo("x", 0, 1)}),
        strange("state_dict_metadata", None),
        strange("state_dict_metadata", {1: BytesStorageMetadata()}),
        strange("state_dict_metadata", {"w": 1}),
        strange("planner_data", {"w": "w"}),
        strange("planner_data", {"w": ()}),
        strange("planner_data", {"w": (None,)}),
        strange("planner_data", {"w": (True,)}),
        strange("planner_data", {"w": ("a",) * 65}),
    ],
)
def test_damage(damage: Any) -> None:
    metadata = small_metadata()
    damage(metadata)
    with pytest.raises(CorruptCheckpointError):
        read_dcp_metadata(pickled(metadata))


def test_what_other_planners_note_leaves_the_names_as_paths() -> None:
    metadata = small_metadata()
    metadata.planner_data = ["of rank 0", {"of": "rank 1"}]
    entries = read_dcp_metadata(pickled(metadata)).entries
    assert {fqn: entry.path for fqn, entry in entries.items()} == {fqn: (fqn,) for fqn in entries}


def test_damaged_entries() -> None:
    for name, value in (
        ("chunks", None),
        ("chunks", [1]),
        ("size", None),
        ("size", (1, 2.0)),
        ("size", (1,) * 65),
        ("size", [1]),
        ("properties", None),
        ("properties", 1),
    ):
        metadata = small_metadata()
        setattr(metadata.state_dict_metadata["w"], name, value)
        with pytest.raises(CorruptCheckpointError) as caught:
            read_dcp_metadata(pickled(metadata))
        assert caught.value.fqn == "w"
    for data in (pickle.dumps(None), pickle.dumps({}), pickled(StorageMeta())):
        with pytest.raises(CorruptCheckpointError):
            read_dcp_metadata(data)


class Exec:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_code_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for name in ("sidestream", "storage_meta", "planner_data"):
        metadata = small_metadata()
        setattr(metadata, name, {"x": Exec(marker)})
        with pytest.raises(UnsafeObjectError, match="system"):
            read_dcp_metadata(pickled(metadata))
    assert not marker.exists()


def test_shared_parts_cannot_make_the_walk_long() -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    chunks = [chunk] * 20_000
    described = TensorStorageMetadata(TensorProperties(), torch.Size([1]), chunks)
    long_path = ("a",) * 20_000
    tensors = {f"t{index}": described for index in range(20_000)}
    storage = {MetadataIndex(fqn, [0]): _StorageInfo("x", 0, 1) for fqn in tensors}
    bombs = [
        Metadata(tensors, None, storage),
        Metadata(tensors, dict.fromkeys(tensors, long_path), storage),
    ]
    huge_size = TensorStorageMetadata(TensorProperties(), long_path, [])  # type: ignore[arg-type]
    bombs.append(Metadata(dict.fromkeys(tensors, huge_size), None, storage))
    for bomb in bombs:
        data = pickled(bomb)
        with processor_budget(5), pytest.raises(CorruptCheckpointError):
            read_dcp_metadata(data)


def test_truncation_at_every_byte() -> None:
    data = pickled(small_metadata())
    for end in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            read_dcp_metadata(data[:end])


def test_mutations_end_in_a_manifest_or_a_typed_error() -> None:
    generator = random.Random(11)
    data = pickled(small_metadata())
    files = {"__0_0.distcp": 1000, "__1_0.distcp": 1000}
    validate(replace(read_dcp_metadata(data), files=files))
    sound = 0
    for _ in range(3000):
        mutated = bytearray(data)
        for _ in range(generator.randint(1, 3)):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        try:
            validate(replace(read_dcp_metadata(bytes(mutated)), files=files))
            sound += 1
        except SidestreamError:
            pass
    assert sound < 2000
