"""What each rank of a group does in a test. Everything returned goes through JSON."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import runpy
import select
import shutil
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from keywords import for_load, for_run, for_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sidestream
from sidestream import events
from sidestream._group import rank_group as group
from sidestream._layout.sharded.rank_table import LocalTable
from sidestream._run import restore
from sidestream._runtime import threads as _threads
from sidestream._save import layouts as planning
from sidestream._save import writer
from sidestream._staging import HostEngine
from sidestream._storage.local import transaction as local
from sidestream._storage.local import transaction as local_write
from sidestream.observability import Journal

TIMEOUT_S = 60.0
ROWS = torch.arange(70.0).reshape(10, 7)
COLUMNS = torch.arange(60, dtype=torch.int32).reshape(6, 10)
CUBE = torch.arange(5 * 6 * 7, dtype=torch.bfloat16).reshape(5, 6, 7)
SHORT = torch.arange(3.0)


def warm_up() -> None:
    """What a first call imports, before the first fork. No thread may be started here."""
    import importlib
    import pkgutil

    for module in pkgutil.walk_packages(sidestream.__path__, "sidestream."):
        if "__main__" not in module.name and not module.name.startswith("sidestream.integrations."):
            importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")  # which the first DTensor or optimizer of every rank would import


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def placed(whole: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    """Without a collective: every rank has the whole."""
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)


def state_of(mesh: DeviceMesh, plus: int = 0, turn: int = 0) -> dict[str, Any]:
    """``turn``: other placements of the same tensors."""
    ways = [Shard(0), Shard(1), Replicate()]
    way = [ways[(number + turn) % 3] for number in range(3)]
    return {
        "rows": placed(ROWS + plus, mesh, way[0]),
        "deep": {"columns": placed(COLUMNS + plus, mesh, way[1]), "plain": torch.arange(5) + plus},
        "cube": placed(CUBE + plus, mesh, Shard(turn % 3)),
        "short": placed(SHORT + plus, mesh, Shard(0)),
        "whole": [placed(ROWS + plus, mesh, way[2]), {"empty": {}}],
        "none": placed(torch.empty(0, 3), mesh, Shard(0)),
        "scalar": placed(torch.tensor(2.5 + plus), mesh, Replicate()),
        "step": 7 + plus,
        "betas": (0.9, 0.99),
        3: torch.ones(2) * plus,
    }


def whole(plus: int = 0) -> dict[str, Any]:
    """The same as one process has it."""
    return {
        "rows": ROWS + plus,
        "deep": {"columns": COLUMNS + plus, "plain": torch.arange(5) + plus},
        "cube": CUBE + plus,
        "short": SHORT + plus,
        "whole": [ROWS + plus, {"empty": {}}],
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.5 + plus),
        "step": 7 + plus,
        "betas": (0.9, 0.99),
        3: torch.ones(2) * plus,
    }


def same(one: Any, other: Any, path: str = "") -> None:
    """Equal where this rank can see it."""
    if isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            same(left, right, f"{path}.{index}")
    elif isinstance(one, DTensor):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), path
        assert torch.equal(one.to_local(), other.to_local()), (path, one.to_local(), other.to_local())
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), (path, one, other)
    else:
        assert one == other, path


# --- the matrix -----------------------------------------------------------------------------------------------------


def save_matrix(rank: int, world: int, directory: Path) -> list[Any]:
    """Ours and stock's, from so many ranks; twice, so that the second plan is a remembered one."""
    mesh = init_device_mesh("cpu", (world,))

    async def save() -> list[Any]:
        told = []
        for number in range(2):
            path = directory / f"ours-{world}-{number}"
            info = await sidestream.save(
                state_of(mesh, number), path, options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
            )
            told.append([info.save_id, info.nbytes, info.url, dict(info.seconds)])
        return told

    told: list[Any] = run(save())
    dcp.save(state_of(mesh, 5), checkpoint_id=directory / f"stock-{world}")
    return told


def load_matrix(rank: int, world: int, directory: Path, saved: list[int]) -> list[Any]:
    """Everything that was saved, in every placement; ours by stock too."""
    mesh = init_device_mesh("cpu", (world,))

    async def load(path: Path, plus: int, turn: int, **options: Any) -> int:
        target = state_of(mesh, 100, turn)
        report = await sidestream.load(target, path, **for_load(timeout_s=TIMEOUT_S, **options))
        same(target, state_of(mesh, plus, turn))
        return report.nbytes

    for writers in saved:
        for turn in range(3):
            run(
                load(
                    directory / f"ours-{writers}-{turn % 2}",
                    turn % 2,
                    turn,
                    options=sidestream.LoadOptions(atomic=turn == 1),
                )
            )
            run(load(directory / f"stock-{writers}", 5, turn))
        target = without_odd_keys(state_of(mesh, 100, 1))
        dcp.load(target, checkpoint_id=directory / f"ours-{writers}-1")
        same(target, without_odd_keys(state_of(mesh, 1, 1)))
    return saved


