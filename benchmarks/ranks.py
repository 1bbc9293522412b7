"""Ranks of this machine that save the same bytes in all, with sidestream and with stock DCP.

``python benchmarks/ranks.py [--ranks 1,2,4] [--megabytes 512] [--saves 4] [--dir DIR] [--json FILE]``

For each number of ranks: GB/s until the checkpoint is durable and visible on all ranks, the trainer's pause (the call
itself, and until the weights may change), and the memory that a rank needed besides its state, at its highest. Medians
over the saves after the first. Stock DCP syncs its files and not its directories.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sidestream

TENSOR_BYTES = 16 << 20


def memory_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return 0


def state_of(world: int, megabytes: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    rows = TENSOR_BYTES // 4 // 1024
    return {
        f"layer{n}": distribute_tensor(torch.randn(rows, 1024), mesh, [Shard(0)], src_data_rank=None)
        for n in range(max(1, (megabytes << 20) // TENSOR_BYTES))
    }


Figures = tuple[float, float, float]
"""Seconds of the pause, seconds in all, and MiB besides the state."""


def begin() -> float:
    """The time; the highest resident size is counted from here."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    return time.perf_counter()


def extra_mib(before_kib: int) -> float:
    """Also what is kept from save to save."""
    return max(0, memory_kib("VmHWM") - before_kib) / 1024


def ours(state: dict[str, Any], directory: Path, saves: int) -> list[Figures]:
    async def run() -> list[Figures]:
        found, before = [], memory_kib("VmRSS")
        async with sidestream.AsyncStager() as stager:
            for number in range(saves):
                started = begin()
                pending = sidestream.async_save(state, directory / f"ours{number}", stager=stager)
                await pending.staged
                paused = time.perf_counter() - started
                await pending
                found.append((paused, time.perf_counter() - started, extra_mib(before)))
        return found

    return asyncio.run(run())


def stock(state: dict[str, Any], directory: Path, saves: int) -> list[Figures]:
    found, before = [], memory_kib("VmRSS")
    for number in range(saves):
        started = begin()
        pending = dcp.async_save(state, checkpoint_id=directory / f"stock{number}")
        paused = time.perf_counter() - started
        pending.result()
        found.append((paused, time.perf_counter() - started, extra_mib(before)))
    return found


def rank_main(rank: int, world: int, desk: Path, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(desk / "store"), world), rank=rank, world_size=world)
    state = state_of(world, arguments.megabytes)
    told = {}
    for name, work in (("sidestream", ours), ("stock DCP", stock)):
        told[name] = work(state, desk, arguments.saves)
        dist.barrier()
    (desk / f"{rank}.json").write_text(json.dumps(told))


def group(world: int, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    desk = Path(tempfile.mkdtemp(dir=arguments.dir))
    try:
        children = [fork(rank, world, desk, arguments) for rank in range(world)]
        if any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children):
            raise SystemExit(f"{world} ranks: one of them failed")
        told = [json.loads((desk / f"{rank}.json").read_text()) for rank in range(world)]
    finally:
        shutil.rmtree(desk)
    gigabytes = max(1, (arguments.megabytes << 20) // TENSOR_BYTES) * TENSOR_BYTES / 1e9
    return {name: summary([one[name][1:] for one in told], gigabytes) for name in told[0]}


def summary(ranks: list[list[Figures]], gigabytes: float) -> dict[str, float]:
    """Of each save the slowest rank, and the median of these."""
    slowest = [[max(rank[save][what] for rank in ranks) for save in range(len(ranks[0]))] for what in range(3)]
    pause, whole, memory = map(statistics.median, slowest)
    return {"durable GB/s": gigabytes / whole, "pause ms": pause * 1000, "extra MiB a rank": memory}


def fork(rank: int, world: int, desk: Path, arguments: argparse.Namespace) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        rank_main(rank, world, desk, arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--dir")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {int(world): group(int(world), arguments) for world in arguments.ranks.split(",")}
    print(f"{arguments.megabytes} MiB in all; pause: until the weights may change")
    for world, told in results.items():
        for name, figures in told.items():
            shown = "  ".join(f"{what} {value:8.2f}" for what, value in figures.items())
            print(f"{world} ranks  {name:<10}  {shown}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
