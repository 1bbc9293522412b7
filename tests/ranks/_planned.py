"""Planners as users write them, and what each rank of a group does with them in a test."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _cases import COLUMNS, ROWS, TIMEOUT_S, failures_of, placed, run, same
from keywords import for_load, for_save
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import sidestream

SAVE_STEPS = ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data"]
LOAD_STEPS = [
    "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes", "resolve_tensor",
    "commit_tensor",
]  # fmt: skip


class Renaming(DefaultSavePlanner):
    """Every name begins with ``renamed.``"""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"renamed": dict(state_dict)}, storage_meta, is_coordinator)


class Dropping(DefaultSavePlanner):
    """Leaves out what is called ``columns``."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[item for item in plan.items if "columns" not in item.index.fqn])
        return self.plan


class Halving(DefaultSavePlanner):
    """Saves floats with half of their bits, and does not say so in its plan."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) and data.is_floating_point() else data


class RenamingBack(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"renamed": state_dict}, metadata, is_coordinator)


class Doubling(DefaultLoadPlanner):
    """Reads into memory of its own, and puts twice as much in place."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor * 2)


def failing(base: type, step: str, where: bool = True) -> Any:
    """A planner that raises in ``step``."""

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError(f"nothing in {step}")

    # ``set_up_planner`` is looked at for the names of its parameters.
    return type("Failing", (base,), {step: fail} if where else {})()


class Gated(DefaultSavePlanner):
    """Waits in ``create_local_plan`` until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go_on = threading.Event(), threading.Event()

    def create_local_plan(self) -> SavePlan:
        self.began.set()
        assert self.go_on.wait(60)
        return super().create_local_plan()


def state_of(mesh: DeviceMesh, plus: float = 0.0) -> dict[str, Any]:
    return {
        "rows": placed(ROWS + plus, mesh, Shard(0)),
        "deep": {"columns": placed(COLUMNS + int(plus), mesh, Shard(1)), "plain": torch.arange(5) + int(plus)},
        "same": placed(ROWS * 2 + plus, mesh, Replicate()),
        "step": 7 + int(plus),
    }


def planned(rank: int, world: int, directory: Path) -> list[Any]:
    """Each kind of planner saves; stock's and our loads read it."""
    mesh = init_device_mesh("cpu", (world,))
    want = state_of(mesh)
    told = []

    async def save(name: str, planner: Any, **options: Any) -> None:
        info = await sidestream.save(
            want, directory / name, **for_save(planner=planner, timeout_s=TIMEOUT_S, **options)
        )
        told.append([info.save_id, info.nbytes])

    def load_all(name: str, expected: dict[str, Any], blank: Any) -> None:
        for load in (stock, ours, with_planner):
            target = blank()
            load(target, directory / name)
            same(target, expected)

    def stock(target: Any, path: Path) -> None:
        dcp.load(target, checkpoint_id=path)

    def ours(target: Any, path: Path) -> None:
        run(sidestream.load(target, path, options=sidestream.LoadOptions(timeout_s=TIMEOUT_S)))

    def with_planner(target: Any, path: Path) -> None:
        report = run(
            sidestream.load(
                target, path, options=sidestream.LoadOptions(planner=DefaultLoadPlanner(), timeout_s=TIMEOUT_S)
            )
        )
        assert report.loaded
        assert not report.unverified

    async def save_all() -> None:
        async with sidestream.AsyncStager(budget_bytes=1 << 26) as stager:
            await save("default", DefaultSavePlanner(), stager=stager)
        await save("again", DefaultSavePlanner(dedup_save_to_lowest_rank=True))
        await save("renamed", Renaming())
        await save("dropped", Dropping())
        await save("halved", Halving())
        cached = DefaultSavePlanner(enable_plan_caching=True)
        for number in range(3):
            await save(f"cached{number}", cached)

    run(save_all())
    for name in ("default", "again", "cached0", "cached1", "cached2"):
        load_all(name, want, lambda: state_of(mesh, 100))
    load_all("renamed", {"renamed": want}, lambda: {"renamed": state_of(mesh, 100)})
    target = state_of(mesh, 100)
    run(
        sidestream.load(
            target, directory / "renamed", options=sidestream.LoadOptions(planner=RenamingBack(), timeout_s=TIMEOUT_S)
        )
    )
    same(target, want)
    few = {**want, "deep": {"plain": want["deep"]["plain"]}}
    load_all("dropped", few, lambda: {**state_of(mesh, 100), "deep": {"plain": torch.zeros(5, dtype=torch.int64)}})
    half = {"rows": placed(ROWS.half(), mesh, Shard(0)), "same": placed((ROWS * 2).half(), mesh, Replicate())}
    load_all("halved", half, lambda: {name: one * 0 for name, one in half.items()})
    target = state_of(mesh, 100)
    run(
        sidestream.load(
            target, directory / "default", options=sidestream.LoadOptions(planner=Doubling(), timeout_s=TIMEOUT_S)
        )
    )
    same(target["rows"], placed(ROWS * 2, mesh, Shard(0)))
    return told


