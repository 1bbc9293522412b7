"""What a training loop gives up while it is saved: to threads, to a writer process, to stock DCP's thread and process.

    python benchmarks/interference.py [--rounds N] [--directory DIR] [--only NAME ...] [--json FILE]

Each line is a process of its own, which trains (a loop of pure Python, or of torch with one thread) and saves, first
once from cold, then ``--rounds`` times. Before and after each save it trains alone for a second, and what it does in
that time is what it would have done. In the tables ``python thread`` and ``torch thread`` the trainer has a thread of
its own, as with ``asyncio.to_thread``, and the event loop is idle; in the others it has the loop's. The columns:

``kept %``: of that speed, from the call to the acknowledgement (median of the warm saves, as below).
``stall ms``: the longest step of a save, beyond a usual one; ``worst ms``: of all.
``lost s/GB``: training time lost. ``lost ms``: in each save.
``cpu s``: processor time in the trainer's process, outside the thread of the loop (of that, ``stall`` tells).
``first s``, ``warm s``: from the call to the acknowledgement.
``wakes``: how often the other threads of the trainer's process, the loop's included, gave up a core to wait.
``fds``: the trainer's descriptors at their most, above those before.
``child MB``: what the other process has for itself at most, shared memory not counted.

The line ``alone`` says what the machine itself does to the loop in a second without a save. ``copy`` saves nothing: one
thread copies the bytes, in a single call, the least that any save beside a training needs. ``bare process`` neither:
another process reads the bytes out of the trainer's memory, computes checksums, writes and syncs. The limit of
descriptors is raised to what the system allows: DCP's process needs some for each tensor. In the line ``process apart``
the trainer has the first core to itself, and the process the others (``WriterProcess(affinity=...)``).

``exporters`` saves with ``thread``, in turns without an observer and with all of ``sidestream.observability``
(Prometheus, OpenTelemetry, a journal, DCP's log, costs), which makes two lines. A third one has the median of the
differences of ``kept %`` between neighbours, in points, and of the ratios of their times.

Everybody makes its checkpoint durable (fsync). DCP's process needs ``torch.distributed``: a group of one, over gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from _common import describe, headline, still_heap, write_json

SHAPES = {"64x16MB": (64, 4 << 20), "10000x1KiB": (10_000, 256)}
LOOPS = ("python", "torch", "python thread", "torch thread")
KINDS = (
    "alone", "copy", "bare process", "thread", "process", "process apart", "exporters", "dcp thread", "dcp process",
)  # fmt: skip
ALONE_S = 1.0
Save = Callable[[dict[str, Any], Path], Awaitable[None]]


# --- the trainer ------------------------------------------------------------------------------------------------------


def python_step() -> None:
    total = 0
    for number in range(4000):
        total += number & 7


WEIGHT = torch.randn(192, 192)


def torch_step() -> None:
    x = WEIGHT
    for _ in range(3):
        x = torch.relu(x @ WEIGHT) * 0.01


class Trainer(ABC):
    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step

    @abstractmethod
    async def until(self, done: asyncio.Future[Any]) -> tuple[int, float, float]:
        """How many steps were done, in how many seconds, and the longest of them."""

    @abstractmethod
    def cpu_s(self) -> float:
        """Processor time of its thread."""

    async def alone(self) -> float:
        """Steps per second."""
        count, seconds, _ = await self.until(asyncio.ensure_future(asyncio.sleep(ALONE_S)))
        return count / seconds

    def close(self) -> None:
        return


class OnTheLoop(Trainer):
    """Steps, one after the other, on the event loop; when each of them ended."""

    async def until(self, done: asyncio.Future[Any]) -> tuple[int, float, float]:
        start = before = time.perf_counter()
        count, longest = 0, 0.0
        while not done.done():
            self.step()
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest = max(longest, now - before)
            before = now
            count += 1
        return count, before - start, longest

    def cpu_s(self) -> float:
        return time.thread_time()


class InAThread(Trainer):
    """Steps, one after the other, in a thread. The loop waits, as it does for ``asyncio.to_thread``."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__(step)
        self._ends: list[float] = []
        self._cpu_s = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        while not self._closing:
            self.step()
            self._ends.append(time.perf_counter())
            self._cpu_s = time.thread_time()

    async def until(self, done: asyncio.Future[Any]) -> tuple[int, float, float]:
        start, first = time.perf_counter(), len(self._ends)
        await asyncio.wait([done])
        seconds, ends = time.perf_counter() - start, self._ends[first:]
        gaps = [later - earlier for earlier, later in itertools.pairwise([start, *ends, start + seconds])]
        return len(ends), seconds, max(gaps)

    def cpu_s(self) -> float:
        return self._cpu_s

    def close(self) -> None:
        self._closing = True
        self._thread.join()


