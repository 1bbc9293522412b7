"""What each rank of a group does in a test. Everything returned goes through JSON."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import sidestream
from sidestream.joint import planning
from sidestream.staging import HostEngine
from sidestream.storage import local

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
        if "__main__" not in module.name:
            importlib.import_module(module.name)
    importlib.import_module("torch.distributed.fsdp")
    importlib.import_module("torch.distributed.checkpoint.state_dict")
    importlib.import_module("torch.distributed.tensor.parallel")


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
            info = await sidestream.save(state_of(mesh, number), path, timeout_s=TIMEOUT_S)
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
        report = await sidestream.load(target, path, timeout_s=TIMEOUT_S, **options)
        same(target, state_of(mesh, plus, turn))
        return report.nbytes

    for writers in saved:
        for turn in range(3):
            run(load(directory / f"ours-{writers}-{turn % 2}", turn % 2, turn, atomic=turn == 1))
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
        fault.before(planning, "encode_values")
    elif phase == "assign":
        fault.before(planning, "_pack_detail")
    elif phase == "stage":
        fault.before(HostEngine, "fill")
    elif phase == "write":
        fault.before(local, "_write_buffer")
    elif phase == "written":
        fault.after(local._Parts, "write")
    elif phase == "receipt":
        fault.before(local, "_put")
    elif phase == "publish":
        fault.before(local, "_publish")
    elif phase == "published":
        fault.after(local, "_publish")
    return fault


def failing_save(
    rank: int, world: int, directory: Path, phase: str, how: str, who: int, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    told: dict[str, Any] = {}

    async def save() -> None:
        await sidestream.save(large(mesh), directory / "before", timeout_s=TIMEOUT_S)
        state: dict[str, Any] = large(mesh, 1)
        fault = arm(phase, how) if rank == who and phase != "call" else Fault(how)
        if phase == "assign":  # a plan that is not known yet
            state["more"] = placed(ROWS, mesh, Shard(1))
        if rank == who and phase == "call":
            state["lethal"] = Lethal() if how == "die" else object()
        started = time.monotonic()
        try:
            info = await sidestream.save(state, directory / "failing", timeout_s=timeout_s)
            told["info"] = [info.save_id, info.nbytes]
        except sidestream.errors.RankFailures as failures:
            told["failures"] = [[one.rank, one.step, one.kind] for one in failures.failures]
            told["text"] = str(failures)
        told["seconds"] = time.monotonic() - started
        fault.armed = False
        told["visible"] = (directory / "failing").exists()
        if how != "die":
            info = await sidestream.save(large(mesh, 2), directory / "after", timeout_s=TIMEOUT_S)
            told["after"] = info.save_id

    run(save())
    return told


def finish() -> None:
    dist.destroy_process_group()
