"""Copying from the trainer's memory inside the writer process. The kernel copies, and the trainer spends no time on
it."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import mmap

from .wire import WorkerMessageKind, unpack_fill

__all__ = ["Copier", "read_memory", "read_pieces"]

_CHUNK_BYTES = 16 << 20  # a cancel waits for the current chunk of each thread
# While the kernel looks up the pages it holds a lock of the trainer, and threads that map memory there wait for it. The
# smaller the call, the less likely it is that this process loses its core during that time.
_CALL_BYTES = 128 << 10
_CALL_PIECES = 512  # the system takes 1,024
_TABLE_BYTES = 4 << 20  # small pieces take longer than large ones


class _Run(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)  # not on every system
if _read is not None:
    _read.restype = ctypes.c_ssize_t
    _read.argtypes = (ctypes.c_int, *(2 * (ctypes.c_void_p, ctypes.c_ulong)), ctypes.c_ulong)


def read_memory(pid: int, address: int, target: int, nbytes: int) -> None:
    """Copy from the memory of process ``pid`` to address ``target`` here. Raises ``OSError``."""
    if _read is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    done = 0
    while done < nbytes:
        size = min(_CALL_BYTES, nbytes - done)
        local, remote = _Run(target + done, size), _Run(address + done, size)
        copied = _read(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if copied <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += copied


def read_pieces(pid: int, addresses: array[int], targets: array[int], sizes: array[int]) -> None:
    """Copy pieces of the memory of process ``pid`` to ``targets`` here, in one call for many of them. Raises
    ``OSError``, by when some of them may have been copied."""
    remote, local = array("Q", bytes(16 * len(sizes))), array("Q", bytes(16 * len(sizes)))
    remote[::2], remote[1::2], local[::2], local[1::2] = addresses, sizes, targets, sizes
    (remote_at, _), (local_at, _) = remote.buffer_info(), local.buffer_info()
    for first, last in _calls(sizes):
        if last == first + 1:
            read_memory(pid, addresses[first], targets[first], sizes[first])
            continue
        if _read is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        copied = _read(pid, local_at + 16 * first, last - first, remote_at + 16 * first, last - first, 0)
        if copied != sum(sizes[first:last]):
            code = ctypes.get_errno() if copied < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))


def _calls(sizes: array[int]) -> Iterator[tuple[int, int]]:
    """Yield the first piece of each call, and the one after its last piece."""
    first = held = 0
    for index, size in enumerate(sizes):
        if index > first and (index - first == _CALL_PIECES or held + size > _CALL_BYTES):
            yield first, index
            first, held = index, 0
        held += size
    if first < len(sizes):
        yield first, len(sizes)


@dataclass(slots=True)
class _Job:
    """One request."""

    number: int
    waiting: int
    """The number of chunks that no thread has taken. Those of a stopped job are not copied."""
    memories: Sequence[mmap]
    """Kept until the job ends, because the trainer may have them unmapped earlier."""
    copying: int = 0
    stopped: bool = False
    error: str | None = None


class Copier:
    """Threads that copy what was requested, in this order. ``fill`` and ``cancel`` are called in the thread that reads
    messages.

    The threads are started at once, before the priority of this process is lowered, because the trainer waits for them.
    """

    def __init__(self, trainer: int, answer: Callable[[WorkerMessageKind, int, bytes], None]) -> None:
        self._trainer = trainer
        self._answer = answer
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._chunks: queue.SimpleQueue[tuple[_Job, Callable[[], None]]] = queue.SimpleQueue()
        count = max(1, min(4, len(os.sched_getaffinity(0)) // 2))  # as many as would copy in the trainer
        self._threads = [
            threading.Thread(target=self._serve, name="sidestream-copy", daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def set_affinity(self, processors: Iterable[int]) -> None:
        """Restrict the threads to ``processors``. Raises ``OSError``."""
        for thread in self._threads:
            if thread.native_id is not None:
                os.sched_setaffinity(thread.native_id, processors)

    def fill(self, number: int, body: bytes, memories: dict[int, mmap]) -> None:
        """Copy the pieces that ``body`` lists. The answer ``FILLED`` or ``UNFILLED`` is sent when no thread copies for
        this request any more."""
        pieces, tables = unpack_fill(body)
        used = {number: memories[number] for number in {one[0] for one in (*pieces, *tables)}}
        starts = {memory: ctypes.addressof(ctypes.c_char.from_buffer(one)) for memory, one in used.items()}
        chunks: list[Callable[[], None]] = []
        for memory, address, offset, nbytes in pieces:
            target = starts[memory] + offset
            for done in range(0, nbytes, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, nbytes - done)
                chunks.append(partial(read_memory, self._trainer, address + done, target + done, size))
        for memory, offset, rows, columns in tables:
            chunks += self._chunks_of(columns, rows, starts[memory] + offset)
        if not chunks:
            self._answer(WorkerMessageKind.FILLED, number, b"")
            return
        job = self._jobs[number] = _Job(number, len(chunks), tuple(used.values()))
        for chunk in chunks:
            self._chunks.put((job, chunk))

    def _chunks_of(self, columns: bytes, count: int, image: int) -> Iterator[Callable[[], None]]:
        """Yield the copies of a table with ``count`` rows into the image at address ``image``, some MiB at a time."""
        addresses, offsets = array("Q", columns[: 8 * count]), array("I", columns[8 * count : 12 * count])
        sizes = array("Q", array("I", columns[12 * count :]))
        targets = array("Q", [image + offset for offset in offsets])
        first = held = 0
        for index, size in enumerate(sizes, 1):
            held += size
            if held >= _TABLE_BYTES or index == count:
                some = slice(first, index)
                yield partial(read_pieces, self._trainer, addresses[some], targets[some], sizes[some])
                first, held = index, 0

    def cancel(self, number: int) -> bool:
        """Stop a request. Return False if ``number`` is not one of these requests, or has been answered."""
        with self._lock:
            job = self._jobs.get(number)
            if job is None:
                return False
            job.stopped = True
        self._answer_if_ended(job)
        return True

    def _serve(self) -> None:
        while True:
            job, chunk = self._chunks.get()
            with self._lock:
                job.waiting -= 1
                copies = not job.stopped
                job.copying += copies
            if copies:
                self._copy(job, chunk)
            del job, chunk  # an idle thread keeps no memory mapped

    def _copy(self, job: _Job, chunk: Callable[[], None]) -> None:
        error = None
        try:
            chunk()
        except OSError as failure:
            error = str(failure)
        with self._lock:
            job.copying -= 1
            if error is not None:
                job.error = job.error or error
                job.stopped = True
        self._answer_if_ended(job)

    def _answer_if_ended(self, job: _Job) -> None:
        with self._lock:
            if job.copying or (job.waiting and not job.stopped) or self._jobs.pop(job.number, None) is None:
                return
        if job.stopped:
            self._answer(WorkerMessageKind.UNFILLED, job.number, (job.error or "stopped").encode())
        else:
            self._answer(WorkerMessageKind.FILLED, job.number, b"")
