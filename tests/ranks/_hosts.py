"""Loads of ranks on one machine that share what they read."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _cases import TIMEOUT_S, failures_of, placed, run, same
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import sidestream
from sidestream import events

MATRIX = torch.arange(8 << 20, dtype=torch.float32).reshape(-1, 512)  # 32 MiB
MEMORY_BYTES = 16 << 20


def whole_state(plus: float = 0.0) -> dict[str, Any]:
    small = {f"small{number}": torch.full((33, 7), number + plus) for number in range(20)}
    return {
        "matrix": MATRIX + plus,
        "turned": (MATRIX[:64] + plus).t(),
        "half": (MATRIX[:700] + plus).bfloat16(),
    } | small


def state_as(layout: str, mesh: DeviceMesh, plus: float = 0.0) -> dict[str, Any]:
    ways = {"replicated": Replicate(), "rows": Shard(0), "columns": Shard(1)}
    if layout == "plain":
        return whole_state(plus)
    return {name: placed(tensor.contiguous(), mesh, ways[layout]) for name, tensor in whole_state(plus).items()}


def write_kinds(rank: int, world: int, directory: Path) -> None:
    """The same state as everything that can be loaded."""
    mesh = init_device_mesh("cpu", (world,))
    run(sidestream.save(state_as("rows", mesh), directory / "ranks", timeout_s=TIMEOUT_S))
    if rank == 0:
        run(sidestream.save(whole_state(), directory / "ours", process_group="alone"))
        dcp.save(whole_state(), checkpoint_id=directory / "stock", no_dist=True)
        torch.save(whole_state(), directory / "file.pt")
        (directory / "safetensors").mkdir()
        plain = {name: one.contiguous() for name, one in whole_state().items()}
        save_file(plain, directory / "safetensors" / "model.safetensors")
    dist.barrier()


class Counted:
    """Bytes that this process reads from files, by what the system says."""

    nbytes = 0

    def __enter__(self) -> Counted:
        self._before = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = self._now() - self._before

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/io").read_text().splitlines()[0].removeprefix("rchar: "))


def shared_bytes() -> int:
    """Of the memory that this process has in common with others of its load."""
    maps = re.findall(r"^(\w+)-(\w+) .*sidestream-read", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sum(int(end, 16) - int(start, 16) for start, end in maps)


def descriptors() -> list[str]:
    found = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if is_open(name)]
    return [one for one in found if "sidestream-read" in one]


def is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def what_is_left() -> list[str]:
    """Once the threads that were told of the failure have gone on."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        gc.collect()
        found = [f"{shared_bytes()} bytes", *descriptors()]
        if found == ["0 bytes"]:
            break
        time.sleep(0.05)
    return found


def load_kind(
    rank: int, world: int, directory: Path, kind: str, layouts: list[str], memory_bytes: int = MEMORY_BYTES
) -> dict[str, dict[str, int]]:
    """By layout, what a rank has read from files and shared meanwhile, and what its report says."""
    mesh = init_device_mesh("cpu", (world,))

    def load(layout: str) -> dict[str, int]:
        target, most, last = state_as(layout, mesh, 50.0), 0, (0, 0)

        def progress(done: int, total: int) -> None:
            nonlocal most, last
            last = done, total
            if done and not most:
                most = shared_bytes()

        options: dict[str, Any] = {"atomic": layout == "rows", "progress": progress, "timeout_s": TIMEOUT_S}
        reading = sidestream.PerHost(memory_bytes=memory_bytes)
        with Counted() as counted:
            report = run(sidestream.load(target, directory / kind, reading=reading, **options))
        same(target, state_as(layout, mesh))
        gc.collect()
        assert last == (report.nbytes, report.nbytes)
        assert shared_bytes() == 0
        assert descriptors() == []
        return {"read": counted.nbytes, "reported": report.nbytes, "shared": most}

    return {layout: load(layout) for layout in layouts}


