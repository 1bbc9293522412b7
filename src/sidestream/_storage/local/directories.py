"""What is done to directories and names, each in one step: make, open, look at, sync, link, take away, remove."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import ClosedError, from_os_error
from ...options import Durability
from ..names import LEASES, attempt_name, parse_step

__all__ = [
    "RACES",
    "RETIRED",
    "OpenDirectory",
    "collect_orphans",
    "has_leases",
    "is_directory",
    "is_vacant",
    "last_write",
    "link_new",
    "make_root",
    "move_new",
    "remove_tree",
    "storage_time",
    "sync_directory",
    "take_away",
]

RETIRED = ".retired-"
"""How the names of directories begin that are being deleted."""

RACES = 100
"""So often in a row another process may make, or remove, the directory that this one needs or removes."""

_ID = 32 * "0"
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


class OpenDirectory:
    """The directory that ``path`` named when it was first used, for threads that open files in it.

    The descriptor is closed when ``close`` was called and no thread uses it: a thread may still be in a system call
    when its caller has given up on it, and the number of a closed descriptor is soon that of another file. Without
    ``close`` it is closed with the object, which each thread that uses it refers to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()  # never held during a system call that may hang
        self._descriptor: int | None = None
        self._users = 0
        self._closed = False

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Keep the directory open meanwhile; the first thread opens it. Raises ``OSError``, ``ClosedError``."""
        descriptor = self._acquire()
        if descriptor is None:
            descriptor = self._acquire_new(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            yield descriptor
        finally:
            self._release()

    def _acquire(self) -> int | None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.path} was closed by the operation that had opened it")
            if self._descriptor is not None:
                self._users += 1
            return self._descriptor

    def _acquire_new(self, opened: int) -> int:
        """Use ``opened``, unless another thread was faster: all threads use one directory."""
        with self._lock:
            first = self._descriptor is None and not self._closed
            if first:
                self._descriptor = opened
                self._users += 1
        if first:
            return opened
        _close(opened)
        descriptor = self._acquire()
        assert descriptor is not None
        return descriptor

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
        self._close_if_unused()

    def refuse(self) -> bool:
        """Refuse threads that have not acquired the directory yet, also one that hangs while it opens it. Makes no
        system call. Returns whether ``close`` has a descriptor to close."""
        with self._lock:
            self._closed = True
            return self._descriptor is not None

    def close(self) -> None:
        """Close the directory, or have the last thread that uses it close it."""
        self.refuse()
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._lock:
            if self._users or not self._closed:
                return
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _close(descriptor)

    def __del__(self) -> None:
        if self._descriptor is not None:
            _close(self._descriptor)


def _close(directory: int) -> None:
    """Close a descriptor that was read only: an error says nothing about what was read, and it is closed all the
    same."""
    with suppress(OSError):
        os.close(directory)


def make_root(root: Path, durability: Durability, made: list[Path], sync: Callable[[Path], None] | None = None) -> None:
    """Every missing directory down to ``root``, each noted in ``made``. ``sync`` takes the place of
    ``sync_directory``."""
    sync = sync_directory if sync is None else sync
    ancestors = (root, *root.parents)
    missing = [path for path in ancestors if not path.exists()]
    if durability == "fsync" and len(missing) < len(ancestors) - 1:
        # The last one that is there may have been made by a save that was killed before it could sync it.
        with suppress(PermissionError):
            sync(ancestors[len(missing)].parent)
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        made.append(path)
        if durability == "fsync":
            sync(path.parent)


def is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise from_os_error(error, "looking at this path", str(path)) from error


def is_vacant(target: Path) -> bool:
    try:
        if not stat.S_ISDIR(target.lstat().st_mode):
            return False
        with os.scandir(target) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except OSError as error:
        raise from_os_error(error, "looking at this path", str(target)) from error


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    failure = OSError(errno.EBUSY, "files keep vanishing from it")
    try:
        for _ in range(RACES):
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                """Another process deletes the same files."""
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                failure = error  # another rank was creating a file meanwhile
            if not path.exists():
                return
    except OSError as error:
        raise from_os_error(error, "removing", str(path)) from error
    raise from_os_error(failure, "removing", str(path)) from failure


def take_away(root: Path, name: str) -> Path | None:
    """Rename it to where nobody looks for it and nobody can publish it; None if it is not there."""
    hidden = root / f"{RETIRED}{uuid.uuid4().hex}"  # other tools would take the name for a step
    try:
        os.rename(root / name, hidden)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, "removing", str(root / name)) from error
    return hidden


def link_new(hidden: Path, path: Path) -> None:
    """``hidden`` is called ``path`` too: unlike a rename it replaces nothing. Raises ``FileExistsError`` if that is
    another file."""
    try:
        os.link(hidden, path)
    except FileExistsError:
        # NFS sends a request again whose answer was lost, and is told of what the first one did.
        with suppress(OSError):
            if os.path.samestat(os.stat(hidden, follow_symlinks=False), os.stat(path, follow_symlinks=False)):
                return
        raise
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise OSError(
                errno.EOPNOTSUPP,  # not EPERM, which link(2) says here: nobody lacks a permission
                f"this file system makes no hard links ({error.strerror}), and nothing else lets a file appear whole "
                "without replacing another",
            ) from error
        raise


def move_new(hidden: Path, path: Path) -> None:
    """``link_new``; a file system without links renames the file, having looked for another one before."""
    try:
        link_new(hidden, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "another writer was first", str(path)) from error
        os.rename(hidden, path)


def last_write(directory: Path) -> float:
    """Return when the directory, or a file in it, was last written to."""
    times = [0.0]
    with suppress(FileNotFoundError):  # it has just been published or deleted
        times.append(directory.stat().st_mtime)
        with os.scandir(directory) as entries:
            for one in entries:
                with suppress(FileNotFoundError):
                    times.append(one.stat(follow_symlinks=False).st_mtime)
    return max(times)


def storage_time(directory: Path) -> float:
    """The time that the file system gives a file which is written now; this machine's where none can be written."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    with suppress(OSError):
        if hasattr(os, "O_TMPFILE"):
            with open(os.open(directory, flags | os.O_TMPFILE, 0o600), "wb") as nameless:
                return os.fstat(nameless.fileno()).st_mtime
    path = directory / f".clock-{uuid.uuid4().hex}"
    try:
        with open(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), "wb") as named:
            return os.fstat(named.fileno()).st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            os.unlink(path)