def without_odd_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Stock DCP makes strings of all keys, and has no empty dicts."""
    return {key: value for key, value in state.items() if key not in (3, "whole")}


def load_whole(rank: int, world: int, directory: Path, saved: list[int]) -> list[Any]:
    """By one process, that knows nothing of ranks."""

    async def load(path: Path) -> list[Any]:
        target = whole(100)
        report = await sidestream.load(target, path, process_group="alone")
        same(target, whole(1))
        found = await (await sidestream.open_checkpoint(path)).state_dict()
        same(found, whole(1))
        verified = await sidestream.verify(path)
        copied = directory / f"copy-{path.name}"
        await sidestream.copy(path, copied)
        target = whole(100)
        await sidestream.load(target, copied, process_group="alone")
        same(target, whole(1))
        return [report.save_id, verified.ok, [damage.message for damage in verified.damaged]]

    return [run(load(directory / f"ours-{writers}-1")) for writers in saved]


# --- failures -------------------------------------------------------------------------------------------------------


def large(mesh: DeviceMesh, plus: int = 0) -> dict[str, Any]:
    return {"rows": placed(torch.arange(1 << 20).reshape(1024, -1) + plus, mesh, Shard(0)), "step": plus}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Lethal:
    """A state whose ``state_dict()`` ends the process."""

    def state_dict(self) -> dict[str, Any]:
        die()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Fault:
    """On one rank, at one moment of a save: the process dies, or the call raises."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.armed = True

    def strike(self) -> None:
        if self.armed and self.how == "die":
            die()
        if self.armed and self.how == "raise":
            raise OSError(errno.EIO, "the disk is gone")
        while self.armed and self.how == "hang":
            time.sleep(0.05)

    def before(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            self.strike()
            return original(*args, **options)

        setattr(owner, name, call)

    def after(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            self.strike()
            return result

        setattr(owner, name, call)


def arm(phase: str, how: str) -> Fault:
    fault = Fault(how)
    if phase == "plan":
        fault.before(LocalTable, "encode_values")
    elif phase == "assign":
        fault.before(planning, "join_pieces")
    elif phase == "stage":
        fault.before(HostEngine, "fill")
    elif phase == "write":
        fault.before(local_write, "write_buffer")
    elif phase == "written":
        fault.after(local_write._Parts, "write")
    elif phase == "receipt":
        fault.before(local.LocalTransaction, "put")
    elif phase == "publish":
        fault.before(local, "publish")
    elif phase == "published":
        fault.after(local, "publish")
    return fault


def failing_save(
    rank: int, world: int, directory: Path, phase: str, how: str, who: int, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    told: dict[str, Any] = {}
    if how == "hang":  # and does not stop when it is told to
        group._STOP_S = writer._GRACE_S = _threads._GRACE_S = 1.0

    async def save() -> None:
        await sidestream.save(large(mesh), directory / "before", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        state: dict[str, Any] = large(mesh, 1)
        fault = arm(phase, how) if rank == who and phase != "call" else Fault(how)
        if phase == "assign":  # a plan that is not known yet
            state["more"] = placed(ROWS, mesh, Shard(1))
        if rank == who and phase == "call":
            state["lethal"] = Lethal() if how == "die" else object()
        started = time.monotonic()
        try:
            pending = sidestream.async_save(
                state, directory / "failing", options=sidestream.SaveOptions(timeout_s=timeout_s)
            )
            info = await pending
            told["info"] = [info.save_id, info.nbytes]
        except sidestream.errors.RankFailuresError as failures:
            told["failures"] = [[one.rank, one.step, one.kind] for one in failures.failures]
            told["text"] = str(failures)
            told["outcome"] = pending.outcome
        told["seconds"] = time.monotonic() - started
        fault.armed = False
        told["visible"] = (directory / "failing").exists()
        if how != "die":
            info = await sidestream.save(
                large(mesh, 2), directory / "after", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
            )
            told["after"] = info.save_id

    run(save())
    return told


# --- models ---------------------------------------------------------------------------------------------------------


def network(width: int = 24) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(10, width), torch.nn.ReLU(), torch.nn.Linear(width, width + 1), torch.nn.Linear(width + 1, 3)
    )


def built(kind: str, world: int) -> tuple[torch.nn.Module, DeviceMesh]:
    """A model as that kind of parallelism has it. Uneven: 25 rows do not divide by 2, 3 or 4."""
    model = network()
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model), init_device_mesh("cpu", (world,))
    if kind == "tp":
        mesh = init_device_mesh("cpu", (world,))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, mesh, plan), mesh
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        return fully_shard(model, mesh=mesh), mesh
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh), mesh
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"]), mesh


