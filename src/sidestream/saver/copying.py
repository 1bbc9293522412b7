"""In the saver process: copies out of the trainer's memory, by the kernel, which the trainer does not notice."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from mmap import mmap

from .._threads import Stop
from .wire import Kind

__all__ = ["PIECE", "Copier", "read_memory"]

PIECE = struct.Struct("<QQQQ")  # number of the memory, address in the trainer, where in the memory, bytes
_CHUNK_BYTES = 16 << 20  # a cancel waits for as much in each thread


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
        step = min(nbytes - done, 128 << 10)
        local, remote = _Run(target + done, step), _Run(address + done, step)
        copied = _read(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if copied <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += copied


@dataclass(slots=True)
class _Job:
    """One request; the last chunk answers."""

    number: int
    left: int
    memories: Sequence[mmap]
    """For as long as it takes: the trainer may forget them."""
    stop: Stop = field(default_factory=Stop)
    error: str | None = None


class Copier:
    """Threads that copy what was asked for, in its order. Its methods are called by the thread that reads frames."""

    def __init__(self, trainer: int, answer: Callable[[Kind, int, bytes], None]) -> None:
        self._trainer = trainer
        self._answer = answer
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._threads = 0
        self._chunks: queue.SimpleQueue[tuple[_Job, int, int, int]] = queue.SimpleQueue()
        while self._threads < max(1, min(4, (os.cpu_count() or 1) // 2)):
            threading.Thread(target=self._serve, name="sidestream-copy", daemon=True).start()
            self._threads += 1

    def fill(self, number: int, body: bytes, memories: dict[int, mmap]) -> None:
        chunks: list[tuple[int, int, int]] = []
        used: dict[int, mmap] = {}
        for memory, address, offset, nbytes in PIECE.iter_unpack(body):
            used[memory] = memories[memory]
            target = ctypes.addressof(ctypes.c_char.from_buffer(used[memory])) + offset
            for done in range(0, nbytes, _CHUNK_BYTES):
                chunks.append((address + done, target + done, min(_CHUNK_BYTES, nbytes - done)))
        if not chunks:
            self._answer(Kind.FILLED, number, b"")
            return
        job = self._jobs[number] = _Job(number, len(chunks), tuple(used.values()))
        for chunk in chunks:
            self._chunks.put((job, *chunk))

    def cancel(self, number: int) -> bool:
        """False if it is none of these; it is answered when nothing is copied any more."""
        job = self._jobs.get(number)
        if job is not None:
            job.stop.set()
        return job is not None

    def _serve(self) -> None:
        while True:
            job, address, target, nbytes = self._chunks.get()
            error = job.error
            if error is None and not job.stop.is_set():
                try:
                    read_memory(self._trainer, address, target, nbytes)
                except OSError as failure:
                    error = str(failure)
            self._ended(job, error)
            del job  # an idle thread keeps no memory mapped

    def _ended(self, job: _Job, error: str | None) -> None:
        with self._lock:
            job.error = job.error or error
            job.left -= 1
            if job.left:
                return
            self._jobs.pop(job.number, None)
        if job.error is None and not job.stop.is_set():
            self._answer(Kind.FILLED, job.number, b"")
        else:
            self._answer(Kind.UNFILLED, job.number, (job.error or "stopped").encode())
