"""``convert``: every format into every other, in pieces, verified, and all or nothing."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from keywords import for_convert
from safetensors.torch import load_file, save_file
from states import SAVED_DTYPES, assert_same, filled, model_and_optimizer
from stock import blank, nested_state, stock_load, stock_save
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import sidestream
from sidestream import errors

MIB = 1 << 20
LEAST = 96 * MIB  # windows of 8 MiB


def large_state() -> dict[str, Any]:
    """Everything that lays out differently; some tensors go through several windows."""
    tied = torch.randn(50, 7)
    return {
        "model": {"large": torch.randn(3 * MIB + 17, 2), "transposed": torch.randn(300, 70).t(), "tied": tied},
        "tied again": tied,
        "byte": torch.arange(5, dtype=torch.uint8),
        "double": torch.randn(3, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "list": [torch.ones(2), {"deep": 1}],
        "keys": {1: 2, None: 3, 2.5: {}},
        "tuple": (1, torch.ones(3), "two"),
        "step": 7,
    }


async def read(path: Path) -> dict[Any, Any]:
    return await (await sidestream.open_checkpoint(path)).state_dict()


def left_over(directory: Path, before: set[str]) -> set[str]:
    return {path.name for path in directory.iterdir()} - before


async def test_there_and_back(tmp_path: Path) -> None:
    """DCP to torch.save to DCP; what torch and stock DCP read of it is the same too."""
    state = large_state()
    await sidestream.save(state, tmp_path / "a")
    report = await sidestream.convert(
        tmp_path / "a", tmp_path / "b.pt", options=sidestream.ConvertOptions(budget_bytes=LEAST)
    )
    assert (report.format, report.files, report.cast, report.left_out) == ("torch", ("b.pt",), (), ())
    assert report.nbytes == (tmp_path / "b.pt").stat().st_size
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert_same(state, loaded)
    assert loaded["model"]["tied"].data_ptr() == loaded["tied again"].data_ptr()

    await sidestream.convert(tmp_path / "b.pt", tmp_path / "c", options=sidestream.ConvertOptions(budget_bytes=LEAST))
    assert_same(state, await read(tmp_path / "c"))
    assert (await sidestream.verify(tmp_path / "c")).ok
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert {"model.large", "keys.1", "list.1.deep"} <= set(checkpoint)
    target = {"model": {"large": torch.zeros(3 * MIB + 17, 2)}, "step": 0}
    assert_same({"model": {"large": state["model"]["large"]}, "step": 7}, stock_load(target, tmp_path / "c"))


async def test_from_what_torch_saved(tmp_path: Path) -> None:
    """Views, shared storages and strides, an optimizer, a module's ordered dict with its attributes."""
    model, optimizer = model_and_optimizer()
    base = torch.randn(100, 10)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [base[10:20], base[:, 3], base.t(), base],
        "large": torch.randn(5 * MIB),
        "strided": torch.randn(2 * MIB + 8, 2).t(),
    }
    torch.save(state, tmp_path / "a.pt")
    await sidestream.convert(tmp_path / "a.pt", tmp_path / "b", options=sidestream.ConvertOptions(budget_bytes=LEAST))
    back = await read(tmp_path / "b")
    assert_same({**state, "model": dict(state["model"])}, back)
    fresh_model, fresh_optimizer = model_and_optimizer(seed=5)
    await sidestream.load({"model": fresh_model, "optimizer": fresh_optimizer}, tmp_path / "b")
    assert_same(dict(model.state_dict()), dict(fresh_model.state_dict()))


