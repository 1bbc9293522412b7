"""Reading the files of one local directory, which stays the same one for as long as it is read."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from ..._runtime.tasks import finish
from ..._runtime.threads import Deadline, Stop, current_deadline, io_threads, time_limit
from ...errors import DeadlineExceeded
from ..store import ReadRange
from .directories import OpenDirectory
from .read import LocalFiles, map_file, read_ranges, read_tail, size_of, sizes_in

__all__ = ["LocalSource", "run_io"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CLOSE_S = 5.0
"""How long the system call that closes a directory is waited for, also when a load has used up its own time."""


class LocalSource:
    """The ``RangeSource`` of the directory ``path``, whose name in its store is ``name``."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        self._directory = OpenDirectory(path)

    def path_of(self, file: str) -> str:
        return file if self.name == "." else f"{self.name}/{file}"

    async def read(self, file: str, ranges: Sequence[ReadRange]) -> None:
        stop = Stop()
        await run_io(read_ranges, self._path / file, self._directory, ranges, stop, stop=stop)

    def files(self, waiting: Callable[[], None]) -> LocalFiles:
        return LocalFiles(self._path, self._directory, waiting)

    async def read_tail(self, file: str, nbytes: int) -> bytes:
        return await run_io(read_tail, self._path / file, self._directory, nbytes)

    async def size(self, file: str) -> int:
        return await run_io(size_of, self._path / file, self._directory)

    async def sizes(self) -> dict[str, int]:
        return await run_io(sizes_in, self._path, self._directory)

    async def map(self, file: str, nbytes: int) -> mmap.mmap:
        return await run_io(map_file, self._path / file, self._directory, nbytes)

    async def aclose(self) -> None:
        if self._directory.is_open:
            await finish(self._close)

    async def _close(self) -> None:
        with suppress(DeadlineExceeded), time_limit(Deadline.after(_CLOSE_S)):
            await io_threads().run(self._directory.close)


async def run_io(fn: Callable[[*Ts], T], *args: *Ts, stop: Stop | None = None) -> T:
    """Run ``fn`` in a thread, under the deadline of the caller, which has to have one: without it a caller would wait
    for ever where a disk hangs."""
    current_deadline()
    return await io_threads().run(fn, *args, stop=stop)
