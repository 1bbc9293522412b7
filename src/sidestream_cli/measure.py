"""Measuring staging, saving and loading on this machine, and its disk alone."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sidestream import AsyncStager, load, save
from sidestream._runtime.tasks import run_shielded
from sidestream._runtime.threads import Threads, io_threads
from sidestream.errors import InvalidOptionError, NoSpaceError
from sidestream.options import Progress

__all__ = ["Measured", "measure"]

_ROUNDS = 3
_LEAST_BYTES = 64 << 20
_BLOCK_BYTES = 16 << 20
_THREADS = 4
_TENSORS = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """The best of ``rounds`` measurements. ``of_disk`` is the share of the disk's own speed in the same direction."""

    what: str
    nbytes: int
    seconds: float
    gib_per_s: float
    of_disk: float | None
    rounds: int


async def measure(directory: str, nbytes: int, progress: Progress) -> list[Measured]:
    """Return measurements of the disk alone, of staging, of saving with all files synced, and of loading with every
    byte verified. Nothing is left in ``directory``, also after an error or a cancel. Raises ``InvalidOptionError``,
    ``NoSpaceError``, and the errors of saving."""
    nbytes = nbytes // _BLOCK_BYTES * _BLOCK_BYTES
    if nbytes < _LEAST_BYTES:
        raise InvalidOptionError(f"--mib has to be at least {_LEAST_BYTES >> 20}")
    if shutil.disk_usage(directory).free < 3 * nbytes:
        raise NoSpaceError(28, f"three times {nbytes >> 20} MiB have to be free", directory)
    place = Path(tempfile.mkdtemp(prefix=".sidestream-bench-", dir=directory))
    try:
        return await _Bench(place, nbytes, progress).run()
    finally:
        await run_shielded(lambda: io_threads().run(shutil.rmtree, place))


class _Bench:
    def __init__(self, place: Path, nbytes: int, progress: Progress) -> None:
        self._place, self._nbytes, self._progress = place, nbytes, progress
        self._path = place / "plain"
        count = nbytes // _TENSORS // 4
        self._state = {f"t{number}": torch.full((count,), float(number)) for number in range(_TENSORS)}
        self._done = 0

    async def run(self) -> list[Measured]:
        self._progress(0, 5 * _ROUNDS * self._nbytes)
        written = await self._best(lambda _: self._disk(os.pwritev, os.O_WRONLY | os.O_CREAT))
        read = await self._best(lambda _: self._disk(os.preadv, os.O_RDONLY))
        self._path.unlink()
        async with AsyncStager() as stager:
            staged = await self._best(lambda _: self._stage(stager))
            saved = await self._best(lambda number: self._save(stager, number))
        loaded = await self._best(lambda _: self._load())
        return [
            self._row("disk: direct writes, synced", written, None),
            self._row("disk: direct reads", read, None),
            self._row("stage", staged, None),
            self._row("save", saved, written),
            self._row("load, verified", loaded, read),
        ]

    async def _best(self, work: Callable[[int], Coroutine[Any, Any, float]]) -> float:
        best = float("inf")
        for number in range(_ROUNDS):
            best = min(best, await work(number))
            self._done += self._nbytes
            self._progress(self._done, 5 * _ROUNDS * self._nbytes)
        return best

    def _row(self, what: str, seconds: float, disk_s: float | None) -> Measured:
        share = None if disk_s is None else disk_s / seconds
        return Measured(what, self._nbytes, seconds, self._nbytes / seconds / (1 << 30), share, _ROUNDS)

    async def _disk(self, move: Callable[[int, list[mmap.mmap], int], int], flags: int) -> float:
        """Move blocks of 16 MiB in four threads, with direct I/O if the file system supports it."""

        def work() -> float:
            descriptor = _open_direct(self._path, flags)
            threads = Threads("sidestream-bench", _THREADS)
            try:
                before = time.perf_counter()
                lanes = [threads.submit(_lane, descriptor, lane, self._nbytes, move) for lane in range(_THREADS)]
                for lane in lanes:
                    lane.result()
                if flags & os.O_CREAT:
                    os.fsync(descriptor)
                return time.perf_counter() - before
            finally:
                threads.close()
                os.close(descriptor)

        return await io_threads().run(work)

    async def _stage(self, stager: AsyncStager) -> float:
        before = time.perf_counter()
        staged = await stager.stage(self._state)
        seconds = time.perf_counter() - before
        staged.release()
        return seconds

    async def _save(self, stager: AsyncStager, number: int) -> float:
        target = self._place / "saved"
        await io_threads().run(lambda: shutil.rmtree(target, ignore_errors=True))
        before = time.perf_counter()
        await save(self._state, target, stager=stager)
        return time.perf_counter() - before

    async def _load(self) -> float:
        target = {name: torch.empty_like(tensor) for name, tensor in self._state.items()}
        await io_threads().run(_forget, self._place / "saved")
        await asyncio.sleep(0)
        before = time.perf_counter()
        await load(target, self._place / "saved")
        return time.perf_counter() - before


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def _lane(descriptor: int, lane: int, nbytes: int, move: Callable[[int, list[mmap.mmap], int], int]) -> None:
    memory = mmap.mmap(-1, _BLOCK_BYTES)
    memory[:8] = b"measured"
    for offset in range(lane * _BLOCK_BYTES, nbytes, _THREADS * _BLOCK_BYTES):
        move(descriptor, [memory], offset)


def _forget(directory: Path) -> None:
    """Drop the files of ``directory`` from the page cache, as far as the system allows."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