async def test_safetensors(tmp_path: Path) -> None:
    state = large_state()
    await sidestream.save(state, tmp_path / "a")
    only = ["model.*", "tied again", "byte", "double", "none", "scalar"]
    report = await sidestream.convert(
        tmp_path / "a",
        tmp_path / "b",
        format="safetensors",
        select=only,
        options=sidestream.ConvertOptions(max_shard_bytes=10 * MIB, budget_bytes=LEAST),
    )
    assert report.files == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    )
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    expected = {f"model.{key}": tensor for key, tensor in state["model"].items()}
    expected |= {key: state[key] for key in ("tied again", "byte", "double", "none", "scalar")}
    assert set(index["weight_map"]) == set(expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    found = {}
    for file in set(index["weight_map"].values()):
        found.update(load_file(tmp_path / "b" / file))
    assert_same(dict(sorted(expected.items())), dict(sorted(found.items())))
    assert set(report.left_out) >= {"step", "tuple", "keys.1", "list.0"}

    (tmp_path / "cut").mkdir()
    shutil.copy(tmp_path / "b" / "model-00001-of-00002.safetensors", tmp_path / "cut")
    with pytest.raises(errors.CorruptCheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        await sidestream.open_checkpoint(tmp_path / "cut")

    report = await sidestream.convert(
        tmp_path / "b", tmp_path / "one.safetensors", options=sidestream.ConvertOptions(budget_bytes=LEAST)
    )
    assert set(report.unverified) == set(expected)  # nothing to compare with
    assert_same(dict(sorted(expected.items())), dict(sorted(load_file(tmp_path / "one.safetensors").items())))
    await sidestream.convert(
        tmp_path / "one.safetensors",
        tmp_path / "consolidated",
        format="safetensors",
        options=sidestream.ConvertOptions(max_shard_bytes=None),
    )
    assert [path.name for path in (tmp_path / "consolidated").iterdir()] == ["model.safetensors"]
    await sidestream.convert(tmp_path / "consolidated", tmp_path / "c.pt")
    assert_same(dict(sorted(expected.items())), dict(sorted(torch.load(tmp_path / "c.pt", weights_only=True).items())))


@pytest.mark.parametrize("kind", ["plain", "zstd", "one file per item"])
async def test_stock_checkpoints(kind: str, tmp_path: Path) -> None:
    state = nested_state()
    options: dict[str, Any] = {
        "zstd": {"_extensions": [ZStandard()]},
        "one file per item": {"single_file_per_rank": False},
    }
    stock_save(state, tmp_path / "a", **options.get(kind, {}))
    await sidestream.convert(tmp_path / "a", tmp_path / "b", options=sidestream.ConvertOptions(budget_bytes=LEAST))
    assert_same(await read(tmp_path / "a"), await read(tmp_path / "b"))
    assert_same(state, stock_load(blank(state), tmp_path / "b"))
    await sidestream.convert(tmp_path / "a", tmp_path / "c.pt", options=sidestream.ConvertOptions(budget_bytes=LEAST))
    assert_same(await read(tmp_path / "a"), torch.load(tmp_path / "c.pt", weights_only=True))


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
async def test_chunks_of_several_ranks(axis: int, tmp_path: Path) -> None:
    """Columns, as a tensor-parallel run writes them, are held as a whole for as long as there are pieces to come."""
    whole = torch.randn(1500, 2000)
    parts = [whole.narrow(axis, 0, 700), whole.narrow(axis, 700, whole.shape[axis] - 700)]
    content, chunks, storage = b"", [], {}
    for number, (part, at) in enumerate(zip(parts, (0, 700), strict=True)):
        torch.save(part.clone(memory_format=torch.contiguous_format), tmp_path / "item")
        raw = (tmp_path / "item").read_bytes()
        chunks.append(ChunkStorageMetadata(torch.Size((0, at) if axis else (at, 0)), part.shape))
        storage[MetadataIndex("w", chunks[-1].offsets, number)] = _StorageInfo("__0_0.distcp", len(content), len(raw))
        content += raw
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__0_0.distcp").write_bytes(content)
    entry = TensorStorageMetadata(TensorProperties(torch.float32), whole.shape, chunks)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Metadata({"w": entry}, {"w": ("w",)}, storage), protocol=4))
    for dtype in (None, torch.float64):
        name = f"{dtype}.safetensors"
        await sidestream.convert(
            tmp_path / "a", tmp_path / name, options=sidestream.ConvertOptions(budget_bytes=LEAST), dtype=dtype
        )
        assert torch.equal(load_file(tmp_path / name)["w"], whole.to(dtype or torch.float32))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
