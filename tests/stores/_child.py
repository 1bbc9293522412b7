"""A warm process that forks one child for each trial, and reports its pid and how it ended. Driven by ``_processes``.

Nothing that is used here before the fork has threads or connections, so that a child is like a fresh process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import warnings
from typing import Any

import anyio.lowlevel
import obstore.store
import s3fs
import torch
from _states import blank_state, files_of, make_state, seed_in
from keywords import for_run, for_save

import sidestream
from sidestream import errors


class Child:
    def __init__(self, trial: dict[str, Any], out: int) -> None:
        self.trial = trial
        self.out = out
        policy = sidestream.StorePolicy(**trial["policy"])
        self.where: dict[str, Any] = {"storage": sidestream.Storage(trial["options"], policy=policy)}

    def tell(self, **what: Any) -> None:
        os.write(self.out, (json.dumps(what) + "\n").encode())

    def run(self) -> None:
        try:
            asyncio.run(getattr(self, self.trial["work"])())
        except errors.SidestreamError as error:
            self.tell(error=type(error).__name__, message=str(error))
        except BaseException as error:
            self.tell(error=type(error).__name__, untyped=True, message=str(error))

    async def steps(self) -> None:
        """Of a run, one after the other."""
        async with sidestream.Checkpointer(self.trial["run"], **for_run(**self.where)) as checkpoints:
            for step, seed in self.trial["saves"]:
                info = await checkpoints.save(make_state(seed, self.trial["mib"]), step=step)
                self.tell(acked=info.url.rpartition("/")[2], seed=seed)

    async def plain(self) -> None:
        for step, seed in self.trial["saves"]:
            url = f"{self.trial['run']}/plain-{step}"
            info = await sidestream.save(make_state(seed, self.trial["mib"]), url, **for_save(**self.where))
            self.tell(acked=info.url.rpartition("/")[2], seed=seed)

    async def over(self) -> None:
        """To one URL, each save in the place of what is there."""
        for _, seed in self.trial["saves"]:
            state = make_state(seed, self.trial["mib"])
            url = f"{self.trial['run']}/last"
            info = await sidestream.save(state, url, overwrite=True, files=files_of(seed), **for_save(**self.where))
            self.tell(acked=info.url.rpartition("/")[2], seed=seed)

    async def remove(self) -> None:
        await sidestream.remove(f"{self.trial['run']}/last", **self.where)
        self.tell(removed=True)

    async def export(self) -> None:
        """A save with an export beside it."""
        ((_, seed),) = self.trial["saves"]
        run = self.trial["run"]
        options: dict[str, Any] = {"select": "model.*", "max_shard_bytes": 3 << 20, "files": files_of(seed)}
        beside = sidestream.HF(f"{run}/hf", **options, **self.where)
        pending = sidestream.async_save(
            make_state(seed, self.trial["mib"]), f"{run}/plain", export=beside, **for_save(**self.where)
        )
        await pending
        self.tell(acked="plain", seed=seed)
        await pending.exports[0]
        self.tell(exported=True)

    async def polling(self) -> None:
        """Restore the newest step again and again until that is ``until``."""
        state, seen, loads = blank_state(self.trial["mib"]), [], 0
        async with sidestream.Checkpointer(self.trial["run"], **for_run(**self.where)) as checkpoints:
            step = None
            while step != self.trial["until"]:
                step = await checkpoints.restore(state)
                if step is None:
                    continue
                loads += 1
                seed = seed_in(state, self.trial["mib"])
                if (step, seed) not in seen:
                    seen.append((step, seed))
        self.tell(seen=seen, loads=loads)

    async def memory(self) -> None:
        """The peak of a save beyond what was resident before it, staging memory included there."""
        mib = self.trial["mib"]
        state = make_state(1, mib)
        async with sidestream.AsyncStager() as stager:
            await stager.prewarm(state)
            url = self.trial["run"]
            await sidestream.save(
                state, f"{url}/first", stager=stager, **for_save(**self.where)
            )  # clients are made, and imported
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            before = _status("VmRSS")
            await sidestream.save(state, f"{url}/second", stager=stager, **for_save(**self.where))
            self.tell(extra_bytes=_status("VmHWM") - before)


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))


async def _warm() -> None:
    """Import now, in the parent of all trials, what a save imports."""
    await anyio.lowlevel.checkpoint()
    assert callable(sidestream.save)
    assert callable(sidestream.Checkpointer)
    assert callable(obstore.store.S3Store)
    assert callable(s3fs.S3FileSystem)


def serve() -> None:
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # or the first threads of a fork race to do it
    warnings.simplefilter("error", ResourceWarning)
    asyncio.run(_warm())
    for line in sys.stdin:
        reading, writing = os.pipe()
        waiting, starting = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reading)
                os.close(starting)
                if os.read(waiting, 1) == b"!":
                    Child(json.loads(line), writing).run()
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
                os._exit(70)
            os._exit(0)
        os.close(writing)
        os.close(waiting)
        print(json.dumps({"pid": pid}), flush=True)
        sys.stdin.readline()  # whoever asked is ready for what the child does
        os.write(starting, b"!")
        os.close(starting)
        with os.fdopen(reading, "rb") as pipe:
            told = [json.loads(report) for report in pipe]
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(status), "told": told}), flush=True)


if __name__ == "__main__":
    serve()
