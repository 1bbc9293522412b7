"""The exchange of two directories in one atomic step, on file systems that support it."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["exchange", "exchanges"]

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
        raise
    finally:
        for path in pair:
            with suppress(OSError):
                path.rmdir()
    return True
