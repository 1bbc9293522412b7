"""Measuring staging, saving and loading on this machine, and its disk alone."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from sidestream import AsyncStager, blocking
from sidestream.errors import NoSpaceError
from sidestream.options import Progress

__all__ = ["Measured", "measure"]

_ROUNDS = 4
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


def measure(directory: str, nbytes: int, progress: Progress) -> list[Measured]:
    """Return measurements of the disk alone, of staging, of saving with all files synced, and of loading with every
    byte verified. They take turns, the disk first in every other round: virtual disks are faster after a pause. Nothing
    is left in ``directory``. Raises ``NoSpaceError``, and the errors of saving."""
    nbytes = nbytes // _BLOCK_BYTES * _BLOCK_BYTES
    if shutil.disk_usage(directory).free < 3 * nbytes:
        raise NoSpaceError(28, f"three times {nbytes >> 20} MiB have to be free", directory)
    with tempfile.TemporaryDirectory(prefix=".sidestream-bench-", dir=directory) as place:
        return _Bench(Path(place), nbytes).run(progress)


class _Bench:
    def __init__(self, place: Path, nbytes: int) -> None:
        self._plain, self._saved, self._nbytes = place / "plain", place / "saved", nbytes
        count = nbytes // _TENSORS // 4
        noise = torch.rand(count)  # not constants, which some disks compress or leave out
        self._state = {f"t{number}": noise + number for number in range(_TENSORS)}
        self._target = {name: torch.empty_like(tensor) for name, tensor in self._state.items()}
        self._lanes = [_touched_memory() for _ in range(_THREADS)]

    def run(self, progress: Progress) -> list[Measured]:
        with closing(AsyncStager()) as stager:
            best = self._best(stager, progress)
        disk = {"save": "disk: direct writes, synced", "load, verified": "disk: direct reads"}
        return [self._row(what, seconds, best.get(disk.get(what, ""))) for what, seconds in best.items()]

    def _best(self, stager: AsyncStager, progress: Progress) -> dict[str, float]:
        disk: dict[str, Callable[[], object]] = {
            "disk: direct writes, synced": lambda: self._disk(os.pwritev, os.O_WRONLY | os.O_CREAT),
            "disk: direct reads": lambda: self._disk(os.preadv, os.O_RDONLY),
        }
        own: dict[str, Callable[[], object]] = {
            "stage": lambda: stager.stage(self._state).result().release(),
            "save": lambda: blocking.save(self._state, self._saved, stager=stager),
            "load, verified": lambda: blocking.load(self._target, self._saved),
        }
        best = dict.fromkeys(disk | own, math.inf)
        for number in range(_ROUNDS):
            works = own | disk if number % 2 else disk | own
            for turn, (what, work) in enumerate(works.items()):
                progress((number * len(works) + turn) * self._nbytes, _ROUNDS * len(works) * self._nbytes)
                best[what] = min(best[what], _seconds(work))
                _forget(self._saved)
            self._plain.unlink()
            shutil.rmtree(self._saved)
        return best

    def _row(self, what: str, seconds: float, disk_s: float | None) -> Measured:
        share = None if disk_s is None else disk_s / seconds
        return Measured(what, self._nbytes, seconds, self._nbytes / seconds / (1 << 30), share, _ROUNDS)

    def _disk(self, move: Callable[[int, list[mmap.mmap], int], int], flags: int) -> None:
        """Move blocks of 16 MiB in four threads, with direct I/O if the file system supports it."""
        descriptor = _open_direct(self._plain, flags)
        try:
            if flags & os.O_CREAT and hasattr(os, "posix_fallocate"):  # as a save does
                with suppress(OSError):  # a file system without it
                    os.posix_fallocate(descriptor, 0, self._nbytes)
            with ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(lambda lane: self._move_all(descriptor, lane, move), range(_THREADS)))
            if flags & os.O_CREAT:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _move_all(self, descriptor: int, lane: int, move: Callable[[int, list[mmap.mmap], int], int]) -> None:
        for offset in range(lane * _BLOCK_BYTES, self._nbytes, _THREADS * _BLOCK_BYTES):
            move(descriptor, [self._lanes[lane]], offset)


def _seconds(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def _touched_memory() -> mmap.mmap:
    memory = mmap.mmap(-1, _BLOCK_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # as the memory of a stager
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = os.urandom(1 << 20) * (_BLOCK_BYTES >> 20)
    return memory


def _forget(directory: Path) -> None:
    """Drop the files of ``directory`` from the page cache, as far as the system allows."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.glob("*"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