def trained(kind: str, world: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _ = built(kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, steps)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, start: int, steps: int) -> float:
    """The same data on every rank, so that every parallelism learns the same."""
    loss = torch.tensor(0.0)
    for step in range(start, start + steps):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 10)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


def state_dicts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def full(state: dict[str, Any]) -> dict[str, Any]:
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def save_model(rank: int, world: int, directory: Path, kind: str) -> float:
    model, optimizer = trained(kind, world, 3)
    run(
        sidestream.save(
            state_dicts(model, optimizer),
            directory / f"{kind}-{world}",
            options=sidestream.SaveOptions(timeout_s=TIMEOUT_S),
        )
    )
    dcp.save(state_dicts(model, optimizer), checkpoint_id=directory / f"stock-{kind}-{world}")
    files = {path.name.split("_")[2] for path in (directory / f"{kind}-{world}").glob("__*.distcp")}
    assert files == {str(one) for one in range(world)}, files
    return train(model, optimizer, 3, 2)


def load_model(rank: int, world: int, directory: Path, kind: str, names: list[str]) -> list[float]:
    """The losses after two more steps from each checkpoint. Those steps leave another state for the next one."""
    losses = []
    model, optimizer = trained(kind, world, 1)
    for name in names:
        state = state_dicts(model, optimizer)
        run(sidestream.load(state, directory / name, options=sidestream.LoadOptions(timeout_s=TIMEOUT_S)))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        losses.append(train(model, optimizer, 3, 2))
    return losses


def sharded_tensors(rank: int, world: int, directory: Path) -> None:
    """``ShardedTensor``, two uneven shards on each rank, none of the last one's."""
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    def make(plus: float) -> Any:
        bounds = [0, 3, 4, 9, 10] if world == 2 else [0, 3, 4, 9, 9, 10, 10]
        mine = [(bounds[2 * rank + n], bounds[2 * rank + n + 1]) for n in range(2)]
        shards = [
            LocalShard.from_tensor_and_offsets(ROWS[start:end].clone() + plus, [start, 0], rank)
            for start, end in mine
            if end > start
        ]
        return init_from_local_shards(shards, 10, 7)

    async def both() -> None:
        await sidestream.save(
            {"t": make(0.0)}, directory / "sharded", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
        )
        target = make(50.0)
        await sidestream.load({"t": target}, directory / "sharded", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S))
        for shard in target.local_shards():
            start = shard.metadata.shard_offsets[0]
            assert torch.equal(shard.tensor, ROWS[start : start + shard.metadata.shard_sizes[0]])
        mesh = init_device_mesh("cpu", (world,))
        other = placed(ROWS + 1, mesh, Shard(1))
        await sidestream.load({"t": other}, directory / "sharded", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S))
        same(other, placed(ROWS, mesh, Shard(1)))

    run(both())


def example(rank: int, world: int, directory: Path, into: str, steps: int, lose: int = -1, at: int = -1) -> None:
    """One rank of ``examples/fsdp2_live.py``. The others end when rank ``lose`` has died, as under torchrun."""
    train = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "fsdp2_live.py"))["train"]
    if lose >= 0:
        pids: list[Any] = [None] * world
        dist.all_gather_object(pids, os.getpid())
        if rank != lose:
            threading.Thread(target=end_after, args=(os.pidfd_open(pids[lose]),), daemon=True).start()
    run(train(argparse.Namespace(into=directory / into, steps=steps, lose=lose, at=at)))