def wakes(besides: int | None) -> dict[str, int]:
    """How often each thread of this process but one has given up its core to wait."""
    found: dict[str, int] = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            if task.name != str(besides):
                lines = (task / "status").read_text().splitlines()
                found[task.name] = int(next(x for x in lines if x.startswith("voluntary")).split()[1])
    return found


async def saved(trainer: Trainer, save: Save, state: dict[str, Any], url: Path) -> dict[str, float]:
    """One save beside the training. The call itself counts as a step that takes as long as it blocks."""
    before = await trainer.alone()
    trains = trainer._thread.native_id if isinstance(trainer, InAThread) else None
    waited = wakes(trains)
    start, others = time.perf_counter(), time.process_time() - trainer.cpu_s()
    task = asyncio.ensure_future(save(state, url))
    steps, _, longest = await trainer.until(task)
    seconds = time.perf_counter() - start
    others = time.process_time() - trainer.cpu_s() - others
    waits = sum(count - waited.get(thread, 0) for thread, count in wakes(trains).items())
    await task
    shutil.rmtree(url, ignore_errors=True)
    rate = (before + await trainer.alone()) / 2
    return {
        "seconds": seconds,
        "kept": steps / seconds / rate,
        "stall": longest - 1 / rate,
        "lost": seconds - steps / rate,
        "cpu": others,
        "wakes": waits,
    }


# --- who saves --------------------------------------------------------------------------------------------------------


async def run_sidestream(saver: str, measure: Callable[[Save], Awaitable[None]], directory: Path) -> None:
    import sidestream

    choice: Any = saver
    if saver == "apart":
        first, *others = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {first})
        choice = sidestream.WriterProcess(affinity=frozenset(others))
    async with sidestream.AsyncStager(backing="private" if saver == "thread" else "shared") as stager:

        async def save(state: dict[str, Any], url: Path) -> None:
            await sidestream.save(state, url, stager=stager, options=sidestream.SaveOptions(writer=choice))

        await measure(save)


async def run_dcp(kind: str, measure: Callable[[Save], Awaitable[None]], directory: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=0, world_size=1)
    checkpointer = AsyncCheckpointerType.PROCESS if kind == "process" else AsyncCheckpointerType.THREAD

    async def save(state: dict[str, Any], url: Path) -> None:
        await asyncio.sleep(0)
        future = dcp.async_save(state, checkpoint_id=str(url), async_checkpointer_type=checkpointer)
        await asyncio.wrap_future(future)  # type: ignore[arg-type]

    await measure(save)


async def run_alone(measure: Callable[[Save], Awaitable[None]]) -> None:
    async def save(state: dict[str, Any], url: Path) -> None:
        await asyncio.sleep(1.0)

    await measure(save)


