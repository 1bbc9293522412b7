"""Functions that read local files, and ``LocalSource``, which reads the files of one directory.

Only regular files are read. Symbolic links are not followed. One system call reads several ranges. A ``LocalSource``
reads the same directory until it is closed, also if the directory is renamed.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from ..._format.marker import TAIL_BYTES, Marker, find_marker, is_complete
from ..._runtime.memory_maps import MemoryMap
from ..._runtime.tasks import run_shielded
from ..._runtime.threads import Deadline, Stop, current_deadline, doing, io_threads, time_limit
from ...errors import CorruptCheckpointError, DeadlineExceededError, SidestreamError, from_os_error
from ..names import MARKER, is_unfinished
from ..store import RangeSource, ReadRange, coalesce
from .directories import OpenDirectory, opened

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_GAP_BYTES = 16 << 10  # reading this many unneeded bytes costs about as much as another system call
_GAP = memoryview(bytearray(_GAP_BYTES))  # unneeded bytes are read into it, by all threads at once
_MOST_CALL_BYTES = 16 << 20  # the most that one system call reads
_CALL_BYTES = 1 << 19
"""How much one system call reads as long as reads do not wait. These bytes are still in the cache of the processor when
a checksum is computed over them right afterwards. With half as many the calls would cost more than the cache gives."""
_UNSEEN_CALL_BYTES = 2 << 20
"""How much it reads of a range whose bytes are not looked at. Fewer calls wait less often for the GIL; longer ones keep
the event loop from its core."""
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)  # reads what is in the page cache, and fails if the first byte is not there
_REFUSED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES})
"""What a file system answers, a kernel, or a sandbox that allows ``preadv`` but not ``preadv2``."""
_WAIT_S = 1e-3
_WAITS = 0.5
"""On file systems without ``RWF_NOWAIT``, a call waits if it takes longer than ``_WAIT_S`` and computes for less than
this part of its time. Readers that wait for a core or for the GIL look the same, so this test is used there only."""
_RUN_RANGES = 512  # with the gaps between them at most IOV_MAX buffers of one preadv
_CLOSE_S = 5.0
"""How long ``aclose`` waits for the system call that closes a directory, also after the deadline of a load."""


class LocalSource(RangeSource):
    """The ``RangeSource`` of the directory ``path``."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(name)
        self._path = path
        self._directory = OpenDirectory(path)

    async def committed_marker(self) -> Marker | None:
        try:
            if (marker := await self.marker()) is not None:
                return marker
        except CorruptCheckpointError:
            if not await self._is_marked_in_place():
                raise
        else:
            if not await self._is_marked_in_place():
                return None
        tail = await self.read_tail(MARKER, TAIL_BYTES)
        if not is_complete(tail):
            raise FileNotFoundError(errno.ENOENT, f"{MARKER} is incomplete", self.path_of(MARKER))
        return find_marker(tail)

    async def _is_marked_in_place(self) -> bool:
        return await io_threads().run(is_unfinished, await self.sizes())

    async def read(self, file: str, ranges: Sequence[ReadRange]) -> None:
        stop = Stop()
        files = LocalFiles(self._path, self._directory, call_bytes=_MOST_CALL_BYTES)
        await run_io(files.read, file, ranges, stop, stop=stop)

    def files(self, waiting: Callable[[], None]) -> LocalFiles:
        return LocalFiles(self._path, self._directory, waiting)

    async def _tail(self, file: str, nbytes: int) -> bytes:
        return await run_io(read_tail, self._path / file, self._directory, nbytes)

    async def size(self, file: str) -> int:
        return await run_io(size_of, self._path / file, self._directory)

    async def sizes(self) -> dict[str, int]:
        return await run_io(sizes_in, self._path, self._directory)

    async def versions(self, files: Iterable[str]) -> dict[str, Hashable]:
        return await run_io(_versions_of, tuple(files), self._path, self._directory)

    async def map(self, file: str, nbytes: int) -> mmap.mmap:
        return await run_io(map_file, self._path / file, self._directory, nbytes)

    async def moved(self) -> bool:
        return await run_io(_moved, self._path, self._directory) or await super().moved()

    async def aclose(self) -> None:
        # Two steps. ``refuse`` makes no system call, so it is done on the loop, and no thread can begin to use the
        # directory after it. Closing may hang on a mount whose server does not answer, so a thread does it, with a
        # limit of its own. A thread that still reads keeps the directory open, and closes it when it has ended: the
        # number of a closed descriptor would soon belong to another file.
        if self._directory.refuse():
            await run_shielded(self._close)

    async def _close(self) -> None:
        with suppress(DeadlineExceededError), time_limit(Deadline.after(_CLOSE_S)):
            await io_threads().run(self._directory.close)