def planners_fail(rank: int, world: int, directory: Path) -> dict[str, Any]:
    """On rank 1, step by step; what is done on rank 0 alone fails there."""
    mesh = init_device_mesh("cpu", (world,))
    want = state_of(mesh)
    run(sidestream.save(want, directory / "good", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)))
    told = {}
    for step in SAVE_STEPS:
        here = rank == (0 if step == "create_global_plan" else 1)
        planner = failing(DefaultSavePlanner, step, here)
        told[f"save {step}"] = failures_of(
            sidestream.save(
                want, directory / "bad", options=sidestream.SaveOptions(planner=planner, timeout_s=TIMEOUT_S)
            )
        )
        assert not (directory / "bad").exists()
    for step in LOAD_STEPS:
        here = rank == (0 if step == "create_global_plan" else 1)
        planner = failing(DefaultLoadPlanner, step, here)
        work = sidestream.load(
            state_of(mesh, 9), directory / "good", options=sidestream.LoadOptions(planner=planner, timeout_s=TIMEOUT_S)
        )
        told[f"load {step}"] = failures_of(work)
    one = {"planner": DefaultSavePlanner()} if rank else {}
    told["save one"] = failures_of(sidestream.save(want, directory / "bad", **for_save(timeout_s=TIMEOUT_S, **one)))
    other = {} if rank else {"planner": DefaultSavePlanner()}
    told["save other"] = failures_of(sidestream.save(want, directory / "bad", **for_save(timeout_s=TIMEOUT_S, **other)))
    for name, here in (("load one", rank == 1), ("load other", rank == 0)):
        mine = {"planner": DefaultLoadPlanner()} if here else {}
        told[name] = failures_of(
            sidestream.load(state_of(mesh), directory / "good", **for_load(timeout_s=TIMEOUT_S, **mine))
        )
    run(
        sidestream.save(
            want, directory / "after", options=sidestream.SaveOptions(planner=DefaultSavePlanner(), timeout_s=TIMEOUT_S)
        )
    )
    target = state_of(mesh, 9)
    run(sidestream.load(target, directory / "after", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S)))
    same(target, want)
    return told


def a_planned_run(rank: int, world: int, directory: Path) -> list[Any]:
    """A ``Checkpointer`` whose saves and restores are planned."""
    mesh = init_device_mesh("cpu", (world,))

    async def go() -> list[Any]:
        async with sidestream.Checkpointer(
            directory / "run",
            timeout_s=TIMEOUT_S,
            save=sidestream.SaveOptions(timeout_s=TIMEOUT_S),
            load=sidestream.LoadOptions(timeout_s=TIMEOUT_S),
        ) as checkpointer:
            for step in range(2):
                pending = await checkpointer.async_save(
                    state_of(mesh, step),
                    step=step,
                    metadata={"loss": step},
                    options=sidestream.SaveOptions(planner=Renaming()),
                )
                await pending
            target = state_of(mesh, 9)
            step = await checkpointer.restore(target, options=sidestream.LoadOptions(planner=RenamingBack()))
            same(target, state_of(mesh, 1))
            return [step, await checkpointer.read_metadata(), await checkpointer.steps()]

    told: list[Any] = run(go())
    return told


