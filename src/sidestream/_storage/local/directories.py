"""Operations on directories and names: make, open, inspect, sync, link, rename, exchange, remove."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import ClosedError, from_os_error, os_errors_as
from ...options import Durability
from ..names import LEASES, parse_step

RACES = 100
"""The number of attempts at an operation that fails because another process makes or removes the same directory."""

_RETIRED = re.compile(r"\.retired-(?:step-[0-9.g]+-)?[0-9a-f]{32}")  # earlier versions put the step into it
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


class _Descriptor:
    """The descriptor of a directory that was only read. It is closed with the last reference to this object. Errors of
    that are ignored: they do not concern the bytes that were read, and the descriptor is closed also then."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, the globals of the module may be gone, and the system closes the descriptor.
        if hasattr(self, "number") and not is_finalizing():
            with suppress(OSError):
                os.close(self.number)


class OpenDirectory:
    """The directory that ``path`` named when it was first used, for threads that open files in it.

    The descriptor is closed when ``close`` was called and no thread uses it any more. A thread may still be in a system
    call when its caller has stopped waiting for it, and the number of a closed descriptor is soon used for another
    file. Without ``close``, the descriptor is closed when the object is freed. Each thread that uses the descriptor
    keeps a reference to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()  # never held during a system call that may hang
        self._opened: _Descriptor | None = None
        self._closed = False

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Keep the directory open in this context. The first thread opens it. Raises ``OSError`` and
        ``ClosedError``."""
        opened = self._shared()
        if opened is None and not self._closed:
            # Opened without the lock, because the call may hang. Two threads may both open it, also two directories if
            # another one takes the name between them. The first one to enter its descriptor decides for all.
            opened = self._shared(_Descriptor(self.path))
        if opened is None:
            raise ClosedError(f"{self.path} was closed by the operation that had opened it")
        try:
            yield opened.number
        finally:
            del opened  # the frames of an error keep no reference

    def _shared(self, opened: _Descriptor | None = None) -> _Descriptor | None:
        """Return the descriptor that all threads use, which is ``opened`` if there was none. None once the directory is
        refused."""
        with self._lock:
            if self._closed:
                return None
            self._opened = self._opened or opened
            return self._opened

    def refuse(self) -> bool:
        """Refuse threads that have not acquired the directory yet, also a thread that hangs while it opens it. Makes no
        system call. Returns whether ``close`` has a descriptor to close."""
        with self._lock:
            self._closed = True
            return self._opened is not None

    def close(self) -> None:
        """Close the directory. If threads still use it, the last of them closes it."""
        self.refuse()
        self._opened = None


def make_root(root: Path, durability: Durability, made: list[Path], sync: Callable[[Path], None]) -> None:
    """Make every missing directory down to ``root``, and append each to ``made``."""
    ancestors = (root, *root.parents)
    # A directory that was made is durable only when its parent has been synced, so every parent of a new one is.
    missing = [path for path in ancestors if not path.exists()]
    if durability == "fsync" and len(missing) < len(ancestors) - 1:
        # The deepest existing directory may have been made by a save that was killed before it could sync it.
        with suppress(PermissionError):
            sync(ancestors[len(missing)].parent)
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        made.append(path)
        if durability == "fsync":
            sync(path.parent)


def is_retired(name: str) -> bool:
    """Return whether ``take_away`` has made this name: whether the directory is being deleted."""
    return _RETIRED.fullmatch(name) is not None


def is_vacant(target: Path) -> bool:
    with os_errors_as("looking at this path", target):
        try:
            if not stat.S_ISDIR(target.lstat().st_mode):
                return False
            with os.scandir(target) as entries:
                return next(entries, None) is None
        except FileNotFoundError:
            return True


