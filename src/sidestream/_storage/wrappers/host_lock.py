"""A lock among all processes of one host, as a file that its holder deletes."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["HostLock"]

_NO_LOCKS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP})  # of the file system


class HostLock:
    """The lock file ``path``. At most one thread of all processes of this host holds it; if its process ends, the
    kernel releases it.

    On a file system without locks it excludes only the threads of this process (``among_processes`` is False). Its
    methods only make system calls on a local file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def among_processes(self) -> bool:
        """Whether the lock is held, and no other process of this host holds it."""
        return self._descriptor is not None

    def try_acquire(self) -> bool:
        """Return whether this call has acquired the lock. Raises ``OSError`` if the file cannot be created."""
        with _guard:
            if self._path in _held:
                return False
            _held[self._path] = self
        try:
            descriptor = _locked(self._path)
        except BaseException as error:
            self.release()
            if isinstance(error, BlockingIOError):
                return False
            raise
        with _guard:
            if _held.get(self._path) is self:
                self._descriptor = descriptor
                return True
        if descriptor is not None:  # ``release`` was called while this thread waited for the file system
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Release the lock if this object holds it. From any thread."""
        with _guard:
            if _held.get(self._path) is not self:
                return
            del _held[self._path]
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                self._path.unlink()  # before others can lock it: see ``_locked``
            os.close(descriptor)


_held: dict[Path, HostLock] = {}
_guard = threading.Lock()


def _locked(path: Path) -> int | None:
    """Return a descriptor of ``path`` that is locked; None on a file system without locks. Raises ``BlockingIOError``
    if another process has locked it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have deleted the file after it was opened here: then others lock another file.
        if not _is_at(descriptor, path):
            raise BlockingIOError(errno.EWOULDBLOCK, "the lock was released in this moment", str(path))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            return None
        raise
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _forget_after_fork() -> None:
    """Close the descriptors in the child: a copy of one would keep its lock beyond the end of the parent."""
    global _guard
    for lock in _held.values():
        if lock._descriptor is not None:
            os.close(lock._descriptor)
    _held.clear()
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
