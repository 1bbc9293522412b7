"""Memory maps that are unmapped in a thread of the process, piece by piece.

The last reference to a mapping dies in any thread: in a finalizer, in a garbage collection, on the event loop.
Unmapping 256 MiB takes 20 to 100 ms. Python releases the GIL for it, but the kernel keeps a lock of the whole process.
Every other thread that maps memory waits for that lock, and Python holds the GIL while it maps memory for its objects:
the event loop stands still. A finalizer therefore only puts the mapping into a queue, which keeps it mapped. One thread
takes it from there and returns its pages in small pieces. Unmapping what is left takes some microseconds.

The thread is started with the first mapping. A finalizer must not start one: it may run inside ``Thread.start()``,
which holds locks that another start would wait for. If the system starts no thread, mappings are unmapped where they
die.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Self, TypeAlias

from .threads import Deadline

UnmapOutcome: TypeAlias = Literal["unmapped", "kept", "unmapped late"]
"""The outcome for a mapping that is not used any more; ``"unmapped late"`` can only follow ``"kept"``."""

_POPULATE_READ = 22  # MADV_POPULATE_READ; the modules of Python lack the name
_MAP_FIXED = 0x10  # on Linux
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)
_PIECE_BYTES = 4 << 20  # 1 to 8 ms if its pages are made, less if they are returned


class MemoryMap(mmap.mmap):
    """A mapping that a thread of the process unmaps when the last reference to it is gone.

    ``__del__`` hands it to the thread, because ``mmap`` unmaps the memory before it calls the callbacks of weak
    references. ``__del__`` runs before that and may make a new reference. Python calls it once.
    """

    ended: Callable[[UnmapOutcome], object] | None = None
    """Called in the thread when the mapping has been unmapped, or when it has to stay mapped."""
    inherited = True
    """Whether a forked child inherits the mapping."""
    _pid: int
    # The globals of a module may be gone at the end of the interpreter, when ``__del__`` runs.
    _getpid = staticmethod(os.getpid)
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        start_thread()
        mapping = super().__new__(cls, *args, **kwargs)
        mapping._pid = os.getpid()
        return mapping

    @classmethod
    def of_file(cls, descriptor: int, nbytes: int, flags: int) -> Self:
        """Return a map of a file, for reading and writing. Raises ``OSError``.

        ``mmap`` keeps a duplicate of the descriptor, and a forked child would have it. So the file takes the place of
        anonymous memory."""
        mapping = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        there, access = address_of(mapping), mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap()(there, nbytes, access, flags | _MAP_FIXED, descriptor, 0) != there:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return mapping

    def unused(self) -> bool:
        """End all other uses of the memory. Called in the thread that unmaps it. Returns False if the memory has to
        stay mapped; ``wait_unmapped`` makes the thread ask again."""
        return True

    def __del__(self) -> None:
        if self._is_finalizing():
            return
        # In a forked child, memory that it inherited is unmapped when the process ends. Memory that it did not inherit
        # has no mapping there, and an unmap would remove what lies at its addresses by now.
        if self._pid == self._getpid():
            _unmapping.take(self)
        elif not self.inherited:
            _never_drop(self)


def start_thread() -> bool:
    """Start the thread that unmaps, unless it runs. Returns False if the system cannot start one."""
    return _unmapping.start()


def wait_unmapped(deadline: Deadline) -> bool:
    """Wait until every mapping in the queue has been unmapped or kept. Returns False if that takes too long."""
    return _unmapping.wait_unmapped(deadline)


class _Unmapping:
    """The queue, its thread, and the mappings that have to stay mapped."""

    def __init__(self) -> None:
        # Its put() is reentrant, so that a garbage collection within put() or get() may put as well.
        self._queue: queue.SimpleQueue[MemoryMap | threading.Event] = queue.SimpleQueue()
        self._kept: list[MemoryMap] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="sidestream-unmap", daemon=True)
                    try:
                        thread.start()
                    except RuntimeError:
                        return False
                    self._thread = thread
        return True

    def take(self, mapping: MemoryMap) -> None:
        """Take over a mapping that is not used any more. Safe in finalizers: takes no lock, starts no thread, never
        blocks."""
        if self._thread is not None:
            self._queue.put(mapping)

    def wait_unmapped(self, deadline: Deadline) -> bool:
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(done)
        return done.wait(deadline.remaining_s())

    def _run(self) -> None:
        while True:
            done = self._next()
            if done is not None:
                self._retry()
                done.set()

    def _next(self) -> threading.Event | None:
        mapping = self._queue.get()
        if isinstance(mapping, threading.Event):
            return mapping
        ended = mapping.ended or _nothing
        if _emptied(mapping):
            del mapping  # unmaps the memory, before wait_unmapped() returns
            ended("unmapped")
        else:
            self._kept.append(mapping)
            ended("kept")
        return None

    def _retry(self) -> None:
        """Try again to unmap kept memory: a capture that prevented it may have ended."""
        kept, self._kept = self._kept, []
        while kept:
            mapping = kept.pop()
            if _emptied(mapping):
                ended = mapping.ended or _nothing
                del mapping
                ended("unmapped late")
            else:
                self._kept.append(mapping)


def _emptied(mapping: MemoryMap) -> bool:
    """Return the pages of a mapping to the system, unless it has to stay mapped. The pages of shared memory remain for
    other processes."""
    if not mapping.unused():
        return False
    address = address_of(mapping)
    for start, nbytes in pieces(len(mapping)):
        if advise(address + start, nbytes, mmap.MADV_DONTNEED):
            break  # locked memory, for example, can only be unmapped as a whole
    return True


def pieces(nbytes: int) -> list[tuple[int, int]]:
    """Divide memory into pieces for system calls that hold up all threads that map memory. Returns start and length of
    each."""
    return [(start, min(_PIECE_BYTES, nbytes - start)) for start in range(0, nbytes, _PIECE_BYTES)]


def address_of(mapping: mmap.mmap) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def advise(address: int, nbytes: int, advice: int) -> int:
    """Call ``madvise`` without the GIL, which ``mmap.madvise`` holds while it waits for calls of other threads."""
    return int(_madvise()(address, nbytes, advice))


def populate_read(address: int, nbytes: int) -> int:
    """Read all pages of mapped memory, without the GIL. Return 0, or the number of the error: ``EINVAL`` if the system
    cannot do this, and another one if a page cannot be read, which would end the process if it were touched."""
    return ctypes.get_errno() if advise(address, nbytes, _POPULATE_READ) else 0


@cache
def _madvise() -> Any:
    """Return ``madvise`` of the C library. It is looked up once, because each look-up makes a class that only a garbage
    collection frees."""
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


@cache
def _mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    function.restype = ctypes.c_void_p
    return function


def _nothing(outcome: UnmapOutcome) -> None:
    """The default of ``ended``."""


_unmapping = _Unmapping()


def _after_fork() -> None:
    global _unmapping
    _never_drop(_unmapping)  # with the mappings in it
    _unmapping = _Unmapping()


def _never_drop(value: object) -> None:
    """Keep a reference to the object for ever, past the end of the interpreter. A forked child does not inherit
    registered memory. Other memory may be mapped at its addresses, and an unmap would remove that."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


os.register_at_fork(after_in_child=_after_fork)
