"""A read-through cache on local disk, for fleets of readers: whole files, under the names of ``simplecache``."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from fsspec.implementations.cache_mapper import HashCacheMapper

__all__ = ["FileCache"]


class FileCache:
    """Keeps files whose names are never used again; their content is verified by whoever reads it, as always.

    fsspec itself writes a file under its final name, where another process may find half of it: here it is fetched
    under a name of this thread first.
    """

    def __init__(self, filesystem: Any, directory: str) -> None:
        self._filesystem = filesystem
        self._directory = Path(directory)
        self._name = HashCacheMapper()
        self._fetching: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def read(self, key: str, start: int, end: int) -> memoryview:
        """In a thread. The first read of a file fetches all of it."""
        path = self._directory / str(self._name(key))
        with self._lock:
            fetching = self._fetching.setdefault(key, threading.Lock())
        with fetching:
            if not path.exists():
                self._fetch(key, path)
        with path.open("rb") as file:
            file.seek(start)
            return memoryview(file.read(end - start))

    def _fetch(self, key: str, path: Path) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
        try:
            self._filesystem.get_file(key, str(partial))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
