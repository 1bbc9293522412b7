"""A read-through cache on local disk, for all processes of a host: whole files, under the names of ``simplecache``."""

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
"""How long a partial file that no lock protects has not been written to before it counts as left by a dead process."""


class FileCache:
    """Keeps files whose names are never used again; readers verify their content, as that of every file.

    Each file is fetched once per host: by the process that holds its ``HostLock``, under a name of its own that becomes
    the final name when all bytes are there. fsspec itself writes a file under its final name, where another process may
    find half of it.
    """

    def __init__(self, filesystem: Any, directory: str) -> None:
        self._filesystem = filesystem
        self._directory = Path(directory)
        self._name = HashCacheMapper()

    async def read(self, key: str, start: int, end: int) -> memoryview:
        """Return bytes ``start`` to ``end``, or fewer at the end of the file.

        The first read of a file fetches all of it, and others wait for that, in all processes of this host, until their
        own deadline or that of the fetch; then another one fetches. Raises ``DeadlineExceededError``, and what the file
        system raises.
        """
        path = self._directory / str(self._name(key))
        while (content := await io_threads().run(_read, path, start, end)) is None:
            await self._provide(key, path)
        return content

    async def _provide(self, key: str, path: Path) -> None:
        """Return when ``path`` is there: fetch it, or wait for another read that does."""
        lock = HostLock(path.with_name(path.name + _LOCK))
        pause_s, deadline = _FIRST_PAUSE_S, current_deadline()
        try:
            while not await io_threads().run(_is_there_or_locked, path, lock):
                deadline.check(f"waiting for another read that fetches {key}")
                await asyncio.sleep(min(pause_s, deadline.remaining_s()))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await io_threads().run(self._fetch, key, path, lock)
        finally:
            lock.release()  # also if the thread hangs in its fetch: what it still writes has a name of its own

    def _fetch(self, key: str, path: Path, lock: HostLock) -> None:
        if path.exists():
            return
        _sweep(path, lock)
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
        try:
            self._filesystem.get_file(key, str(partial))
            try:
                partial.replace(path)
            except FileNotFoundError as error:  # which would mean that the storage has no such object
                raise ConnectionError(f"{partial} was deleted before all bytes were there") from error
        finally:
            partial.unlink(missing_ok=True)


def _read(path: Path, start: int, end: int) -> memoryview | None:
    """Return None if there is no such file."""
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
    """Delete what processes left that ended during a fetch, of all files beside ``path``. ``own`` is the lock of
    ``path``. The lock of a file is held for as long as it is fetched, so what can be locked has been left."""
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