async def test_every_dtype(tmp_path: Path) -> None:
    state = {str(dtype): filled((3, 4), dtype, seed) for seed, dtype in enumerate(SAVED_DTYPES)}
    await sidestream.save(state, tmp_path / "a")
    await sidestream.convert(tmp_path / "a", tmp_path / "b.pt")
    await sidestream.convert(tmp_path / "b.pt", tmp_path / "c")
    assert_same(state, await read(tmp_path / "c"))
    for dtype in ("complex128", "complex32", "bits8", "bits2x4"):
        says = rf"torch\.{dtype}: safetensors have no dtype {dtype}; leave it out with select="
        with pytest.raises(errors.UnsupportedTensorError, match=says):
            await sidestream.convert(
                tmp_path / "c", tmp_path / "d.safetensors", select=["torch.float32", f"torch.{dtype}"]
            )
    left = [name for name in state if not name.startswith(("torch.complex128", "torch.complex32", "torch.bits"))]
    await sidestream.convert(tmp_path / "c", tmp_path / "d.safetensors", select=left)
    assert left_over(tmp_path, {"a", "b.pt", "c"}) == {"d.safetensors"}


async def test_cast_select_and_rename(tmp_path: Path) -> None:
    state = {"model": {"layer.weight": torch.randn(4 * MIB), "count": torch.arange(3)}, "other": 1, "x": torch.ones(2)}
    await sidestream.save(state, tmp_path / "a")
    report = await sidestream.convert(
        tmp_path / "a", tmp_path / "b", dtype=torch.bfloat16, select="model.*",
        names=lambda fqn: fqn.replace("layer.", "dense."),
        options=sidestream.ConvertOptions(budget_bytes=LEAST),
    )  # fmt: skip
    expected = {"model": {"dense.weight": state["model"]["layer.weight"].bfloat16(), "count": torch.arange(3)}}
    assert_same(expected, await read(tmp_path / "b"))
    assert (report.cast, report.left_out) == (("model.dense.weight",), ("other", "x"))
    assert report.tensors == ("model.dense.weight", "model.count")
    await sidestream.convert(
        tmp_path / "b", tmp_path / "c.pt", dtype=torch.float64, names=sidestream.add_prefix("module.")
    )
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert set(loaded) == {"module.model.dense.weight", "module.model.count"}
    assert torch.equal(loaded["module.model.dense.weight"], expected["model"]["dense.weight"].double())


async def test_values_that_are_left_out_are_not_read(tmp_path: Path) -> None:
    model = {"w": torch.ones(3)}
    stock_save({"model": model, "began": dt.date(2026, 1, 1), "log": os.urandom(48 * MIB)}, tmp_path / "a")
    for target, expected in (
        ("b", {"model": model}),
        ("b.pt", {"model": model}),
        ("b.safetensors", {"model.w": model["w"]}),
    ):
        report = await sidestream.convert(tmp_path / "a", tmp_path / target, select="model.*")
        assert (report.tensors, report.values, report.left_out) == (("model.w",), (), ("began", "log"))
        assert_same(expected, await read(tmp_path / target))
    for name, kind in (("began", errors.UnsafeObjectError), ("log", errors.CorruptCheckpointError)):
        with pytest.raises(kind, match=name):
            await sidestream.convert(tmp_path / "a", tmp_path / "c", select=["model.*", name])
    assert left_over(tmp_path, {"a"}) == {"b", "b.pt", "b.safetensors"}


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"select": "no.*"}, errors.MissingKeysError, "no"),
        ({"select": []}, errors.MissingKeysError, "an empty selection"),
        ({"names": lambda _: "same"}, errors.KeyCollisionError, "same"),
        ({"names": lambda _: ""}, errors.InvalidOptionError, "empty"),
        ({"names": lambda _: 3}, errors.InvalidOptionError, "not a string"),
        ({"names": lambda name: name * 5000}, errors.InvalidOptionError, "a name of 5000 characters"),
        ({"names": {"nobody": ""}}, errors.InvalidOptionError, "nobody"),
        ({"dtype": torch.int8}, errors.InvalidOptionError, "dtype="),
        ({"dtype": "float16"}, errors.InvalidOptionError, "dtype="),
        ({"format": "onnx"}, errors.InvalidOptionError, "format="),
        ({"format": "safetensors"}, errors.InvalidOptionError, "step"),
        ({"budget_bytes": MIB}, errors.InvalidOptionError, "budget_bytes="),
        ({"max_shard_bytes": 0}, errors.InvalidOptionError, "max_shard_bytes="),
        ({"verify": "yes"}, errors.InvalidOptionError, "verify="),
        ({"timeout_s": -1}, errors.InvalidOptionError, "timeout_s="),
    ],
)
async def test_what_cannot_be_done_is_refused_before_anything_is_written(
    options: dict[str, Any], kind: type[Exception], says: str, tmp_path: Path
) -> None:
    await sidestream.save({"w": torch.ones(3), "v": torch.ones(2), "step": 1}, tmp_path / "a")
    with pytest.raises(kind) as raised:
        await sidestream.convert(tmp_path / "a", tmp_path / "b", **for_convert(**options))
    assert says in str(raised.value)
    assert left_over(tmp_path, {"a"}) == set()


