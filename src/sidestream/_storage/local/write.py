"""The function that writes one new file. Several threads write its parts, with direct I/O if the file system allows
it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

from ..._runtime.threads import Stop, Threads
from ...errors import CheckpointExistsError, SidestreamError, from_os_error, without_frames
from ...options import Durability
from ..bodies import Body, FilePart

__all__ = ["write_file"]

_MAX_TRANSFER_BYTES = 0x7FFFF000  # the most that one write on Linux transfers
_WRITERS = 4  # this many direct writes in flight keep a fast disk busy
_NO_DIRECT_IO = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def write_file(
    path: Path,
    body: Body,
    durability: Durability,
    stop: Stop,
    threads: Threads | None = None,
    *,
    target: str = "",
    preallocate: bool = True,
) -> None:
    """Write a new file. Errors name ``target``, because ``path`` need not contain the name of what is saved.
    ``preallocate=False`` is for file systems that cannot reserve space: there libc would write into every block."""
    try:
        descriptor, direct = _open_new(path, direct=body.aligned)
        try:
            if body.nbytes and preallocate:
                _preallocate(descriptor, body.nbytes)
            _Parts(descriptor, direct, body).write(stop, threads)
            if durability == "fsync":
                os.fsync(descriptor)
        finally:
            os.close(descriptor)  # its errors count: NFS may report a failed write only here
    except FileExistsError as error:
        raise CheckpointExistsError(f"{path} exists already: two saves share one attempt's name") from error
    except OSError as error:
        if isinstance(error, SidestreamError):  # from staging: some of them are also an OSError
            raise
        raise from_os_error(error, f"writing {target}".rstrip(), str(path)) from error


class _Parts:
    """The parts of one file, written at their offsets by several threads."""

    def __init__(self, descriptor: int, direct: bool, body: Body) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._parts = body.parts
        self._lock = threading.Lock()
        self._next = 0
        self._error: BaseException | None = None

    def write(self, stop: Stop, threads: Threads | None) -> None:
        """Write all parts. When this returns or raises, no thread writes any more. Of several errors the first is
        raised."""
        failed = Stop()
        others: list[Future[None]] = []
        with stop.waking(failed.set):
            stop.check()
            try:
                if threads is not None:
                    for _ in range(min(len(self._parts), _WRITERS) - 1):
                        others.append(threads.submit(self._work, failed))
                self._work(failed)
            except BaseException:
                failed.set()
                raise
            finally:  # also if ``submit`` fails: the caller closes the descriptor after this
                wait([other for other in others if not other.cancel()])
        if self._error is not None:
            raise self._error

    def _work(self, failed: Stop) -> None:
        while (part := self._take_one()) is not None:
            try:
                self._write_part(part, failed)
            except BaseException as error:
                with self._lock:  # without frames: an error that is kept for a retry must not keep the memory alive
                    self._error = self._error or without_frames(error)
                failed.set()
            finally:
                part.release()

    def _take_one(self) -> FilePart | None:
        with self._lock:
            if self._error is not None or self._next == len(self._parts):
                return None
            self._next += 1
            return self._parts[self._next - 1]

    def _write_part(self, part: FilePart, failed: Stop) -> None:
        view = part.take(failed)
        failed.check()
        self._direct = _write_buffer(self._descriptor, view, part.offset, self._direct)


def _open_new(path: Path, *, direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
            with suppress(FileNotFoundError):  # some kernels create the file before they refuse the flag
                os.unlink(path)
    return os.open(path, flags, 0o666), False


def _preallocate(descriptor: int, nbytes: int) -> None:
    """Reserve the space of the file, so that a full disk raises before anything is written. File systems without
    preallocation raise later."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise


def _write_buffer(descriptor: int, buffer: memoryview, position: int, direct: bool) -> bool:
    """Write all of ``buffer``. Returns whether direct I/O still works on this file."""
    done = 0
    while done < len(buffer):
        if direct and (len(buffer) % 4096 or done % 4096):
            direct = _leave_direct_io(descriptor)
        try:
            done += os.pwrite(descriptor, buffer[done : done + _MAX_TRANSFER_BYTES], position + done)
        except OSError as error:
            if not direct or error.errno not in _NO_DIRECT_IO:
                del buffer  # as in write_file
                raise
            direct = _leave_direct_io(descriptor)
    return direct


def _leave_direct_io(descriptor: int) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return False
