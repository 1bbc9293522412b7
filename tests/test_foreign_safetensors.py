"""safetensors as stock DCP writes it in one process, and files that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import assert_same, filled
from stock import blank, stock_save
from torch.distributed.checkpoint.filesystem import SerializationFormat

import sidestream
from sidestream import errors
from sidestream._foreign.safetensors import parse_header
from sidestream.dcp import StorageReader

safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def shards_save(state: dict[str, Any], path: Path, **options: Any) -> None:
    stock_save(state, path, serialization_format=SerializationFormat.SAFETENSORS, **options)


def mixed_state() -> dict[str, Any]:
    return {
        "layers": [{"w": torch.randn(70, 300)}, {"w": torch.randn(5), "n": 3}],
        "bf16": torch.randn(200, 30).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "also empty": torch.empty(4, 0, dtype=torch.int8),
        "step": 7,
        "betas": (0.9, 0.999),
    }


@pytest.mark.parametrize(
    "options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}, {"per_thread_copy_ahead": 0}], ids=str
)
async def test_shards(options: dict[str, Any], tmp_path: Path) -> None:
    state = mixed_state()
    shards_save(state, tmp_path / "c", **options)
    target = blank(state)
    report = await sidestream.load(target, tmp_path / "c")
    assert_same(state, target)
    assert "layers.0.w" in report.unverified
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert_same(state, await checkpoint.state_dict())
    assert torch.equal(await checkpoint.tensor("layers.0.w", rows=slice(7, 9)), state["layers"][0]["w"][7:9])


async def test_shards_are_mapped(tmp_path: Path) -> None:
    state = mixed_state()
    shards_save(state, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    told: list[int] = []
    mapped = await checkpoint.state_dict(memory="mapped", progress=lambda done, _: told.append(done))
    assert_same(state, mapped)
    mapped["layers"][0]["w"].zero_()
    assert_same(state, await checkpoint.state_dict())


async def test_shards_into_memory_that_is_not_row_major(tmp_path: Path) -> None:
    state = {"w": torch.randn(30, 50)}
    shards_save(state, tmp_path / "c")
    target = {"w": torch.zeros(50, 30).t()}
    await sidestream.load(target, tmp_path / "c")
    assert torch.equal(target["w"], state["w"])


async def test_shards_through_a_compressor_are_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    for state in ({"a": torch.ones(100), "b": torch.ones(50), "n": 1}, {"a": torch.ones(100)}):
        shards_save(state, tmp_path / "c", _extensions=[ZStandard()])
        with pytest.raises(errors.UnsupportedCheckpointError, match="as safetensors through a compressor"):
            await sidestream.open_checkpoint(tmp_path / "c")


DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "float16",
    "bfloat16",
    "int32",
    "uint32",
    "float32",
    "float64",
    "int64",
    "uint64",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]


@pytest.mark.parametrize("dtype", DTYPES)
async def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    state = {"t": filled((6, 4), getattr(torch, dtype)), "s": filled((3,), getattr(torch, dtype))}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    target = {key: torch.empty_like(value) for key, value in state.items()}
    await sidestream.load(target, tmp_path)
    assert_same(state, target)


# --- directories ----------------------------------------------------------------------------------------------------


def directory_save(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(path), **options), no_dist=True)


def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


async def test_directory(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(10, 3), "b": torch.arange(4)}, "head": torch.randn(2)}
    directory_save(state, tmp_path / "one")
    directory_save(state, tmp_path / "two", fqn_to_index_mapping={"model.w": 1, "model.b": 2, "head": 2})
    for name in ("one", "two"):
        target = blank(state)
        report = await sidestream.load(target, tmp_path / name)
        assert_same(state, target)
        assert set(report.unverified) == {"model.w", "model.b", "head"}
        back = await (await sidestream.open_checkpoint(tmp_path / name)).state_dict()
        assert set(back) == {"model.w", "model.b", "head"}, "safetensors has names and no paths"
        assert torch.equal(back["model.w"], state["model"]["w"])
    with pytest.raises(errors.MissingKeysError, match=r"model\.c"):
        await sidestream.load({"model": {"c": torch.zeros(1)}}, tmp_path / "one")


async def test_directory_into_a_module(tmp_path: Path) -> None:
    source, target = module(), module()
    directory_save({"model": source}, tmp_path / "c")
    await sidestream.load({"model": target}, tmp_path / "c")
    assert_same(dict(source.state_dict()), dict(target.state_dict()))


async def test_only_what_the_index_names_counts(tmp_path: Path) -> None:
    state = {"w": torch.randn(10), "b": torch.randn(4)}
    directory_save(state, tmp_path, fqn_to_index_mapping={"w": 1, "b": 2})
    second = tmp_path / "model-00002-of-00002.safetensors"
    safetensors.save_file({"b": state["b"], "w": torch.zeros(10), "stale": torch.zeros(3)}, second)
    safetensors.save_file({"w": torch.zeros(10)}, tmp_path / "model-more.safetensors")
    assert_same(state, await (await sidestream.open_checkpoint(tmp_path)).state_dict())
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(errors.CorruptCheckpointError, match=r"chunks of 'w' .* overlap"):
        await sidestream.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "is malformed"),
        ("[]", "is malformed"),
        ('{"weight_map": {"w": 1}}', "is malformed"),
        ('{"weight_map": {"w": "../other.safetensors"}}', "missing from the directory"),
        ('{"weight_map": {"w": "gone.safetensors"}}', "missing from the directory"),
        ("[" * 100_000, "is malformed"),
    ],
)
async def test_index_that_lies(index: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    safetensors.save_file({"w": torch.zeros(3)}, tmp_path / "other.safetensors")
    directory_save({"w": torch.randn(10)}, tmp_path / "c")
    (tmp_path / "c" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(errors.CorruptCheckpointError, match=says):
        await sidestream.open_checkpoint(tmp_path / "c")


async def test_a_tensor_that_its_file_lacks_hides_no_other(tmp_path: Path) -> None:
    state = {"w": torch.randn(10), "b": torch.randn(4)}
    directory_save(state, tmp_path / "c")
    index = tmp_path / "c" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lost"] = content["weight_map"]["w"]
    index.write_text(json.dumps(content))
    target = {"w": torch.zeros(10), "b": torch.zeros(4)}
    await sidestream.load(target, tmp_path / "c")
    assert_same(state, target)
    dcp.load(target, storage_reader=StorageReader(tmp_path / "c"), no_dist=True)
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert set(dict(checkpoint)) == {"w", "b", "lost"}
    says = rf"lost: it is in {index.name}, but not in model-00001-of-00001\.safetensors"
    for refuses in (
        sidestream.load({"lost": torch.zeros(4)}, tmp_path / "c"),
        checkpoint.tensor("lost"),
        checkpoint.state_dict(),
        sidestream.convert(tmp_path / "c", tmp_path / "d"),
    ):
        with pytest.raises(errors.CorruptCheckpointError, match=says):
            await refuses
    with pytest.raises(errors.CorruptCheckpointError, match=says):
        checkpoint.info("lost")
    await sidestream.convert(tmp_path / "c", tmp_path / "d", select=["w", "b"])
    report = await sidestream.verify(tmp_path / "c")
    assert [damage.fqn for damage in report.damaged] == ["lost"]


async def test_what_stock_wrote_beyond_repair_is_told(tmp_path: Path) -> None:
    directory_save({"w": torch.randn(10), "n": 1}, tmp_path / "c")
    with pytest.raises(errors.UnsupportedCheckpointError, match=r"not a safetensors file.*more than tensors"):
        await sidestream.open_checkpoint(tmp_path / "c")


# --- headers that lie -----------------------------------------------------------------------------------------------


def file_of(header: Any, data: bytes = bytes(16)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def described(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


LIES: dict[str, tuple[bytes, type[errors.SidestreamError]]] = {
    "empty": (b"", errors.CorruptCheckpointError),
    "header of 2**63": (struct.pack("<Q", 1 << 63) + b"{}", errors.CorruptCheckpointError),
    "header longer than the file": (struct.pack("<Q", 1000) + b"{}", errors.CorruptCheckpointError),
    "no json": (file_of(b"{"), errors.CorruptCheckpointError),
    "no dict": (file_of(b"[1]"), errors.CorruptCheckpointError),
    "no text": (file_of(b"\xff\xfe{}"), errors.CorruptCheckpointError),
    "deep": (file_of(b'{"t":' * 50_000), errors.CorruptCheckpointError),
    "many digits": (file_of(b'{"t":' + b"9" * 10_000 + b"}"), errors.CorruptCheckpointError),
    "name twice": (
        file_of(b'{"t":%s,"t":%s}' % ((json.dumps(described()["t"]).encode(),) * 2)),
        errors.CorruptCheckpointError,
    ),
    "data behind the end": (file_of(described(data_offsets=[16, 32])), errors.CorruptCheckpointError),
    "rest behind the data": (file_of(described(), bytes(17)), errors.CorruptCheckpointError),
    "cut off": (file_of(described(), bytes(15)), errors.CorruptCheckpointError),
    "negative": (file_of(described(data_offsets=[-16, 0])), errors.CorruptCheckpointError),
    "backwards": (file_of(described(data_offsets=[16, 0])), errors.CorruptCheckpointError),
    "shape too small": (file_of(described(shape=[2])), errors.CorruptCheckpointError),
    "shape too large": (file_of(described(shape=[1 << 40])), errors.CorruptCheckpointError),
    "shape overflows": (file_of(described(shape=[1 << 62, 4])), errors.CorruptCheckpointError),
    "negative shape": (file_of(described(shape=[-2, -2])), errors.CorruptCheckpointError),
    "shape of words": (file_of(described(shape=["4"])), errors.CorruptCheckpointError),
    "rank of 1000": (file_of(described(shape=[1] * 999 + [4])), errors.CorruptCheckpointError),
    "booleans": (file_of(described(shape=[True, 4])), errors.CorruptCheckpointError),
    "no offsets": (file_of({"t": {"dtype": "F32", "shape": [4]}}), errors.CorruptCheckpointError),
    "unknown dtype": (file_of(described(dtype="F12")), errors.UnsupportedCheckpointError),
    "dtype no word": (file_of(described(dtype=["F32"])), errors.CorruptCheckpointError),
    "overlap": (file_of({**described(), "u": described()["t"]}), errors.CorruptCheckpointError),
    "sharding no json": (
        file_of({**described(), "__metadata__": {"DCP_SHARDING_INFO": "{"}}),
        errors.CorruptCheckpointError,
    ),
    "sharding of others": (
        file_of({**described(), "__metadata__": {"DCP_SHARDING_INFO": '{"u":{}}'}}),
        errors.CorruptCheckpointError,
    ),
    "offset of another rank": (
        file_of({**described(), "__metadata__": {"DCP_SHARDING_INFO": '{"t":{"saved_offsets":[0,0]}}'}}),
        errors.CorruptCheckpointError,
    ),
    "far away": (
        file_of(
            {**described(), "__metadata__": {"DCP_SHARDING_INFO": '{"t":{"saved_offsets":[9223372036854775807]}}'}}
        ),
        errors.CorruptCheckpointError,
    ),
    "holes": (
        file_of({**described(), "__metadata__": {"DCP_SHARDING_INFO": '{"t":{"saved_offsets":[4]}}'}}),
        errors.IncompleteTensorError,
    ),
    "metadata no dict": (file_of({**described(), "__metadata__": 3}), errors.CorruptCheckpointError),
}


@pytest.mark.parametrize(("content", "kind"), LIES.values(), ids=LIES.keys())
async def test_headers_that_lie(content: bytes, kind: type[errors.SidestreamError], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(kind) as raised:
        await sidestream.open_checkpoint(tmp_path)
    assert type(raised.value) is kind
    if isinstance(raised.value, errors.CorruptCheckpointError):
        assert raised.value.file == "model.safetensors" or raised.value.fqn is not None


def test_the_honest_one_is_read() -> None:
    content = file_of(described())
    (found,) = parse_header(content[8:-16], len(content) - 16, len(content), "f").values()
    assert (found.dtype, found.sizes, found.start, found.nbytes) == ("float32", (4,), len(content) - 16, 16)


async def test_shards_and_metadata_that_contradict_each_other(tmp_path: Path) -> None:
    shards_save({"t": torch.ones(4), "u": torch.ones(2)}, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.distcp")
    honest = shard.read_bytes()
    for header in ({"other": described()["t"]}, described(dtype="I32"), described(shape=[2, 2])):
        shard.write_bytes(file_of(header))
        with pytest.raises(
            errors.CorruptCheckpointError, match=r"__0_0\.distcp has .* for t, \.metadata says"
        ) as raised:
            await sidestream.open_checkpoint(tmp_path / "c")
        assert (raised.value.fqn, raised.value.file) == ("t", "__0_0.distcp")
    shard.write_bytes(honest)
    assert (await (await sidestream.open_checkpoint(tmp_path / "c")).tensor("t")).sum() == 4
