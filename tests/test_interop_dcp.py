"""Stock DCP reads what sidestream writes, and sidestream reads what stock DCP writes, bit for bit."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import SAVED_DTYPES, assert_same, filled, model_and_optimizer
from stock import blank, nested_state, stock_load, stock_save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

import sidestream
from sidestream.dcp import StorageReader
from sidestream.errors import MissingKeysError, UnsafeObjectError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*ComplexHalf support is experimental.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*:UserWarning"),
]


async def test_stock_reads_ours(tmp_path: Path) -> None:
    state = nested_state()
    await sidestream.save(state, tmp_path / "c")
    assert_same(state, stock_load(blank(state), tmp_path / "c"))


async def test_ours_reads_stock(tmp_path: Path) -> None:
    state = nested_state()
    stock_save(state, tmp_path / "c")
    target = blank(state)
    report = await sidestream.load(target, tmp_path / "c")
    assert_same(state, target)
    assert report.unverified == ()
    assert_same(state, await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict())


# Stock DCP cannot plan a save of the bits dtypes (it asks torch.iinfo for their size), so they are ours alone.
STOCK_DTYPES = [dtype for dtype in SAVED_DTYPES if "bits" not in str(dtype)]


@pytest.mark.parametrize("dtype", STOCK_DTYPES, ids=str)
async def test_every_dtype_both_ways(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"t": filled((5, 4), dtype), "s": filled((), dtype), "v": filled((8, 6), dtype)[2:5, ::2]}
    await sidestream.save(state, tmp_path / "ours")
    assert_same(state, stock_load({key: torch.empty_like(value) for key, value in state.items()}, tmp_path / "ours"))
    stock_save(state, tmp_path / "stock")
    target = {key: torch.empty_like(value) for key, value in state.items()}
    await sidestream.load(target, tmp_path / "stock")
    assert_same(state, target)


async def test_optimizers_both_ways(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(seed=1)
    await sidestream.save({"model": model, "optimizer": optimizer}, tmp_path / "ours")
    other, other_optimizer = model_and_optimizer(seed=2)
    stock_load({"model": other, "optimizer": other_optimizer}, tmp_path / "ours")
    assert_same(model.state_dict(), other.state_dict())
    assert_same(optimizer.state_dict(), other_optimizer.state_dict())

    stock_save({"model": model, "optimizer": optimizer}, tmp_path / "stock")
    third, _ = model_and_optimizer(seed=3)
    fresh = torch.optim.AdamW(third.parameters(), lr=9.0, amsgrad=True)  # no state yet: stock DCP would drop it
    await sidestream.load({"model": third, "optimizer": fresh}, tmp_path / "stock")
    assert_same(model.state_dict(), third.state_dict())
    assert_same(optimizer.state_dict(), fresh.state_dict())


@pytest.mark.parametrize(
    "options",
    [{"thread_count": 3}, {"single_file_per_rank": False}, {"thread_count": 2, "single_file_per_rank": False}],
)
async def test_other_layouts_of_stock(options: dict[str, Any], tmp_path: Path) -> None:
    state = nested_state()
    stock_save(state, tmp_path / "c", **options)
    target = blank(state)
    await sidestream.load(target, tmp_path / "c")
    assert_same(state, target)


async def test_stock_without_flattening_and_partial(tmp_path: Path) -> None:
    dcp.save(
        {"a": torch.arange(4), "b": torch.ones(2)},
        checkpoint_id=tmp_path / "c",
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    target = {"a": torch.zeros(4, dtype=torch.int64)}
    report = await sidestream.load(target, tmp_path / "c")
    assert target["a"].tolist() == [0, 1, 2, 3]
    assert report.not_requested == ("b",)
    with pytest.raises(MissingKeysError, match="c: in the target"):
        await sidestream.load({"c": torch.zeros(1)}, tmp_path / "c")


async def test_rows_of_a_stock_checkpoint(tmp_path: Path) -> None:
    tensor = torch.randn(3000, 200)
    stock_save({"t": tensor, "transposed": tensor.t()}, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert torch.equal(await checkpoint.tensor("t", rows=slice(700, 2100)), tensor[700:2100])
    assert torch.equal(await checkpoint.tensor("transposed", rows=slice(5, 9)), tensor.t()[5:9])


async def test_altered_stock_payload_is_found(tmp_path: Path) -> None:
    stock_save({"t": torch.zeros(1000)}, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.distcp")
    raw = bytearray(shard.read_bytes())
    raw[1500] ^= 1
    shard.write_bytes(raw)
    assert stock_load({"t": torch.ones(1000)}, tmp_path / "c")["t"].count_nonzero() == 1, "stock DCP notices nothing"
    with pytest.raises(sidestream.errors.CorruptCheckpointError, match="t: its bytes"):
        await sidestream.load({"t": torch.ones(1000)}, tmp_path / "c")


class Payload:
    """Unpickled by anything careless, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