async def test_targets_that_are_there_and_sources_that_are_not(tmp_path: Path) -> None:
    await sidestream.save({"w": torch.ones(3)}, tmp_path / "a")
    (tmp_path / "b.pt").write_bytes(b"mine")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine").touch()
    before = {"a", "b.pt", "d"}
    for target, options in (("b.pt", {}), ("d", {}), ("d", {"format": "safetensors"}), ("a", {})):
        with pytest.raises(errors.CheckpointExistsError):
            await sidestream.convert(tmp_path / "a", tmp_path / target, **options)  # type: ignore[arg-type]
    for source in ("nothing", "b.pt/x", "nothing/x.pt"):
        with pytest.raises(errors.CheckpointNotFoundError):
            await sidestream.convert(tmp_path / source, tmp_path / "c")
    with pytest.raises(
        errors.UnsupportedCheckpointError, match=r"b\.pt cannot be read as a torch\.save file: it is a text file"
    ):
        await sidestream.convert(tmp_path / "b.pt", tmp_path / "c")
    assert (tmp_path / "b.pt").read_bytes() == b"mine"
    assert left_over(tmp_path, before) == set()


async def test_damage_is_found_and_nothing_is_left(tmp_path: Path) -> None:
    large = torch.randn(5 * MIB)
    await sidestream.save({"w": large}, tmp_path / "own")
    stock_save({"w": large}, tmp_path / "stock")
    torch.save({"w": large}, tmp_path / "file.pt")
    before = {path.name for path in tmp_path.iterdir()}
    for source, file in (("own", "own/__0_1.distcp"), ("stock", "stock/__0_0.distcp"), ("file.pt", "file.pt")):
        raw = bytearray((tmp_path / file).read_bytes())
        at = raw.index(large[-1000:].numpy().tobytes())
        raw[at] ^= 4
        (tmp_path / file).write_bytes(raw)
        for target in ("t", "t.pt", "t.safetensors"):
            with pytest.raises(errors.CorruptCheckpointError, match="w: "):
                await sidestream.convert(
                    tmp_path / source, tmp_path / target, options=sidestream.ConvertOptions(budget_bytes=LEAST)
                )
            assert left_over(tmp_path, before) == set()
        await sidestream.convert(
            tmp_path / source, tmp_path / f"as-is-{source}", options=sidestream.ConvertOptions(verify="manifest")
        )
        before.add(f"as-is-{source}")


@pytest.mark.parametrize("first", ["tied", "another view"])
async def test_damage_in_a_storage_that_is_shared_with_a_tensor_that_is_left_out(first: str, tmp_path: Path) -> None:
    whole = torch.randn(4 * MIB)
    kept = whole if first == "tied" else whole[MIB:]
    torch.save({"a": whole if first == "tied" else whole[:MIB], "b": kept}, tmp_path / "file.pt")
    raw = bytearray((tmp_path / "file.pt").read_bytes())
    raw[raw.index(whole[-1000:].numpy().tobytes())] ^= 4
    (tmp_path / "file.pt").write_bytes(raw)
    for target in ("t", "t.pt", "t.safetensors"):
        with pytest.raises(errors.CorruptCheckpointError, match="b: "):
            await sidestream.convert(tmp_path / "file.pt", tmp_path / target, select="b")
    assert left_over(tmp_path, {"file.pt"}) == set()