def has_leases(root: Path, target: str) -> bool:
    """Return whether ``target`` is a step of a run, where leases tell who lives."""
    return parse_step(target) is not None and (root / LEASES).exists()


def collect_orphans(
    root: Path, target: str, after_s: float, take: Callable[[Path, str], Path | None] = take_away
) -> list[str]:
    """Delete attempts at ``target`` that nobody has written to for ``after_s``, and what is left of deletions that were
    interrupted as long ago, and return their names. A process that still has such an attempt cannot publish it any
    more, if ``take`` takes it out of its reach. In a run nothing is collected: there leases tell who lives. What cannot
    be deleted is passed over."""
    before, _, after = attempt_name(target, _ID).partition(_ID)
    attempt = re.compile(f"{re.escape(before)}[0-9a-f]{{32}}{re.escape(after)}")
    collected: list[str] = []
    with suppress(OSError):
        found = [name for name in os.listdir(root) if attempt.fullmatch(name) or name.startswith(RETIRED)]
        if not found or has_leases(root, target):
            return []
        now = storage_time(root)
        for name in found:
            with suppress(OSError):  # another process collects it, or it may not be deleted
                retired = name.startswith(RETIRED)
                if now - ((root / name).stat().st_ctime if retired else last_write(root / name)) <= after_s:
                    continue
                path = root / name if retired else take(root, name)
                if path is not None:
                    remove_tree(path)
                    collected.append(name)
    return collected
