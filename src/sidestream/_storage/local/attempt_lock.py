"""A lock on an attempt, which its process holds while it lives, so that others know at once when it has ended.

Not every file system has locks, and on some mounts a lock excludes only the processes that use the same mount (Lustre
with ``localflock``, NFS with ``local_lock``, most file systems in user space, of which each container may have a mount
of its own). So the file of the lock contains the boot id of the holder's host, and the number that the kernel gives to
the mounted file system. Only a process with the same two concludes anything from the lock.
"""

from __future__ import annotations

import fcntl
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from weakref import WeakSet

from ..names import MARKER
from .directories import last_write

_NAME = ".writer.partial"  # sidecar files have no names of this form
_PLACE_BYTES = 64


@cache
def boot_id() -> str | None:
    """Return an id that is equal in all processes of this host, in whatever containers they run, until it is booted
    again. None if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


class AttemptLock:
    """The lock of this process on the new, empty directory of an attempt. On a file system without locks nothing is
    locked. The kernel releases the lock when the process ends, and a forked child closes its copy."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _NAME
        self._descriptor: int | None = None
        self._descriptor = _acquire(self._path)
        _held.add(self)

    def release(self) -> None:
        """Delete the file, and release the lock. In the other order, another process would find a free lock and delete
        the attempt. Raises ``OSError`` if the file cannot be deleted."""
        if self._descriptor is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            self.close()

    def close(self) -> None:
        """Release the lock of an attempt that will not be committed. The file stays, so that others delete it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then globals of the module may be gone, and the system closes the descriptor
            self.close()


def _acquire(path: Path) -> int | None:
    """Return a descriptor of the new file ``path``, which is locked. None if that is not possible: then only the time
    of the last write shows whether the process lives.

    The place is written last. Until then others conclude nothing from the file."""
    if boot_id() is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, _place(descriptor))
    except OSError:
        for undo in (partial(os.unlink, path), partial(os.close, descriptor)):
            with suppress(OSError):
                undo()
        return None
    return descriptor


def _place(descriptor: int) -> bytes:
    """Return what is equal in all processes whose locks on this file exclude each other."""
    return f"{boot_id()} {os.fstat(descriptor).st_dev}".encode()


def silence_s(directory: Path, now: float) -> float:
    """Return the time since the last sign of life of the process that writes an attempt: infinity if that process has
    ended, 0 if it has not, and the time since the last write to the attempt if its lock tells nothing. ``now`` is the
    time of the file system."""
    alive = _is_held(directory / _NAME)
    if alive is not None:
        return 0.0 if alive else math.inf
    last = last_write(directory)
    with suppress(FileNotFoundError):
        if (directory / MARKER).exists():
            # It may be a checkpoint that a living process has just replaced, by an exchange that may not be durable.
            # The exchange has changed the status of the directory, and nothing in it.
            last = max(last, directory.stat().st_ctime)
    return now - last


def _is_held(path: Path) -> bool | None:
    """Return whether a process that uses the same mount holds the lock; None if that is unknown."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.read(descriptor, _PLACE_BYTES) != _place(descriptor):
            return None
        # Shared, so that two processes that look at the same moment do not take each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # The holder deletes the file before it releases the lock, when it publishes or discards the attempt.
        same = os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
        return False if same else None
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)


_held: WeakSet[AttemptLock] = WeakSet()


def _close_after_fork() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_after_fork)