async def run_io(fn: Callable[[*Ts], T], *args: *Ts, stop: Stop | None = None) -> T:
    """Run ``fn`` in a thread, with the deadline of the caller. The caller must have one: without it, it would wait for
    ever for a disk that hangs."""
    current_deadline()
    return await io_threads().run(fn, *args, stop=stop)


@contextmanager
def _place(path: Path, within: OpenDirectory | None) -> Iterator[tuple[str, int | None]]:
    """Return what names the file in a system call: the path, or the name and the descriptor of an open directory. The
    latter never finds a file of another directory."""
    if within is None:
        yield str(path), None
    else:
        with within.descriptor() as descriptor:
            yield path.name, descriptor


@contextmanager
def _regular(path: Path, within: OpenDirectory | None) -> Iterator[int]:
    """Keep a regular file open for reading in this context. This does not follow symbolic links, and does not wait for
    the other end of a pipe."""
    with _place(path, within) as (name, directory):
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptCheckpointError(f"{path} is not a regular file", file=path.name)
        yield descriptor
    finally:
        os.close(descriptor)


class LocalFiles:
    """The files of a directory, read by several threads. A system call reads 512 KiB or 2 MiB, and more when reads wait
    for a device or a server. ``waiting`` is called once, when that is first noticed."""

    def __init__(
        self,
        directory: Path,
        within: OpenDirectory,
        waiting: Callable[[], None] | None = None,
        call_bytes: int = _CALL_BYTES,
    ) -> None:
        self._directory = directory
        self._within = within
        self._waiting = waiting
        self._call_bytes = call_bytes
        self._nowait = _NOWAIT

    def read(self, name: str, ranges: Sequence[ReadRange], stop: Stop) -> None:
        path = self._directory / name
        deadline = current_deadline()
        with _os_errors_as("reading", path), doing(f"reading {path}"), _regular(path, self._within) as descriptor:
            for run in coalesce(ranges, gap_bytes=_GAP_BYTES, most=_RUN_RANGES, most_bytes=self._call_bytes):
                stop.check()
                deadline.check(f"reading {path}")
                self._read_run(descriptor, run, path, stop)

    def _read_run(self, descriptor: int, run: Sequence[ReadRange], path: Path, stop: Stop) -> None:
        if len(run) == 1:
            self._read_alone(descriptor, run[0], path, stop)
        else:
            self._fill(descriptor, run[0].offset, _buffers_of(run), path)
            for one in run:
                if one.seen is not None:
                    one.seen(one.into)
        for one in run:
            if one.arrived is not None:
                one.arrived()

    def _read_alone(self, descriptor: int, one: ReadRange, path: Path, stop: Stop) -> None:
        """Read one range, piece by piece. The loop is short: while it holds the GIL, the other readers wait for it, and
        waking up takes each of them as long as reading half a piece."""
        offset, into, seen = one.offset, one.into, one.seen
        done, nbytes = 0, len(into)
        while done < nbytes:
            stop.check()
            most = self._call_bytes if seen is not None else max(self._call_bytes, _UNSEEN_CALL_BYTES)
            piece = into[done : done + most]
            count = self._read_some(descriptor, offset + done, [piece])
            if count == 0:
                raise _too_short(path, offset + done, nbytes - done)
            if seen is not None:
                seen(piece[:count])
            done += count

    def _fill(self, descriptor: int, offset: int, buffers: list[memoryview], path: Path) -> None:
        """Fill all buffers with one system call, or with several if the system returns fewer bytes than were
        requested."""
        while buffers:
            count = self._read_some(descriptor, offset, buffers)
            if count == 0:
                raise _too_short(path, offset, sum(map(len, buffers)))
            offset += count
            buffers = _rest(buffers, count)

    def _read_some(self, descriptor: int, offset: int, buffers: list[memoryview]) -> int:
        """Do one ``preadv``, and find out whether it waits for a device or a server."""
        # There are three cases. The calls have grown to their limit: nothing is left to find out. ``RWF_NOWAIT`` works:
        # it returns what is in the page cache and fails if the first byte is not there, so the answer is certain.
        # Otherwise the times of a call are compared, which is wrong where a reader waits for a core or for the GIL.
        if self._call_bytes == _MOST_CALL_BYTES:
            return os.preadv(descriptor, buffers, offset)
        if self._nowait:
            try:
                count = os.preadv(descriptor, buffers, offset, self._nowait)
                # Linux 5.9 and 5.10 may return 0 before the end of a file (preadv2(2)).
                return count or os.preadv(descriptor, buffers, offset)
            except BlockingIOError:  # the next byte is not in the page cache
                self._wait_less()
                return os.preadv(descriptor, buffers, offset)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self._nowait = 0
        began, computing = time.perf_counter(), time.thread_time()
        count = os.preadv(descriptor, buffers, offset)
        took = time.perf_counter() - began
        if took > _WAIT_S and time.thread_time() - computing < _WAITS * took:
            self._wait_less()
        return count

    def _wait_less(self) -> None:
        self._call_bytes = min(2 * self._call_bytes, _MOST_CALL_BYTES)  # a lost update between threads does no harm
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting()