async def test_code_in_a_stock_checkpoint_is_not_run(tmp_path: Path) -> None:
    stock_save({"x": Payload(tmp_path / "executed"), "t": torch.ones(2)}, tmp_path / "c")
    target = {"x": None, "t": torch.zeros(2)}
    with pytest.raises(UnsafeObjectError, match=r"x: .*io\.open"):
        await sidestream.load(target, tmp_path / "c")
    assert target["x"] is None
    assert target["t"].tolist() == [0, 0]
    assert not (tmp_path / "executed").exists()


async def test_metadata_has_only_classes_of_torch(tmp_path: Path) -> None:
    """Stock DCP reads ours in a process that cannot import sidestream."""
    await sidestream.save(nested_state(), tmp_path / "c")
    code = """
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["sidestream"] = None
import torch, torch.distributed.checkpoint as dcp
state = {"large": torch.zeros(3 << 18), "step": 0}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
assert state["step"] == 7 and state["large"].count_nonzero()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_converters_of_stock_work_on_ours(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(3, 4)}, "step": 5}
    await sidestream.save(state, tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "one.pt")
    assert_same(state, torch.load(tmp_path / "one.pt", weights_only=True))


async def test_our_stager_under_stock_async_save(tmp_path: Path) -> None:
    state = {"w": torch.randn(1000), "n": 1}
    expected = state["w"].clone()
    async with sidestream.AsyncStager(budget_bytes=1 << 26) as stager:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            response = dcp.async_save(state, checkpoint_id=tmp_path / "c", async_stager=stager)
            response.staging_completion.result()
            state["w"].zero_()
            response.upload_completion.result()
        finally:
            torch.distributed.destroy_process_group()
    assert torch.equal(stock_load({"w": torch.zeros(1000)}, tmp_path / "c")["w"], expected)


class Halves(DefaultSavePlanner):
    """Saves ``m.w``, of 4 elements, as two chunks."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            if item.index.fqn != "m.w":
                items.append(item)
                continue
            assert item.tensor_data is not None
            whole = item.tensor_data
            for number, start in enumerate((0, 2)):
                chunk = ChunkStorageMetadata(torch.Size([start]), torch.Size([2]))
                index = MetadataIndex("m.w", chunk.offsets, number)
                data = TensorWriteData(chunk, whole.properties, whole.size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn != "m.w":
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        (start,) = write_item.tensor_data.chunk.offsets
        return self.state_dict["m.w"][start : start + 2].clone()


@pytest.mark.parametrize("how", ["shards", "reader"])
async def test_a_tensor_whose_name_looks_like_that_of_a_part(how: str, tmp_path: Path) -> None:
    saved = {"w": torch.arange(1.0, 5.0), "w (part 1)": torch.tensor([8.0, 9.0]), "w (part 3)": torch.tensor([6.0])}
    dcp.save({"m": saved}, checkpoint_id=tmp_path / "c", no_dist=True, planner=Halves())
    target = {fqn: torch.zeros_like(one) for fqn, one in reversed(saved.items())}
    if how == "shards":
        vars(target["w"]).update(  # as torch's CheckpointableTensor has them
            global_shape=(4,), global_offsets=[(0,), (2,)], local_sizes=[(2,), (2,)], local_offsets=[(0,), (2,)]
        )
        await sidestream.load({"m": target}, tmp_path / "c")
    else:
        dcp.load({"m": target}, storage_reader=StorageReader(tmp_path / "c"), no_dist=True)
    for fqn, one in saved.items():
        assert torch.equal(target[fqn], one), fqn
