"""Local directories: direct I/O where the file system takes it, everything synced, one rename to publish."""

from __future__ import annotations

import errno
import mmap
import os
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..._runtime.threads import Stop
from ...errors import CheckpointExistsError, StorageError, from_os_error
from ...options import Capabilities, Durability
from ..bodies import Body
from ..store import Leftover, ReadRange
from ..transaction import Attempt, StoreAddress, Transaction
from .directories import RACES, RETIRED, make_root, remove_tree, sync_directory, take_away
from .read import LocalSource, map_file, read_ranges, read_tail, run_io, size_of, sizes_in
from .transaction import LocalTransaction
from .write import write_file

__all__ = ["LocalStore"]

_ATTEMPT = re.compile(r"\..+\.[0-9a-f]{32}\.partial")


class LocalStore:
    """A ``Store`` over the directory ``root``, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    capabilities = Capabilities(create_only=True, listing=True, mapping=True, rename=True)

    retired_note = None

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(str(self.root))

    def begin(self, attempt: Attempt) -> Transaction:
        return LocalTransaction(self.root, attempt)

    def check_replaces(self) -> None:
        """Do nothing: whether the file system exchanges directories is known when it is asked to."""

    async def put(self, name: str, body: Body, *, durability: Durability) -> None:
        stop = Stop()
        await run_io(_put, self.root, self.root / name, body, durability, stop, stop=stop)

    async def discard(self, leftover: str) -> None:
        await run_io(_discard, self.root, leftover)

    async def retire(self, directory: str, *, durability: Durability) -> None:
        await run_io(_retire, self.root, directory, durability)

    async def leftovers(self) -> list[Leftover]:
        return await run_io(_leftovers, self.root)

    async def remove(self, names: Sequence[str]) -> None:
        await run_io(_remove, self.root, tuple(names))

    async def ages(self, directory: str) -> dict[str, float]:
        return await run_io(_ages, self.root / directory)

    async def read(self, name: str, ranges: Sequence[ReadRange]) -> None:
        stop = Stop()
        await run_io(read_ranges, self.root / name, None, ranges, stop, stop=stop)

    def source(self, directory: str) -> LocalSource:
        return LocalSource(self.root / directory, directory)

    async def map(self, name: str, nbytes: int) -> mmap.mmap:
        return await run_io(map_file, self.root / name, None, nbytes)

    async def read_tail(self, name: str, nbytes: int) -> bytes:
        return await run_io(read_tail, self.root / name, None, nbytes)

    async def size(self, name: str) -> int:
        return await run_io(size_of, self.root / name, None)

    async def sizes(self, directory: str) -> dict[str, int]:
        return await run_io(sizes_in, self.root / directory, None)

    async def directories(self, directory: str = ".") -> list[str]:
        return await run_io(_directories, self.root / directory)


# --- what runs in threads; each function owns the descriptors that it opens ---


def _put(root: Path, path: Path, body: Body, durability: Durability, stop: Stop) -> None:
    for _ in range(RACES):  # whoever removes the last file of a directory removes the directory too
        try:
            write_file(path, body, durability, stop)
            return
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
        try:
            if not root.exists():  # also for a file that need not last: a save that comes next relies on its parents
                make_root(root, "fsync", [])
            path.parent.mkdir(exist_ok=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise from_os_error(error, "creating a directory", str(path.parent)) from error
    raise CheckpointExistsError(f"{path.parent} is removed as often as it is made")


def _discard(root: Path, leftover: str) -> None:
    path = root / leftover if leftover.startswith(RETIRED) else take_away(root, leftover)
    if path is not None:
        remove_tree(path)


def _retire(root: Path, directory: str, durability: Durability) -> None:
    hidden = take_away(root, directory)
    if hidden is None:
        return
    if durability == "fsync":
        try:
            sync_directory(root)
        except OSError as error:
            raise from_os_error(error, "removing", str(root / directory)) from error
    remove_tree(hidden)


def _leftovers(root: Path) -> list[Leftover]:
    try:
        with os.scandir(root) as entries:
            names = [one.name for one in entries if one.name.startswith(".") and one.is_dir(follow_symlinks=False)]
        found = [(name, "retired") for name in names if name.startswith(RETIRED)]
        found += [(name, "attempt") for name in names if _ATTEMPT.fullmatch(name)]
        if not found:
            return []
        now = _storage_time(root)
        return [Leftover(name, kind, now - _last_write(root / name)) for name, kind in found]  # type: ignore[arg-type]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, "listing", str(root)) from error


def _last_write(directory: Path) -> float:
    times = [0.0]
    with suppress(FileNotFoundError):  # it has just been published or deleted
        times.append(directory.stat().st_mtime)
        with os.scandir(directory) as entries:
            for one in entries:
                with suppress(FileNotFoundError):
                    times.append(one.stat(follow_symlinks=False).st_mtime)
    return max(times)


def _remove(root: Path, names: tuple[str, ...]) -> None:
    for path in [root / name for name in names]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise from_os_error(error, "removing", str(path)) from error
    for parent in {(root / name).parent for name in names} - {root}:
        with suppress(OSError):  # others still have files in it
            parent.rmdir()


def _ages(directory: Path) -> dict[str, float]:
    try:
        with os.scandir(directory) as entries:
            found = list(entries)
        if not found:
            return {}
        now = _storage_time(directory)
        ages = {}
        for one in found:
            with suppress(FileNotFoundError):
                ages[one.name] = now - one.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise from_os_error(error, "listing", str(directory)) from error
    return ages


def _storage_time(directory: Path) -> float:
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


def _directories(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return [one.name for one in entries if one.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, "listing", str(root)) from error
