"""Tensors that consist of others, saved and loaded by ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _cases import ROWS, TIMEOUT_S, failures_of, placed, run, same
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import sidestream

SAVE = sidestream.SaveOptions(timeout_s=TIMEOUT_S)
LOAD = sidestream.LoadOptions(timeout_s=TIMEOUT_S)


def low(plus: int) -> torch.Tensor:
    return (torch.arange(8, dtype=torch.uint8) + plus).view(torch.int4)


def sparse(plus: int, extra: int = 0) -> torch.Tensor:
    """Of more elements for each ``extra``."""
    dense = torch.diag(torch.arange(1.0, 9.0) + plus)
    dense[4 + extra :] = 0
    return dense.to_sparse()


def replicas(plus: int, blank: bool = False) -> dict[str, Any]:
    """What every rank has; ``blank``: to load into."""
    big = torch.arange(5 << 20, dtype=torch.float32).reshape(-1, 512) + plus  # is cut, because it has over 16 MiB
    coo = torch.zeros(8, 8).to_sparse() if blank else sparse(plus)
    return {
        "coo": coo,
        "csr": (torch.zeros(4, 4) if blank else torch.eye(4) * (2 + plus)).to_sparse_csr(),
        "two": [TwoTensor(ROWS + plus, ROWS + plus + 1), {"n": plus}],
        "big": TwoTensor(big, big * 2),
        "low": low(plus),
    }


def state_of(mesh: DeviceMesh, plus: int, names: list[str], blank: bool = False) -> dict[str, Any]:
    whole = replicas(plus, blank)
    own = {name: replicas(10 * int(name[-1]) + plus, blank)["coo"] for name in names}
    return {**whole, "own": own, "rows": placed(ROWS + plus, mesh, Shard(0))}


def equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            equal(one[key], other[key])
    elif isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            equal(left, right)
    elif isinstance(one, TwoTensor):
        equal([one.a, one.b], [other.a, other.b])
    elif isinstance(one, torch.Tensor) and one.dtype == torch.int4:
        equal(one.view(torch.uint8), other.view(torch.uint8))
    elif isinstance(one, torch.Tensor) and not isinstance(one, DTensor):
        assert one.layout is other.layout
        assert torch.equal(one.to_dense(), other.to_dense())
    else:
        same(one, other)


def saved_composites(rank: int, world: int, directory: Path) -> None:
    """Replicas, and what belongs to one rank; twice, so that the second plan is a remembered one."""
    mesh = init_device_mesh("cpu", (world,))

    async def save() -> None:
        for number in range(2):
            state = state_of(mesh, number, [f"rank{rank}"])
            await sidestream.save(state, directory / f"step{number}", options=SAVE)
            target = state_of(mesh, 5, [f"rank{rank}"], blank=True)
            await sidestream.load(target, directory / f"step{number}", options=LOAD)
            equal(target, state)

    run(save())


def loaded_composites(rank: int, world: int, directory: Path, saved_by: int) -> None:
    """By another number of ranks, each of which takes all."""
    mesh = init_device_mesh("cpu", (world,))
    names = [f"rank{one}" for one in range(saved_by)]

    async def load() -> None:
        for atomic in (False, True):
            target = state_of(mesh, 5, names, blank=True)
            options = sidestream.LoadOptions(timeout_s=TIMEOUT_S, atomic=atomic)
            await sidestream.load(target, directory / "step1", options=options)
            equal(target, state_of(mesh, 1, names))

    run(load())


def refused_composites(rank: int, world: int, directory: Path) -> dict[str, Any]:
    """What ranks that save together cannot say, or do not agree on."""
    mesh = init_device_mesh("cpu", (world,))
    local = TwoTensor(ROWS, ROWS + 1)
    cases: dict[str, Any] = {
        "over": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
        "long": {"x" * 5000: ROWS},
        "dimensions": torch.ones((1,) * 65),
        "kinds": TwoTensor(ROWS, ROWS) if rank else ROWS,
        "layouts": torch.eye(3).to_sparse_csr() if rank else torch.eye(3).to_sparse(),
        "context": torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 2), is_coalesced=bool(rank), check_invariants=True),
        "elements": sparse(0, extra=rank),
        "dict": {"a": ROWS, "b": ROWS, "c": ROWS} if rank else local,
    }
    told = {}
    for name, value in cases.items():
        told[name] = failures_of(sidestream.save({"m": {"x": value}, "w": ROWS}, directory / name, options=SAVE))
        dist.barrier()

    async def instead() -> None:
        """As the error of the first case says."""
        state = {"x": {f"rank{rank}": cases["over"].to_local()}}
        await sidestream.save(state, directory / "instead", options=SAVE)
        target = {"x": {f"rank{rank}": TwoTensor(ROWS + 7, ROWS + 8)}}
        await sidestream.load(target, directory / "instead", options=LOAD)
        equal(target, state)

    run(instead())
    return told


def loaded_of_one_process(rank: int, world: int, directory: Path) -> None:
    """By all ranks, what one process has saved."""

    async def single() -> None:
        await sidestream.save(replicas(1), directory / "single", process_group="alone")

    async def loaded() -> None:
        target = replicas(5, blank=True)
        await sidestream.load(target, directory / "single", options=LOAD)
        equal(target, replicas(1))

    if rank == 0:
        run(single())
    dist.barrier()
    run(loaded())


def damaged_composites(rank: int, world: int, directory: Path) -> list[Any]:
    """Of a checkpoint whose manifest names parts that are not there."""
    mesh = init_device_mesh("cpu", (world,))
    target = state_of(mesh, 5, [], blank=True)
    told = failures_of(sidestream.load(target, directory / "damaged", options=LOAD))
    dist.barrier()
    return told
