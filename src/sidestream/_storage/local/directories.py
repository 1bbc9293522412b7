"""What is done to directories and names, each in one step: make, look at, sync, link, take away, remove."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from ...errors import from_os_error
from ...options import Durability

__all__ = [
    "RACES",
    "RETIRED",
    "is_directory",
    "is_vacant",
    "link_new",
    "make_root",
    "remove_tree",
    "sync_directory",
    "take_away",
]

RETIRED = ".retired-"
"""How the names of directories begin that are being deleted."""

RACES = 100
"""So often in a row another process may make, or remove, the directory that this one needs or removes."""

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


def make_root(root: Path, durability: Durability, made: list[Path]) -> None:
    """Every missing directory down to ``root``, each noted in ``made``."""
    ancestors = (root, *root.parents)
    missing = [path for path in ancestors if not path.exists()]
    if durability == "fsync" and len(missing) < len(ancestors) - 1:
        # The last one that is there may have been made by a save that was killed before it could sync it.
        with suppress(PermissionError):
            sync_directory(ancestors[len(missing)].parent)
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        made.append(path)
        if durability == "fsync":
            sync_directory(path.parent)


def is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise from_os_error(error, "looking at", str(path)) from error


def is_vacant(target: Path) -> bool:
    try:
        if not stat.S_ISDIR(target.lstat().st_mode):
            return False
        with os.scandir(target) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except OSError as error:
        raise from_os_error(error, "looking at", str(target)) from error


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
    hidden = root / f"{RETIRED}{name[:200]}-{uuid.uuid4().hex}"
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
