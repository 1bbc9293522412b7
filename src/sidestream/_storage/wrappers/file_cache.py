"""A read-through cache on local disk, for fleets of readers: whole files, under the names of ``simplecache``."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsspec.implementations.cache_mapper import HashCacheMapper

from ..._runtime.threads import Deadline

__all__ = ["FileCache"]


@dataclass(frozen=True, slots=True, eq=False)
class _Fetch:
    """Somebody is at it; not for longer than until ``deadline``, or it hangs."""

    deadline: Deadline
    ended: threading.Event = field(default_factory=threading.Event)


class FileCache:
    """Keeps files whose names are never used again; their content is verified by whoever reads it, as always.

    fsspec itself writes a file under its final name, where another process may find half of it: here it is fetched
    under a name of this thread first.
    """

    def __init__(self, filesystem: Any, directory: str) -> None:
        self._filesystem = filesystem
        self._directory = Path(directory)
        self._name = HashCacheMapper()
        self._fetching: dict[str, _Fetch] = {}
        self._lock = threading.Lock()

    def read(self, key: str, start: int, end: int, deadline: Deadline) -> memoryview:
        """In a thread. The first read of a file fetches all of it, and others wait for that, until its deadline or
        their own. Raises ``DeadlineExceeded``, and what the file system raises."""
        path = self._directory / str(self._name(key))
        while not path.exists():
            deadline.check(f"fetching {path.name}")
            own = _Fetch(deadline)
            with self._lock:
                other = self._fetching.get(key)
                if other is None or other.deadline.remaining_s() == 0:
                    other = None
                    self._fetching[key] = own
            if other is not None:
                other.ended.wait(min(deadline.remaining_s(), other.deadline.remaining_s()))
                continue
            try:
                self._fetch(key, path)
            finally:
                own.ended.set()
                with self._lock:
                    if self._fetching.get(key) is own:
                        del self._fetching[key]
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
