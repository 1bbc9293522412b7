"""Saving to and loading from a local disk, beside rivals and the disk's own ceiling on the same bytes in the same run.

    python benchmarks/storage.py [--shapes NAME ...] [--rivals NAME ...] [--rounds N] [--seconds N] [--directory DIR]
                                 [--json FILE] [--png FILE]

Rounds are interleaved: each measures the ceiling and then every rival in turn. A round of a save makes a new rival,
saves twice ("first" and "warm") and throws it away; a rival that keeps nothing between calls saves once, and its first
call of all is "first". Rates are of warm calls, or of all calls where nothing is kept. A shape has a share of
``--seconds``: sidestream and the ceiling have all rounds, rivals have as many as fit ("n"), and at least one as long as
anything is left of the share. Whoever is left out is named with the reason: a rival that needs more memory than is
free, or more file descriptors than ``ulimit -n`` allows, does not run with that shape.

Saves are timed until they are durable: what a library does not sync itself is synced for it, on the clock. "% ceiling"
is the median of the rates as shares of the ceiling of the same round: for saves the better of buffered writes with
fsync, and direct I/O from four threads into a preallocated file. Loads end in existing tensors (whoever returns new
ones has them copied), from the page cache. The ceiling of a load is ``preadv`` of the very files that it reads into the
same memory, the better of one thread and four, right before it: two files with the same bytes differ by up to 15 %,
depending on the sizes of the pieces in which the page cache holds them. A load beside which other processes used more
than 0.1 cores does not count ("dropped"). "cold" is a load after the files' pages have been dropped from the page
cache.

"blocked" is how long the call holds its caller. Pauses are those of a 1 ms ticker on the loop, from the call until all
is durable (or loaded). Calls that are not asynchronous are made on the loop, as a caller would make them; a library
that refuses that ("*") is called in a thread. "memory" is the peak beyond what was resident before the rival was made;
pages of mapped files count. CPU seconds and memory include child processes.

The heap is collected and frozen before anything is measured, for all alike: a full collection holds the GIL for 100 ms
and more with torch imported. Shared machines drift: trust the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import errno
import gc
import inspect
import logging
import math
import mmap
import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _common import available_bytes, describe, headline, quantile, still_heap, ticking, write_json
from _storage_rivals import RIVALS, Load, Rival, Sidestream, SidestreamStreaming, State, sync_tree

PIECE_BYTES = 16 << 20
CEILING_THREADS = 4
PAGE = mmap.PAGESIZE
PACKAGES = (
    "safetensors",
    "torch_checkpointing",
    "tensorstore",
    "torchsnapshot-nightly",
    "orbax-checkpoint",
    "fastsafetensors",
    "runai-model-streamer",
)


# --- the shapes ---


def _transformer() -> dict[str, tuple[int, ...]]:
    """A decoder with Adam's moments and steps: 20 layers of width 640."""
    width, found = 640, {"embed.weight": (50_257, 640), "positions.weight": (1024, 640)}
    for layer in range(20):
        for name, rows in (("qkv", 3 * width), ("proj", width), ("up", 4 * width)):
            found[f"layers.{layer}.{name}.weight"] = (rows, width)
            found[f"layers.{layer}.{name}.bias"] = (rows,)
        found[f"layers.{layer}.down.weight"] = (width, 4 * width)
        for name in ("down.bias", "norm_1.weight", "norm_1.bias", "norm_2.weight", "norm_2.bias"):
            found[f"layers.{layer}.{name}"] = (width,)
    found |= {"norm.weight": (width,), "norm.bias": (width,)}
    moments = {f"optimizer.{name}.{key}": shape for name, shape in found.items() for key in ("exp_avg", "exp_avg_sq")}
    return (
        {f"model.{name}": shape for name, shape in found.items()}
        | moments
        | {f"optimizer.{name}.step": () for name in found}
    )


