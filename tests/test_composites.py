"""Tensors that are made of others, torch's own stagers, DCP, and optimizers of every kind at the fence."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines import GatedEngine
from fake_device import FakeDriver
from leases import all_returned
from states import assert_same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.staging import AsyncStager as DcpStagerProtocol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import sidestream
from sidestream._group.operation import Operation, RankGroup
from sidestream._staging import AsyncStager, DeviceEngine
from sidestream._staging.stage import guard
from sidestream.errors import (
    ArenaExhaustedError,
    ClosedError,
    KindMismatchError,
    SidestreamError,
    UnsafeObjectError,
    UnsupportedTensorError,
)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sparse_tensors() -> dict[str, torch.Tensor]:
    dense = torch.zeros(8, 6)
    dense[2, 3], dense[7, 0] = 1.5, -2.0
    uncoalesced = torch.sparse_coo_tensor([[1, 1], [2, 2]], [1.0, 2.0], (4, 4), check_invariants=True)
    with warnings.catch_warnings(action="ignore"):  # torch calls them a beta, once
        return {
            "coo": dense.to_sparse(),
            "uncoalesced": uncoalesced,
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
            "bsr": dense.to_sparse_bsr((2, 3)),
            "bsc": dense.to_sparse_bsc((2, 3)),
        }


# --- composites ---


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "TwoTensor", "meta"])
async def test_none_is_loaded_into_from_a_plain_tensor(kind: str, atomic: bool, tmp_path: Path) -> None:
    dense = torch.zeros(4, 4)
    with warnings.catch_warnings(action="ignore"):
        targets: dict[str, torch.Tensor] = {
            "sparse_coo": dense.to_sparse(),
            "sparse_csr": dense.to_sparse_csr(),
            "TwoTensor": TwoTensor(dense, dense.clone()),
            "meta": dense.to("meta"),
        }
    await sidestream.save({"first": torch.ones(3), "x": torch.ones(4, 4)}, tmp_path / "c")
    first = torch.zeros(3)
    error: type[SidestreamError] = KindMismatchError
    text = f"x: a .*{kind} in the target, a plain tensor in the checkpoint"
    if kind == "meta":
        error, text = UnsupportedTensorError, "x: cannot load into .*meta"
    with pytest.raises(error, match=text):
        await sidestream.load(
            {"first": first, "x": targets[kind]}, tmp_path / "c", options=sidestream.LoadOptions(atomic=atomic)
        )
    assert not first.any()


async def test_sparse_tensors_go_by_their_parts(stager: AsyncStager) -> None:
    state = sparse_tensors()
    staged = await stager.stage(state)
    for name, tensor in state.items():
        copy = staged[name]
        assert copy.layout is tensor.layout
        assert torch.equal(copy.to_dense(), tensor.to_dense())
    assert staged["uncoalesced"].is_coalesced() is False
    assert staged["coo"]._values().data_ptr() != state["coo"]._values().data_ptr()
    staged.release()
    del staged, copy


@pytest.mark.parametrize("others", [2, 100])
async def test_one_unusual_tensor_among_plain_ones(others: int, stager: AsyncStager) -> None:
    """Large dicts of plain tensors are captured as a whole, small ones tensor by tensor."""
    plain = {f"t{n}": torch.full((3,), float(n)) for n in range(others)}
    marked = torch.ones(3)
    marked.mine = ["kept"]  # type: ignore[attr-defined]
    sparse = torch.eye(3).to_sparse()
    staged = await stager.stage({"marked": {**plain, "it": marked}, "sparse": {**plain, "it": sparse}, "plain": plain})
    assert staged["marked"]["it"].mine == ["kept"]
    assert staged["sparse"]["it"].layout is torch.sparse_coo
    assert torch.equal(staged["sparse"]["it"].to_dense(), torch.eye(3))
    for found in staged.values():
        assert list(found)[:others] == list(plain)
        assert all(torch.equal(found[name], one) for name, one in plain.items())
    staged.release()
    del staged, found


@pytest.mark.parametrize("kind", [None, KeyboardInterrupt])
async def test_a_save_of_one_rank_that_cannot_start_leaves_nothing_open(
    kind: type[BaseException] | None, mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = RankGroup.begin, []

    def kept(group: RankGroup, *args: Any) -> Operation:
        begun.append(begin(group, *args))
        return begun[-1]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RankGroup, "begin", kept)
    shard = LocalShard.from_tensor_and_offsets(torch.ones(8, 4), [0, 0], 0)
    state = {"t": init_from_local_shards([shard], 8, 4)}
    async with AsyncStager() as stager:
        if kind is not None:
            monkeypatch.setattr(AsyncStager, "enqueue", interrupted)
        else:
            await stager.aclose()
        with pytest.raises(ClosedError if kind is None else kind):
            sidestream.async_save(state, tmp_path / "c", stager=stager)
    assert len(begun) == (kind is not None)  # nothing begins with a stager that is closed
    async with asyncio.timeout(60):
        while not all(operation._ended for operation in begun):
            await asyncio.sleep(0)
    assert list(tmp_path.iterdir()) == []


async def test_dtensors_keep_mesh_and_placements(mesh: Any, stager: AsyncStager) -> None:
    local = torch.randn(8, 4)
    state = {
        "sharded": distribute_tensor(local, mesh, [Shard(0)]),
        "replicated": distribute_tensor(local, mesh, [Replicate()]),
        "parameter": torch.nn.Parameter(distribute_tensor(local, mesh, [Shard(1)])),
    }
    staged = await stager.stage(state)
    for name, tensor in state.items():
        copy = staged[name]
        assert isinstance(copy, DTensor)
        assert (copy.placements, copy.device_mesh, copy.shape) == (tensor.placements, mesh, tensor.shape)
        assert torch.equal(copy.to_local(), tensor.to_local())
        assert copy.to_local().data_ptr() != tensor.to_local().data_ptr()
    with pytest.raises(UnsupportedTensorError, match=r"a\.0: .*Partial"):
        stager.stage({"a": [DTensor.from_local(local, mesh, [Partial()])]})
    staged.release()
    del staged, copy


@pytest.mark.parametrize("process_group", [None, "alone"])
async def test_one_process_saves_a_dtensor_over_one_rank(process_group: Any, mesh: Any, tmp_path: Path) -> None:
    """Its local tensor is all of it. Stock DCP reads that as a ``DTensor`` and as a plain tensor."""
    local = torch.randn(8, 4)
    state = {
        "sharded": distribute_tensor(local, mesh, [Shard(0)]),
        "n": {"parameter": torch.nn.Parameter(distribute_tensor(local + 1, mesh, [Replicate()]))},
    }
    await sidestream.save(state, tmp_path / "c", process_group=process_group)
    assert (await sidestream.verify(tmp_path / "c")).ok
    plain = {"sharded": torch.zeros(8, 4), "n": {"parameter": torch.zeros(8, 4)}}
    dcp.load(plain, checkpoint_id=tmp_path / "c")
    assert_same({"sharded": local, "n": {"parameter": local + 1}}, plain)
    for load in (dcp.load, sidestream.blocking.load):
        target = {
            "sharded": distribute_tensor(torch.zeros(8, 4), mesh, [Shard(1)]),
            "n": {"parameter": distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])},
        }
        with sidestream.blocking.stopping_the_loop():
            load(target, checkpoint_id=tmp_path / "c") if load is dcp.load else load(target, tmp_path / "c")
        assert torch.equal(target["sharded"].to_local(), local)
        assert torch.equal(target["n"]["parameter"].to_local(), local + 1)
    with pytest.raises(UnsupportedTensorError, match="Partial"):
        await sidestream.save({"p": DTensor.from_local(local, mesh, [Partial()])}, tmp_path / "d")
    half = DTensor.from_local(
        local, DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0), [Shard(0)], run_check=False
    )
    with pytest.raises(UnsupportedTensorError, match="cannot save a DTensor"):
        await sidestream.save({"h": half}, tmp_path / "d", process_group="alone")


async def test_sharded_tensors(mesh: Any, stager: AsyncStager) -> None:
    sharded = init_from_local_shards([LocalShard.from_tensor_and_offsets(torch.randn(5, 2), [0, 0], 0)], 5, 2)
    staged = await stager.stage({"s": sharded})
    copy = staged["s"]
    assert isinstance(copy, ShardedTensor)
    assert torch.equal(copy.local_tensor(), sharded.local_tensor())
    assert copy.metadata() == sharded.metadata()
    assert copy.local_tensor().data_ptr() != sharded.local_tensor().data_ptr()
    staged.release()
    del staged, copy


async def test_wrapper_subclasses_keep_their_type(stager: AsyncStager) -> None:
    inner = torch.randn(3, 4)
    nested = TwoTensor(TwoTensor(inner, inner + 1), TwoTensor(inner + 2, inner))
    staged = await stager.stage({"n": {"t": nested}})
    copy = staged["n"]["t"]
    assert isinstance(copy, TwoTensor)
    assert isinstance(copy.a, TwoTensor)
    assert torch.equal(copy.a.a, inner)
    assert torch.equal(copy.b.a, inner + 2)
    assert copy.a.a.data_ptr() == copy.b.b.data_ptr(), "parts that share a storage share it in the copy"
    staged.release()
    del staged, copy


async def test_parts_on_a_device() -> None:
    driver = FakeDriver()
    sparse = torch.eye(40).to_sparse()
    driver.put(sparse._values())
    async with AsyncStager(budget_bytes=1 << 20, engine=DeviceEngine(driver, small_bytes=16, chunk_bytes=64)) as stager:
        staged = await driver.drive(stager.stage({"s": sparse}))
        assert torch.equal(staged["s"].to_dense(), torch.eye(40))


async def test_what_has_no_bytes_is_refused_by_name(stager: AsyncStager) -> None:
    with FakeTensorMode():
        fake = torch.empty(3)
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)  # what a sharded FSDP parameter looks like
    with warnings.catch_warnings(action="ignore"):  # torch deprecates them
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    cases: list[tuple[Any, str]] = [
        (fake, "a fake tensor"),
        (torch.empty(3, device="meta"), "a meta tensor"),
        (freed, "freed or shrunk"),
        (quantized, "a quantized tensor"),
        (TwoTensor(torch.empty(3, device="meta"), torch.empty(3, device="meta")), "a meta tensor"),
    ]
    for tensor, what in cases:
        with pytest.raises(UnsupportedTensorError, match=rf"layers\.2.*: cannot save {what}|layers\.2.*{what}"):
            await stager.stage({"layers": {2: tensor}})


# --- BlockingAsyncStager ---


@pytest.mark.parametrize("cached", [True, False])
def test_a_blocking_stage_is_a_copy_that_nobody_overwrites(cached: bool) -> None:
    stager = sidestream.BlockingAsyncStager(cache_staged_state_dict=cached)
    source = torch.zeros(1000)
    held = []
    for step in range(5):
        source.fill_(step)
        held.append(stager.stage({"t": source, "n": {"step": step}})["t"])
        source.fill_(-1)
    assert [int(tensor.max()) for tensor in held] == [int(tensor.min()) for tensor in held] == list(range(5))
    stager.close()
    with pytest.raises(ClosedError):
        stager.stage({"t": source})
    assert int(held[0][0]) == 0


def test_the_cache_is_one_memory_that_is_used_again() -> None:
    stager = sidestream.BlockingAsyncStager(cache_staged_state_dict=True)
    addresses = set()
    for _ in range(5):
        staged = stager.stage({"t": torch.ones(1000)})
        addresses.add(staged["t"].data_ptr())
        del staged
        gc.collect()
    assert len(addresses) == 1
    stager.close()


def test_type_check_and_budget() -> None:
    strict = sidestream.BlockingAsyncStager(type_check=True, budget_bytes=1 << 16)
    assert strict.stage({"a": [1, 2.0, "s", b"b", None, {"t": torch.ones(2)}, (1,)]})["a"][0] == 1
    with pytest.raises(UnsafeObjectError, match=r"a\.0: .*type_check"):
        strict.stage({"a": [object()]})
    with pytest.raises(ArenaExhaustedError):
        strict.stage({"t": torch.ones(1 << 16)})
    strict.close()


@pytest.mark.parametrize("kind", ["async", "blocking", "cached"])
def test_dcp_saves_through_our_stagers(kind: str, tmp_path: Path) -> None:
    stager: Any = AsyncStager() if kind == "async" else sidestream.BlockingAsyncStager(kind == "cached")
    assert isinstance(stager, DcpStagerProtocol)
    source = {"t": torch.zeros(100, 30), "view": torch.zeros(60)[::2]}
    for step in range(3):
        source["t"].fill_(step)
        response: Any = dcp.async_save(source, checkpoint_id=tmp_path / str(step), async_stager=stager, no_dist=True)
        if kind == "async":
            response.staging_completion.result(60)
            source["t"].fill_(-1)
            response.upload_completion.result(60)
        else:
            source["t"].fill_(-1)
            response.result(60)
        loaded = {"t": torch.ones(100, 30), "view": torch.ones(30)}
        dcp.load(loaded, checkpoint_id=tmp_path / str(step), no_dist=True)
        assert (loaded["t"] == step).all()
    stager.close()


# --- every optimizer at the fence ---


def loss_of(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter * parameter).sum()


def optimizers(parameter: torch.nn.Parameter) -> dict[str, torch.optim.Optimizer]:
    return {
        "sgd": torch.optim.SGD([parameter], lr=0.1),
        "foreach": torch.optim.AdamW([parameter], foreach=True),
        "fused": torch.optim.AdamW([parameter], fused=True),
        "lbfgs": torch.optim.LBFGS([parameter]),
    }


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "foreach", "fused", "lbfgs"])
async def test_no_optimizer_steps_before_the_copy(kind: str, everywhere: bool) -> None:
    engine = GatedEngine()
    async with AsyncStager(engine=engine, budget_bytes=1 << 24) as stager:
        parameter = torch.nn.Parameter(torch.ones(64))
        optimizer = optimizers(parameter)[kind]
        handle = stager.guard(None if everywhere else optimizer)
        closure = closure_of(optimizer, parameter)
        future = stager.stage({"p": parameter})
        stepping = asyncio.create_task(asyncio.to_thread(optimizer.step, closure))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not stepping.done()
        assert (parameter == 1.0).all()
        engine.gate.set()
        await stepping
        assert not (parameter == 1.0).any()
        assert ((await future)["p"] == 1.0).all()
        handle.remove()


def closure_of(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(parameter)
        loss.backward()
        return loss

    return closure


async def test_an_optimizer_in_backward_waits_at_the_global_guard() -> None:
    engine = GatedEngine()
    async with AsyncStager(engine=engine, budget_bytes=1 << 24) as stager:
        parameter = torch.nn.Parameter(torch.ones(64))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        handle = stager.guard()
        future = stager.stage({"p": parameter})
        backward = asyncio.create_task(asyncio.to_thread(lambda: loss_of(parameter).backward()))
        for _ in range(100):
            await asyncio.sleep(0)
        assert (parameter == 1.0).all()
        engine.gate.set()
        await backward
        assert not (parameter == 1.0).any()
        assert ((await future)["p"] == 1.0).all()
        handle.remove()


def test_a_compiled_step_calls_the_guard_each_time() -> None:
    stager = AsyncStager(budget_bytes=1 << 24)
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    calls: list[bool] = []

    def fence() -> None:
        calls.append(torch.compiler.is_compiling())
        stager.fence()

    handle = guard(fence, optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        parameter.grad = torch.ones(8)
        with warnings.catch_warnings(action="ignore"):  # of torch's own imports
            step()
    handle.remove()
    assert calls == [False, False, False]
    stager.close()


async def test_all_is_returned_after_a_composite_fails(stager: AsyncStager) -> None:
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(UnsupportedTensorError):
        await stager.stage({"s": sparse, "m": torch.empty(2, device="meta")})
    staged = await stager.stage({"s": sparse})
    assert_same({"d": sparse.to_dense()}, {"d": staged["s"].to_dense()})
    staged.release()
    del staged
    await all_returned(stager)
