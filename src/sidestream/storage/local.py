"""Local directories: direct I/O where the file system takes it, everything synced, one rename to publish."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

from .._threads import Deadline, Stop, Threads, io_threads
from ..errors import Conflict, Corrupt, NotDurable, SidestreamError, from_os_error, without_frames
from ..options import Durability
from .coalesce import coalesce
from .store import Body, Part, ReadRange

__all__ = ["LocalStore"]

_MAX_TRANSFER_BYTES = 0x7FFFF000  # what one Linux write or read moves at most
_GAP_BYTES = 16 << 10  # to read past as many bytes costs about as much as another system call
_GAP = memoryview(bytearray(_GAP_BYTES))  # every thread reads into it, and none looks
_RUN_BYTES = 16 << 20  # one system call; with 2 MiB a load without verification took a sixth longer
_RUN_RANGES = 512  # with the gaps between them, what one readv takes (IOV_MAX)
_WRITERS = 4  # so many direct writes in flight keep a fast disk busy
_NO_DIRECT_IO = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


class LocalStore:
    """A ``Store`` over the directory ``root``, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modes: dict[str, int] = {}  # what the umask gave each attempt of ours, kept for the published directory

    def write(
        self,
        attempt: str,
        target: str,
        files: Iterable[tuple[str, Body]],
        *,
        threads: Threads,
        durability: Durability,
        stop: Stop,
        deadline: Deadline,
    ) -> None:
        stop.check()
        if not _is_vacant(self.root / target):
            raise _occupied(self.root / target)
        self._modes[attempt] = _create(self.root, self.root / attempt, durability)
        for name, body in files:
            _write(self.root / attempt / name, body, durability, stop, deadline, threads)
            del body  # and with it the memory, while the next one is waited for

    async def put(self, name: str, body: Body, *, durability: Durability, deadline: Deadline) -> None:
        stop = Stop()
        await io_threads().run(_write, self.root / name, body, durability, stop, deadline, stop=stop, deadline=deadline)

    async def publish(self, attempt: str, target: str, *, durability: Durability, deadline: Deadline) -> None:
        mode = self._modes.pop(attempt, 0o700)
        await io_threads().run(_publish, self.root / attempt, self.root / target, mode, durability, deadline=deadline)

    async def discard(self, attempt: str, *, deadline: Deadline) -> None:
        await io_threads().run(self.discard_here, attempt, deadline=deadline)

    def discard_here(self, attempt: str) -> None:
        self._modes.pop(attempt, None)
        _discard(self.root / attempt)

    async def read(self, name: str, ranges: Sequence[ReadRange], *, deadline: Deadline) -> None:
        stop = Stop()
        await io_threads().run(_read, self.root / name, ranges, stop, stop=stop, deadline=deadline)

    async def map(self, name: str, nbytes: int, *, deadline: Deadline) -> mmap.mmap:
        return await io_threads().run(_map, self.root / name, nbytes, deadline=deadline)

    async def read_tail(self, name: str, nbytes: int, *, deadline: Deadline) -> bytes:
        return await io_threads().run(_read_tail, self.root / name, nbytes, deadline=deadline)

    async def sizes(self, directory: str, *, deadline: Deadline) -> dict[str, int]:
        return await io_threads().run(_sizes, self.root / directory, deadline=deadline)

    async def directories(self, *, deadline: Deadline) -> list[str]:
        return await io_threads().run(_directories, self.root, deadline=deadline)


# --- what runs in threads; each function owns the descriptors that it opens ---


def _create(root: Path, attempt: Path, durability: Durability) -> int:
    """Returns the mode that the umask gives a directory; until it is published nobody else looks into the attempt."""
    made: list[Path] = []
    try:
        ancestors = (root, *root.parents)
        missing = [path for path in ancestors if not path.exists()]
        if durability == "fsync" and len(missing) < len(ancestors) - 1:
            # The last one that is there may have been made by a save that was killed before it could sync it.
            with suppress(PermissionError):
                _sync_directory(ancestors[len(missing)].parent)
        for path in (*reversed(missing), attempt):
            path.mkdir(exist_ok=path != attempt)
            made.append(path)
            if durability == "fsync" and path != attempt:
                _sync_directory(path.parent)
        mode = stat.S_IMODE(attempt.stat().st_mode)
        attempt.chmod(mode & ~0o077)
    except OSError as error:
        with suppress(OSError):  # not empty: another save has moved in meanwhile
            for path in reversed(made):
                path.rmdir()
        raise from_os_error(error, "creating a checkpoint directory", str(attempt)) from error
    return mode


def _write(
    path: Path, body: Body, durability: Durability, stop: Stop, deadline: Deadline, threads: Threads | None = None
) -> None:
    try:
        descriptor, direct = _open_new(path, direct=body.aligned)
        try:
            if body.nbytes:
                _preallocate(descriptor, body.nbytes)
            _Parts(descriptor, direct, body, deadline).write(stop, threads)
            if durability == "fsync":
                os.fsync(descriptor)
        finally:
            os.close(descriptor)  # an error that NFS kept for close() is one of this write
    except FileExistsError as error:
        raise Conflict(f"{path} exists already: two saves share one attempt's name") from error
    except OSError as error:
        if isinstance(error, SidestreamError):  # of the staging: some are also an OSError
            raise
        raise from_os_error(error, "writing", str(path)) from error