async def test_cancelled_or_stopped_nothing_is_left(tmp_path: Path) -> None:
    await sidestream.save({"w": torch.randn(6 * MIB), "v": torch.randn(3 * MIB)}, tmp_path / "a")
    for target in ("b", "b.pt", "b.safetensors"):
        for stop_at in (0, 9 * MIB, 25 * MIB):

            def stop(done: int, total: int, stop_at: int = stop_at) -> None:
                if done >= stop_at:
                    raise RuntimeError("enough")

            with pytest.raises(RuntimeError, match="enough"):
                await sidestream.convert(
                    tmp_path / "a",
                    tmp_path / target,
                    options=sidestream.ConvertOptions(budget_bytes=LEAST, progress=stop),
                )

            started = asyncio.Event()

            def tell(done: int, total: int, stop_at: int = stop_at, started: asyncio.Event = started) -> None:
                if done >= stop_at:
                    started.set()

            task = asyncio.create_task(
                sidestream.convert(
                    tmp_path / "a",
                    tmp_path / target,
                    options=sidestream.ConvertOptions(budget_bytes=LEAST, progress=tell),
                )
            )
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert left_over(tmp_path, {"a"}) == set()
    shown: list[tuple[int, int]] = []
    await sidestream.convert(
        tmp_path / "a",
        tmp_path / "b.pt",
        options=sidestream.ConvertOptions(budget_bytes=LEAST, progress=lambda *told: shown.append(told)),
    )
    assert shown[0] == (0, 36 * MIB)
    assert shown[-1] == (36 * MIB, 36 * MIB)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("key", [float("inf"), float("-inf"), 10**400])
async def test_keys_that_json_does_not_hold(key: float, tmp_path: Path) -> None:
    """They are read, and a checkpoint with them is refused before anything is written."""
    state = {"m": {key: torch.ones(2), 1.5: torch.ones(3)}, "a": torch.ones(4)}
    torch.save(state, tmp_path / "file.pt")
    assert_same(await read(tmp_path / "file.pt"), state)
    target = {"m": {1.5: torch.zeros(3)}}
    await sidestream.load(target, tmp_path / "file.pt", allow_unexpected=True)
    assert_same(target, {"m": {1.5: torch.ones(3)}})
    if isinstance(key, float):
        with pytest.raises(errors.UnsupportedCheckpointError, match="select="):
            await sidestream.convert(tmp_path / "file.pt", tmp_path / "c")
        assert not (tmp_path / "c").exists()
        await sidestream.convert(tmp_path / "file.pt", tmp_path / "named", names=lambda fqn: f"x.{fqn}")
        assert "x.a" in await read(tmp_path / "named")
    await sidestream.convert(tmp_path / "file.pt", tmp_path / "selected", select=["a", "m.1.5"])
    assert_same(await read(tmp_path / "selected"), {"m": {1.5: torch.ones(3)}, "a": torch.ones(4)})


async def test_files_that_are_more_than_data(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "v": Evil(tmp_path / "executed")}, tmp_path / "a.pt")
    with pytest.raises(errors.UnsafeObjectError, match="system"):
        await sidestream.convert(tmp_path / "a.pt", tmp_path / "b")
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "expanded.pt")
    with pytest.raises(errors.UnsupportedCheckpointError, match="w: an expanded tensor"):
        await sidestream.convert(tmp_path / "expanded.pt", tmp_path / "b")
    torch.save([torch.ones(3)], tmp_path / "list.pt")
    with pytest.raises(errors.UnsupportedCheckpointError, match="something else than a dict"):
        await sidestream.convert(tmp_path / "list.pt", tmp_path / "b")
    evil = {"w": torch.ones(3), "v": Evil(tmp_path / "executed")}
    torch.save(evil, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(errors.UnsafeObjectError, match="system"):
        await sidestream.convert(tmp_path / "old.pt", tmp_path / "b")
    save_file({"w": torch.ones(3)}, tmp_path / "cut.safetensors")
    raw = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(raw[:-1])
    with pytest.raises(errors.CorruptCheckpointError):
        await sidestream.convert(tmp_path / "cut.safetensors", tmp_path / "b")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "b").exists()


