"""Tokens per second of a training that is saved every few seconds: without saves, by sidestream, and by its rivals.

    python benchmarks/tokens.py [--seconds S] [--every S ...] [--rounds N] [--only NAME ...] [--directory DIR]
                                [--json FILE]

The training is that of ``examples/train_live.py``: a GPT of 25 million parameters with AdamW, 300 MB of state, whose
steps run in a worker thread with one thread of torch, beside an event loop with a 1 ms ticker. A save begins every
``--every`` seconds, unless the one before has not ended. Each measurement is a process of its own and trains for
``--seconds``, after some steps and one save that do not count. The rivals take turns in each round. The columns:

``tokens/s``: what was trained in the time, while saves were under way and in between (median; ``best`` of the rounds).
``of none``: that, divided by what the training without saves reaches in the same round (median).
``saves``: how many were begun; ``save s``: from the call to durable (median). ``pause ms``: the longest delay of the
ticker (median).

Everybody makes its checkpoints durable (fsync). sidestream's saves begin on the loop, and the optimizer waits until the
state is staged. DCP's and torch_checkpointing's calls copy the state before they return, and are made in the worker
thread, so that they do not stop the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _common import describe, headline, ticking, write_json

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from train_live_.model import FULL, QUICK, Training

WARM_STEPS = 3


class Saver(ABC):
    """Saves ``state`` while it is trained."""

    def __init__(self, state: dict[str, Any], worker: ThreadPoolExecutor) -> None:
        self.state = state
        self.worker = worker

    async def open(self) -> None:
        return

    @abstractmethod
    async def begin(self, path: Path) -> asyncio.Future[Any]:
        """Return, when the next gradients may be computed, what is done when the checkpoint is durable."""

    async def before_update(self) -> None:
        return

    async def close(self) -> None:
        return


class Sidestream(Saver):
    def __init__(self, state: dict[str, Any], worker: ThreadPoolExecutor, writer: str) -> None:
        super().__init__(state, worker)
        import sidestream

        self._async_save = sidestream.async_save
        self._stager = sidestream.AsyncStager(backing="shared" if writer == "process" else "private")
        self._options = sidestream.SaveOptions(writer=writer)  # type: ignore[arg-type]
        self._pending: Any = None

    async def begin(self, path: Path) -> asyncio.Future[Any]:
        self._pending = self._async_save(self.state, path, stager=self._stager, options=self._options)
        return asyncio.ensure_future(_ended(self._pending))

    async def before_update(self) -> None:
        if self._pending is not None:
            await self._pending.staged

    async def close(self) -> None:
        await self._stager.aclose()


class Dcp(Saver):
    def __init__(self, state: dict[str, Any], worker: ThreadPoolExecutor, kind: str) -> None:
        super().__init__(state, worker)
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._type = AsyncCheckpointerType.PROCESS if kind == "process" else AsyncCheckpointerType.THREAD

    async def open(self) -> None:
        if self._type.name == "PROCESS":
            import torch.distributed as dist

            file = tempfile.mktemp(prefix="group-", dir=Path.cwd())
            dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)

    async def begin(self, path: Path) -> asyncio.Future[Any]:
        import torch.distributed.checkpoint as dcp

        def call() -> Any:
            return dcp.async_save(self.state, checkpoint_id=str(path), async_checkpointer_type=self._type)

        return asyncio.wrap_future(await asyncio.get_running_loop().run_in_executor(self.worker, call))


class TorchCheckpointing(Saver):
    async def open(self) -> None:
        from _storage_rivals import TorchCheckpointing as Rival

        self._rival = Rival({})

    async def begin(self, path: Path) -> asyncio.Future[Any]:
        state = {name: one.state_dict() for name, one in self.state.items()}
        self._rival.state = state
        pending = await asyncio.get_running_loop().run_in_executor(self.worker, self._rival.save, path)
        return asyncio.ensure_future(self._rival.saved(pending))

    async def close(self) -> None:
        self._rival.close()


async def _ended(pending: Any) -> None:
    await pending


def saver_for(kind: str, state: dict[str, Any], worker: ThreadPoolExecutor) -> Saver | None:
    name, _, how = kind.partition(" ")
    if name == "sidestream":
        return Sidestream(state, worker, how)
    if name == "dcp":
        return Dcp(state, worker, how)
    return TorchCheckpointing(state, worker) if name == "torch_checkpointing" else None


KINDS = ("none", "sidestream thread", "sidestream process", "dcp thread", "dcp process", "torch_checkpointing")


async def trained(kind: str, seconds: float, every_s: float, directory: Path, quick: bool) -> dict[str, Any]:
    loop, size = asyncio.get_running_loop(), QUICK if quick else FULL
    training = Training(size)
    state = {"model": training.model, "optimizer": training.optimizer}
    took: list[float] = []
    with ThreadPoolExecutor(1, "train") as worker:
        saver = saver_for(kind, state, worker)
        number = 0

        async def step() -> None:
            nonlocal number
            number += 1
            await loop.run_in_executor(worker, training.compute_gradients, number)
            if saver is not None:
                await saver.before_update()
            await loop.run_in_executor(worker, training.apply_update)

        async def save() -> asyncio.Future[Any]:
            assert saver is not None
            path, before = directory / f"step-{number}", time.perf_counter()
            pending = await saver.begin(path)

            def ended(done: asyncio.Future[Any]) -> None:
                took.append(time.perf_counter() - before)

            pending.add_done_callback(ended)
            return pending

        for _ in range(WARM_STEPS):
            await step()
        pending: asyncio.Future[Any] | None = None
        if saver is not None:
            await saver.open()
            await (await save())
        took.clear()
        begun = steps = 0
        async with ticking() as late:
            start = due = time.perf_counter()
            due += every_s / 2
            while time.perf_counter() - start < seconds:
                await step()
                steps += 1
                if saver is not None and time.perf_counter() >= due and (pending is None or pending.done()):
                    pending = await save()
                    begun += 1
                    due = max(due + every_s, time.perf_counter())
            passed = time.perf_counter() - start
        if saver is not None:
            if pending is not None:
                await pending
            await saver.before_update()
            await saver.close()
    return {
        "tokens_per_s": steps * size.batch * size.context / passed,
        "saves": begun,
        "save_s": statistics.median(took) if took else None,
        "pause_ms": 1e3 * max(late),
    }


def one(kind: str, seconds: float, every_s: float, directory: Path, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as folder:
        asked = json.dumps([kind, seconds, every_s, quick])
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--one", asked]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()  # what this one has left to the page cache must not slow the next one down
    if done.returncode:
        raise SystemExit(f"{kind} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def show(every_s: float, rounds: dict[str, list[dict[str, Any]]]) -> None:
    heads = ("tokens/s", "best", "of none", "saves", "save s", "pause ms")
    print(f"\na save every {every_s:g} s\n{'':22}" + "".join(f"{head:>10}" for head in heads))
    for kind, runs in rounds.items():
        tokens = [run["tokens_per_s"] for run in runs]
        of_none = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(runs, rounds["none"], strict=True)]
        save_s = [run["save_s"] for run in runs if run["save_s"] is not None]
        saved = f"{statistics.median(save_s):10.2f}" if save_s else f"{'-':>10}"
        saves, pause = (statistics.median(run[key] for run in runs) for key in ("saves", "pause_ms"))
        print(
            f"{kind:22}{statistics.median(tokens):10.0f}{max(tokens):10.0f}{statistics.median(of_none):10.3f}"
            f"{saves:10.0f}{saved}{pause:10.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--every", type=float, nargs="+", default=[5])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], choices=KINDS, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a small model: a test, not a measurement")
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("--json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        kind, seconds, every_s, quick = json.loads(options.one)
        found = asyncio.run(trained(kind, seconds, every_s, Path.cwd(), quick))
        print(json.dumps(found), flush=True)
        os._exit(0)  # DCP's process is not waited for
    run = describe("torch_checkpointing")
    print(headline(run), flush=True)
    kinds = [kind for kind in KINDS if kind in ("none", *(options.only or KINDS))]
    if find_spec("torch_checkpointing") is None:
        kinds = [kind for kind in kinds if kind != "torch_checkpointing"]
    tables: dict[str, Any] = {}
    for every_s in options.every:
        rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind in kinds:
                found = one(kind, options.seconds, every_s, options.directory.absolute(), options.quick)
                rounds[kind].append(found)
        show(every_s, rounds)
        tables[f"every {every_s:g} s"] = rounds
    write_json(options.json, {"run": run, "tables": tables})


if __name__ == "__main__":
    main()