def map_file(path: Path, within: OpenDirectory, nbytes: int) -> MemoryMap:
    with _os_errors_as("mapping", path), _regular(path, within) as descriptor:
        if os.fstat(descriptor).st_size < nbytes:  # an access beyond the end would kill the process (SIGBUS)
            raise CorruptCheckpointError(f"{path} is shorter than the {nbytes} bytes that were saved", file=path.name)
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return MemoryMap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def read_tail(path: Path, within: OpenDirectory | None, nbytes: int) -> bytes:
    with (
        _os_errors_as("reading", path),
        _regular(path, within) as descriptor,
        open(descriptor, "rb", closefd=False) as file,
    ):
        file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
        return file.read(nbytes)


def _buffers_of(run: Sequence[ReadRange]) -> list[memoryview]:
    """Return the memory for the bytes from the first range to the last one, the gaps between them included."""
    position = run[0].offset
    buffers: list[memoryview] = []
    for one in run:
        if one.offset > position:
            buffers.append(_GAP[: one.offset - position])
        buffers.append(one.into)
        position = one.offset + len(one.into)
    return buffers


def _too_short(path: Path, offset: int, missing: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} ends at byte {offset}, but {missing} more belong there", file=path.name, offset=offset
    )


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers that are still to be filled when ``count`` bytes have arrived."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


def size_of(path: Path, within: OpenDirectory) -> int:
    with _os_errors_as("looking at this path", path), _place(path, within) as (name, directory):
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_size


def _versions_of(files: Sequence[str], path: Path, within: OpenDirectory) -> dict[str, Hashable]:
    # No inodes: a file system gives the number of a deleted file to the next one, and a mount of a bucket may number a
    # file anew whenever it looks.
    found: dict[str, Hashable] = {}
    for file in files:
        with _os_errors_as("looking at this path", path / file), _place(path / file, within) as (name, directory):
            status = os.stat(name, dir_fd=directory)
        found[file] = status.st_mtime_ns, status.st_size
    return found


def _moved(path: Path, within: OpenDirectory) -> bool:
    try:
        with within.descriptor() as descriptor:
            opened = os.fstat(descriptor)
    except OSError:
        return False  # the directory was never opened
    try:
        with _os_errors_as("looking at this path", path):
            return not os.path.samestat(opened, os.stat(path, follow_symlinks=True))
    except FileNotFoundError:
        return True


def sizes_in(directory: Path, within: OpenDirectory | None) -> dict[str, int]:
    with _os_errors_as("listing", directory):
        if within is None:
            return _sizes(directory)
        # Opened once more, because all listings through one descriptor share its position.
        with within.descriptor() as descriptor, opened(".", os.O_DIRECTORY, descriptor) as listed:
            return _sizes(listed)


def _sizes(directory: Path | int) -> dict[str, int]:
    sizes = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # the file was deleted since it was listed
                if entry.is_file(follow_symlinks=False):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


@contextmanager
def _os_errors_as(doing: str, path: Path) -> Iterator[None]:
    """Raise the typed error for an ``OSError`` in the ``with`` block. A missing file or directory is a
    ``FileNotFoundError``, which each caller handles in its own way."""
    try:
        yield
    except SidestreamError:
        raise
    except FileNotFoundError as error:
        error.filename = str(path)
        raise
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path)) from error
        if error.errno == errno.ELOOP:
            raise CorruptCheckpointError(f"{path} is a symbolic link", file=path.name) from error
        raise from_os_error(error, doing, str(path)) from error
