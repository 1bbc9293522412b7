"""Sources of ``files=``: bytes and small local files that are saved as sidecar files of a checkpoint."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping
from typing import Any

import aiofiles

from ..._runtime.tasks import run_shielded
from ...errors import DeadlineExceededError, InvalidOptionError, from_os_error
from ...options import FileSource

_MOST_BYTES = 64 << 20
_MOST_NAME_BYTES = 200  # object storage adds a prefix of 38 characters
_GRACE_S = 5.0
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # do not wait for a pipe
_OWN_STARTS = ("__", "manifest-", "file-")
_OWN_ENDS = (".distcp", ".metadata", ".partial")


def check_sources(files: Mapping[str, FileSource] | None) -> dict[str, FileSource]:
    """Return ``files``, the sidecar files of a checkpoint. Raises ``InvalidOptionError`` for a name that is not a plain
    file name, for a name that other files of checkpoints have, and for a source of another type."""
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise InvalidOptionError(f"files={files!r:.80} has to be a mapping of file names to bytes or paths")
    for name, one in files.items():
        if not is_plain_name(name) or name.startswith(_OWN_STARTS) or name.endswith(_OWN_ENDS):
            raise InvalidOptionError(
                f"files={name!r} has to be a plain file name of {_MOST_NAME_BYTES} bytes at most, and no name of the "
                "files of a checkpoint (__*, manifest-*, file-*, *.distcp, *.metadata, *.partial)"
            )
        if not isinstance(one, bytes | str | os.PathLike):
            raise InvalidOptionError(f"files[{name!r}] has to be bytes or a path, not a {type(one).__name__}")
        if isinstance(one, bytes) and len(one) > _MOST_BYTES:
            raise _too_large(name, f"{len(one)} bytes")
    return dict(files)


def is_plain_name(name: object) -> bool:
    """Return whether ``name`` can be the name of a file on every store: one component, printable, not hidden."""
    if not isinstance(name, str) or not name or name[0] == "." or name[1:2] == ":" or not name.isprintable():
        return False
    return "/" not in name and "\\" not in name and len(name.encode()) <= _MOST_NAME_BYTES


async def read_sources(files: Mapping[str, FileSource], *, timeout_s: float) -> dict[str, bytes]:
    """Return the content of ``files``. If this task is cancelled meanwhile, the files are still read to their end.

    Raises ``InvalidOptionError`` for a path that is not a regular file and for a file of more than 64 MiB,
    ``DeadlineExceededError`` 5 s after ``timeout_s``, and a typed error for each error of the file system.
    """
    found = {name: one for name, one in files.items() if isinstance(one, bytes)}
    paths = {name: one for name, one in files.items() if not isinstance(one, bytes)}
    if not paths:
        return found

    async def read() -> None:
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                for name, path in paths.items():
                    found[name] = await _read(name, path)
        except TimeoutError:
            raise DeadlineExceededError(f"reading files=: not done within {timeout_s:.0f} s") from None

    # Shielded, because ``aiofiles`` abandons a thread that is opening a file when its task is cancelled: the descriptor
    # would stay open, and this call would return while the thread is still at work. So it reads these small files and
    # nothing of a checkpoint.
    await run_shielded(read)
    return {name: found[name] for name in files}


async def _read(name: str, path: str | os.PathLike[str]) -> bytes:
    try:
        async with aiofiles.open(path, "rb", opener=_open) as file:
            # Of the open file, and not of the path: another file may take its name between the two calls.
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:
                raise _too_large(name, os.fspath(path))
            content = await file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise from_os_error(error, f"reading files[{name!r}]", os.fspath(path)) from error
    except InvalidOptionError:
        raise
    except ValueError as error:  # of a null character, or of a surrogate
        raise InvalidOptionError(f"files[{name!r}]: {os.fspath(path)!r} is not a path: {error}") from None
    if len(content) > _MOST_BYTES:  # the file has grown since ``fstat``
        raise _too_large(name, os.fspath(path))
    return content


def _open(path: Any, _: int) -> int:
    return os.open(path, _OPEN_FLAGS)


def _too_large(name: str, what: str) -> InvalidOptionError:
    return InvalidOptionError(f"files[{name!r}]: {what} has to be a regular file of 64 MiB at most")
