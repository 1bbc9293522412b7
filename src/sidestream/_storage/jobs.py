"""Reading in jobs: a few threads take batches of ranges from one queue until it is empty, read them, and verify them.

No batch needs the event loop. With one switch to the loop and back for each 16 MiB, waiting for a core took a third of
the time of a load whose files were in the page cache.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, TypeAlias, TypeVar

from .._runtime.memory_maps import MemoryMap
from .._runtime.tasks import first_error, in_parallel
from .._runtime.threads import Stop, io_threads, read_threads
from ..errors import allocating
from .store import Files, RangeSource, ReadRange

T = TypeVar("T")
Memory: TypeAlias = MemoryMap | bytearray

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_JOBS = min(max(_CORES, 2), 4)
"""The number of jobs: at most one for each core, because copies from the page cache and checksums keep cores busy."""
_MOST_JOBS = 4  # if reads wait: each job may use 16 MiB of scratch memory, and the gaps between small tensors
_ALIGN_BYTES = 64


class Scratch:
    """Memory for bytes that cannot be read to their place directly. It is used again, because touching new pages costs
    more than reading."""

    def __init__(self) -> None:
        self._spare: list[MemoryMap] = []  # one for each batch in flight; list methods are atomic

    def take(self, nbytes: int) -> Memory:
        if nbytes <= 1 << 16:
            return bytearray(nbytes)  # only for few bytes: clearing the pages of a large one would hold the GIL
        try:
            spare: MemoryMap | None = self._spare.pop()
        except IndexError:
            spare = None
        if spare is not None and len(spare) >= nbytes:
            return spare
        with allocating("memory to read into"):
            return MemoryMap(-1, nbytes)

    def views(self, sizes: Sequence[int]) -> tuple[Memory, list[memoryview]]:
        """Return memory, and a view of it for each of ``sizes``. Each begins at an address that suits every dtype."""
        ends = list(accumulate(map(_aligned, sizes)))
        memory = self.take(ends[-1] if ends else 0)
        view = memoryview(memory)
        starts = [0, *ends[:-1]]
        return memory, [view[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=False)]

    def give_back(self, memory: Memory) -> None:
        """Give back memory into which no thread reads any more."""
        if isinstance(memory, MemoryMap):
            self._spare.append(memory)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Jobs(Generic[T]):
    """Threads that do ``work`` on each of ``items``. ``work`` returns the number of bytes that it has read, and raises
    ``ClosedError`` once its ``Stop`` is set. ``progress`` is awaited with the sum of these numbers."""

    def __init__(
        self, items: Sequence[T], work: Callable[[T, Stop], int], progress: Callable[[int], Awaitable[object]] | None
    ) -> None:
        self._items: Iterator[T] = iter(items)
        self._unread = len(items)
        self._work = work
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = Stop()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._more = asyncio.Event()
        self.nbytes = 0
        self._counts: deque[int] = deque()

    def waiting(self) -> None:
        """Start more threads, because reads wait. From any thread."""
        self._set(self._more)

    async def run(self) -> None:
        """Do the work on all items. The first failure, a cancel, or the deadline stops all threads, and is raised when
        the threads have stopped."""
        jobs = min(_JOBS, self._unread)
        late = min(_MOST_JOBS, self._unread) - jobs
        try:
            async with asyncio.TaskGroup() as group:
                # Each task only waits for its thread. The late ones wait until reads are found to wait for a device or
                # a server: then more reads at a time are faster. Otherwise they would compete for the cores with copies
                # and checksums.
                running = [group.create_task(self._run()) for _ in range(jobs)]
                for task in running:
                    task.add_done_callback(lambda _: self._changed.set())
                for _ in range(late):
                    group.create_task(self._run_late())
                await self._follow(running)
                self._more.set()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            self._work = _nothing  # breaks a reference cycle
        await self._report_progress()  # for the last items of late jobs

    async def _follow(self, running: Sequence[asyncio.Task[None]]) -> None:
        while not all(task.done() for task in running):
            await self._changed.wait()
            self._changed.clear()
            await self._report_progress()

    async def _report_progress(self) -> None:
        while self._counts and self._progress is not None:
            await self._progress(self._counts.popleft())

    async def _run(self) -> None:
        if self._unread:
            await read_threads().run(self._read, stop=self._stop)

    async def _run_late(self) -> None:
        await self._more.wait()
        await self._run()

    # --- the threads ---

    def _read(self) -> None:
        work = self._work
        for item in self._queue():
            nbytes = work(item, self._stop)
            with self._lock:
                self.nbytes += nbytes
                self._counts.append(self.nbytes)
            if self._progress is not None:
                self._set(self._changed)

    def _queue(self) -> Iterator[T]:
        while True:
            with self._lock:
                if not self._unread:
                    return
                self._unread -= 1
                item = next(self._items)
            yield item

    def _set(self, event: asyncio.Event) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(event.set)


def _nothing(item: object, stop: Stop) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Reads:
    """The reads for one batch: ``ranges`` of ``file``. ``scratch`` is memory that is free when they have been read.
    ``arrived`` is called in a thread when all of them have been read and verified."""

    file: str
    ranges: list[ReadRange]
    nbytes: int
    scratch: Memory
    arrived: Callable[[], None] | None = None


@dataclass(slots=True)
class Batches(Generic[T]):
    """The reading of batches from ``source``, in jobs. If a read is a request to a server, several requests are made at
    a time instead.

    ``reads`` is called in a thread and returns the reads for a batch. It takes scratch memory from its argument. Its
    ``Stop`` is None for a request. ``progress`` is awaited with the sum of the bytes. ``noting`` returns the
    context of each read. The bytes of a read whose error it suppresses are not counted.
    """

    source: RangeSource
    reads: Callable[[T, Scratch, Stop | None], Reads]
    progress: Callable[[int], Awaitable[object]] | None = None
    scratch: Scratch = field(default_factory=Scratch)
    noting: Callable[[T], AbstractContextManager[object]] = nullcontext
    nbytes: int = 0
    _files: Files | None = None

    async def run(self, batches: Sequence[T]) -> None:
        """Read all batches. ``nbytes`` is the number of bytes that were read, also if this raises."""
        jobs = Jobs(batches, self._work, self.progress)
        self._files = self.source.files(jobs.waiting)
        # Two ways to read. Local files: threads take batches from one queue, and no batch needs the loop. A server:
        # each batch is a request, and as many are in flight as the store allows.
        if self._files is None:
            await in_parallel(batches, self._request, self.source.concurrency)
            return
        try:
            await jobs.run()
        finally:
            self.nbytes = jobs.nbytes

    def _work(self, batch: T, stop: Stop) -> int:
        assert self._files is not None
        reads = self.reads(batch, self.scratch, stop)
        nbytes = 0
        with self.noting(batch):
            self._files.read(reads.file, reads.ranges, stop)
            if reads.arrived is not None:
                stop.check()  # a thread that returns from a read that has hung must not write after its load has ended
                reads.arrived()
            nbytes = reads.nbytes
        # Not after an error: a thread may hang in a read, and still write into this memory. It is freed with the last
        # reference.
        self.scratch.give_back(reads.scratch)
        return nbytes

    # A method, because errors show the name of what a thread runs, and a partial has none.
    def _reads(self, batch: T) -> Reads:
        return self.reads(batch, self.scratch, None)

    async def _request(self, batch: T) -> None:
        reads = await io_threads().run(self._reads, batch)
        with self.noting(batch):
            await self.source.read(reads.file, reads.ranges)
            if reads.arrived is not None:
                await io_threads().run(reads.arrived)
            self.nbytes += reads.nbytes
        self.scratch.give_back(reads.scratch)
        if self.progress is not None:
            await self.progress(self.nbytes)