class _Parts:
    """The parts of one file, written at their offsets by several threads."""

    def __init__(self, descriptor: int, direct: bool, body: Body, deadline: Deadline) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._parts = body.parts
        self._deadline = deadline
        self._lock = threading.Lock()
        self._next = 0
        self._error: BaseException | None = None

    def write(self, stop: Stop, threads: Threads | None) -> None:
        """Return or raise when no thread writes any more; of several errors the first is raised."""
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
            finally:  # also when there is no thread for the next one: the descriptor is closed after this
                wait([other for other in others if not other.cancel()])
        if self._error is not None:
            raise self._error

    def _work(self, failed: Stop) -> None:
        while (part := self._take_one()) is not None:
            try:
                self._write_part(part, failed)
            except BaseException as error:
                with self._lock:  # whoever keeps the error in order to retry shall not keep the memory with it
                    self._error = self._error or without_frames(error)
                failed.set()
            finally:
                part.release()

    def _take_one(self) -> Part | None:
        with self._lock:
            if self._error is not None or self._next == len(self._parts):
                return None
            self._next += 1
            return self._parts[self._next - 1]

    def _write_part(self, part: Part, failed: Stop) -> None:
        view = part.take(failed, self._deadline)
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
    """A full disk is noticed before anything is written; file systems without preallocation notice it later."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise


def _write_buffer(descriptor: int, buffer: memoryview, position: int, direct: bool) -> bool:
    """Write all of ``buffer``; returns whether direct I/O still works on this file."""
    done = 0
    while done < len(buffer):
        if direct and (len(buffer) % 4096 or done % 4096):
            direct = _leave_direct_io(descriptor)
        try:
            done += os.pwrite(descriptor, buffer[done : done + _MAX_TRANSFER_BYTES], position + done)
        except OSError as error:
            if not direct or error.errno not in _NO_DIRECT_IO:
                del buffer  # as in _write
                raise
            direct = _leave_direct_io(descriptor)
    return direct


def _leave_direct_io(descriptor: int) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return False


def _publish(attempt: Path, target: Path, mode: int, durability: Durability) -> None:
    try:
        attempt.chmod(mode)
        if durability == "fsync":
            _sync_directory(attempt)
        os.rename(attempt, target)
    except OSError as error:
        if error.errno in _OCCUPIED:
            raise _occupied(target) from error
        raise from_os_error(error, "publishing", str(target)) from error
    if durability == "fsync":
        try:
            _sync_directory(target.parent)
        except OSError as error:
            raise NotDurable(
                error.errno, "the checkpoint is committed, but the sync of its parent directory failed", str(target)
            ) from error


def _occupied(target: Path) -> Conflict:
    return Conflict(f"{target} is not empty: save to a new directory, or let a Checkpointer make generations of a step")


def _is_vacant(target: Path) -> bool:
    try:
        if not stat.S_ISDIR(target.lstat().st_mode):
            return False
        with os.scandir(target) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except OSError as error:
        raise from_os_error(error, "looking at", str(target)) from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(attempt: Path) -> None:
    try:
        shutil.rmtree(attempt)
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, "removing an attempt", str(attempt)) from error


def _open_regular(path: str, flags: int) -> int:
    """Follows no link, and does not wait for the other end of a pipe."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Corrupt(f"{path} is not a regular file", file=os.path.basename(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read(path: Path, ranges: Sequence[ReadRange], stop: Stop) -> None:
    try:
        descriptor = _open_regular(str(path), os.O_RDONLY)
        try:
            for run in coalesce(ranges, gap_bytes=_GAP_BYTES, most=_RUN_RANGES, most_bytes=_RUN_BYTES):
                stop.check()
                _read_run(descriptor, run, path)
                for one in run:
                    if one.arrived is not None:
                        one.arrived()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _translated(error, "reading", str(path)) from error


def _map(path: Path, nbytes: int) -> mmap.mmap:
    try:
        descriptor = _open_regular(str(path), os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size < nbytes:  # to touch a page behind the end would kill the process
                raise Corrupt(f"{path} is shorter than the {nbytes} bytes that were saved", file=path.name)
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            return mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _translated(error, "mapping", str(path)) from error


def _read_tail(path: Path, nbytes: int) -> bytes:
    try:
        with open(path, "rb", opener=_open_regular) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
            return file.read(nbytes)
    except OSError as error:
        raise _translated(error, "reading", str(path)) from error


def _read_run(descriptor: int, run: Sequence[ReadRange], path: Path) -> None:
    """One system call for all ranges of the run, unless the system moves fewer bytes than were asked for."""
    start = position = run[0].offset
    buffers: list[memoryview] = []
    for one in run:
        if one.offset > position:
            buffers.append(_GAP[: one.offset - position])
        buffers.append(one.into)
        position = one.offset + len(one.into)
    done = start
    while buffers:
        count = os.preadv(descriptor, buffers, done)
        if count == 0:
            raise Corrupt(
                f"{path} ends at byte {done}, but {position - done} more belong there", file=path.name, offset=done
            )
        done += count
        buffers = _rest(buffers, count)


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left to fill when ``count`` bytes have arrived."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


def _sizes(directory: Path) -> dict[str, int]:
    try:
        with os.scandir(directory) as entries:
            return {one.name: one.stat().st_size for one in entries if one.is_file(follow_symlinks=False)}
    except OSError as error:
        raise _translated(error, "listing", str(directory)) from error


def _directories(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return [one.name for one in entries if one.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, "listing", str(root)) from error


def _translated(error: OSError, doing: str, path: str) -> Exception:
    if isinstance(error, (SidestreamError, FileNotFoundError)):
        return error  # what is missing means something else to each caller
    if error.errno == errno.ENOTDIR:
        return FileNotFoundError(errno.ENOENT, "no such directory", path)
    if error.errno == errno.ELOOP:
        return Corrupt(f"{path} is a symbolic link", file=os.path.basename(path))
    return from_os_error(error, doing, path)