# --- tensors that say which shards they hold ---


def holder(whole: torch.Tensor, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], fill: bool = True) -> Any:
    """A plain tensor with the attributes of torch's ``CheckpointableTensor``: boxes of ``whole`` one below the other,
    with a row of padding before each."""
    rows = sum(sizes[0] + 1 for _, sizes in boxes)
    columns = max((sizes[1] for _, sizes in boxes), default=1)
    local = torch.full((rows, columns), -1.0)
    begins, at = [], 1
    for (first, left), (height, width) in boxes:
        if fill:
            local[at : at + height, :width] = whole[first : first + height, left : left + width]
        begins.append((at, 0))
        at += height + 1
    tensor: Any = local
    tensor.global_shape = tuple(whole.shape)
    tensor.global_offsets = tuple(offsets for offsets, _ in boxes)
    tensor.local_offsets = tuple(begins)
    tensor.local_sizes = tuple(sizes for _, sizes in boxes)
    return tensor


def boxes_of(rank: int, world: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every second pair of rows, from left and right."""
    rows, columns = ROWS.shape
    found = []
    for number, first in enumerate(range(0, rows, 2)):
        if number % world == rank:
            found += [((first, 0), (2, 3)), ((first, 3), (2, columns - 3))]
    return found


def holders(rank: int, world: int, directory: Path) -> None:
    """Shards of this rank, several in one tensor, saved and loaded beside everything else."""
    mesh = init_device_mesh("cpu", (world,))
    mine = holder(ROWS, boxes_of(rank, world))
    for number in range(2):  # planned, and remembered
        state = {"held": mine, "rows": placed(ROWS, mesh, Shard(0))}
        run(sidestream.save(state, directory / f"holders{number}", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)))
    path = directory / "holders1"
    assert run(sidestream.verify(path)).ok
    for target in (placed(ROWS * 0, mesh, Shard(1)), placed(ROWS * 0, mesh, Replicate()), torch.zeros_like(ROWS)):
        run(sidestream.load({"held": target}, path, options=sidestream.LoadOptions(timeout_s=TIMEOUT_S)))
        whole = target.full_tensor() if hasattr(target, "full_tensor") else target
        assert torch.equal(whole, ROWS)
        target.zero_()
        dcp.load({"held": target}, checkpoint_id=path)
        whole = target.full_tensor() if hasattr(target, "full_tensor") else target
        assert torch.equal(whole, ROWS)
    other = holder(ROWS, boxes_of((rank + 1) % world, world), fill=False)
    run(sidestream.load({"held": other}, path, options=sidestream.LoadOptions(timeout_s=TIMEOUT_S)))
    assert torch.equal(other, holder(ROWS, boxes_of((rank + 1) % world, world)))
    if world > 1:
        wrong = holder(ROWS, boxes_of(rank, world))
        wrong.local_sizes = wrong.local_sizes[1:]
        failures = failures_of(
            sidestream.save({"w": wrong}, directory / "x", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        )
        assert {kind for _, kind, _ in failures} == {"UnsupportedTensorError"}, failures
        few = holder(ROWS, boxes_of(rank, world)[1:])
        failures = failures_of(
            sidestream.save({"w": few}, directory / "x", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        )
        assert [kind for _, kind, _ in failures] == ["InvalidOptionError"], failures
        assert not (directory / "x").exists()
    staged = run(stage(mine))
    assert torch.equal(staged, mine)
    assert staged.global_offsets == mine.global_offsets


async def stage(tensor: torch.Tensor) -> Any:
    async with sidestream.AsyncStager(budget_bytes=1 << 24) as stager:
        return (await stager.stage({"held": tensor}))["held"]
