"""Payloads on their way from a source to the windows of a target's files, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial

import torch

from .._threads import Deadline, Stop, Threads, io_threads
from .._torch import dtype_from_name
from ..errors import Closed
from ..format.dtypes import itemsize
from ..options import Durability, Progress, Verify
from ..plan.checks import Piece
from ..plan.ranges import Box
from ..reading import Reader, Scratch, Wanted, first_error, in_parallel, whole
from ..storage import ReadRange, Store
from .source import Source, SourceTensor
from .targets import Slice, TargetFile

__all__ = ["WINDOWS", "Pipeline"]

WINDOWS = 4
"""So many windows are in memory at once."""

_WRITE_THREADS = 4


class _Part:
    """A window of a file: filled by the loop, sealed and written by a thread, which gives its memory back."""

    def __init__(self, file: TargetFile, index: int, pipeline: Pipeline) -> None:
        self.file, self.index = file, index
        self.offset, self.end = file.windows[index]
        self.filled: Future[memoryview] = Future()
        self._pipeline = pipeline
        self._released = False

    @property
    def nbytes(self) -> int:
        return self.end - self.offset

    def take(self, stop: Stop, deadline: Deadline) -> memoryview:
        with stop.waking(self._wake):
            stop.check()
            try:
                view = self.filled.result(deadline.remaining_s())
            except CancelledError:
                raise Closed("stopped before the work was done") from None
            except TimeoutError as error:
                raise deadline.exceeded("reading the source") from error
        self.file.seal(self.index, view, stop, deadline)
        return view

    def _wake(self) -> None:
        self.filled.cancel()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._pipeline.give_back(self)


@dataclass(frozen=True, slots=True)
class _Body:
    nbytes: int
    aligned: bool
    parts: Sequence[_Part]


@dataclass(slots=True)
class Pipeline:
    """One conversion's data. ``origin`` says by the FQN in the target which tensor of the source it is."""

    source: Source
    origin: Mapping[str, tuple[str, SourceTensor]]
    verify: Verify
    deadline: Deadline
    progress: Progress | None
    total_bytes: int
    _done_bytes: int = 0
    _largest: int = 0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WINDOWS))
    _memory: dict[_Part, mmap.mmap] = field(default_factory=dict)
    _spare: list[mmap.mmap] = field(default_factory=list)
    _scratch: Scratch = field(default_factory=Scratch)
    _held: dict[str, torch.Tensor] = field(default_factory=dict)

    async def check(self, pieces: Sequence[Piece]) -> None:
        """Before anything is written: what has one checksum over more than is read at once."""
        queue = iter(pieces)

        async def work() -> None:
            for piece in queue:
                memory = self._scratch.take(piece.nbytes)
                view = memoryview(memory)[: piece.nbytes]
                read = ReadRange(piece.offset, view, partial(piece.check, view))
                await self.source.store.read(f"{self.source.directory}/{piece.file}", [read], deadline=self.deadline)
                self._scratch.give_back(memory)

        await in_parallel(work)

    async def write(
        self, store: Store, attempt: str, target: str, files: Sequence[TargetFile], durability: Durability
    ) -> None:
        """Write all of ``files`` into ``attempt``; when this returns or raises, no thread works on them any more."""
        self._tell(0)
        parts = [[_Part(file, index, self) for index in range(len(file.windows))] for file in files]
        bodies = [(file.name, _Body(file.nbytes, file.aligned, one)) for file, one in zip(files, parts, strict=True)]
        self._largest = max((part.nbytes for one in parts for part in one), default=1)
        threads, stop = Threads("sidestream-convert", _WRITE_THREADS), Stop()

        def write() -> None:
            store.write(
                attempt,
                target,
                bodies,
                threads=threads,
                durability=durability,
                stop=stop,
                deadline=self.deadline,
            )

        try:
            done = threads.submit(write)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fill_all([part for one in parts for part in one]))
                await threads.wait(done, "writing", stop=stop, deadline=self.deadline)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            threads.close()

    def give_back(self, part: _Part) -> None:
        """In any thread: the memory of a part may be used again."""
        memory = self._memory.pop(part, None)
        part.filled = Future()  # the old one refers to the memory
        if memory is not None:
            self._spare.append(memory)
            self._loop.call_soon_threadsafe(self._slots.release)

    async def _fill_all(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            await self._slots.acquire()
            memory = self._take(part.nbytes)
            self._memory[part] = memory
            view = memoryview(memory)[: part.nbytes]
            slices = await io_threads().run(lambda part=part: list(part.file.slices(part.index)))  # type: ignore[misc]
            await self._fill(slices, view)
            if part.filled.set_running_or_notify_cancel():
                part.filled.set_result(view)
            self._tell(sum(one.nbytes for one in slices))

    def _take(self, nbytes: int) -> mmap.mmap:
        """Mapped as large as any window is, so that every piece of memory serves every window."""
        self._largest = max(self._largest, nbytes, 1)
        spare = self._spare.pop() if self._spare else None  # appended by other threads, taken here alone
        return spare if spare is not None and len(spare) >= nbytes else mmap.mmap(-1, self._largest)

    async def _fill(self, slices: Sequence[Slice], view: memoryview) -> None:
        straight: list[Wanted] = []
        for one in slices:
            if not one.nbytes:
                continue
            fqn, source = self.origin[one.tensor.fqn]
            size = itemsize(one.tensor.dtype)
            count, first = one.nbytes // size, one.begin // size
            into = torch.frombuffer(view, dtype=dtype_from_name(one.tensor.dtype), count=count, offset=one.at)
            if source.straight is not None:
                straight.append(Wanted(fqn, source.straight, Box((first,), (count,)), into))
            elif one.nbytes == one.tensor.nbytes:
                await self._read_whole(fqn, source, into.reshape(one.tensor.shape))
            else:
                await self._from_held(fqn, source, one, into, first)
        if straight:
            await self._reader().read(straight, own=True)

    async def _from_held(self, fqn: str, source: SourceTensor, one: Slice, into: torch.Tensor, first: int) -> None:
        """A tensor that cannot be read piece by piece is held as a whole for as long as there are pieces to come."""
        held = self._held.get(fqn)
        if held is None:
            held = torch.empty(one.tensor.shape, dtype=dtype_from_name(one.tensor.dtype))
            await self._read_whole(fqn, source, held)
            self._held[fqn] = held
        flat = held.reshape(-1)[first : first + into.numel()]
        await io_threads().run(into.copy_, flat, deadline=self.deadline)
        if one.begin + one.nbytes == one.tensor.nbytes:
            del self._held[fqn]

    async def _read_whole(self, fqn: str, source: SourceTensor, into: torch.Tensor) -> None:
        located = None if source.located is None else {fqn: source.located}
        wanted = [Wanted(fqn, source.entry, whole(source.entry), into)]
        await self._reader().read(wanted, own=self.source.own, located=located)

    def _reader(self) -> Reader:
        source = self.source
        return Reader(source.store, source.directory, self.verify, self.deadline, scratch=self._scratch)

    def _tell(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self.progress is not None:
            self.progress(self._done_bytes, self.total_bytes)
