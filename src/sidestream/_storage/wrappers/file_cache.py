"""A cache of whole files on local disk, shared by all processes of a host. The files have the names that fsspec's
``simplecache`` gives them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.implementations.cache_mapper import HashCacheMapper

from ..._runtime.threads import current_deadline, io_threads
from ...errors import is_stuck

if TYPE_CHECKING:
    from filelock import BaseFileLock

_LOCK = ".lock"
_PARTIAL = ".partial"
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1
_ABANDONED_S = 3600.0
"""On file systems without locks, a partial file that was last written to longer ago than this counts as left behind by
a dead process."""
_NO_LOCKS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP})  # of the file system


class FileCache:
    """A cache of files whose names are never used again. Readers verify the content of cached files like that of all
    files.

    Each file is fetched once per host, by the read that holds its ``FetchLock``. That read writes the file under a
    unique name, and renames it when all bytes are there. fsspec itself writes a file under its final name, where
    another process may read an incomplete file.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._name = HashCacheMapper()

    async def read(self, filesystem: Any, key: str, start: int, end: int) -> memoryview:
        """Return bytes ``start`` to ``end``, or fewer at the end of the file. ``filesystem`` has the file.

        The first read of a file fetches all of it. Other reads, in all processes of this host, wait for the fetch until
        their own deadline. If the fetch fails, one of them fetches the file. Raises ``DeadlineExceededError``, and
        what the file system raises.
        """
        path = self._directory / str(self._name(key))
        while (content := await io_threads().run(_read, path, start, end)) is None:
            await _provide(filesystem.get_file, key, path)
        return content


class FetchLock:
    """What the read holds that fetches ``path``: at most one read of all processes of this host holds it. If its
    process ends, the kernel releases it. A forked child does not hold it.

    On a file system without locks it excludes only the reads of this process (``among_processes`` is False).
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + _LOCK)
        self._file: BaseFileLock | None = None
        self._releasing = threading.Lock()

    @property
    def among_processes(self) -> bool:
        """Whether the lock is held, and no other process of this host holds it."""
        return self._file is not None and self._file.is_locked

    def try_acquire(self) -> bool:
        """Return whether this call has acquired the lock. Called in a thread. Raises ``OSError`` if the file of the
        lock cannot be created."""
        from filelock import FileLock, Timeout  # here, because the import takes 40 ms, and few programs have a cache

        if _held.setdefault((os.getpid(), self._path), self) is not self:
            return False
        # Others wait for a read that hangs until its deadline only, so another thread may release the lock. Without
        # the mode, another user of the directory could not open the file.
        self._file = FileLock(self._path, mode=0o666, thread_local=False, fallback_to_soft=False)
        try:
            self._file.acquire(blocking=False)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _NO_LOCKS:
                return True
            self.release()
            if isinstance(error, Timeout):
                return False
            raise
        return True

    def release(self) -> None:
        """Release the lock if this object holds it. From any thread."""
        with self._releasing:
            if self._file is not None and self._file.is_locked:
                with suppress(OSError):
                    # While it is locked: who has opened the file meanwhile finds out that it was deleted, and does not
                    # acquire it. A file deleted later could be the lock of another process.
                    self._path.unlink()
                self._file.release()
            if _held.get((os.getpid(), self._path)) is self:
                del _held[os.getpid(), self._path]


_held: dict[tuple[int, Path], FetchLock] = {}


async def _provide(get_file: Callable[[str, str], object], key: str, path: Path) -> None:
    """Fetch ``path``, or wait until another read has fetched it."""
    lock = FetchLock(path)
    pause_s, deadline = _FIRST_PAUSE_S, current_deadline()
    try:
        while not await io_threads().run(_fetch_if_free, get_file, key, path, lock):
            deadline.check(f"waiting for another read that fetches {key}")
            await asyncio.sleep(min(pause_s, deadline.remaining_s()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except BaseException as error:
        if is_stuck(error):  # the thread hangs in its fetch; the name of its partial file is unique
            io_threads().submit(lock.release)
        raise


def _fetch_if_free(get_file: Callable[[str, str], object], key: str, path: Path, lock: FetchLock) -> bool:
    """Fetch ``path``, unless another read fetches it, and return whether it is there."""
    if path.exists():
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    if not lock.try_acquire():
        return False
    try:
        current_deadline().check(f"fetching {key}")  # this thread may have hung until its caller had left it
        if not path.exists():
            _sweep(path, lock)
            _fetch(get_file, key, path)
    finally:
        lock.release()
    return True


def _fetch(get_file: Callable[[str, str], object], key: str, path: Path) -> None:
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
    try:
        get_file(key, str(partial))
        try:
            partial.replace(path)
        except FileNotFoundError as error:  # callers would take it for a missing object
            raise ConnectionError(f"{partial} was deleted before all bytes were there") from error
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path, start: int, end: int) -> memoryview | None:
    """Return the bytes of the file; None if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return memoryview(file.read(end - start))
    except FileNotFoundError:
        return None


def _sweep(path: Path, own: FetchLock) -> None:
    """Delete the partial files of processes that ended during a fetch, for all files in the directory of ``path``.
    ``own`` is the lock of ``path``. The lock of a file is held during its fetch. So if the lock can be acquired, no
    process is fetching the file."""
    names = {name.partition(".")[0] for name in os.listdir(path.parent) if name.endswith((_PARTIAL, _LOCK))}
    _sweep_partials(path, own)
    for name in names - {path.name}:
        lock = FetchLock(path.with_name(name))
        try:
            with suppress(OSError):  # the files of another user
                if lock.try_acquire():
                    _sweep_partials(path.with_name(name), lock)
        finally:
            lock.release()


def _sweep_partials(path: Path, lock: FetchLock) -> None:
    for partial in path.parent.glob(f"{path.name}.*{_PARTIAL}"):
        with suppress(FileNotFoundError):
            if lock.among_processes or time.time() - partial.stat().st_mtime > _ABANDONED_S:
                partial.unlink()