@contextmanager
def opened(path: Path | str, flags: int, within: int | None = None) -> Iterator[int]:
    """Keep ``path`` open for reading in this context. ``within`` is the descriptor of a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    with opened(path, os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def remove_tree(path: Path) -> None:
    failure = OSError(errno.EBUSY, "files keep vanishing from it")
    with os_errors_as("removing", path):
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
        raise failure


def unlink(path: Path) -> None:
    with os_errors_as("removing", path):
        path.unlink(missing_ok=True)


def unlink_or_remove(path: Path) -> None:
    """Delete a file, or a directory with everything in it."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        unlink(path)


def take_away(root: Path, name: str) -> Path | None:
    """Rename the directory, so that readers do not find it and its writer cannot publish it, and return its new path.
    Return None if it does not exist."""
    hidden = root / f".retired-{uuid.uuid4().hex}"  # not ``name``, because other tools search names for steps
    with os_errors_as("removing", root / name):
        try:
            # One rename takes the directory away from readers and from its writer at once. The deletion may then take
            # as long as it needs, or be interrupted: the new name says that it is garbage.
            os.rename(root / name, hidden)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return hidden


def link_new(hidden: Path, path: Path) -> None:
    """Link ``path`` to the file ``hidden``. Unlike a rename, this never replaces a file. Raises ``FileExistsError`` if
    ``path`` is another file."""
    try:
        os.link(hidden, path)
    except FileExistsError:
        # When an answer is lost, NFS sends the request again, which fails because of the first one.
        with suppress(OSError):
            if os.path.samestat(os.stat(hidden, follow_symlinks=False), os.stat(path, follow_symlinks=False)):
                return
        raise
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise OSError(
                errno.EOPNOTSUPP,  # link(2) says EPERM, but the cause is not a lack of permissions
                f"this file system makes no hard links ({error.strerror}), and nothing else lets a file appear whole "
                "without replacing another",
            ) from error
        raise


def move_new(hidden: Path, path: Path) -> None:
    """Do ``link_new``. On a file system without hard links, rename the file after a check that ``path`` does not
    exist."""
    try:
        link_new(hidden, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        # The best that is left without hard links. Two writers may both pass the check, and the second rename then
        # replaces the file of the first.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "another writer was first", str(path)) from error
        os.rename(hidden, path)


def last_write(directory: Path) -> float:
    """Return the time of the last write to the directory or to a file in it."""
    times = [0.0]
    with suppress(FileNotFoundError):  # the directory has just been published or deleted
        # The time of a directory changes when a file is made or removed, and the time of a file when it is written. A
        # writer that fills one large file changes only the latter.
        times.append(directory.stat().st_mtime)
        with os.scandir(directory) as entries:
            for one in entries:
                with suppress(FileNotFoundError):
                    times.append(one.stat(follow_symlinks=False).st_mtime)
    return max(times)


def storage_time(directory: Path) -> float:
    """Return the time that the file system gives to a file that is written now. If no file can be written, return the
    time of this machine."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    with suppress(OSError):
        # A file without a name cannot be taken for a part of what is in the directory. If the process is killed here,
        # nothing is left behind.
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
    """Return whether ``target`` is a step of a run. There leases show which processes are alive."""
    return parse_step(target) is not None and (root / LEASES).exists()


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories. Raises ``OSError``, with ``ENOSYS`` or ``EINVAL`` if the kernel, the C library or the
    file system does not support it."""
    try:
        renameat2 = _renameat2()
    except (AttributeError, OSError):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(one), None, str(other)) from None
    paths = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))


@cache
def _renameat2() -> Any:
    """Return the C function. It is looked up once, because each look-up makes a class that only a garbage collection
    frees."""
    return ctypes.CDLL(None, use_errno=True).renameat2


def exchanges(directory: Path) -> bool:
    """Return whether two directories within ``directory`` can be exchanged. This makes two and tries it, because there
    is no other way to find out."""
    pair = directory / ".one", directory / ".other"
    try:
        for path in pair:
            path.mkdir()
        exchange(*pair)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            return False
        raise from_os_error(error, "trying to exchange two directories", str(directory)) from error
    finally:
        for path in pair:
            with suppress(OSError):
                path.rmdir()
    return True
