"""A hand on every file operation. Nothing of sidestream is replaced: ``Intercept`` stands between it and ``os``, and
between it and the one system call that ``os`` lacks, the exchange of two directories."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPERATIONS = (
    "open", "dup", "close", "write", "writev", "pwrite", "pwritev", "read", "readv", "pread", "preadv", "fsync",
    "fdatasync", "rename", "replace", "link", "symlink", "mkdir", "chmod", "fchmod", "utime", "posix_fallocate",
    "truncate", "ftruncate", "unlink", "remove", "rmdir", "scandir", "listdir", "stat", "lstat", "fstat",
)  # fmt: skip
"""``test_operations`` holds the package to these."""

_WRITES = ("pwrite", "write", "writev", "pwritev", "posix_fallocate", "truncate", "ftruncate")
_ON_LINKS = ("rename", "replace", "link", "symlink", "exchange")
_EXCHANGE = "sidestream._storage.local.directories"


_real_stat = os.stat


def exists(path: str) -> bool:
    """Do this without a call that is intercepted."""
    try:
        _real_stat(path)
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Operation:
    """The ``index``-th call (from 1) of ``os.<name>`` on ``path``. ``call()`` does it."""

    index: int
    name: str
    path: str
    real: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def call(self) -> Any:
        return self.real(*self.args, **self.options)

    @property
    def changes(self) -> bool:
        """Whether it changes what is on disk, other than by removing."""
        if self.name == "open":
            return bool(self.args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if self.name == "mkdir":
            return not exists(self.path)
        return self.name in (*_WRITES, *_ON_LINKS, "fsync", "fdatasync", "chmod", "fchmod", "utime")


@dataclass(frozen=True, slots=True)
class Called:
    """What is kept of an operation: nothing that would keep a buffer alive."""

    name: str
    path: str
    changes: bool
    target: str = ""

    @property
    def visible(self) -> bool:
        """Whether another process can see what it did."""
        removes = self.name in ("unlink", "remove", "rmdir")
        return removes or (self.changes and self.name not in ("fsync", "fdatasync"))


class Intercept:
    """Hands every operation on something at or below ``root`` to ``hook``, which does it with ``operation.call()``.

    Calls come from all threads. ``log`` has what was called, in order; ``running`` calls have not returned yet.
    """

    def __init__(self, root: Path, hook: Callable[[Operation], Any]) -> None:
        self._root = str(root)
        self._hook = hook
        self._lock = threading.Lock()
        self.log: list[Called] = []
        self.running = 0

    @contextmanager
    def installed(self) -> Iterator[Intercept]:
        real = {name: getattr(os, name) for name in OPERATIONS if hasattr(os, name)}
        for name, function in real.items():
            setattr(os, name, self._wrapped(name, function))
        exchanging: Any = sys.modules.get(_EXCHANGE)
        look_up = None if exchanging is None else exchanging._renameat2
        if exchanging is not None:
            exchanging._renameat2 = lambda: self._exchange(look_up)
        try:
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            if exchanging is not None:
                exchanging._renameat2 = look_up

    def _exchange(self, look_up: Callable[[], Any]) -> Callable[..., Any]:
        """``renameat2``, as it is called."""
        renameat2 = look_up()

        def exchange(one_at: int, one: bytes, other_at: int, other: bytes, flags: Any) -> Any:
            call = self._wrapped("exchange", lambda one, other: renameat2(one_at, one, other_at, other, flags))
            return call(one, other)

        return exchange

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def intercepted(*args: Any, **options: Any) -> Any:
            path = _path(args[0] if args else ".", options.get("dir_fd"))
            if path != self._root and not path.startswith(self._root + "/"):
                return real(*args, **options)
            with self._lock:
                operation = Operation(len(self.log) + 1, name, path, real, args, options)
                target = _path(args[1], options.get("dst_dir_fd")) if name in _ON_LINKS else ""
                self.log.append(Called(name, path, operation.changes, target))
                self.running += 1
            try:
                return self._hook(operation)
            finally:
                with self._lock:
                    self.running -= 1

        return intercepted


def _path(target: Any, dir_fd: int | None) -> str:
    if isinstance(target, int):
        try:
            return os.readlink(f"/proc/self/fd/{target}")
        except OSError:
            return ""
    text = os.fsdecode(target)
    if not text.startswith("/"):
        base = os.getcwd() if dir_fd is None else _path(dir_fd, None)
        return f"{base}/{text}"
    return text