async def run_copy(measure: Callable[[Save], Awaitable[None]], nbytes: int) -> None:
    from sidestream._runtime.threads import io_threads

    target = torch.zeros(nbytes // 4)

    def copy(state: dict[str, Any]) -> None:
        sources = list(state.values())
        torch._foreach_copy_(list(target.split(sources[0].numel())), sources)  # lets go of the GIL once

    async def save(state: dict[str, Any], url: Path) -> None:
        await io_threads().run(copy, state)  # with turns: or it would starve beside the loop

    await measure(save)


async def run_bare(measure: Callable[[Save], Awaitable[None]], state: dict[str, Any], directory: Path) -> None:
    nbytes = sum(tensor.nbytes for tensor in state.values())
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("_bare_copy.py")),
        str(nbytes),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()
    pieces = [(tensor.data_ptr(), tensor.nbytes) for tensor in state.values()]
    asked = (json.dumps([str(directory / "bare"), pieces]) + "\n").encode()

    async def save(state: dict[str, Any], url: Path) -> None:
        process.stdin.write(asked)  # type: ignore[union-attr]
        await process.stdout.readline()  # type: ignore[union-attr]

    await measure(save)
    process.stdin.close()
    await process.wait()


async def one(kind: str, shape: str, loop: str, rounds: int, directory: Path) -> dict[str, Any]:
    tensors, elements = SHAPES[shape]
    state = {f"layer.{number}.weight": torch.full((elements,), float(number)) for number in range(tensors)}
    step = python_step if loop.startswith("python") else torch_step
    trainer = InAThread(step) if loop.endswith("thread") else OnTheLoop(step)
    found: dict[str, Any] = {"gb": tensors * elements * 4 / 1e9, "saves": [], "observed": []}
    still_heap()
    print("ready", flush=True)

    async def measure(save: Save) -> None:
        for number in range(1 + rounds):
            for name in turn(number) if kind == "exporters" else ("saves",):
                with exporters(directory) if name == "observed" else nullcontext():
                    found[name].append(await saved(trainer, save, state, directory / f"c{number}"))
        trainer.close()

    name = kind.rpartition(" ")[2]
    if kind == "alone":
        await run_alone(measure)
    elif kind == "copy":
        await run_copy(measure, tensors * elements * 4)
    elif kind == "bare process":
        await run_bare(measure, state, directory)
    elif kind.startswith("dcp"):
        await run_dcp(name, measure, directory)
    else:
        await run_sidestream("thread" if kind == "exporters" else name, measure, directory)
    return found


def turn(number: int) -> tuple[str, str]:
    return ("saves", "observed") if number % 2 else ("observed", "saves")


def exporters(directory: Path) -> AbstractContextManager[object]:
    from observing import everyone

    return everyone(directory)


# --- whoever watches --------------------------------------------------------------------------------------------------


def watched(process: subprocess.Popen[str]) -> tuple[str, int, int]:
    """What it printed last, its descriptors at their most, and the own memory of its children, in bytes."""
    assert process.stdout is not None
    ready = process.stdout.readline()
    if not ready.startswith("ready"):
        raise SystemExit(f"the trainer said {ready!r}")
    before, most, memory = descriptors(process.pid), 0, 0
    while process.poll() is None:
        most = max(most, descriptors(process.pid) - before)
        memory = max(memory, sum(own_memory(child) for child in children(process.pid)))
        time.sleep(0.5)  # to look takes a core from whom it looks at
    return process.stdout.read(), most, memory


def descriptors(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def own_memory(pid: int) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("Pss_Anon:"))) << 10
    return 0


