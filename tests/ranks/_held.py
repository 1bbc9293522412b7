"""Tensors that say which shards of a whole they hold, and what each rank of a group does with them in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _cases import ROWS, TIMEOUT_S, failures_of, placed, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import sidestream


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
