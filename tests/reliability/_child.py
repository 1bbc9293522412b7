"""A warm process that forks one child for each trial and reports how it ended. Driven by ``_trials.Trials``.

The child saves for real and is killed for real, at the file operation that it is told.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import anyio.lowlevel
import torch
from _faults import Intercept, Operation, make_state

import sidestream
from sidestream import errors
from sidestream._threads import Threads, io_threads

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
        self.tell(operations=[operation.name for operation in intercept.log])
        if trial.get("cut"):
            self.die()

    # --- what a trial does; every save that is acknowledged is told at once ---

    async def steps(self, run: Path) -> None:
        async with sidestream.Checkpointer(run, durability=self.trial.get("durability", "fsync")) as checkpoints:
            for step, seed in self.trial["saves"]:
                info = await (await checkpoints.save(make_state(seed), step=step))
                self.tell(acked=Path(info.url).name, seed=seed)

    async def together(self, run: Path) -> None:
        """All saves in flight at once."""
        async with sidestream.Checkpointer(run) as checkpoints:

            async def one(step: int, seed: int) -> None:
                info = await (await checkpoints.save(make_state(seed), step=step))
                self.tell(acked=Path(info.url).name, seed=seed)

            async with asyncio.TaskGroup() as group:
                for step, seed in self.trial["saves"]:
                    group.create_task(one(step, seed))

    async def plain(self, run: Path) -> None:
        """``save`` to a URL."""
        for step, seed in self.trial["saves"]:
            info = await sidestream.save(make_state(seed), run / f"plain-{step}")
            self.tell(acked=Path(info.url).name, seed=seed)

    async def limited(self, run: Path) -> None:
        """No file may grow beyond ``limit``."""
        limit = self.trial["limit"]
        async with sidestream.AsyncStager() as stager:
            await stager.prewarm(1 << 20)
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

        async def use_them() -> None:
            for use in (threads.run(int), checkpoints.steps(), checkpoints.save({}, step=1), stage()):
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


async def _warm() -> None:
    """Import now, in the parent of all trials, what a save imports."""
    await anyio.lowlevel.checkpoint()
    assert callable(sidestream.save)


def serve() -> None:
    torch.set_num_threads(1)
    asyncio.run(_warm())
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