def end_after(process: int) -> None:
    select.select([process], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


# --- what else ranks do ---------------------------------------------------------------------------------------------


def failures_of(work: Coroutine[Any, Any, Any]) -> list[Any]:
    async def caught() -> list[Any]:
        try:
            await work
        except sidestream.errors.RankFailuresError as failures:
            return [[one.rank, one.kind, one.text] for one in failures.failures]
        return []

    return run(caught())


async def saved_in_run(state: dict[str, Any], run: Path, options: Any) -> None:
    async with sidestream.Checkpointer(run) as checkpoints:
        await checkpoints.save(state, step=1, options=options)


def disagreements(rank: int, world: int, directory: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    good = large(mesh)

    def save(state: dict[str, Any], name: str, **options: Any) -> list[Any]:
        return failures_of(sidestream.save(state, directory / name, **for_save(timeout_s=TIMEOUT_S, **options)))

    told = {
        "good": save(good, "good"),
        "conflict": save(good, "good"),
        "names": save(good, f"name{rank}"),
        "values": save({"loss": rank, "w": good["rows"]}, "values"),
        "shapes": save({"w": torch.ones(2 + rank)}, "shapes"),
        "partial": save({"p": partial}, "partial"),
        "one_rank": save({"w": good["rows"], **({"x": object()} if rank else {})}, "one_rank"),
        "option": save(good, "option", files={} if rank else {"a/b": b"no plain name"}),
        "export": save(good, "export", export=object() if rank else None),
        "options": failures_of(sidestream.save(good, directory / "options", options={} if rank else None)),
        "load_options": failures_of(sidestream.load(good, directory / "good", options={} if rank else None)),
        "run_options": failures_of(saved_in_run(good, directory / "run", {} if rank else None)),
        "not_shared": save(good, f"disk{rank}/x"),
        "missing": failures_of(
            sidestream.load(large(mesh), directory / "nothing", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S))
        ),
        "keys": failures_of(
            sidestream.load(
                {**large(mesh), **({"more": 1} if rank else {})},
                directory / "good",
                options=sidestream.LoadOptions(timeout_s=TIMEOUT_S),
            )
        ),
    }
    target = large(mesh, 9)
    run(sidestream.load(target, directory / "good", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S)))
    same(target, good)
    return told


def stages(rank: int, world: int, directory: Path) -> list[Any]:
    """Pipeline stages in one checkpoint: each rank has names of its own, the last one only what others have too."""
    state = {"model": {f"stage{rank}": ROWS + rank}, "step": 3, "rng": {f"rank{rank}": rank}} if rank < 2 else {}

    async def both() -> list[Any]:
        info = await sidestream.save(
            {**state, "common": COLUMNS}, directory / "stages", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
        )
        target = {**state, "common": torch.zeros_like(COLUMNS)}
        if rank < 2:
            target["model"] = {f"stage{rank}": torch.zeros_like(ROWS)}
        await sidestream.load(target, directory / "stages", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S))
        same(target, {**state, "common": COLUMNS})
        return [info.save_id, len(list((directory / "stages").glob("__*")))]

    return run(both())