SHAPES: dict[str, Callable[[], dict[str, tuple[int, ...]]]] = {
    "64x16MB": lambda: {f"layers.{index}.weight": (4_000_000,) for index in range(64)},
    "transformer": _transformer,
    "10000x1KiB": lambda: {f"layers.{index}.weight": (256,) for index in range(10_000)},
    "1x4GB": lambda: {"weight": (1_000_000_000,)},
}
SHARES = {"64x16MB": 5, "transformer": 5, "10000x1KiB": 3, "1x4GB": 4}
"""Of the time: about what one round of everybody takes, but for the last shape, where that would take minutes."""

CEILINGS = {
    "save": ("write + fsync", f"direct I/O, {CEILING_THREADS} threads"),
    "load": ("preadv", f"preadv, {CEILING_THREADS} threads"),
}
"""Of the block of memory as one file. Each load has a ceiling of its own."""
QUIET_CORES = 0.1
SPARE_DESCRIPTORS = 64
"""Kept free for everything whose number does not grow with the number of tensors."""

TRIAL = {f"layers.{index}.weight": (256,) for index in range(4)}


class Target:
    """Tensors side by side in one page-aligned mapping, for loads and, as one block, for the ceilings."""

    def __init__(self, state: State) -> None:
        offsets = [0]
        for tensor in state.values():
            offsets.append(offsets[-1] + -(-tensor.nbytes // 64) * 64)
        self.block = mmap.mmap(-1, -(-offsets[-1] // PAGE) * PAGE)
        self.nbytes = sum(tensor.nbytes for tensor in state.values())
        self.tensors: State = {}
        for (name, tensor), offset in zip(state.items(), offsets, strict=False):
            flat = torch.frombuffer(self.block, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            self.tensors[name] = flat.view(tensor.shape).copy_(tensor)

    def pieces(self) -> list[tuple[int, memoryview]]:
        view = memoryview(self.block)
        return [(start, view[start : start + PIECE_BYTES]) for start in range(0, len(view), PIECE_BYTES)]


# --- measuring ---


@dataclass
class Row:
    seconds: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    pauses: list[list[float]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Of the ceiling in the same round."""
    dropped: int = 0
    cost: float = 0.0
    """Of one round, with everything around it."""


@dataclass
class Call:
    blocked: float
    seconds: float
    late: list[float]
    cpu: float


async def timed(call: Callable[[], Any], finish: Callable[[Any], Awaitable[None]], *, threaded: bool) -> Call:
    async with ticking() as late:
        cpu, start = cpu_seconds(), time.perf_counter()
        pending = await asyncio.to_thread(call) if threaded else call()
        blocked = time.perf_counter() - start
        await finish(pending)
        seconds = time.perf_counter() - start
    return Call(blocked, seconds, late or [seconds], cpu_seconds() - cpu)


def relatives() -> list[int]:
    """The process ids of this process's children, and of theirs."""
    found = [os.getpid()]
    for pid in found:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
        except OSError:  # it has ended
            continue
    return found[1:]


def cpu_seconds() -> float:
    total, ticks = time.process_time(), os.sysconf("SC_CLK_TCK")
    for pid in relatives():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def others_seconds() -> float:
    """CPU seconds that the machine has spent on everybody else: only the difference of two calls means something."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    except OSError:
        return 0.0
    user, nice, system, _, _, hard, soft = (int(number) / os.sysconf("SC_CLK_TCK") for number in fields)
    ended = os.times()
    return user + nice + system + hard + soft - cpu_seconds() - ended.children_user - ended.children_system


def status(pid: int | str, key: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)


def peak_from_here() -> int:
    """Give freed memory back to the system, forget the peak so far; returns what is resident."""
    gc.collect()
    with suppress(AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("self", "VmRSS")


def peak_since(resident: int) -> int:
    children = sum(status(pid, "VmHWM") - status(pid, "RssFile") - status(pid, "RssShmem") for pid in relatives())
    return status("self", "VmHWM") - resident + children


def descriptor_limit() -> int:
    """How many file descriptors this process may have open (``ulimit -n``)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# --- ceilings ---


def in_threads(work: Callable[[Any], None], pieces: list[Any], threads: int) -> None:
    if threads == 1 or len(pieces) == 1:
        for piece in pieces:
            work(piece)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, pieces):
            pass


def write_ceiling(target: Target, path: Path, *, direct: bool) -> float | None:
    """Seconds; None where the file system takes no direct I/O."""
    pieces = target.pieces()
    start = time.perf_counter()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if error.errno == errno.EINVAL:
            path.unlink(missing_ok=True)
            return None
        raise

    def write(piece: tuple[int, memoryview]) -> None:
        position, view = piece
        while view:
            done = os.pwrite(descriptor, view, position)
            position, view = position + done, view[done:]

    try:
        if direct:
            os.posix_fallocate(descriptor, 0, len(target.block))
        in_threads(write, pieces, CEILING_THREADS if direct else 1)
        os.fsync(descriptor)
        return time.perf_counter() - start
    except OSError as error:
        if direct and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    finally:
        os.close(descriptor)


def read_ceiling(target: Target, path: Path, threads: int) -> float:
    """Seconds to read the files at ``path``, as much of them as the target has bytes."""
    start = time.perf_counter()
    descriptors: list[int] = []
    pieces: list[tuple[int, int, memoryview]] = []
    left = memoryview(target.block)
    try:
        for file in sorted(files_of(path), key=lambda file: -file.stat().st_size):
            descriptors.append(os.open(file, os.O_RDONLY))
            for position in range(0, min(file.stat().st_size, len(left)), PIECE_BYTES):
                nbytes = min(PIECE_BYTES, file.stat().st_size - position)
                pieces.append((descriptors[-1], position, left[:nbytes]))
                left = left[nbytes:]
        in_threads(_read_piece, pieces, threads)
        return time.perf_counter() - start
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read_piece(piece: tuple[int, int, memoryview]) -> None:
    descriptor, position, view = piece
    while view and (done := os.preadv(descriptor, [view], position)):
        position, view = position + done, view[done:]


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def warm_up(path: Path) -> None:
    """All of its files into the page cache."""
    buffer = bytearray(PIECE_BYTES)
    for file in files_of(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def cool_down(path: Path) -> bool:
    """Its files out of the page cache; returns whether that has worked, as far as the first pages say."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.fstat(descriptor).st_size and _is_cached(descriptor):
                return False
        finally:
            os.close(descriptor)
    return True


def _is_cached(descriptor: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:
        return True  # the file system does not say


def remove(path: Path) -> None:
    """With the disk quiet afterwards, so that nobody pays for somebody else's files."""
    if path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
    os.sync()


# --- one shape ---


class Shape:
    def __init__(self, name: str, shapes: dict[str, tuple[int, ...]], directory: Path, budget: float) -> None:
        self.name, self.directory, self._budget = name, directory, budget
        generator = torch.Generator().manual_seed(0)
        self.state: State = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.target = Target(self.state)
        self.saves: dict[str, Row] = {}
        self.loads: dict[str, Row] = {}
        self.left_out: dict[str, str] = {}
        self._start, self._others = time.perf_counter(), others_seconds()
        still_heap()

    async def measure(self, rounds: int, rivals: list[type[Rival]]) -> None:
        for number in range(rounds):
            await self._ceilings()
            for kind in sorted(rivals, key=self._rounds_of):  # whoever had fewer rounds, for want of time, goes first
                if kind.name in self.left_out or not self._has_room(kind, number):
                    continue
                start = time.perf_counter()
                try:
                    await self._round(kind, number)
                except Exception as error:  # the others go on
                    self.left_out[kind.name] = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
                finally:
                    remove(self.directory / "saved")
                    gc.collect()  # reference cycles of a rival keep its memory and its descriptors
                row = self.saves.get(kind.name)
                if row is not None:
                    row.cost = max(row.cost, time.perf_counter() - start)

    def _has_room(self, kind: type[Rival], number: int) -> bool:
        lacking = self._lacking_memory(kind) or self._lacking_descriptors(kind)
        if lacking is None and self._has_time(kind):
            return True
        if lacking or not number:
            self.left_out[kind.name] = lacking or "no time left for this shape (--seconds)"
        return False

    def _lacking_memory(self, kind: type[Rival]) -> str | None:
        free = available_bytes()
        needed = kind.copies * self.target.nbytes * 1.2
        if free is None or free >= needed:
            return None
        return f"{free / 1e9:.1f} GB of memory are free, it may need {needed / 1e9:.1f}"

    def _lacking_descriptors(self, kind: type[Rival]) -> str | None:
        limit = descriptor_limit()
        needed = kind.descriptors_per_tensor * len(self.state) + SPARE_DESCRIPTORS
        if limit >= needed:
            return None
        return f"{limit:,} file descriptors are allowed (ulimit -n), it may need {needed:,}"

    def _has_time(self, kind: type[Rival]) -> bool:
        if kind in (Sidestream, SidestreamStreaming):
            return True
        left = self._budget - (time.perf_counter() - self._start)
        cost = self.saves[kind.name].cost if kind.name in self.saves else 0.0
        return left >= cost

    def _rounds_of(self, kind: type[Rival]) -> int:
        row = self.saves.get(kind.name)
        return 0 if row is None or kind in (Sidestream, SidestreamStreaming) else len(row.seconds)

    async def _ceilings(self) -> None:
        path = self.directory / "ceiling"
        for name, direct in zip(CEILINGS["save"], (False, True), strict=True):
            remove(path)
            seconds = write_ceiling(self.target, path, direct=direct)
            if seconds is None:
                self.left_out[name] = "the file system takes no direct I/O"
            else:
                self.saves.setdefault(name, Row()).seconds.append(seconds)
        written = [self.saves[name].seconds[-1] for name in CEILINGS["save"] if name in self.saves]
        self._written_s = min(written)
        warm_up(path)
        for name, threads in zip(CEILINGS["load"], (1, CEILING_THREADS), strict=True):
            row = self.loads.setdefault(name, Row())
            row.seconds.append(read_ceiling(self.target, path, threads))
            if cool_down(path):
                row.cold.append(read_ceiling(self.target, path, threads))
            warm_up(path)
        remove(path)
        idle = await timed(lambda: None, lambda _: asyncio.sleep(0.5), threaded=False)
        for rows in (self.saves, self.loads):
            rows.setdefault("idle loop", Row()).pauses.append(idle.late)

    async def _round(self, kind: type[Rival], number: int) -> None:
        resident = peak_from_here()
        rival = kind(self.state)
        path = self.directory / "saved"

        async def finish(pending: Any) -> None:
            await rival.saved(pending)
            if not rival.syncs:
                await asyncio.to_thread(sync_tree, path)

        try:
            for warm in (False, True) if kind.keeps else (number > 0,):
                remove(path)
                gc.collect()
                call = await timed(lambda: rival.save(path), finish, threaded=kind.threaded)
                row = self.saves.setdefault(kind.name, Row())
                (row.warm if warm else row.first).append(call.blocked)
                if warm or not kind.keeps:
                    row.seconds.append(call.seconds)
                    row.shares.append(self._written_s / call.seconds)
                    row.pauses.append(call.late)
                    row.cpu.append(call.cpu)
            row.memory.append(peak_since(resident))
            rival.saves_done()
            for name, load in rival.loads().items():
                if name not in self.left_out:
                    await self._load(name, load, path, kind)
        finally:
            rival.close()

    async def _load(self, name: str, load: Load, path: Path, kind: type[Rival]) -> None:
        async def finish(pending: Any) -> None:
            if inspect.isawaitable(pending):
                await pending

        row = self.loads.setdefault(name, Row())
        if not row.seconds:
            for tensor in self.target.tensors.values():
                tensor.zero_()
        warm_up(path)
        resident = peak_from_here()
        start, others = time.perf_counter(), others_seconds()
        ceiling = min(read_ceiling(self.target, path, threads) for threads in (1, CEILING_THREADS))
        try:
            call = await timed(lambda: load(path, self.target.tensors), finish, threaded=False)
            quiet = others_seconds() - others <= QUIET_CORES * (time.perf_counter() - start)
            row.memory.append(peak_since(resident))
            if not row.seconds and not all(torch.equal(t, self.state[n]) for n, t in self.target.tensors.items()):
                raise ValueError("it did not load what was saved")
        except Exception as error:  # the others go on
            self.left_out[name] = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
            del self.loads[name]
            return
        row.seconds.append(call.seconds)
        row.dropped += not quiet
        if quiet:
            row.shares.append(ceiling / call.seconds)
        row.pauses.append(call.late)
        row.cpu.append(call.cpu)
        if len(row.cold) < 2 and cool_down(path):
            gc.collect()
            row.cold.append((await timed(lambda: load(path, self.target.tensors), finish, threaded=False)).seconds)

    def results(self) -> dict[str, Any]:
        return {
            "bytes": self.target.nbytes,
            "tensors": len(self.state),
            "cores used by others": (others_seconds() - self._others) / (time.perf_counter() - self._start),
            "save": figures(self.saves, self.target.nbytes, CEILINGS["save"]),
            "load": figures(self.loads, self.target.nbytes, CEILINGS["load"]),
            "left out": self.left_out,
        }


# --- figures and tables ---


def figures(rows: dict[str, Row], nbytes: int, ceilings: tuple[str, ...]) -> dict[str, Any]:
    best = min(min(rows[name].seconds) for name in ceilings if name in rows)
    found: dict[str, Any] = {}
    for name, row in rows.items():
        figure: dict[str, Any] = {"n": len(row.seconds)}
        if row.seconds:
            figure["seconds"] = statistics.median(row.seconds)
            figure["GB/s"] = nbytes / figure["seconds"] / 1e9
            figure["best GB/s"] = nbytes / min(row.seconds) / 1e9
            if row.shares:
                figure["of ceiling"] = statistics.median(row.shares)
            figure["dropped"] = row.dropped
            figure["best of best ceiling"] = best / min(row.seconds)
        if row.cold:
            figure["cold GB/s"] = nbytes / statistics.median(row.cold) / 1e9
        for key, values in (("first", row.first), ("warm", row.warm)):
            if values:
                figure[f"blocked {key}"] = statistics.median(values)
        if row.pauses:
            figure["longest pause"] = statistics.median(max(late) for late in row.pauses)
            figure["p99 pause"] = quantile([tick for late in row.pauses for tick in late], 0.99)
        if row.memory:
            figure["memory"] = max(row.memory) / nbytes
            figure["memory bytes"] = max(row.memory)
        if row.cpu:
            figure["CPU seconds"] = statistics.median(row.cpu)
        raw = asdict(row)
        del raw["pauses"]
        found[name] = figure | {"raw": raw}
    return found


COLUMNS = {  # heading: figure, factor, format
    "s": ("seconds", 1, "8.3f"),
    "GB/s": ("GB/s", 1, "7.2f"),
    "best": ("best GB/s", 1, "7.2f"),
    "% ceiling": ("of ceiling", 100, "10.0f"),
    "% best": ("best of best ceiling", 100, "7.0f"),
    "cold": ("cold GB/s", 1, "7.2f"),
    "first ms": ("blocked first", 1e3, "10.1f"),
    "warm ms": ("blocked warm", 1e3, "9.1f"),
    "pause ms": ("longest pause", 1e3, "9.1f"),
    "p99 ms": ("p99 pause", 1e3, "8.1f"),
    "memory MB": ("memory bytes", 1e-6, "10.0f"),
    "x state": ("memory", 1, "8.2f"),
    "CPU s": ("CPU seconds", 1, "7.2f"),
    "n": ("n", 1, "3d"),
    "dropped": ("dropped", 1, "8d"),
}
ONLY_LOADS, ONLY_SAVES = {"cold", "dropped"}, {"first ms", "warm ms"}


def show(name: str, results: dict[str, Any], marked: set[str]) -> None:
    size, others = results["bytes"] / 1e9, results["cores used by others"]
    print(f"\n{name}: {results['tensors']:,} tensors, {size:.3f} GB; other processes used {others:.2f} cores meanwhile")
    for what, unwanted in (("save", ONLY_LOADS), ("load", ONLY_SAVES)):
        columns = {heading: how for heading, how in COLUMNS.items() if heading not in unwanted}
        print(f"  {what:31}" + "".join(f"{heading:>{width(how)}}" for heading, how in columns.items()))
        for row, figure in results[what].items():
            cells = (cell(figure, how) for how in columns.values())
            print(f"  {row + '*' * (row in marked):31}" + "".join(cells))
    for who, why in results["left out"].items():
        print(f"  left out: {who}: {why}", flush=True)


def width(how: tuple[str, float, str]) -> int:
    return int(how[2].partition(".")[0].rstrip("d"))


def cell(figure: dict[str, Any], how: tuple[str, float, str]) -> str:
    key, factor, form = how
    value = figure.get(key)
    return " " * width(how) if value is None or not math.isfinite(value) else f"{value * factor:{form}}"


def draw(path: str, results: dict[str, Any]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    shapes = results["shapes"]
    figure, axes = plt.subplots(len(shapes), 2, figsize=(12, 3.6 * len(shapes)), squeeze=False)
    for line, (name, shape) in zip(axes, shapes.items(), strict=True):
        for axis, what in zip(line, ("save", "load"), strict=True):
            rows = {row: found["seconds"] for row, found in shape[what].items() if "seconds" in found}
            colours = ["tab:blue" if row.startswith("sidestream") else "0.7" for row in rows]
            ceiling = min(rows[row] for row in CEILINGS[what] if row in rows)
            axis.barh(list(rows), [shape["bytes"] / seconds / 1e9 for seconds in rows.values()], color=colours)
            axis.axvline(shape["bytes"] / ceiling / 1e9, color="tab:red", linewidth=1)
            axis.invert_yaxis()
            axis.set_title(f"{name}: {what}, GB/s" + (" until durable" if what == "save" else ", page cache warm"))
            axis.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


# --- the run ---


def present() -> tuple[list[type[Rival]], dict[str, str]]:
    found, missing = [], {}
    for kind in RIVALS:
        try:
            there = kind.needs is None or find_spec(kind.needs) is not None
        except ModuleNotFoundError:  # of the package around it
            there = False
        if there:
            found.append(kind)
        else:
            missing[kind.name] = "not installed"
    for module in ("fastsafetensors", "runai_model_streamer"):
        if find_spec(module) is None:
            missing[module] = "not installed"
    return found, missing


async def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    asked = {"rounds": arguments.rounds, "seconds": arguments.seconds}
    results = describe(*PACKAGES) | asked | {"descriptor limit": descriptor_limit(), "shapes": {}}
    print(headline(results))
    rivals, missing = present()
    if arguments.rivals:
        rivals, missing = [kind for kind in rivals if kind.name in arguments.rivals], {}
    start = time.perf_counter()
    trial = Shape("trial", TRIAL, directory, math.inf)  # imports and thread pools are on nobody's clock
    await trial.measure(2, rivals)
    results["left out"] = missing | trial.left_out
    for who, why in results["left out"].items():
        print(f"left out: {who}: {why}")
    rivals = [kind for kind in rivals if kind.name not in trial.left_out]
    for number, name in enumerate(arguments.shapes):
        left = arguments.seconds - (time.perf_counter() - start)
        share = SHARES[name] / sum(SHARES[later] for later in arguments.shapes[number:])
        shape = Shape(name, SHAPES[name](), directory, left * share)
        shape.left_out |= {who: why for who, why in trial.left_out.items() if who not in {k.name for k in RIVALS}}
        await shape.measure(arguments.rounds, rivals)
        results["shapes"][name] = shape.results()
        show(name, results["shapes"][name], {kind.name for kind in rivals if kind.threaded})
        del shape
        gc.unfreeze()  # its tensors, so that they can go
        gc.collect()
    return results


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--rivals", nargs="+", choices=[kind.name for kind in RIVALS], help="these alone (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=320, help="for all shapes together, roughly")
    parser.add_argument("--directory", default=".", help="where to write, on the disk that is to be measured")
    parser.add_argument("--json", help="write all figures to this file too")
    parser.add_argument("--png", help="draw them into this file (needs matplotlib)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.path.abspath(arguments.directory)) as scratch:
        results = asyncio.run(run(arguments, Path(scratch)))
    write_json(arguments.json, results)
    if arguments.png:
        draw(arguments.png, results)
