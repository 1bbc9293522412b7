"""Loads of ranks on one machine that share what they read."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import mmap
import os
import re
import resource
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
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
from sidestream._group import hub as group
from sidestream._load.per_host import hosts

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
    return [one for one in open_files() if "sidestream-read" in one]


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # threads close some
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


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
        assert report.unverified == () or kind == "safetensors"  # whose files have no checksums
        assert shared_bytes() == 0
        assert descriptors() == []
        return {"read": counted.nbytes, "reported": report.nbytes, "shared": most}

    load(layouts[0])  # what a first one reads besides (modules, the system's files) is not counted
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

    if how == "hang":  # and does not stop when it is told to
        group._STOP_S = 1.0
    options: dict[str, Any] = {"reading": "per_host", "timeout_s": 3.0 if how == "hang" else TIMEOUT_S}
    failures = failures_of(sidestream.load(target, directory / "ours", progress=progress, **options))
    told = {"failures": [[one, kind] for one, kind, _ in failures], "left": what_is_left()}
    flag.touch()
    if how != "die":
        run(sidestream.load(target, directory / "ours", reading="per_host", timeout_s=TIMEOUT_S))
        assert torch.equal(target["matrix"], MATRIX)
    return told


def fail_before_sharing(rank: int, world: int, directory: Path) -> list[Any]:
    """Rank 0 fails when all have offered their memory, and rank 1 opens that late. The step is as good as before."""
    opened, closed = hosts.open_pages, hosts.HostReads.close

    def close(self: hosts.HostReads) -> None:
        closed(self)
        time.sleep(1.0 if rank == 0 else 0.0)  # whoever is told only now is told too late

    def open_pages(process: int, address: Mapping[str, Any]) -> mmap.mmap:
        if address["nbytes"] < 1 << 20:  # a list of what is needed
            return opened(process, address)
        if rank == 0:
            raise RuntimeError("the program's own mistake")
        gone = time.monotonic() + 10.0  # a chance for what must not happen
        while time.monotonic() < gone and os.path.lexists(f"/proc/{process}/fd/{address['descriptor']}"):
            time.sleep(0.01)
        return opened(process, address)

    async def restore() -> list[Any]:
        async with sidestream.Checkpointer(directory / "run", timeout_s=TIMEOUT_S) as checkpoints:
            for step in (1, 2):
                await (await checkpoints.save({"matrix": MATRIX + step}, step=step))
            target = {"matrix": torch.zeros_like(MATRIX)}
            hosts.open_pages, hosts.HostReads.close = open_pages, close  # type: ignore[method-assign]
            try:
                await checkpoints.restore(target, reading="per_host", fallback="older")
            except sidestream.errors.RankFailures as failures:
                return [[one.rank, one.kind] for one in failures.failures]
            finally:
                hosts.open_pages, hosts.HostReads.close = opened, closed  # type: ignore[method-assign]
        return [float(target["matrix"][0, 0])]

    return list(run(restore()))


def damaged(rank: int, world: int, directory: Path, kind: str) -> list[Any]:
    target = {"matrix": torch.zeros_like(MATRIX)}
    options: dict[str, Any] = {"reading": "per_host", "timeout_s": TIMEOUT_S}
    return [one[:2] for one in failures_of(sidestream.load(target, directory / kind, **options))]


def cannot_share(rank: int, world: int, directory: Path, why: str) -> list[str]:
    """One rank may not have so much memory of that kind, or has no such thing: all read for themselves, and say why."""
    reading = sidestream.PerHost(memory_bytes=world << 30)  # which is address space, as long as nobody touches it
    target = {"matrix": torch.zeros_like(MATRIX)}
    seen: list[events.Event] = []
    limit = None
    if rank == 1 and why == "file_size":
        limit = resource.RLIMIT_FSIZE, 1 << 20
    elif rank == 1 and why == "address_space":  # room for its own ring, and none for those of the others
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        limit = resource.RLIMIT_AS, mapped + (1 << 30) + (3 << 28)
    elif rank == 1 and why == "memory_files":
        del os.memfd_create
    elif rank == 1 and why == "seals":
        del fcntl.F_ADD_SEALS

    async def load() -> None:
        if rank == 1 and why == "loop":
            asyncio.get_running_loop().add_reader = refuse  # type: ignore[method-assign]
        await sidestream.load(target, directory / "ours", reading=reading, timeout_s=TIMEOUT_S)

    if limit is not None:
        resource.setrlimit(limit[0], (limit[1], resource.RLIM_INFINITY))
    with events.observe(seen.append):
        run(load())
    assert torch.equal(target["matrix"], MATRIX)
    if limit is not None:
        resource.setrlimit(limit[0], (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert what_is_left() == ["0 bytes"]
    return [one.reason for one in seen if isinstance(one, events.ReadAlone)]


def refuse(*_: object) -> None:
    raise NotImplementedError


def children(rank: int, world: int, directory: Path) -> list[list[int]]:
    """What a child that is forked in the middle of a load has of it: open descriptors, bytes of memory."""
    told: list[list[int]] = []

    def progress(done: int, total: int) -> None:
        if not 0 < done < total or told:
            return
        assert descriptors()
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            os.close(readable)
            pipes = [one for one in open_files() if one.startswith("pipe:")]
            own = os.readlink(f"/proc/self/fd/{writable}")
            said = [len(descriptors()), shared_bytes(), len(set(pipes) & mailboxes - {own})]
            os.write(writable, " ".join(map(str, said)).encode())
            os._exit(0)
        os.close(writable)
        with os.fdopen(readable) as said_by_child:
            told.append([int(one) for one in said_by_child.read().split()])
        os.waitpid(child, 0)

    before = {one for one in open_files() if one.startswith("pipe:")}
    mailboxes: set[str] = set()
    target = {"matrix": torch.zeros_like(MATRIX)}

    def watched(done: int, total: int) -> None:
        mailboxes.update(one for one in open_files() if one.startswith("pipe:") and one not in before)
        progress(done, total)

    options: dict[str, Any] = {"progress": watched, "timeout_s": TIMEOUT_S}
    run(sidestream.load(target, directory / "ours", reading=sidestream.PerHost(memory_bytes=MEMORY_BYTES), **options))
    assert torch.equal(target["matrix"], MATRIX)
    assert len(mailboxes) >= world
    return told


def differing(rank: int, world: int, directory: Path) -> list[Any]:
    """Ranks that mean different ways of reading, and one that means none."""
    target = {"matrix": torch.zeros_like(MATRIX)}
    told = []
    for reading in ("per_host" if rank else "each_rank", "per_host" if rank else "sometimes"):
        told.append(failures_of(sidestream.load(target, directory / "ours", reading=reading, timeout_s=TIMEOUT_S)))  # type: ignore[arg-type]
    dist.barrier()  # a process that is gone has died, whatever it said last
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
