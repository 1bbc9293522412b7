"""Writes of files in windows. Each window is filled, sealed and written, and a limited number of them is in memory."""

from __future__ import annotations

import asyncio
import ctypes
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from .._format.marker import METADATA_NAME
from .._runtime.memory_maps import MemoryMap, wait_unmapped
from .._runtime.tasks import first_error
from .._runtime.threads import Deadline, Stop, current_deadline, write_threads
from .._save.operation import RankReceipt
from .._storage import Transaction
from ..errors import ClosedError, allocating

WINDOWS = 4
"""The number of windows that are in memory at the same time."""
_UNMAPPED_S = 5.0  # not longer, because memory of a device that does not respond may be in the way


class WindowedFile(Protocol):
    """A file to write."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def aligned(self) -> bool: ...

    @property
    def windows(self) -> Sequence[tuple[int, int]]:
        """The beginning and the end of each window, without gaps."""

    def seal(self, index: int, view: memoryview, stop: Stop) -> None:
        """Finish a window whose payloads are in ``view``. Called in a worker thread. May wait for earlier windows."""


class _Part:
    """A window of a file. The loop fills it. A thread seals and writes it, and then drops its memory."""

    def __init__(self, file: WindowedFile, index: int) -> None:
        self.file, self.index = file, index
        self.offset, self.end = file.windows[index]
        self.filled: Future[memoryview] = Future()

    @property
    def nbytes(self) -> int:
        return self.end - self.offset

    def take(self, stop: Stop) -> memoryview:
        deadline = current_deadline()
        with stop.waking(self._wake):
            stop.check()
            try:
                view = self.filled.result(deadline.remaining_s())
            except CancelledError:
                raise ClosedError("stopped before the work was done") from None
            except TimeoutError as error:
                raise deadline.exceeded("reading the source") from error
        self.file.seal(self.index, view, stop)
        return view

    def _wake(self) -> None:
        self.filled.cancel()

    def release(self) -> None:
        self.filled = Future()  # the old future refers to the memory


@dataclass(frozen=True, slots=True)
class PlainFiles:
    """The layout of files that have no manifest, or keep the one that they had. The ``.metadata``, if there is one, is
    what was written."""

    sizes: Mapping[str, int]

    def receipt(self, plan: None, written: bytes | None, stop: Stop) -> RankReceipt:
        return RankReceipt(self.sizes, written)

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        (receipt,) = receipts
        return {} if receipt.content is None else {METADATA_NAME: [receipt.content]}


@dataclass(frozen=True, slots=True)
class _Body:
    nbytes: int
    aligned: bool
    parts: Sequence[_Part]


Fill: TypeAlias = Callable[[WindowedFile, int, memoryview], Awaitable[None]]
"""Fills memory with the content of a window of a file, given its index. Runs on the event loop."""


class Windows:
    """The memory of one conversion or copy. Windows are filled one after the other, in the order of the files."""

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._largest = 1
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(WINDOWS)
        self._spare: list[MemoryMap] = []
        self._keeping = True

    async def write(self, files: Iterable[WindowedFile], into: Transaction) -> None:
        """Write all of ``files``. When this returns or raises, no thread works on them any more, and their memory is
        being returned to the system. After success it has been returned, because what follows takes as much again."""
        parts = [(file, [_Part(file, index) for index in range(len(file.windows))]) for file in files]
        bodies = [(file.name, _Body(file.nbytes, file.aligned, one)) for file, one in parts]
        self._largest = max((part.nbytes for _, one in parts for part in one), default=1)
        threads, stop = write_threads(), Stop()

        try:
            # The thread writes the windows as the loop fills them. Either side may fail first: the task group cancels
            # the filling, and the wait signals the thread, so that both have ended when this returns.
            done = threads.submit(partial(into.write, bodies, stop=stop))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fill_all([part for _, one in parts for part in one]))
                await threads.wait(done, "writing", stop=stop)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            # A thread that has just ended its work may refer to the memory for some time.
            self._keeping = False
            self._spare.clear()
        # Unmapping is done by a thread of its own. A conversion that follows at once would otherwise map its windows
        # while these still count against the memory of the machine.
        await threads.run(wait_unmapped, Deadline.after(_UNMAPPED_S))

    async def _fill_all(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            await self._slots.acquire()
            view = self._take(part.nbytes)
            await self._fill(part.file, part.index, view)
            # False if the thread was stopped while the window was being filled. Then no thread takes it.
            if part.filled.set_running_or_notify_cancel():
                part.filled.set_result(view)
            del view

    def _take(self, nbytes: int) -> memoryview:
        """Return memory for a window. It is used again when the last view of it is gone, because a client of object
        storage may still send a part that it has released."""
        spare = self._spare.pop() if self._spare else None  # other threads append, only this one pops
        with allocating("memory for a window"):
            memory = MemoryMap(-1, self._largest) if spare is None else spare
        array = (ctypes.c_char * nbytes).from_buffer(memory)
        weakref.finalize(array, self._give_back, memory).atexit = False
        return memoryview(array).cast("B")

    def _give_back(self, memory: MemoryMap) -> None:
        """Keep the memory for another window. Called in any thread."""
        self._spare.append(memory)
        if not self._keeping:
            self._spare.clear()
        with suppress(RuntimeError):  # the view was kept until after the end of the loop
            self._loop.call_soon_threadsafe(self._slots.release)
