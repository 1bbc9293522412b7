"""Loads by ranks of a directory that is replaced meanwhile, as each rank of a group runs them in a test."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _cases import TIMEOUT_S, damage, die, large, run, same
from keywords import for_load, for_run
from torch.distributed.device_mesh import init_device_mesh

import sidestream
from sidestream import events
from sidestream._group import Operation
from sidestream._storage.local.read import LocalFiles

OLD, NEW = 1, 2


class Race:
    """What one rank does, and what it saw. ``path`` has a checkpoint, ``other`` the one that takes its place."""

    def __init__(self, rank: int, world: int, directory: Path, name: str = "c") -> None:
        self.rank, self.world = rank, world
        self.mesh = init_device_mesh("cpu", (world,))
        self.path, self.other = directory / "run" / name, directory / "other" / name
        self.opened: list[str] = []
        self.on_event: Callable[[events.LoadEvent], None] = lambda _: None
        self._desk = directory / "desk"

    async def save(self, new: dict[str, Any] | None = None) -> list[str]:
        """Save both, and return their ids."""
        self._desk.mkdir(exist_ok=True)
        infos = [
            await sidestream.save(
                large(self.mesh, OLD), self.path, options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
            ),
            await sidestream.save(
                new or large(self.mesh, NEW), self.other, options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
            ),
        ]
        return [one.save_id for one in infos]

    def tell(self, what: str) -> None:
        (self._desk / f"{what}-{self.rank}").touch()

    def await_told(self, what: str, ranks: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while len(list(self._desk.glob(f"{what}-*"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.002)

    def replace(self, *, delete: bool) -> None:
        self.path.rename(self.path.with_name("old"))
        self.other.rename(self.path)
        if delete:
            shutil.rmtree(self.path.with_name("old"))
        self.tell("replaced")

    def observe(self, event: events.Event) -> None:
        if not isinstance(event, events.LoadEvent):
            return
        if isinstance(event, events.LoadOpened):
            self.opened.append(event.load.save_id)
        self.on_event(event)

    async def load(self, path: Path | None = None, **options: Any) -> dict[str, Any]:
        """Load what is at ``path``, and compare it with the second checkpoint if nothing fails."""
        target = large(self.mesh, 9)
        told: dict[str, Any] = {}
        with events.observe(self.observe):
            try:
                report = await sidestream.load(target, path or self.path, **for_load(timeout_s=TIMEOUT_S, **options))
            except sidestream.errors.RankFailuresError as failures:
                told["failures"] = [[one.rank, one.kind, one.text] for one in failures.failures]
                told["written"] = list(failures.written)
            except asyncio.CancelledError:
                told["cancelled"] = True
            else:
                told["save_id"] = report.save_id
                same(target, large(self.mesh, NEW))
        told["opened"] = self.opened
        return told


def once(work: Callable[[], None]) -> Callable[[int, int], None]:
    """A callback for ``progress=`` that does ``work`` when the load begins to read for the first time."""
    calls = iter((work,))
    return lambda done, total: next(calls, lambda: None)()


def held_until_stopped(planned: threading.Event, begun: Callable[[], None]) -> None:
    """Reads in this process that come after ``planned`` do not begin until this rank is told to stop."""
    stopped = threading.Event()
    stop, read = Operation.stop, LocalFiles.read

    def stop_and_tell(operation: Operation) -> None:
        stop(operation)
        stopped.set()

    def wait_and_read(*args: Any) -> None:
        if planned.is_set():
            begun()
            assert stopped.wait(TIMEOUT_S)
        read(*args)

    Operation.stop, LocalFiles.read = stop_and_tell, wait_and_read  # type: ignore[method-assign]


def replaced_while_read(
    rank: int, world: int, directory: Path, who: int, others: str, fits: bool = True, then: str = ""
) -> dict[str, Any]:
    """Rank ``who`` loses its files. ``others`` have then ``read`` everything, are ``reading``, or lose theirs too.

    ``then``: what happens to the last rank when it has opened the second checkpoint."""
    race = Race(rank, world, directory)

    def replace() -> None:
        race.await_told("there", world - 1)
        race.replace(delete=True)

    def lose() -> None:
        race.tell("there")
        race.await_told("replaced", 1)

    progress: Callable[[int, int], None] | None = None
    planned = threading.Event()
    if rank == who:
        progress = once(replace)
    elif others == "reading":
        held_until_stopped(planned, lambda: race.tell("there"))
    elif others == "losing":
        progress = once(lose)

    async def work() -> dict[str, Any]:
        saved = await race.save(None if fits else {"step": NEW})
        loading = asyncio.ensure_future(race.load(progress=progress))

        def seen(event: events.LoadEvent) -> None:
            if isinstance(event, events.LoadPlanned):
                planned.set()
            if isinstance(event, events.LoadRead) and rank != who and others == "read":
                race.tell("there")
            if isinstance(event, events.LoadOpened) and len(race.opened) == 2 and rank == world - 1:
                if then == "die":
                    die()
                if then == "cancel":
                    loading.cancel()

        race.on_event = seen
        return {"saved": saved, **await loading}

    return dict(run(work()))


def seen_by_some(rank: int, world: int, directory: Path, who: int) -> dict[str, Any]:
    """Rank ``who`` opens the first checkpoint, all others the second one, which has taken its place."""
    race = Race(rank, world, directory)

    def seen(event: events.LoadEvent) -> None:
        if rank == who and isinstance(event, events.LoadOpened) and len(race.opened) == 1:
            race.replace(delete=False)
        if rank != who and isinstance(event, events.LoadStarted):
            race.await_told("replaced", 1)

    async def work() -> dict[str, Any]:
        saved = await race.save()
        race.on_event = seen
        return {"saved": saved, **await race.load()}

    return dict(run(work()))


def altered(rank: int, world: int, directory: Path, file: str) -> dict[str, Any]:
    """No other checkpoint takes the place of the one with a damaged file."""
    race = Race(rank, world, directory)

    async def work() -> dict[str, Any]:
        await race.save()
        if rank == 0:
            damage(race.path, file)
        dist.barrier()
        return await race.load()

    return dict(run(work()))


def own_directories(rank: int, world: int, directory: Path, changing: bool) -> dict[str, Any]:
    """Each rank has a directory of its own. ``changing``: another checkpoint is there each time that the last rank
    looks."""
    race = Race(rank, world, directory)
    mine = directory / f"disk{rank}"

    def swap(event: events.LoadEvent) -> None:
        if rank == world - 1 and changing and isinstance(event, events.LoadOpened):
            (mine / "c").rename(mine / "x")
            (mine / "next").rename(mine / "c")
            (mine / "x").rename(mine / "next")

    async def work() -> dict[str, Any]:
        for name in ("c", "next"):
            state = {"rows": torch.arange(1 << 20).reshape(1024, -1), "step": 0}
            await sidestream.save(state, mine / name, process_group="alone")
        race.on_event = swap
        cwd = os.getcwd()
        os.chdir(mine)
        try:
            return await race.load(Path("c"))
        finally:
            os.chdir(cwd)

    return dict(run(work()))


def restored(rank: int, world: int, directory: Path) -> dict[str, Any]:
    """A step is replaced while ranks restore it, and saves go on afterwards."""
    race = Race(rank, world, directory, "step-1")

    def seen(event: events.LoadEvent) -> None:
        if rank == 0 and isinstance(event, events.LoadOpened) and len(race.opened) == 1:
            race.replace(delete=False)
        if rank and isinstance(event, events.LoadStarted):
            race.await_told("replaced", 1)

    async def work() -> dict[str, Any]:
        for name, plus in (("run", OLD), ("other", NEW)):
            async with sidestream.Checkpointer(directory / name, **for_run(timeout_s=TIMEOUT_S)) as checkpoints:
                await checkpoints.save(large(race.mesh, plus), step=1)
        race._desk.mkdir(exist_ok=True)
        race.on_event = seen
        target = large(race.mesh, 9)
        async with sidestream.Checkpointer(directory / "run", **for_run(timeout_s=TIMEOUT_S)) as checkpoints:
            with events.observe(race.observe):
                step = await checkpoints.restore(target)
            same(target, large(race.mesh, NEW))
            again = await checkpoints.save(large(race.mesh, 3), step=2)
        return {"step": step, "opened": race.opened, "again": again.save_id}

    return dict(run(work()))