def shared_names(rank: int, world: int, directory: Path) -> list[Any]:
    """A local tensor saved by itself too, and a dict that is empty on all ranks but one."""
    mesh = init_device_mesh("cpu", (world,))

    def state(plus: int) -> dict[str, Any]:
        tensor = placed(ROWS + plus, mesh, Shard(0))
        inner = {} if rank else {"x": COLUMNS + plus, "deep": {"y": plus}}
        return {"w": tensor, "raw": {f"rank{rank}": tensor.to_local()}, "opt": inner}

    async def both() -> list[Any]:
        path = directory / "shared"
        await sidestream.save(state(1), path, options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        target = {**state(5), "raw": {f"rank{rank}": state(5)["w"].to_local()}}
        await sidestream.load(target, path, options=sidestream.LoadOptions(timeout_s=TIMEOUT_S))
        same(target, state(1))
        found = await (await sidestream.open_checkpoint(path)).state_dict()
        same(found["w"], ROWS + 1)
        same(found["opt"], {"x": COLUMNS + 1, "deep": {"y": 1}})
        assert torch.equal(torch.cat([found["raw"][f"rank{one}"] for one in range(world)]), ROWS + 1)
        return sorted(found)

    told = run(both())
    other = {"x": 1} if rank else 1
    failures = failures_of(
        sidestream.save({"opt": other}, directory / "bad", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
    )
    return [told, [[one, kind] for one, kind, _ in failures]]


def subgroups(rank: int, world: int, directory: Path) -> None:
    """Actor and critic: two groups save at once, one rank alone besides."""
    halves = [dist.new_group(list(range(0, world, 2))), dist.new_group(list(range(1, world, 2)))]
    mine, name = halves[rank % 2], ("actor", "critic")[rank % 2]

    async def both() -> None:
        saves = [
            sidestream.save(
                {"w": ROWS + rank % 2},
                directory / f"{name}{n}",
                process_group=mine,
                options=sidestream.SaveOptions(timeout_s=TIMEOUT_S),
            )
            for n in range(3)
        ]
        alone = sidestream.save({"w": ROWS + rank}, directory / f"alone{rank}", process_group="alone")
        await asyncio.gather(*saves, alone)
        target = {"w": torch.zeros_like(ROWS)}
        await sidestream.load(
            target, directory / f"{name}2", process_group=mine, options=sidestream.LoadOptions(timeout_s=TIMEOUT_S)
        )
        same(target, {"w": ROWS + rank % 2})

    run(both())


def replicas(rank: int, world: int, directory: Path) -> list[int]:
    """Who writes how many bytes of what all ranks have."""
    state = {f"w{n}": torch.ones(1 << 18) * n for n in range(3 * world)}
    state["huge"] = torch.arange(float(world) * (4 << 20)).reshape(-1, 64)

    async def both() -> list[int]:
        await sidestream.save(state, directory / "replicas", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        target = {name: torch.zeros_like(one) for name, one in state.items()}
        await sidestream.load(target, directory / "replicas", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S))
        same(target, state)
        return [
            sum(path.stat().st_size for path in (directory / "replicas").glob(f"__{one}_*.distcp"))
            for one in range(world)
        ]

    return run(both())


def read_bytes(rank: int, world: int, directory: Path) -> float:
    """Bytes fetched for each byte needed, when the world has another size."""
    mesh = init_device_mesh("cpu", (world,))
    tensor = torch.arange(24 << 20, dtype=torch.float32).reshape(-1, 512)

    async def load() -> float:
        target = {"w": placed(torch.zeros_like(tensor), mesh, Shard(0))}
        report = await sidestream.load(target, directory / "rows", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S))
        same(target, {"w": placed(tensor, mesh, Shard(0))})
        return report.nbytes / target["w"].to_local().nbytes

    if world == 3:
        run(
            sidestream.save(
                {"w": placed(tensor, mesh, Shard(0))},
                directory / "rows",
                options=sidestream.SaveOptions(timeout_s=TIMEOUT_S),
            )
        )
        return 0.0
    return float(run(load()))


def a_run(rank: int, world: int, directory: Path) -> list[Any]:
    """A ``Checkpointer`` over ranks: steps, generations, retention, restore, fallback."""
    mesh = init_device_mesh("cpu", (world,))

    async def steps() -> list[Any]:
        keep = sidestream.KeepLast(2)
        async with sidestream.Checkpointer(directory / "run", keep=keep, **for_run(timeout_s=TIMEOUT_S)) as checkpoints:
            first = await checkpoints.restore(large(mesh))
            for step in range(4):
                pending = checkpoints.async_save(large(mesh, step), step=step, metadata={"step": step})
                await pending.staged
                info = await pending
            again = await checkpoints.save(large(mesh, 30), step=3)
        async with sidestream.Checkpointer(directory / "run", **for_run(timeout_s=TIMEOUT_S)) as checkpoints:
            target = large(mesh, 99)
            restored = await checkpoints.restore(target)
            same(target, large(mesh, 30))
            leased = checkpoints.restored.leased if checkpoints.restored else None
            dist.barrier()
            if rank == 0:
                damage(directory / "run" / "step-3.g2")
            dist.barrier()
            older = await checkpoints.restore(target, fallback="older")
            same(target, large(mesh, 2))
            steps = await checkpoints.steps()
            await sidestream.save(large(mesh, 7), directory / "run" / "step-7.g2", **for_save(timeout_s=TIMEOUT_S))
            seeded = await checkpoints.restore(target)
            same(target, large(mesh, 7))
            report = checkpoints.restored
            assert report is not None
            assert (report.step, report.generation) == (7, 2)
            return [first, info.step, again.generation, restored, leased, older, steps, seeded]

    return run(steps())


def deleted_in_part(rank: int, world: int, directory: Path) -> list[Any]:
    """A process that knows no leases deletes the newest step, in parts, while it is restored."""
    load_from = restore.load_from

    async def deleting(where: Any, *args: Any) -> Any:
        if where.name == "step-2":
            (directory / "step-2" / ".metadata").unlink()  # first, or rank 0 may find the rest damaged
            shutil.rmtree(directory / "step-2", ignore_errors=True)
            raise sidestream.errors.IncompleteCheckpointError("step-2 lacks the part of rank 1")
        return await load_from(where, *args)

    async def restored() -> list[Any]:
        async with sidestream.Checkpointer(directory, **for_run(timeout_s=TIMEOUT_S)) as checkpoints:
            for step in (1, 2):
                await checkpoints.save({"w": ROWS + step}, step=step)
            if rank:
                restore.load_from = deleting  # type: ignore[assignment]
            target = {"w": torch.zeros_like(ROWS)}
            step = await checkpoints.restore(target)
            same(target, {"w": ROWS + 1})
            return [step]

    return run(restored())


def own_disks(rank: int, world: int, directory: Path) -> list[Any]:
    """A run on disks that each rank has for itself: only rank 0's has a step. Then it is shared, and all is well."""
    mine = directory / f"disk{rank}"

    async def restore(path: Path) -> list[Any]:
        async with sidestream.Checkpointer(path, **for_run(timeout_s=TIMEOUT_S)) as checkpoints:
            target = {"w": torch.zeros_like(ROWS)}
            try:
                step = await checkpoints.restore(target, fallback="older")
            except sidestream.errors.RankFailuresError as failures:
                return [[one.rank, one.kind] for one in failures.failures]
            same(target, {"w": ROWS})
            return [step]

    async def save() -> None:
        async with sidestream.Checkpointer(mine, process_group="alone", **for_run(timeout_s=TIMEOUT_S)) as checkpoints:
            await checkpoints.save({"w": ROWS}, step=1)

    if rank == 0:
        run(save())
    return [run(restore(mine)), run(restore(directory / "disk0"))]


def damage(checkpoint: Path, file: str = "__1_1.distcp") -> None:
    (path,) = checkpoint.glob(file)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cancelled(rank: int, world: int, directory: Path) -> list[Any]:
    """One rank cancels its save: the others hear of it, and what comes next works."""
    mesh = init_device_mesh("cpu", (world,))

    async def save() -> list[Any]:
        fault = arm("write", "hang") if rank == 1 else None
        pending = sidestream.async_save(
            large(mesh), directory / "cancelled", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
        )
        told: list[Any] = []
        if rank == 0:
            await pending.staged
            pending.cancel()
        while fault is not None and fault.armed:  # this rank holds up the commit until it has heard of the cancel
            fault.armed = not pending._work.coordinator._operation.stopping  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        try:
            await pending
        except asyncio.CancelledError:
            told.append("cancelled")
        except sidestream.errors.RankFailuresError as failures:
            told.append([[one.rank, one.kind] for one in failures.failures])
        told.append(pending.outcome)
        await sidestream.save(large(mesh), directory / "next", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        return told

    return run(save())


class _Slow:
    """An object whose rank does not stop before the cancel of the other one: its state dict takes that long."""

    def __init__(self, begun: Path, go_on: Path) -> None:
        self._begun, self._go_on = begun, go_on

    def state_dict(self) -> dict[str, Any]:
        self._begun.touch()
        while not self._go_on.exists():
            time.sleep(0.01)
        return {"n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def cancelled_after_its_failure(rank: int, world: int, directory: Path) -> list[Any]:
    """Rank 1 fails, and is cancelled while rank 0 is too busy to stop."""

    async def one(name: str, begin: Callable[[dict[str, Any]], Awaitable[Any]]) -> Any:
        busy, go_on = directory / f"{name}-busy", directory / name
        while rank and not busy.exists():  # or rank 0 may hear of the failure when it begins, and stop at once
            await asyncio.sleep(0.01)
        task = asyncio.ensure_future(begin({} if rank else {"slow": _Slow(busy, go_on)}))
        if rank:
            await asyncio.sleep(1)
            task.cancel()
            await asyncio.sleep(0.01)
            go_on.touch()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled" if task.cancelled() else None
        except sidestream.errors.RankFailuresError as failures:
            return [[one.rank, one.kind] for one in failures.failures]

    async def both() -> list[Any]:
        saving = sidestream.SaveOptions(timeout_s=TIMEOUT_S)
        url = "unknown://x" if rank else directory / "c"

        async def save(slow: dict[str, Any]) -> None:
            await sidestream.save({f"a{rank}": torch.ones(3), **slow}, url, options=saving)

        return [
            await one("load", lambda slow: sidestream.load({"a": torch.zeros(3), **slow}, directory / "nothing")),
            await one("save", save),
        ]

    return run(both())


def storage_then_disk(rank: int, world: int, directory: Path) -> None:
    """The same state to storage where names carry the save's id, then twice to a disk, where they do not."""
    mesh = init_device_mesh("cpu", (world,))

    async def save() -> None:
        for url in ("memory://then/disk", str(directory / "one"), str(directory / "two")):
            await sidestream.save(large(mesh), url, options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))

    run(save())
    for name in ("one", "two"):
        target = large(mesh, 5)
        dcp.load(target, checkpoint_id=str(directory / name))
        same(target, large(mesh))


def overwritten_on_storage(rank: int, world: int, directory: Path, url: str, options: dict[str, Any]) -> list[Any]:
    """All ranks replace one checkpoint several times; the last time another save is faster."""
    mesh = init_device_mesh("cpu", (world,))
    policy = sidestream.StorePolicy(engine="obstore", part_bytes=5 << 20)
    keywords: dict[str, Any] = {"storage": sidestream.Storage(options, policy=policy), "timeout_s": TIMEOUT_S}

    def overtake(event: sidestream.events.Event) -> None:
        """On rank 0, when it has written and not committed."""
        if isinstance(event, sidestream.events.SaveWritten) and event.save.world == world and not rank:
            small = {"other": torch.ones(3)}
            save = sidestream.blocking.save
            alone = for_save(overwrite=True, process_group="alone", **keywords)
            thread = threading.Thread(target=save, args=(small, url), kwargs=alone)
            thread.start()
            thread.join()

    async def several() -> list[Any]:
        ids = []
        for seed in range(3):
            ids.append((await sidestream.save(large(mesh, seed), url, overwrite=True, **for_save(**keywords))).save_id)
            target = large(mesh, 9)
            await sidestream.load(target, url, **for_load(**keywords))
            same(target, large(mesh, seed))
        with sidestream.events.observe(overtake):
            try:
                await sidestream.save(large(mesh, 3), url, overwrite=True, **for_save(**keywords))
            except sidestream.errors.RankFailuresError as failures:
                return [ids, [[one.rank, one.kind] for one in failures.failures]]
        return []

    return run(several())


def object_storage(rank: int, world: int, directory: Path, url: str, options: dict[str, Any]) -> list[Any]:
    policy = sidestream.StorePolicy(engine="fsspec", part_bytes=5 << 20)
    return saved_by_markers(world, url, sidestream.Storage(options, policy=policy))


def marked(rank: int, world: int, directory: Path) -> list[Any]:
    return saved_by_markers(world, str(directory), sidestream.Storage(commit="marker"))


def saved_by_markers(world: int, url: str, storage: sidestream.Storage) -> list[Any]:
    """Where nothing is renamed: twice in one run, then a save that fails, and what is left of it."""
    mesh = init_device_mesh("cpu", (world,))
    keywords: dict[str, Any] = {"storage": storage, "timeout_s": TIMEOUT_S}

    async def both() -> list[Any]:
        ids = []
        async with sidestream.Checkpointer(f"{url}/run", **for_run(**keywords)) as checkpoints:
            for step in range(2):
                ids.append((await checkpoints.save(large(mesh, step), step=step)).save_id)
            target = large(mesh, 9)
            restored = await checkpoints.restore(target)
            same(target, large(mesh, 1))
        bad = {**large(mesh), **({"x": object()} if mesh.get_rank() else {})}
        try:
            await sidestream.save(bad, f"{url}/bad", **for_save(**keywords))
        except sidestream.errors.RankFailuresError as failures:
            return [ids, restored, [[one.rank, one.kind] for one in failures.failures]]
        return []

    return run(both())


def saved_as(rank: int, world: int, directory: Path) -> list[Any]:
    """Saves under other names and with other dtypes, twice, so that the second plan is a known one; and names that are
    refused on one rank alone."""
    mesh = init_device_mesh("cpu", (world,))
    keywords: dict[str, Any] = {"timeout_s": TIMEOUT_S}
    torch.manual_seed(3)
    whole, replica = torch.randn(world * 300 + 1, 1001), torch.randn(200, 300)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    columns = distribute_tensor(whole, mesh, [Shard(1)])
    state = {"model": {"a": sharded, "b": sharded, "columns": columns, "replica": replica}, f"own{rank}": whole[rank]}
    names = {"model.a": "weights.a", "model.b": "weights.b", "own0": "rank.0", "own1": "rank.1"}
    dtype = {"weights.*": torch.bfloat16, "model.columns": torch.float16, "rank.1": torch.float64}

    async def all_of_it() -> list[Any]:
        async with sidestream.AsyncStager() as stager:
            for number in range(2):
                url = directory / f"step{number}"
                await sidestream.save(
                    state, url, stager=stager, **for_save(names=names, dtype=dtype, digest="blake3", **keywords)
                )
                target = {
                    "weights": {
                        "a": distribute_tensor(torch.zeros_like(whole, dtype=torch.bfloat16), mesh, [Shard(0)])
                    },
                    "model": {"columns": torch.zeros_like(whole, dtype=torch.float16)},
                }
                await sidestream.load(target, url, allow_unexpected=True, **for_load(**keywords))
                same(target["weights"], {"a": distribute_tensor(whole.bfloat16(), mesh, [Shard(0)])})
                assert torch.equal(target["model"]["columns"], whole.half())
        try:
            mine = {"model.a": "model.b"} if rank else {"model.a": "model.c"}
            await sidestream.save(
                {"model": {"a": sharded, "b": columns}}, directory / "none", **for_save(names=mine, **keywords)
            )
        except sidestream.errors.RankFailuresError as failures:
            return [[one.rank, one.kind] for one in failures.failures]
        return []

    return run(all_of_it())


def with_files(rank: int, world: int, directory: Path) -> list[Any]:
    """Sidecar files, of which those of rank 0 count, and a load under other names."""
    mesh = init_device_mesh("cpu", (world,))
    keywords: dict[str, Any] = {"timeout_s": TIMEOUT_S}

    async def all_of_it() -> list[Any]:
        await sidestream.save(
            large(mesh, 1), directory / "step", files={"rank": str(rank).encode()}, **for_save(**keywords)
        )
        target = {"module": large(mesh, 9)}
        prefix = sidestream.strip_prefix("module.")
        await sidestream.load(target, directory / "step", **for_load(names=prefix, **keywords))
        same(target["module"], large(mesh, 1))
        try:
            await sidestream.save(
                large(mesh, 1), directory / "none", files={"a": directory / "missing"}, **for_save(**keywords)
            )
        except sidestream.errors.RankFailuresError as failures:
            return [[one.rank, one.kind] for one in failures.failures]
        return []

    return run(all_of_it())


def many_states_at_once(rank: int, world: int, directory: Path) -> list[str]:
    """States of six structures, of which the group keeps the agreements of four, each by a stager of its own."""
    states = [{f"m{n}": {f"w{k}": torch.ones(64) for k in range(3 + n)}} for n in range(6)]
    options = sidestream.SaveOptions(durability="flush", timeout_s=TIMEOUT_S)

    async def save() -> list[str]:
        outcomes = []
        for turn in range(12):
            pending = [
                sidestream.async_save(state, directory / f"{turn}-{n}", options=options)
                for n, state in enumerate(states)
            ]
            await asyncio.gather(*pending, return_exceptions=True)
            outcomes += [one.outcome for one in pending]
        return outcomes

    return run(save())


def differing_replicas(rank: int, world: int, directory: Path) -> list[str]:
    """Per-rank state under one name, beside replicas that are equal, that are on one rank only, and that are large.
    Returns what was logged."""
    torch.manual_seed(rank)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sidestream").addHandler(handler)
    mesh = init_device_mesh("cpu", (world,))
    state = {
        "rng": torch.get_rng_state(),
        "step": torch.tensor(float(rank)),
        "equal": torch.arange(100.0),
        "sharded": placed(ROWS + rank, mesh, Shard(0)),
        "own": {f"rank{rank}": torch.get_rng_state()},
        "large": torch.full((1 << 20,), float(rank)),
    }
    for name in ("first", "second"):
        run(sidestream.save(state, directory / name, **for_save(timeout_s=TIMEOUT_S)))
    run(sidestream.save({**state, "more": torch.ones(2)}, directory / "third", **for_save(timeout_s=TIMEOUT_S)))
    target = {"own": {f"rank{rank}": torch.zeros_like(state["rng"])}}
    run(sidestream.load(target, directory / "third"))
    assert torch.equal(target["own"][f"rank{rank}"], state["rng"])
    return [one.replace(str(directory), "D") for one in told]


# --- observers --------------------------------------------------------------------------------------------------------


def journaled(rank: int, world: int, directory: Path) -> None:
    """Three saves of a run, and a restore, in a journal of this rank."""
    state = {"replicated": torch.ones(1000), "mine": torch.full((100,), float(rank))}

    async def work() -> None:
        async with sidestream.Checkpointer(directory / "run", slots=1) as checkpoints:
            pending = [checkpoints.async_save({"replicated": state["replicated"]}, step=step) for step in (1, 2, 3)]
            for one in pending:
                await one
            await checkpoints.restore({"replicated": state["replicated"]})

    with Journal(directory / f"rank{rank}.jsonl"):
        run(work())


def waits_for_rank(rank: int, world: int, directory: Path, in_run: bool) -> Any:
    """The last rank makes its call half a second late. The seconds that each one awaited ``staged``, by the event and
    by the clock of the test, and what for."""
    seen: list[events.CallerWaited] = []

    async def save(checkpoints: sidestream.Checkpointer | None, number: int) -> float:
        if checkpoints is None:
            pending = sidestream.async_save({"w": torch.ones(1000)}, directory / f"save-{number}")
        else:
            pending = checkpoints.async_save({"w": torch.ones(1000)}, step=number)
        began = time.monotonic()
        await pending.staged
        seconds = time.monotonic() - began
        await pending
        return seconds

    async def work() -> Any:
        async with AsyncExitStack() as stack:
            checkpoints = None
            if in_run:
                checkpoints = await stack.enter_async_context(sidestream.Checkpointer(directory / "run"))
            await save(checkpoints, 1)
            seen.clear()
            if rank == world - 1:
                await asyncio.sleep(0.5)
            outside = await save(checkpoints, 2)
        staged = [event for event in seen if event.cause == "staged"]
        return [sum(one.seconds for one in staged), outside, dict(staged[-1].waited_for) if staged else {}]

    with events.observe(lambda event: isinstance(event, events.CallerWaited) and seen.append(event)):
        return run(work())