def measured(kind: str, shape: str, loop: str, rounds: int, directory: Path) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as folder:
        asked = json.dumps([kind, shape, loop, rounds, folder])
        process = subprocess.Popen(
            [sys.executable, __file__, "--one", asked],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        with ThreadPoolExecutor(1) as pool:  # DCP's process talks
            said = pool.submit(process.stderr.read)  # type: ignore[union-attr]
            told, most, memory = watched(process)
    if process.returncode:
        return [{"kind": kind, "failed": (said.result().strip().splitlines() or ["?"])[-1]}]
    found = json.loads(told.splitlines()[-1])
    more = {"gb": found["gb"], "fds": most, "child_mb": memory / 1e6}
    if kind != "exporters":
        return [summary(kind, found["saves"], more)]
    return [summary("exporters off", found["saves"], more), summary("exporters on", found["observed"], more)]


def summary(kind: str, saves: list[dict[str, float]], more: dict[str, float]) -> dict[str, Any]:
    first, warm = saves[0], saves[1:]
    return {
        "kind": kind,
        "kept": statistics.median(one["kept"] for one in warm),
        "stall_ms": 1e3 * statistics.median(one["stall"] for one in warm),
        "worst_ms": 1e3 * max(one["stall"] for one in warm),
        "cpu_s": statistics.median(one["cpu"] for one in warm),
        "lost_s_per_gb": statistics.median(one["lost"] for one in warm) / more["gb"],
        "lost_ms": 1e3 * statistics.median(one["lost"] for one in warm),
        "least_lost_ms": 1e3 * min(one["lost"] for one in warm),
        "wakes": statistics.median(one["wakes"] for one in warm),
        "first_s": first["seconds"],
        "first_stall_ms": 1e3 * first["stall"],
        "warm_s": statistics.median(one["seconds"] for one in warm),
        "saves": saves,
        **more,
    }


def differences(off: dict[str, Any], on: dict[str, Any]) -> str:
    pairs = list(zip(off["saves"][1:], on["saves"][1:], strict=True))
    points = 100 * statistics.median(b["kept"] - a["kept"] for a, b in pairs)
    ratio = statistics.median(b["seconds"] / a["seconds"] for a, b in pairs)
    return f"{'':13} exporters: {points:+.2f} points of what is kept, {ratio:.3f} x the time (medians of {len(pairs)})"


HEAD = "{:13} {:>6} {:>9} {:>9} {:>10} {:>8} {:>6} {:>6} {:>7} {:>8} {:>7} {:>5} {:>9}".format(
    "", "kept %", "stall ms", "worst ms", "lost s/GB", "lost ms", "best", "wakes", "cpu s", "first s", "warm s", "fds",
    "child MB",
)  # fmt: skip


def line(one: dict[str, Any]) -> str:
    if "failed" in one:
        return f"{one['kind']:13} failed: {one['failed'][:100]}"
    figures = (100 * one["kept"], one["stall_ms"], one["worst_ms"])
    lost = (one["lost_s_per_gb"], one["lost_ms"], one["least_lost_ms"], one["wakes"])
    rest = (one["cpu_s"], one["first_s"], one["warm_s"], one["fds"], one["child_mb"])
    form = "{:13} {:6.1f} {:9.1f} {:9.1f} {:10.2f} {:8.1f} {:6.1f} {:6.0f} {:7.2f} {:8.2f} {:7.2f} {:5d} {:9.0f}"
    return form.format(one["kind"], *figures, *lost, *rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("--only", nargs="*", default=[], help="kinds, shapes or loops")
    parser.add_argument("--json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        kind, shape, loop, rounds, folder = json.loads(options.one)
        print(json.dumps(asyncio.run(one(kind, shape, loop, rounds, Path(folder)))), flush=True)
        os._exit(0)  # DCP's process is not waited for
    run = describe()
    print(headline(run))

    def wanted(names: Any) -> list[str]:
        return [name for name in names if name in options.only] or list(names)

    results: dict[str, Any] = {"run": run, "tables": {}}
    for shape in wanted(SHAPES):
        for loop in wanted(LOOPS):
            print(f"\n{shape}, a loop of {loop}\n{HEAD}")
            table = results["tables"][f"{shape} {loop}"] = []
            for kind in wanted(KINDS):
                rows = measured(kind, shape, loop, options.rounds, options.directory.absolute())
                table += rows
                print(*map(line, rows), *([differences(*rows)] if len(rows) == 2 else []), sep="\n", flush=True)
    write_json(options.json, results)


if __name__ == "__main__":
    main()
