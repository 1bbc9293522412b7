"""Files on their way to a store in windows, each filled, sealed and written, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from .._threads import Deadline, Stop, Threads
from ..errors import Closed
from ..options import Durability
from ..reading import first_error
from ..storage import Naming, Place, Store

__all__ = ["WINDOWS", "Destination", "WindowedFile", "Windows"]

WINDOWS = 4
"""So many windows are in memory at once."""

_WRITE_THREADS = 4


class WindowedFile(Protocol):
    """A file to be written."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def aligned(self) -> bool: ...

    @property
    def windows(self) -> Sequence[tuple[int, int]]:
        """Begin and end of each, without gaps."""

    def seal(self, index: int, view: memoryview, stop: Stop, deadline: Deadline) -> None:
        """In a thread: finish a window whose payloads are in ``view``; it may wait for the windows before."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where files go: the ``attempt`` that is to become ``target``, and what they are called there."""

    store: Store
    attempt: str
    target: str
    naming: Naming
    durability: Durability

    def path_of(self, file: str) -> str:
        """Where a file with a name of its own lies before it is published."""
        if self.store.appears_whole:
            return f"{self.attempt}/{file}"
        return self.target if self.naming == "single" else f"{self.target}/{file}"


class _Part:
    """A window of a file: filled by the loop, sealed and written by a thread, which gives its memory back."""

    def __init__(self, file: WindowedFile, index: int, windows: _AnyWindows) -> None:
        self.file, self.index = file, index
        self.offset, self.end = file.windows[index]
        self.filled: Future[memoryview] = Future()
        self._windows = windows
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
            self._windows.give_back(self)


class _AnyWindows(Protocol):
    def give_back(self, part: _Part) -> None: ...


@dataclass(frozen=True, slots=True)
class _Body:
    nbytes: int
    aligned: bool
    parts: Sequence[_Part]


Fill: TypeAlias = Callable[[WindowedFile, int, memoryview], Awaitable[None]]
"""On the loop: put the content of a file's window of this index into memory."""


class Windows:
    """The memory of one conversion or copy. Windows are filled one after the other, in the order of the files."""

    def __init__(self, fill: Fill, deadline: Deadline) -> None:
        self._fill = fill
        self._deadline = deadline
        self._largest = 1
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(WINDOWS)
        self._memory: dict[_Part, mmap.mmap] = {}
        self._spare: list[mmap.mmap] = []

    async def write(self, files: Iterable[WindowedFile], into: Destination, *, place: Place = "new") -> None:
        """Write all of ``files``; when this returns or raises, no thread works on them any more."""
        parts = [(file, [_Part(file, index, self) for index in range(len(file.windows))]) for file in files]
        bodies = [(file.name, _Body(file.nbytes, file.aligned, one)) for file, one in parts]
        self._largest = max((part.nbytes for _, one in parts for part in one), default=1)
        threads, stop = Threads("sidestream-convert", _WRITE_THREADS), Stop()

        def write() -> None:
            into.store.write(
                into.attempt,
                into.target,
                bodies,
                threads=threads,
                durability=into.durability,
                stop=stop,
                deadline=self._deadline,
                place=place,
                naming=into.naming,
            )

        try:
            done = threads.submit(write)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fill_all([part for _, one in parts for part in one]))
                await threads.wait(done, "writing", stop=stop, deadline=self._deadline)
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
            await self._fill(part.file, part.index, view)
            if part.filled.set_running_or_notify_cancel():
                part.filled.set_result(view)

    def _take(self, nbytes: int) -> mmap.mmap:
        """Mapped as large as any window is, so that every piece of memory serves every window."""
        self._largest = max(self._largest, nbytes, 1)
        spare = self._spare.pop() if self._spare else None  # appended by other threads, taken here alone
        return spare if spare is not None and len(spare) >= nbytes else mmap.mmap(-1, self._largest)