_MEASURE = """
import asyncio, re, sys, time, torch, weakref, sidestream
from pathlib import Path
from sidestream._runtime.memory_maps import MemoryMap, wait_unmapped
from sidestream._runtime.threads import Deadline
from sidestream._storage.local import transaction as local

MIB = 1 << 20
root = Path(sys.argv[1])

def peak_kib():
    # of this program: ru_maxrss still has the peak of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

now = most = 0  # bytes of windows that have been mapped and not been unmapped
make = MemoryMap.__new__

def changed(nbytes):
    global now, most
    now += nbytes
    most = max(most, now)

def counted(*args):
    memory = make(*args)
    changed(len(memory))
    weakref.finalize(memory, changed, -len(memory))  # called when it has been unmapped
    return memory

write = local.write_buffer

calls = 0

def slowly(*args):
    global calls
    calls += 1
    if calls <= 4:
        time.sleep(0.5)  # whoever reads ahead without a bound has all of the source in memory by then
    return write(*args)

local.write_buffer = slowly

async def main():
    await sidestream.save({"w": torch.ones(3)}, root / "small")
    await sidestream.convert(root / "small", root / "small.pt")  # brings every import
    before = peak_kib()
    MemoryMap.__new__ = counted
    chain = [root / name for name in ("a.safetensors", "b", "c.pt", "d.safetensors")]
    for source, target in zip(chain, chain[1:]):
        globals().update(calls=0)
        options = sidestream.ConvertOptions(budget_bytes=96 * MIB, durability="flush")
        await sidestream.convert(source, target, options=options)
        print(target.name, most / MIB, (peak_kib() - before) // 1024)
        assert wait_unmapped(Deadline.after(60))
        assert now == 0
    globals().update(calls=0)
    await sidestream.copy(chain[-1], root / "e.safetensors", budget_bytes=96 * MIB, durability="flush")
    print("copy", most / MIB, (peak_kib() - before) // 1024)

asyncio.run(main())
"""


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """A state of more than twice the budget, one tensor of it alone larger than the budget. What the process has in
    memory besides, such as the heap, is bounded loosely: it could not have the whole state in there."""
    tensors = {"large": torch.arange(20 * MIB, dtype=torch.int64), **{f"t{n}": torch.full((MIB,), n) for n in range(8)}}
    save_file(tensors, tmp_path / "a.safetensors")
    child = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    windows, grown = zip(*(map(float, line.split()[1:]) for line in child.stdout.splitlines()), strict=True)
    assert len(windows) == 4
    assert 0 < max(windows) <= 96, child.stdout
    assert max(grown) <= 96 + 64, f"the state has 224 MiB; {child.stdout}"
    back = load_file(tmp_path / "d.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


async def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    await sidestream.save({"w": torch.ones(3)}, tmp_path / "a")

    def appear(done: int, total: int) -> None:
        if done == total:
            (tmp_path / "b.pt").write_bytes(b"mine")

    with pytest.raises(errors.CheckpointExistsError):
        await sidestream.convert(tmp_path / "a", tmp_path / "b.pt", options=sidestream.ConvertOptions(progress=appear))
    assert (tmp_path / "b.pt").read_bytes() == b"mine"
    assert left_over(tmp_path, {"a", "b.pt"}) == set()


def test_blocking(tmp_path: Path) -> None:
    sidestream.blocking.save({"w": torch.ones(3)}, tmp_path / "a")
    assert sidestream.blocking.convert(tmp_path / "a", tmp_path / "b.pt").tensors == ("w",)


def test_transformers_reads_it(tmp_path: Path) -> None:
    """A small GPT-2 of transformers' own making: safetensors, DCP, torch.save, safetensors, and transformers again."""
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "a", max_shard_size="50KB")
    convert = sidestream.blocking.convert
    convert(tmp_path / "a", tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c.pt")
    convert(
        tmp_path / "c.pt",
        tmp_path / "d",
        format="safetensors",
        options=sidestream.ConvertOptions(max_shard_bytes=50_000),
    )
    assert (tmp_path / "d" / "model.safetensors.index.json").exists()
    config.save_pretrained(tmp_path / "d")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "d")
    assert_same(dict(model.state_dict()), dict(again.state_dict()))
