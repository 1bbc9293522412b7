"""A cache of whole files on local disk, shared by all processes of a host. The files have the names that fsspec's
``simplecache`` gives them."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.implementations.cache_mapper import HashCacheMapper

from ..._runtime.threads import current_deadline, io_threads
from .host_lock import HostLock

__all__ = ["FileCache"]

_LOCK = ".lock"
_PARTIAL = ".partial"
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1
_ABANDONED_S = 3600.0
"""On file systems without locks, a partial file that was last written to longer ago than this counts as left behind by
a dead process."""


class FileCache:
    """A cache of files whose names are never used again. Readers verify the content of cached files like that of all
    files.

    Each file is fetched once per host, by the process that holds its ``HostLock``. That process writes the file under a
    unique name, and renames it when all bytes are there. fsspec itself writes a file under its final name, where
    another process may read an incomplete file.
    """

    def __init__(self, filesystem: Any, directory: str) -> None:
        self._filesystem = filesystem
        self._directory = Path(directory)
        self._name = HashCacheMapper()

    async def read(self, key: str, start: int, end: int) -> memoryview:
        """Return bytes ``start`` to ``end``, or fewer at the end of the file.

        The first read of a file fetches all of it. Other reads, in all processes of this host, wait for the fetch until
        their own deadline. If the fetch fails, one of them fetches the file. Raises ``DeadlineExceededError``, and
        what the file system raises.
        """
        path = self._directory / str(self._name(key))
        while (content := await io_threads().run(_read, path, start, end)) is None:
            await self._provide(key, path)
        return content

    async def _provide(self, key: str, path: Path) -> None:
        """Fetch ``path``, or wait until another read has fetched it."""
        lock = HostLock(path.with_name(path.name + _LOCK))
        pause_s, deadline = _FIRST_PAUSE_S, current_deadline()
        try:
            while not await io_threads().run(_is_there_or_locked, path, lock):
                deadline.check(f"waiting for another read that fetches {key}")
                await asyncio.sleep(min(pause_s, deadline.remaining_s()))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await io_threads().run(self._fetch, key, path, lock)
        finally:
            lock.release()  # also if the thread hangs in its fetch: the name of its partial file is unique

    def _fetch(self, key: str, path: Path, lock: HostLock) -> None:
        if path.exists():
            return
        _sweep(path, lock)
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
        try:
            self._filesystem.get_file(key, str(partial))
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


def _is_there_or_locked(path: Path, lock: HostLock) -> bool:
    if path.exists():
        return True
    path.parent.mkdir(parents=True, exist_ok=True)
    return lock.try_acquire()


def _sweep(path: Path, own: HostLock) -> None:
    """Delete the partial files of processes that ended during a fetch, for all files in the directory of ``path``.
    ``own`` is the lock of ``path``. The lock of a file is held during its fetch. So if the lock can be acquired, no
    process is fetching the file."""
    names = {name.partition(".")[0] for name in os.listdir(path.parent) if name.endswith((_PARTIAL, _LOCK))}
    _sweep_partials(path, own)
    for name in names - {path.name}:
        lock = HostLock(path.with_name(name + _LOCK))
        try:
            with suppress(OSError):  # the files of another user
                if lock.try_acquire():
                    _sweep_partials(path.with_name(name), lock)
        finally:
            lock.release()


def _sweep_partials(path: Path, lock: HostLock) -> None:
    for partial in path.parent.glob(f"{path.name}.*{_PARTIAL}"):
        with suppress(FileNotFoundError):
            if lock.among_processes or time.time() - partial.stat().st_mtime > _ABANDONED_S:
                partial.unlink()
