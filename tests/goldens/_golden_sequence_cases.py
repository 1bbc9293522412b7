"""A case: ``prepare`` runs first, then ``work`` runs while the system calls are recorded."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _golden_calls import Fault
from _golden_checkpoints import COLUMNS, ROWS
from _golden_states import blank, small

import sidestream
from sidestream import KeepLast
from sidestream._engine.loop import operation_loop
from sidestream.dcp import StorageWriter


async def nothing(root: Path) -> None: ...


async def saved(root: Path) -> None:
    await sidestream.save(small(), root / "c")


async def run_saved(root: Path) -> None:
    async with sidestream.Checkpointer(root / "run") as checkpoints:
        await checkpoints.save(small(), step=1)


async def save(root: Path, **options: Any) -> Any:
    return await sidestream.save(small(), root / "c", **options)


@dataclass(frozen=True)
class Case:
    work: Callable[[Path], Awaitable[Any]]
    prepare: Callable[[Path], Awaitable[None]] = nothing
    fault: Fault | None = None


async def _checkpointer(root: Path) -> Any:
    async with sidestream.Checkpointer(root / "run", keep=KeepLast(1)) as checkpoints:
        for step in (2, 3):
            await checkpoints.save(small(), step=step)
            await checkpoints.prune()
        return await checkpoints.steps()


async def _generation(root: Path) -> Any:
    async with sidestream.Checkpointer(root / "run") as checkpoints:
        return await checkpoints.save(small(), step=1)


async def _restore(root: Path) -> Any:
    async with sidestream.Checkpointer(root / "run") as checkpoints:
        return await checkpoints.restore(blank(small()))


def _stock_save(root: Path, **options: Any) -> None:
    dcp.save(small(), storage_writer=StorageWriter(root / "c", **options), no_dist=True)


async def _cancelled(root: Path, **options: Any) -> Any:
    """The supervisor sends ``SIGUSR1`` at some call, and waits until the save has been told."""
    loop = asyncio.get_running_loop()

    def told(turns: int = 50) -> None:
        if turns:  # of the loop of operations, in which the cancel reaches every task
            operation_loop().call(told, turns - 1)
        else:
            os.close(os.open(root.parent / "cancelled", os.O_CREAT | os.O_WRONLY))

    def cancel() -> None:
        pending.cancel()
        told()

    loop.add_signal_handler(signal.SIGUSR1, cancel)  # before the save, whose threads do not wait for this loop
    pending = sidestream.async_save(small(), root / "c", **options)
    await pending.ended()
    return [pending.outcome, sorted(path.name for path in root.iterdir())]


async def _ranks(root: Path) -> Any:
    """Two ranks, both forks of this process."""
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            code = 1
            try:
                _rank(rank, root)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _rank(rank: int, root: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    asyncio.events._set_running_loop(None)  # the parent's
    dist.init_process_group("gloo", store=dist.FileStore(str(root.parent / "store"), 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "rows": distribute_tensor(ROWS, mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(COLUMNS, mesh, [Shard(1)], src_data_rank=None),
        "n": 7,
    }
    asyncio.run(sidestream.save(state, root / "c"))


def _faults() -> dict[str, Case]:
    calls = {
        "denied: making the attempt": ("mkdir", "partial", errno.EACCES),
        "full: preallocating a shard": ("fallocate", "__0_1", errno.ENOSPC),
        "full: writing a shard": ("pwrite64", "__0_1", errno.ENOSPC),
        "broken: syncing a shard": ("fsync", "__0_1", errno.EIO),
        "full: writing the manifest": ("pwrite64", "manifest-", errno.ENOSPC),
        "full: writing .metadata": ("pwrite64", ".metadata", errno.ENOSPC),
        "broken: syncing .metadata": ("fsync", ".metadata", errno.EIO),
        "denied: renaming": ("rename", "partial", errno.EACCES),
    }
    cases: dict[str, Case] = {}
    for name, (call, path, number) in calls.items():
        cases[f"save, {name}"] = Case(save, fault=Fault(call, path, number))
        step = name.partition(": ")[2]
        cases[f"save, cancelled: {step}"] = Case(_cancelled, fault=Fault(call, path, action="cancel"))
    return cases | {
        "save, broken: syncing the attempt": Case(save, fault=Fault("fsync", ".partial", errno.EIO, besides="/__")),
        "save, broken: syncing the parent": Case(
            save, fault=_AfterRename("fsync", "root", errno.EIO, besides="partial")
        ),
        "save, killed: writing a shard": Case(save, fault=Fault("pwrite64", "__0_1", action="kill")),
        "save, killed: renaming": Case(save, fault=Fault("rename", "partial", action="kill")),
        "load, broken: reading a shard": Case(_load, saved, Fault("preadv", "__0_1", errno.EIO)),
        "load, broken: opening a shard": Case(_load, saved, Fault("openat", "__0_1", errno.EIO)),
        "load, denied: opening .metadata": Case(_load, saved, Fault("openat", ".metadata", errno.EACCES)),
    }


async def _second_step(root: Path) -> Any:
    async with sidestream.Checkpointer(root / "run") as checkpoints:
        return await checkpoints.save(small(), step=2)


def _other_writers() -> dict[str, Case]:
    """What else writes, and fails in the middle: what does it leave behind?"""
    works: dict[str, tuple[Callable[[Path], Awaitable[Any]], Callable[[Path], Awaitable[None]]]] = {
        "save, writer process": (lambda root: save(root, options=sidestream.SaveOptions(writer="process")), nothing),
        "save, streaming": (lambda root: save(root, options=sidestream.SaveOptions(streaming=True)), nothing),
        "StorageWriter": (lambda root: _in_thread(_stock_save, root), nothing),
        "StorageWriter, overwrite": (lambda root: _in_thread(_stock_save, root, overwrite=True), saved),
        "Checkpointer": (_second_step, run_saved),
        "copy": (lambda root: sidestream.copy(root / "c", root / "d"), saved),
        "convert, dcp": (lambda root: sidestream.convert(root / "c", root / "d"), saved),
        "convert, torch.save": (lambda root: sidestream.convert(root / "c", root / "m.pt"), saved),
    }
    full = Fault("pwrite", "root/", errno.ENOSPC)
    faults = {f"{name}, full: its first write": Case(work, prepare, full) for name, (work, prepare) in works.items()}
    renamed = {
        f"{name}, denied: renaming": Case(*works[name], Fault("rename", "partial", errno.EACCES))
        for name in ("StorageWriter", "StorageWriter, overwrite", "Checkpointer", "copy")
    }
    killed = Fault("pwrite64", "__0_1", action="kill")
    return {
        **faults,
        **renamed,
        "save, streaming, cancelled: writing a shard": Case(
            lambda root: _cancelled(root, options=sidestream.SaveOptions(streaming=True)),
            fault=Fault("pwrite64", "__0_1", action="cancel"),
        ),
        "save, writer process, it is killed: writing a shard": Case(
            lambda root: save(root, options=sidestream.SaveOptions(writer="process")), fault=killed
        ),
        "save, an object": Case(lambda root: sidestream.save(small() | {"a": object()}, root / "c")),
    }


@dataclass(frozen=True)
class _AfterRename(Fault):
    """The last sync of all: the one of the directory that holds the new name."""

    def meets(self, call: Any) -> bool:
        return call.name == self.name and call.path.endswith("/root") and os.path.exists(call.path + "/c")


async def _load(root: Path) -> Any:
    return await sidestream.load(blank(small()), root / "c")


async def _in_thread(work: Callable[..., None], *arguments: Any, **options: Any) -> None:
    await asyncio.to_thread(work, *arguments, **options)


CASES: dict[str, Case] = {
    "save": Case(save),
    "save, a new run": Case(lambda root: sidestream.save(small(), root / "new" / "run" / "c")),
    "save, flush": Case(lambda root: save(root, options=sidestream.SaveOptions(durability="flush"))),
    "save, streaming": Case(lambda root: save(root, options=sidestream.SaveOptions(streaming=True))),
    "save, writer process": Case(lambda root: save(root, options=sidestream.SaveOptions(writer="process"))),
    "save, the target is there": Case(save, saved),
    "save, ranks": Case(_ranks),
    "StorageWriter": Case(lambda root: _in_thread(_stock_save, root)),
    "StorageWriter, overwrite": Case(lambda root: _in_thread(_stock_save, root, overwrite=True), saved),
    "Checkpointer, save and prune": Case(_checkpointer, run_saved),
    "Checkpointer, a generation": Case(_generation, run_saved),
    "Checkpointer, restore": Case(_restore, run_saved),
    "copy": Case(lambda root: sidestream.copy(root / "c", root / "copy"), saved),
    "convert, dcp": Case(lambda root: sidestream.convert(root / "c", root / "d"), saved),
    "convert, torch.save": Case(lambda root: sidestream.convert(root / "c", root / "m.pt"), saved),
    "convert, safetensors": Case(
        lambda root: sidestream.convert(root / "c", root / "d", format="safetensors", select="model.*"), saved
    ),
    **_faults(),
    **_other_writers(),
}