def each_its_own(rank: int, world: int, directory: Path, kind: str) -> list[float]:
    """Ranks that load different checkpoints of another writer, in which everything has the same name and size."""
    mine = directory / f"{kind}-{rank}"
    mine.mkdir()
    state = {"matrix": MATRIX[:2048] + rank}
    path = {"safetensors": mine, "stock": mine, "file.pt": mine / "file.pt"}[kind]
    if kind == "stock":
        dcp.save(state, checkpoint_id=mine, no_dist=True)
    elif kind == "file.pt":
        torch.save(state, path)
    else:
        save_file(state, mine / "model.safetensors")
    dist.barrier()
    target = {"matrix": torch.zeros_like(state["matrix"])}
    run(sidestream.load(target, path, reading="per_host", timeout_s=TIMEOUT_S))
    return [float((one - MATRIX[:2048]).abs().max()) for one in target.values()]


def fail_while_sharing(rank: int, world: int, directory: Path, how: str, who: int) -> dict[str, Any]:
    """In the middle of a load one rank is killed, raises, or does nothing any more; then all load again."""
    target = {"matrix": torch.zeros_like(MATRIX)}
    flag = directory / "told"

    def progress(done: int, total: int) -> None:
        if rank != who or not 0 < done < total:
            return
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise OSError(5, "the program's own mistake")
        while how == "hang" and not flag.exists():
            time.sleep(0.05)

    options: dict[str, Any] = {"reading": "per_host", "timeout_s": 3.0 if how == "hang" else TIMEOUT_S}
    failures = failures_of(sidestream.load(target, directory / "ours", progress=progress, **options))
    told = {"failures": [[one, kind] for one, kind, _ in failures], "left": what_is_left()}
    flag.touch()
    if how != "die":
        run(sidestream.load(target, directory / "ours", reading="per_host", timeout_s=TIMEOUT_S))
        assert torch.equal(target["matrix"], MATRIX)
    return told


def damaged(rank: int, world: int, directory: Path, kind: str) -> list[Any]:
    target = {"matrix": torch.zeros_like(MATRIX)}
    options: dict[str, Any] = {"reading": "per_host", "timeout_s": TIMEOUT_S}
    return [one[:2] for one in failures_of(sidestream.load(target, directory / kind, **options))]


def cannot_share(rank: int, world: int, directory: Path) -> list[str]:
    """One rank may not have so much memory of that kind: all read for themselves, and say why."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    seen: list[events.Event] = []
    target = {"matrix": torch.zeros_like(MATRIX)}
    with events.observe(seen.append):
        run(sidestream.load(target, directory / "ours", reading="per_host", timeout_s=TIMEOUT_S))
    assert torch.equal(target["matrix"], MATRIX)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return [one.reason for one in seen if isinstance(one, events.ReadAlone)]


def differing(rank: int, world: int, directory: Path) -> list[Any]:
    """Ranks that mean different ways of reading, and one that means none."""
    target = {"matrix": torch.zeros_like(MATRIX)}
    told = []
    for reading in ("per_host" if rank else "each_rank", "per_host" if rank else "sometimes"):
        told.append(failures_of(sidestream.load(target, directory / "ours", reading=reading, timeout_s=TIMEOUT_S)))  # type: ignore[arg-type]
    return [[one[:2] for one in failures] for failures in told]


def restored(rank: int, world: int, directory: Path) -> int:
    """Of a run; two saves of groups and loads of groups at once besides."""
    halves = [dist.new_group(list(range(0, world, 2))), dist.new_group(list(range(1, world, 2)))]

    async def both() -> int:
        state = {"w": MATRIX[:600] + 1}
        async with sidestream.Checkpointer(directory / "run", timeout_s=TIMEOUT_S) as checkpoints:
            await (await checkpoints.save(state, step=3))
            target = {"w": torch.zeros_like(state["w"])}
            await checkpoints.restore(target, reading="per_host")
            same(target, state)
            assert checkpoints.restored is not None
        targets = [{"w": torch.zeros_like(state["w"])} for _ in range(3)]
        step, mine = directory / "run" / "step-3", halves[rank % 2]
        loads = [
            sidestream.load(one, step, reading="per_host", process_group=mine, timeout_s=TIMEOUT_S) for one in targets
        ]
        await asyncio.gather(*loads)
        for one in targets:
            same(one, state)
        alone = await sidestream.load(targets[0], step, reading="per_host", process_group="alone")
        return alone.nbytes

    return int(run(both()))
