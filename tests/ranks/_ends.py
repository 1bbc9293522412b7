"""Disks that are full for one rank, ranks that are told to end, and the other ways to stage."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _cases import TIMEOUT_S, large, run, same
from keywords import for_run, for_save
from torch.distributed.device_mesh import init_device_mesh

import sidestream
from sidestream._group import rendezvous

SAVE = sidestream.SaveOptions(timeout_s=TIMEOUT_S)


def full_disk(rank: int, world: int, directory: Path, who: int, limit_bytes: int) -> dict[str, Any]:
    """The system lets one rank write no file that is longer than so much, for one save."""
    mesh = init_device_mesh("cpu", (world,))
    told: dict[str, Any] = {}

    async def save() -> None:
        await sidestream.save(large(mesh), directory / "before", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        if rank == who:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
        pending = sidestream.async_save(
            large(mesh, 1), directory / "failing", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
        )
        try:
            await pending
        except sidestream.errors.RankFailuresError as failures:
            told["failures"] = [[one.rank, one.text] for one in failures.failures]
        told["outcome"] = pending.outcome
        told["visible"] = (directory / "failing").exists()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await sidestream.save(large(mesh, 2), directory / "after", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        target = large(mesh, 9)
        await sidestream.load(target, directory / "after", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S))
        same(target, large(mesh, 2))

    run(save())
    return told


def preempted(rank: int, world: int, directory: Path) -> list[Any]:
    """All ranks are told to end, one after the other, with a save in flight and one more to come."""
    mesh = init_device_mesh("cpu", (world,))

    async def train() -> list[Any]:
        async with sidestream.Checkpointer(directory / "run", **for_run(timeout_s=TIMEOUT_S)) as checkpoints:
            checkpoints.on_preemption(save=lambda: (large(mesh, 7), 7), then="stay", grace_s=TIMEOUT_S)
            pending = checkpoints.async_save(large(mesh, 1), step=1)
            await asyncio.sleep(0.05 * rank)  # as a scheduler does, not all at once
            os.kill(os.getpid(), signal.SIGTERM)
            while checkpoints.preempted is None:
                await asyncio.sleep(0.01)
            await pending
        async with sidestream.Checkpointer(directory / "run", **for_run(timeout_s=TIMEOUT_S)) as checkpoints:
            target = large(mesh, 9)
            step = await checkpoints.restore(target)
            same(target, large(mesh, 7))
            return [checkpoints.preempted, step, await checkpoints.steps()]

    return list(run(train()))


def other_stagers(rank: int, world: int, directory: Path) -> list[str]:
    """Through windows, by a stager that snapshots, and with a writer process."""
    mesh = init_device_mesh("cpu", (world,))
    ways: dict[str, Any] = {
        "windows": lambda: {"streaming": True},
        "snapshot": lambda: {"stager": sidestream.AsyncStager(mode="eager")},
        "process": lambda: {"writer": "process"},
    }

    async def save(name: str, options: dict[str, Any]) -> None:
        for number in range(2):
            path = directory / f"{name}-{number}"
            await sidestream.save(large(mesh, number), path, **for_save(timeout_s=TIMEOUT_S, **options))
            target = large(mesh, 9)
            await sidestream.load(target, path, options=sidestream.LoadOptions(timeout_s=TIMEOUT_S))
            same(target, large(mesh, number))

    for name, options in ways.items():
        run(save(name, options()))
        dist.barrier()
    return list(ways)


def closed_loop(rank: int, world: int, directory: Path, who: int, turns: int) -> dict[str, Any]:
    """A program whose rank closes its loop during a save and continues to run without another call."""
    mesh = init_device_mesh("cpu", (world,))
    told: dict[str, Any] = {}

    async def begin() -> sidestream.PendingSave:
        pending = sidestream.async_save(
            large(mesh, 1), directory / "failing", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
        )
        for _ in range(turns):
            await asyncio.sleep(0.001)
        return pending

    async def wait(pending: sidestream.PendingSave) -> None:
        try:
            await pending
        except sidestream.errors.RankFailuresError as failures:
            told["failures"] = [[one.rank, one.kind] for one in failures.failures]
        (directory / f"noticed-{rank}").touch()

    loop = asyncio.new_event_loop()
    pending = loop.run_until_complete(begin())
    if rank != who:
        loop.run_until_complete(wait(pending))
    loop.close()
    end = time.monotonic() + TIMEOUT_S
    while not (directory / f"noticed-{1 if who == 0 else 0}").exists() or not pending.done():
        assert time.monotonic() < end, "nobody has noticed"
        time.sleep(0.01)
    told["outcome"] = pending.outcome
    told["visible"] = (directory / "failing").exists()
    return told


def destroyed_meanwhile(rank: int, world: int, directory: Path) -> list[Any]:
    """The process group is destroyed while ranks save and export: once they have connections, and before that. In the
    end another group takes its place."""
    state = {"model": {"w": torch.arange(1_000_000.0), "b": torch.ones(3)}, "step": 3}

    def export_to(name: str) -> sidestream.HF:
        return sidestream.HF(str(directory / name), select="model.*")

    async def save(name: str, *, connected: bool) -> list[Any]:
        pending = sidestream.async_save(
            state, directory / name, export=export_to(f"{name}-hf"), **for_save(timeout_s=TIMEOUT_S)
        )
        if connected:
            await pending.staged
        dist.destroy_process_group()
        info = await pending
        return [info.nbytes, (await pending.exports[0]).tensors]

    def join(number: int) -> None:
        store = dist.FileStore(str(directory / f"store{number}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    told = [run(save("first", connected=True))]
    join(1)
    told.append(run(save("second", connected=False)))
    gc.collect()
    assert not rendezvous._groups, "nothing keeps a member whose operations have ended"
    join(2)
    target = {"model": {"w": torch.zeros(1_000_000), "b": torch.zeros(3)}, "step": 0}
    for name in ("first", "second"):
        run(sidestream.load(target, directory / name))
        same(target, state)
    return told


def left_behind(rank: int, world: int, directory: Path) -> list[Any]:
    """Rank 1 destroys the process group and goes on, while the others save."""
    if rank == 1:
        run(sidestream.save({"n": 1}, directory / "first", **for_save(timeout_s=TIMEOUT_S)))
        dist.destroy_process_group()
        while not (directory / "told").exists():
            time.sleep(0.01)
        return []
    run(sidestream.save({"n": 1}, directory / "first", **for_save(timeout_s=TIMEOUT_S)))
    try:
        run(sidestream.save({"n": 2}, directory / "second", **for_save(timeout_s=TIMEOUT_S)))
    except sidestream.errors.RankFailuresError as failures:
        (directory / "told").touch()
        return [[one.rank, one.kind, one.text] for one in failures.failures]
    return []
