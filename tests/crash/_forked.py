"""A warm process that forks one child for each trial and reports how it ended. Driven by ``_trials.Trials``.

The child saves for real and is killed for real, at the file operation that it is told.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import faulthandler
import fcntl
import gc
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import anyio.lowlevel
import torch
from _one_name import WORK, Doing
from _operations import Intercept, Operation
from _seeded import blank_state, files_of, make_state
from keywords import for_run

import sidestream
from sidestream import errors
from sidestream._runtime.threads import Threads, io_threads

HANGS_S = 20
IO_THREADS = io_threads()._size
_M_ARENA_MAX = -8
_FS_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = struct.pack("I", 2)


class _Child:
    def __init__(self, trial: dict[str, Any], out: int) -> None:
        self.trial = trial
        self.out = out

    def tell(self, **what: Any) -> None:
        os.write(self.out, (json.dumps(what) + "\n").encode())

    def die(self) -> None:
        """The end: of the process alone, or of the whole machine as far as the file system can tell."""
        mount = self.trial.get("cut")
        if mount:
            self._descriptor = os.open(mount, os.O_RDONLY) if not hasattr(self, "_descriptor") else self._descriptor
            fcntl.ioctl(self._descriptor, _FS_IOC_SHUTDOWN, _NO_LOG_FLUSH)
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, operation: Operation) -> Any:
        if operation.index != self.trial["at"]:
            return operation.call()
        after = self.trial["when"] == "after"
        self.tell(killed_at=operation.name, path=os.path.basename(operation.path), when=self.trial["when"])
        try:
            if after:
                self._kept = operation.call()
        finally:
            self.die()

    def run(self) -> None:
        trial = self.trial
        os.environ.update(trial.get("env", {}))
        if trial.get("cut"):
            self._descriptor = os.open(trial["cut"], os.O_RDONLY)
        if trial.get("uid"):
            os.setgid(trial["uid"])
            os.setuid(trial["uid"])
        with Intercept(Path(trial["root"]), self.hook).installed() as intercept:
            try:
                asyncio.run(getattr(self, trial["work"])(Path(trial["run"])))
            except errors.SidestreamError as error:
                self.tell(error=type(error).__name__, number=getattr(error, "errno", None), message=str(error))
            except BaseException as error:
                self.tell(error=type(error).__name__, untyped=True, message=str(error))
        log = intercept.log
        self.tell(operations=[one.name for one in log], visible=[one.visible for one in log])
        if trial.get("cut"):
            self.die()

    def stager(self) -> sidestream.AsyncStager:
        """With the memory that the trial grants: with less than the state has, it passes through in windows."""
        return sidestream.AsyncStager(budget_bytes=self.trial.get("budget_bytes", 1 << 26))

    @property
    def storage(self) -> sidestream.Storage:
        return sidestream.Storage(commit=self.trial.get("commit", "rename"))

    def saver(self) -> Any:
        """One that is silent for two seconds is killed, also where the machine is merely busy: then it is one more."""
        return sidestream.WriterProcess(silence_s=2, retries=9) if self.trial.get("saver") else "thread"

    # --- what a trial does; every save that is acknowledged is told at once ---

    async def steps(self, run: Path) -> None:
        how: dict[str, Any] = {"writer": self.saver(), "storage": self.storage}
        async with (
            self.stager() as stager,
            sidestream.Checkpointer(run, stager=stager, **for_run(**how)) as checkpoints,
        ):
            for step, seed in self.trial["saves"]:
                info = await checkpoints.save(make_state(seed), step=step, files=files_of(seed))
                self.tell(acked=Path(info.url).name, seed=seed)

    async def exported(self, run: Path) -> None:
        """Saves with an export of the model beside them, which replaces the one of the same step."""
        export = sidestream.HF(run.with_name("exports") / "step-{step}", select="model.*", max_shard_bytes=90_000)
        async with self.stager() as stager, sidestream.Checkpointer(run, stager=stager, export=export) as checkpoints:
            for step, seed in self.trial["saves"]:
                pending = checkpoints.async_save(make_state(seed), step=step)
                info = await pending
                self.tell(acked=Path(info.url).name, seed=seed)
                report = await pending.exports[0]
                self.tell(exported=Path(report.url).name, seed=seed)

    async def together(self, run: Path) -> None:
        """All saves in flight at once."""
        async with self.stager() as stager, sidestream.Checkpointer(run, stager=stager) as checkpoints:

            async def one(step: int, seed: int) -> None:
                info = await checkpoints.save(make_state(seed), step=step)
                self.tell(acked=Path(info.url).name, seed=seed)

            async with asyncio.TaskGroup() as group:
                for step, seed in self.trial["saves"]:
                    group.create_task(one(step, seed))

    async def prune(self, run: Path) -> None:
        """One save after which retention lets older steps go, and a pass of its own."""
        # Its leases are long: nothing is deleted under a lease that may have ended before the deletion begins.
        keep, before = sidestream.KeepLast(2), set(os.listdir(run))
        async with self.stager() as stager, sidestream.Checkpointer(run, stager=stager, keep=keep) as checkpoints:
            for step, seed in self.trial["saves"]:
                info = await checkpoints.save(make_state(seed), step=step)
                self.tell(acked=Path(info.url).name, seed=seed)
            await checkpoints.prune()  # or the pass after the save, whichever comes first
            self.tell(pruned={"deleted": sorted(name for name in before.difference(os.listdir(run)) if name[0] != ".")})

    async def recover(self, run: Path) -> None:
        """What somebody left who was killed is removed; nothing is saved."""
        async with self.stager() as stager, self.pruning(run, stager) as checkpoints:
            with suppress(errors.CheckpointNotFoundError):
                await checkpoints.verify()
            await checkpoints.restore(blank_state(), fallback="older")
            for _ in range(3):  # what is not known to be dead is looked at twice
                await checkpoints.prune()

    def pruning(self, run: Path, stager: sidestream.AsyncStager) -> sidestream.Checkpointer:
        """Whoever is silent for a moment is dead."""
        keep = sidestream.KeepLast(self.trial.get("keep", 2))
        return sidestream.Checkpointer(
            run, stager=stager, keep=keep, lease_s=1e-3, abandoned_after_s=1e-3, storage=self.storage
        )

    async def plain(self, run: Path) -> None:
        """``save`` to a URL."""
        for step, seed in self.trial["saves"]:
            snapshot = self.trial.get("snapshot", True)
            url = run / f"plain-{step}"
            info = await sidestream.save(
                make_state(seed), url, storage=self.storage, options=sidestream.SaveOptions(streaming=not snapshot)
            )
            self.tell(acked=Path(info.url).name, seed=seed)

    async def overwriting(self, run: Path) -> None:
        """``save`` to a URL, again and again."""
        async with self.stager() as stager:
            for step, seed in self.trial["saves"]:
                info = await sidestream.save(
                    make_state(seed),
                    run / f"plain-{step}",
                    overwrite=True,
                    files=files_of(seed),
                    stager=stager,
                    options=sidestream.SaveOptions(writer=self.saver()),
                )
                self.tell(acked=Path(info.url).name, seed=seed)

    async def one_name(self, run: Path) -> None:
        """``what`` of ``_one_name``."""
        async with self.stager() as stager:
            doing = Doing(lambda name, seed: self.tell(acked=name, seed=seed), stager, self.saver())
            await WORK[self.trial["what"]](run, doing, **self.trial.get("how", {}))

    async def race(self, run: Path) -> None:
        """As ``me`` of two, at the same moment as the other: the same steps of one run, or the same directories."""
        me, rounds, storage = self.trial["me"], self.trial["rounds"], self.storage
        async with (
            self.stager() as stager,
            sidestream.Checkpointer(run / "run", stager=stager, storage=storage) as checkpoints,
        ):
            for number in range(rounds):
                seed = 2 * number + me
                (run / f"ready-{number}-{me}").touch()
                while not (run / f"ready-{number}-{1 - me}").exists():
                    await asyncio.sleep(0)
                try:
                    if number % 2:
                        info = await checkpoints.save(make_state(seed), step=number)
                    else:
                        url = run / f"plain-{number}"
                        info = await sidestream.save(make_state(seed), url, stager=stager, storage=storage)
                except errors.CheckpointExistsError:
                    self.tell(lost=number)
                except BaseException:
                    (run / f"ready-{number + 1}-{me}").touch()
                    raise
                else:
                    self.tell(acked=Path(info.url).name, seed=seed, round=number)

    async def rival(self, run: Path) -> None:
        """As ``me`` of two, at the same moment as the other: the same name is overwritten, and now and then removed."""
        me, rounds, random = self.trial["me"], self.trial["rounds"], Random(self.trial["me"])
        for number in range(rounds):
            seed, name = 2 * number + me + 1, f"plain-{number}"
            if number % 2 and me:
                await sidestream.save(make_state(0), run / name, overwrite=True, files=files_of(0))
            (run / f"ready-{number}-{me}").touch()
            while not (run / f"ready-{number}-{1 - me}").exists():
                await asyncio.sleep(0)
            removes = number % 4 == 3 and not me
            try:
                if removes:
                    await asyncio.sleep(random.random() * 0.01)
                    await sidestream.remove(run / name)
                    self.tell(removed=number)
                    continue
                await sidestream.save(
                    make_state(seed),
                    run / name,
                    overwrite=True,
                    files=files_of(seed),
                    options=sidestream.SaveOptions(writer=self.saver()),
                )
                self.tell(acked=name, seed=seed, round=number)
            except BaseException:
                (run / f"ready-{number + 1}-{me}").touch()
                raise

    async def overwrite_on(self, run: Path) -> None:
        """One name, until the file ``stop`` is there."""
        seed = 0
        while not Path(self.trial["stop"]).exists():
            seed += 1
            await sidestream.save(
                make_state(seed),
                run / "last",
                overwrite=True,
                files=files_of(seed),
                options=sidestream.SaveOptions(durability="flush", writer=self.saver()),
            )
            if seed == 1:
                self.tell(begun=True)
        self.tell(published=seed)

    async def publish(self, run: Path) -> None:
        """Step after step, old ones pruned, until the file ``stop`` is there."""
        keep = sidestream.KeepLast(2)
        async with (
            self.stager() as stager,
            sidestream.Checkpointer(
                run, stager=stager, keep=keep, save=sidestream.SaveOptions(durability="flush")
            ) as checkpoints,
        ):
            step = 0
            while not Path(self.trial["stop"]).exists():
                step += 1
                noted = {"seed": step}
                await checkpoints.save(make_state(step), step=step, metadata=noted)
        self.tell(published=step)

    async def soak(self, run: Path) -> None:
        """``saves`` of them; how much memory, how many descriptors and threads there are after every ``every``."""
        async with (
            self.stager() as stager,
            sidestream.Checkpointer(
                run, stager=stager, keep=sidestream.KeepLast(2), save=sidestream.SaveOptions(durability="flush")
            ) as checkpoints,
        ):
            state = make_state(1)
            for number in range(1, self.trial["saves"] + 1):
                await checkpoints.save(state, step=number)
                if number % self.trial["every"] == 0:
                    await checkpoints.prune()  # a pass of retention that goes on has files open
                    self.tell(after=number, **usage())

    async def held(self, run: Path) -> None:
        """A save that waits in the middle until the file ``go`` is there; it tells by the file ``ready``."""
        here = threading.Event()

        def hook(operation: Operation) -> Any:
            if operation.index == self.trial["hold"]:
                Path(self.trial["ready"]).touch()
                while not Path(self.trial["go"]).exists():
                    time.sleep(0.001)
                here.set()
            return operation.call()

        with Intercept(run, hook).installed():
            async with self.stager() as stager, sidestream.Checkpointer(run, stager=stager) as checkpoints:
                for step, seed in self.trial["saves"]:
                    info = await checkpoints.save(make_state(seed), step=step)
                    self.tell(acked=Path(info.url).name, seed=seed)
        self.tell(held=here.is_set())

    async def odd_clock(self, run: Path) -> None:
        """Saves and prunes where the clock of this machine jumps at every look at it."""
        random = Random(self.trial["jumps"])
        now, now_ns = time.time, time.time_ns
        month = 30 * 86400
        time.time = lambda: now() + random.uniform(-month, month)
        time.time_ns = lambda: now_ns() + random.randint(-month, month) * 10**9
        keep = sidestream.KeepLast(2) | sidestream.KeepEvery(seconds=3600)
        async with self.stager() as stager, sidestream.Checkpointer(run, stager=stager, keep=keep) as checkpoints:
            for step, seed in self.trial["saves"]:
                info = await checkpoints.save(make_state(seed), step=step)
                self.tell(acked=Path(info.url).name, seed=seed)
                await checkpoints.prune()

    async def tight(self, run: Path) -> None:
        """Saves of ``state_bytes`` within ``limit_bytes`` more than there are in use, by cgroup or address space. One
        that hangs is ended with code 1, and its stacks are in ``stacks``."""
        trial = self.trial
        stacks = Path(trial["stacks"]).open("w")  # noqa: SIM115 - for as long as this process lives
        faulthandler.dump_traceback_later(HANGS_S, exit=True, file=stacks)
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)  # glibc reserves 64 MiB for each thread otherwise
        state = {"weights": [torch.full((trial["state_bytes"] // 32 // 4,), float(n)) for n in range(32)], "seed": 1}
        async with sidestream.AsyncStager(budget_bytes=trial["budget_bytes"], timeout_s=60) as stager:
            # The pool's threads have begun before memory is short: see of_python() of test_row_memory.py.
            everyone = threading.Barrier(IO_THREADS)
            await asyncio.gather(*(io_threads().run(everyone.wait) for _ in range(IO_THREADS)))
            await sidestream.save({"one": torch.ones(1 << 16), "seed": 1}, run / "before", stager=stager)
            if trial["cgroup"]:
                join_cgroup(Path(trial["cgroup"]), trial["limit_bytes"])
            else:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                resource.setrlimit(resource.RLIMIT_AS, (used + trial["limit_bytes"], resource.RLIM_INFINITY))
            try:
                for number in range(2):
                    info = await sidestream.save(state, run / f"tight-{number}", stager=stager)
                    self.tell(acked=Path(info.url).name, seed=1)
            finally:
                if not trial["cgroup"]:
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    async def limited(self, run: Path) -> None:
        """No file may grow beyond ``limit``."""
        limit = self.trial["limit"]
        async with sidestream.AsyncStager() as stager:
            await stager.reserve(1 << 20)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                info = await sidestream.save(make_state(12), run / "limited", stager=stager)
                self.tell(acked=Path(info.url).name, seed=12)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    async def forked(self, run: Path) -> None:
        """What was made before the fork refuses; what is made here works."""
        stager, checkpoints = sidestream.AsyncStager(), sidestream.Checkpointer("/nonexistent")
        threads = Threads("test-threads", 1)
        assert await threads.run(int) == await io_threads().run(int) == 0
        pid = os.fork()
        if pid:
            _, status = os.waitpid(pid, 0)
            os._exit(os.waitstatus_to_exitcode(status))
        refused = []

        async def stage() -> None:
            stager.stage({})

        async def save() -> None:
            checkpoints.async_save({}, step=1)

        async def use_them() -> None:
            for use in (threads.run(int), checkpoints.steps(), save(), stage()):
                try:
                    await use
                except errors.SidestreamError as error:
                    refused.append(type(error).__name__)
            threads.close()
            own = Threads("test-threads", 1)
            self.tell(refused=refused, worked=[await own.run(len, "child"), await io_threads().run(bool, 1)])
            own.close()

        asyncio.run(use_them())

    async def failing(self, run: Path) -> None:
        """A save whose preallocation fails, so that the child dies while it cleans up."""
        real = os.posix_fallocate

        def full(descriptor: int, offset: int, nbytes: int) -> None:
            real(descriptor, offset, nbytes)
            raise OSError(errno.ENOSPC, "No space left on device")

        os.posix_fallocate = full
        await self.steps(run)


_OF_THE_PROCESS = ("sidestream-io", "sidestream-read", "sidestream-unmap", "sidestream-watch", "sidestream-write")


def usage() -> dict[str, int]:
    """Of this process: resident bytes once all garbage has been given back, descriptors, threads."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "fds": len(os.listdir("/proc/self/fd")),
        # the pools of the process grow when several hops happen to meet
        "threads": sum(one.name not in _OF_THE_PROCESS for one in threading.enumerate()),
    }


def join_cgroup(group: Path, limit_bytes: int) -> None:
    """What is charged already is charged to the parent's group; from here on there are ``limit_bytes``."""
    limit = group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")
    limit.write_text(str(limit_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))


async def _warm() -> None:
    """Import now, in the parent of all trials, what a save imports."""
    await anyio.lowlevel.checkpoint()
    assert callable(sidestream.save)


def serve() -> None:
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # or the first threads of a fork race to do it
    warnings.simplefilter("error", ResourceWarning)
    asyncio.run(_warm())
    gc.collect()
    gc.freeze()  # or every child would copy the pages of all that was imported
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reading)
                _Child(json.loads(line), writing).run()
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
                os._exit(70)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = [json.loads(report) for report in pipe]
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(status), "told": told}), flush=True)


if __name__ == "__main__":
    serve()
