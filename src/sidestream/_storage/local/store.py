"""Local directories: direct I/O where the file system takes it, everything synced, one rename to publish."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

from ..._runtime.threads import Deadline, Stop, Threads, io_threads
from ...errors import (
    Conflict,
    Corrupt,
    NotDurable,
    NotShared,
    SidestreamError,
    StorageError,
    from_os_error,
    without_frames,
)
from ...options import Durability
from ..coalesce import coalesce
from ..store import Body, Leftover, Naming, Part, Place, ReadRange, StoreAddress
from .exchange import exchange, exchanges

__all__ = ["LocalStore"]

_MAX_TRANSFER_BYTES = 0x7FFFF000  # what one Linux write or read moves at most
_GAP_BYTES = 16 << 10  # to read past as many bytes costs about as much as another system call
_GAP = memoryview(bytearray(_GAP_BYTES))  # every thread reads into it, and none looks
_RUN_BYTES = 16 << 20  # one system call; with 2 MiB a load without verification took a sixth longer
_RUN_RANGES = 512  # with the gaps between them, what one readv takes (IOV_MAX)
_WRITERS = 4  # so many direct writes in flight keep a fast disk busy
_NO_DIRECT_IO = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
_ATTEMPT = re.compile(r"\..+\.[0-9a-f]{32}\.partial")
_RETIRED = ".retired-"
_RACES = 100  # so often in a row another process may make, or remove, the directory that this one needs or removes
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


class LocalStore:
    """A ``Store`` over the directory ``root``, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modes: dict[str, int] = {}  # what the umask gave each attempt of ours, kept for the published directory
        self._replacing: set[str] = set()
        self._apart: dict[str, list[Path]] = {}  # what was written into the target itself
        self._names: dict[str, set[str]] = {}  # the files of each attempt that this store has written

    appears_whole = True
    lists = True

    @property
    def url(self) -> str:
        return str(self.root)

    def published_name(self, attempt: str, name: str) -> str:
        return name

    def write(
        self,
        attempt: str,
        target: str,
        files: Iterable[tuple[str, Body]],
        *,
        threads: Threads,
        durability: Durability,
        stop: Stop,
        deadline: Deadline,
        place: Place = "new",
        naming: Naming = "attempt",
    ) -> None:
        stop.check()
        directory = self.root / (target if place == "apart" else attempt)
        if place == "joined":
            _check_joined(directory)
        elif place == "apart":
            _make_shared(directory, durability)
        else:
            self._begin(attempt, target, durability, place)
        for name, body in files:
            if place == "apart":
                self._apart.setdefault(attempt, []).append(directory / name)
            else:
                self._names.setdefault(attempt, set()).add(name)
            _write(directory / name, body, durability, stop, deadline, threads)
            del body  # and with it the memory, while the next one is waited for

    def _begin(self, attempt: str, target: str, durability: Durability, place: Place) -> None:
        vacant = _is_vacant(self.root / target)
        if not vacant and (place == "new" or not _is_directory(self.root / target)):
            raise _occupied(self.root / target)
        self._modes[attempt] = _create(self.root, self.root / attempt, durability)
        if place == "replacing":
            if not vacant and not _exchanges(self.root / attempt):
                self.discard_here(attempt)
                raise Conflict(
                    f"{self.root / target} is not empty, and this file system cannot exchange two directories in one "
                    "step: save to a new directory, or remove the old one first"
                )
            self._replacing.add(attempt)

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(str(self.root))

    def wrote(self, attempt: str, sizes: Mapping[str, int]) -> None:
        """Record names of files in the directory. All of them must exist when it is published."""
        self._names.setdefault(attempt, set()).update(sizes)

    def clear(self, attempt: str, names: Sequence[str], *, deadline: Deadline) -> None:
        for name in names:
            try:
                (self.root / attempt / name).unlink(missing_ok=True)
            except OSError as error:
                raise from_os_error(error, "removing", str(self.root / attempt / name)) from error

    async def put(self, name: str, body: Body, *, durability: Durability, deadline: Deadline) -> None:
        stop = Stop()
        attempt, _, file = name.rpartition("/")
        if attempt in self._modes:
            self._names.setdefault(attempt, set()).add(file)
        await io_threads().run(
            _put, self.root, self.root / name, body, durability, stop, deadline, stop=stop, deadline=deadline
        )

    async def publish(self, attempt: str, target: str, *, durability: Durability, deadline: Deadline) -> None:
        mode = self._modes.get(attempt, 0o700)
        paths = self.root / attempt, self.root / target
        replacing = attempt in self._replacing
        names = frozenset(self._names.get(attempt, ()))
        await io_threads().run(_publish, *paths, names, mode, durability, replacing, deadline=deadline)
        self.forget(attempt)

    async def publish_file(self, attempt: str, target: str, *, durability: Durability, deadline: Deadline) -> None:
        self._modes.pop(attempt, None)
        self._names.pop(attempt, None)
        await io_threads().run(_publish_file, self.root / attempt, self.root / target, durability, deadline=deadline)

    async def publish_part(
        self, attempt: str, target: str, name: str, body: Body, *, durability: Durability, deadline: Deadline
    ) -> None:
        path, stop = self.root / target / name, Stop()
        await io_threads().run(_publish_part, path, body, durability, stop, deadline, stop=stop, deadline=deadline)
        self._apart.pop(attempt, None)

    async def discard(self, attempt: str, *, deadline: Deadline) -> None:
        await io_threads().run(self.discard_here, attempt, deadline=deadline)

    def forget(self, attempt: str) -> None:
        self._apart.pop(attempt, None)
        self._modes.pop(attempt, None)
        self._names.pop(attempt, None)
        self._replacing.discard(attempt)

    def discard_here(self, attempt: str) -> None:
        for written in self._apart.pop(attempt, ()):  # others may be writing into that directory
            try:
                written.unlink(missing_ok=True)
            except OSError as error:
                raise from_os_error(error, "removing", str(written)) from error
        # Nobody else publishes an attempt of our own; any other is taken out of its writer's reach first.
        own = self._modes.pop(attempt, None) is not None
        self._names.pop(attempt, None)
        self._replacing.discard(attempt)
        path = self.root / attempt if own or attempt.startswith(_RETIRED) else _take_away(self.root, attempt)
        if path is not None:
            _discard(path)

    async def retire(self, directory: str, *, durability: Durability, deadline: Deadline) -> None:
        await io_threads().run(_retire, self.root, directory, durability, deadline=deadline)

    async def leftovers(self, *, deadline: Deadline) -> list[Leftover]:
        return await io_threads().run(_leftovers, self.root, deadline=deadline)

    async def remove(self, names: Sequence[str], *, deadline: Deadline) -> None:
        await io_threads().run(_remove, self.root, tuple(names), deadline=deadline)

    async def ages(self, directory: str, *, deadline: Deadline) -> dict[str, float]:
        return await io_threads().run(_ages, self.root / directory, deadline=deadline)

    async def read(self, name: str, ranges: Sequence[ReadRange], *, deadline: Deadline) -> None:
        stop = Stop()
        await io_threads().run(_read, self.root / name, ranges, stop, stop=stop, deadline=deadline)

    async def map(self, name: str, nbytes: int, *, deadline: Deadline) -> mmap.mmap:
        return await io_threads().run(_map, self.root / name, nbytes, deadline=deadline)

    async def read_tail(self, name: str, nbytes: int, *, deadline: Deadline) -> bytes:
        return await io_threads().run(_read_tail, self.root / name, nbytes, deadline=deadline)

    async def size(self, name: str, *, deadline: Deadline) -> int:
        return await io_threads().run(_size, self.root / name, deadline=deadline)

    async def sizes(self, directory: str, *, deadline: Deadline) -> dict[str, int]:
        return await io_threads().run(_sizes, self.root / directory, deadline=deadline)

    async def directories(self, directory: str = ".", *, deadline: Deadline) -> list[str]:
        return await io_threads().run(_directories, self.root / directory, deadline=deadline)


# --- what runs in threads; each function owns the descriptors that it opens ---


def _create(root: Path, attempt: Path, durability: Durability) -> int:
    """Returns the mode that the umask gives a directory; until it is published nobody else looks into the attempt."""
    made: list[Path] = []
    try:
        _make_root(root, durability, made)
        attempt.mkdir()
        made.append(attempt)
        mode = stat.S_IMODE(attempt.stat().st_mode)
        attempt.chmod(mode & ~0o077)
    except OSError as error:
        with suppress(OSError):  # not empty: another save has moved in meanwhile
            for path in reversed(made):
                path.rmdir()
        raise from_os_error(error, "creating a checkpoint directory", str(attempt)) from error
    return mode


def _make_root(root: Path, durability: Durability, made: list[Path]) -> None:
    """Every missing directory down to ``root``, each noted in ``made``."""
    ancestors = (root, *root.parents)
    missing = [path for path in ancestors if not path.exists()]
    if durability == "fsync" and len(missing) < len(ancestors) - 1:
        # The last one that is there may have been made by a save that was killed before it could sync it.
        with suppress(PermissionError):
            _sync_directory(ancestors[len(missing)].parent)
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        made.append(path)
        if durability == "fsync":
            _sync_directory(path.parent)


def _put(root: Path, path: Path, body: Body, durability: Durability, stop: Stop, deadline: Deadline) -> None:
    for _ in range(_RACES):  # whoever removes the last file of a directory removes the directory too
        try:
            _write(path, body, durability, stop, deadline)
            return
        except StorageError as error:
            if error.errno != errno.ENOENT or _ATTEMPT.fullmatch(path.parent.name):
                raise  # an attempt that is gone was taken away: nothing of it may come back
        try:
            if not root.exists():  # also for a file that need not last: a save that comes next relies on its parents
                _make_root(root, "fsync", [])
            path.parent.mkdir(exist_ok=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise from_os_error(error, "creating a directory", str(path.parent)) from error
    raise Conflict(f"{path.parent} is removed as often as it is made")


def _write(
    path: Path, body: Body, durability: Durability, stop: Stop, deadline: Deadline, threads: Threads | None = None
) -> None:
    try:
        descriptor, direct = _open_new(path, direct=body.aligned)
        try:
            if body.nbytes:
                _preallocate(descriptor, body.nbytes)
            _Parts(descriptor, direct, body, deadline).write(stop, threads)
            if durability == "fsync":
                os.fsync(descriptor)
        finally:
            os.close(descriptor)  # an error that NFS kept for close() is one of this write
    except FileExistsError as error:
        raise Conflict(f"{path} exists already: two saves share one attempt's name") from error
    except OSError as error:
        if isinstance(error, SidestreamError):  # of the staging: some are also an OSError
            raise
        raise from_os_error(error, "writing", str(path)) from error


class _Parts:
    """The parts of one file, written at their offsets by several threads."""

    def __init__(self, descriptor: int, direct: bool, body: Body, deadline: Deadline) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._parts = body.parts
        self._deadline = deadline
        self._lock = threading.Lock()
        self._next = 0
        self._error: BaseException | None = None

    def write(self, stop: Stop, threads: Threads | None) -> None:
        """Return or raise when no thread writes any more; of several errors the first is raised."""
        failed = Stop()
        others: list[Future[None]] = []
        with stop.waking(failed.set):
            stop.check()
            try:
                if threads is not None:
                    for _ in range(min(len(self._parts), _WRITERS) - 1):
                        others.append(threads.submit(self._work, failed))
                self._work(failed)
            except BaseException:
                failed.set()
                raise
            finally:  # also when there is no thread for the next one: the descriptor is closed after this
                wait([other for other in others if not other.cancel()])
        if self._error is not None:
            raise self._error

    def _work(self, failed: Stop) -> None:
        while (part := self._take_one()) is not None:
            try:
                self._write_part(part, failed)
            except BaseException as error:
                with self._lock:  # whoever keeps the error in order to retry shall not keep the memory with it
                    self._error = self._error or without_frames(error)
                failed.set()
            finally:
                part.release()

    def _take_one(self) -> Part | None:
        with self._lock:
            if self._error is not None or self._next == len(self._parts):
                return None
            self._next += 1
            return self._parts[self._next - 1]

    def _write_part(self, part: Part, failed: Stop) -> None:
        view = part.take(failed, self._deadline)
        failed.check()
        self._direct = _write_buffer(self._descriptor, view, part.offset, self._direct)


def _open_new(path: Path, *, direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
            with suppress(FileNotFoundError):  # some kernels create the file before they refuse the flag
                os.unlink(path)
    return os.open(path, flags, 0o666), False


def _preallocate(descriptor: int, nbytes: int) -> None:
    """A full disk is noticed before anything is written; file systems without preallocation notice it later."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise


def _write_buffer(descriptor: int, buffer: memoryview, position: int, direct: bool) -> bool:
    """Write all of ``buffer``; returns whether direct I/O still works on this file."""
    done = 0
    while done < len(buffer):
        if direct and (len(buffer) % 4096 or done % 4096):
            direct = _leave_direct_io(descriptor)
        try:
            done += os.pwrite(descriptor, buffer[done : done + _MAX_TRANSFER_BYTES], position + done)
        except OSError as error:
            if not direct or error.errno not in _NO_DIRECT_IO:
                del buffer  # as in _write
                raise
            direct = _leave_direct_io(descriptor)
    return direct


def _leave_direct_io(descriptor: int) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return False


def _publish(
    attempt: Path, target: Path, names: frozenset[str], mode: int, durability: Durability, replacing: bool
) -> None:
    """``names`` are files that must be in the directory. A concurrent ``rm -r`` of the run removes files from it,
    before the rename or just after: then the directory is, or becomes, invisible."""
    try:
        attempt.chmod(mode)
        if durability == "fsync":
            _sync_directory(attempt)
        swap = replacing and not _is_vacant(target)
        _check_whole(attempt, names, target)
        exchange(attempt, target) if swap else os.rename(attempt, target)
        try:
            _check_whole(target, names, target)
        except FileNotFoundError:
            pass  # retention or another process has removed the whole directory
        except StorageError:
            exchange(attempt, target) if swap else os.rename(target, attempt)
            raise
    except SidestreamError:
        raise
    except OSError as error:
        if error.errno in _OCCUPIED:
            raise _occupied(target) from error
        raise from_os_error(error, "publishing", str(target)) from error
    if durability == "fsync":
        try:
            _sync_directory(target.parent)
        except OSError as error:
            raise NotDurable(
                error.errno, "the checkpoint is committed, but the sync of its parent directory failed", str(target)
            ) from error


def _check_whole(directory: Path, names: frozenset[str], target: Path) -> None:
    """Raise ``StorageError`` if files are missing, ``FileNotFoundError`` if the directory is missing."""
    gone = sorted(names.difference(os.listdir(directory)))
    if gone:
        listed = ", ".join(gone[:4])
        raise StorageError(
            errno.ENOENT,
            f"another process removed {len(gone)} files of this save while it was written ({listed}): no part of the "
            "save is visible; do not remove a run while a save is in progress",
            str(target),
        )


def _publish_file(attempt: Path, target: Path, durability: Durability) -> None:
    try:
        _link(attempt / target.name, target)
    except FileExistsError as error:
        raise Conflict(f"{target} already exists: choose another name, or delete it first") from error
    except OSError as error:
        raise from_os_error(error, "publishing", str(target)) from error
    try:
        if durability == "fsync":
            _sync_directory(target.parent)
    except OSError as error:
        raise NotDurable(
            error.errno, "the file is complete, but the sync of its directory failed", str(target)
        ) from error
    finally:
        shutil.rmtree(attempt, ignore_errors=True)


def _link(hidden: Path, path: Path) -> None:
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


def _make_shared(directory: Path, durability: Durability) -> None:
    """It is there when this returns, whoever has made it."""
    try:
        _make_root(directory, durability, [])
    except OSError as error:
        raise from_os_error(error, "creating a checkpoint directory", str(directory)) from error


def _publish_part(path: Path, body: Body, durability: Durability, stop: Stop, deadline: Deadline) -> None:
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        _write(hidden, body, durability, stop, deadline)
        if durability == "fsync":
            _sync_directory(path.parent)  # the names of what it speaks of
        _link(hidden, path)
    except FileExistsError as error:
        if isinstance(error, SidestreamError):
            raise
        raise Conflict(f"{path} exists already: save to a new directory") from error
    except OSError as error:
        if isinstance(error, SidestreamError):
            raise
        raise from_os_error(error, "publishing", str(path)) from error
    finally:
        with suppress(OSError):
            hidden.unlink()
    if durability == "fsync":
        try:
            _sync_directory(path.parent)
        except OSError as error:
            raise NotDurable(
                error.errno, "the part is committed, but the sync of its directory failed", str(path)
            ) from error


def _occupied(target: Path) -> Conflict:
    if not os.path.isdir(target):
        return Conflict(f"{target} already exists and is a file: choose another name, or delete it first")
    return Conflict(f"{target} is not empty: save to a new directory, or let a Checkpointer make generations of a step")


def _exchanges(attempt: Path) -> bool:
    try:
        return exchanges(attempt)
    except OSError as error:
        raise from_os_error(error, "trying to exchange two directories", str(attempt)) from error


def _check_joined(attempt: Path) -> None:
    try:
        there = _is_directory(attempt)
    except FileNotFoundError:
        there = False
    if not there:
        raise NotShared(
            errno.ENOENT, "rank 0 has made this directory, and it is not here: save to storage that all ranks share",
            str(attempt),
        )  # fmt: skip


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise from_os_error(error, "looking at", str(path)) from error


def _is_vacant(target: Path) -> bool:
    try:
        if not stat.S_ISDIR(target.lstat().st_mode):
            return False
        with os.scandir(target) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except OSError as error:
        raise from_os_error(error, "looking at", str(target)) from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(path: Path) -> None:
    try:
        for _ in range(_RACES):
            with suppress(FileNotFoundError):  # of one file: another process deletes it too
                shutil.rmtree(path)
            if not path.exists():
                return
    except OSError as error:
        raise from_os_error(error, "removing", str(path)) from error
    raise from_os_error(OSError(errno.EBUSY, "files keep vanishing from it"), "removing", str(path))


def _take_away(root: Path, name: str) -> Path | None:
    """Rename it to where nobody looks for it and nobody can publish it; None if it is not there."""
    hidden = root / f"{_RETIRED}{name[:200]}-{uuid.uuid4().hex}"
    try:
        os.rename(root / name, hidden)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, "removing", str(root / name)) from error
    return hidden


def _retire(root: Path, directory: str, durability: Durability) -> None:
    hidden = _take_away(root, directory)
    if hidden is None:
        return
    if durability == "fsync":
        try:
            _sync_directory(root)
        except OSError as error:
            raise from_os_error(error, "removing", str(root / directory)) from error
    _discard(hidden)


def _leftovers(root: Path) -> list[Leftover]:
    try:
        with os.scandir(root) as entries:
            names = [one.name for one in entries if one.name.startswith(".") and one.is_dir(follow_symlinks=False)]
        found = [(name, "retired") for name in names if name.startswith(_RETIRED)]
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


def _open_regular(path: str, flags: int) -> int:
    """Follows no link, and does not wait for the other end of a pipe."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Corrupt(f"{path} is not a regular file", file=os.path.basename(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read(path: Path, ranges: Sequence[ReadRange], stop: Stop) -> None:
    try:
        descriptor = _open_regular(str(path), os.O_RDONLY)
        try:
            for run in coalesce(ranges, gap_bytes=_GAP_BYTES, most=_RUN_RANGES, most_bytes=_RUN_BYTES):
                stop.check()
                _read_run(descriptor, run, path)
                for one in run:
                    if one.arrived is not None:
                        one.arrived()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _translated(error, "reading", str(path)) from error


def _map(path: Path, nbytes: int) -> mmap.mmap:
    try:
        descriptor = _open_regular(str(path), os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size < nbytes:  # to touch a page behind the end would kill the process
                raise Corrupt(f"{path} is shorter than the {nbytes} bytes that were saved", file=path.name)
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            return mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _translated(error, "mapping", str(path)) from error


def _read_tail(path: Path, nbytes: int) -> bytes:
    try:
        with open(path, "rb", opener=_open_regular) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
            return file.read(nbytes)
    except OSError as error:
        raise _translated(error, "reading", str(path)) from error


def _read_run(descriptor: int, run: Sequence[ReadRange], path: Path) -> None:
    """One system call for all ranges of the run, unless the system moves fewer bytes than were asked for."""
    start = position = run[0].offset
    buffers: list[memoryview] = []
    for one in run:
        if one.offset > position:
            buffers.append(_GAP[: one.offset - position])
        buffers.append(one.into)
        position = one.offset + len(one.into)
    done = start
    while buffers:
        count = os.preadv(descriptor, buffers, done)
        if count == 0:
            raise Corrupt(
                f"{path} ends at byte {done}, but {position - done} more belong there", file=path.name, offset=done
            )
        done += count
        buffers = _rest(buffers, count)


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left to fill when ``count`` bytes have arrived."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


def _size(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError as error:
        raise _translated(error, "looking at", str(path)) from error


def _sizes(directory: Path) -> dict[str, int]:
    try:
        with os.scandir(directory) as entries:
            return {one.name: one.stat().st_size for one in entries if one.is_file(follow_symlinks=False)}
    except OSError as error:
        raise _translated(error, "listing", str(directory)) from error


def _directories(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            return [one.name for one in entries if one.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, "listing", str(root)) from error


def _translated(error: OSError, doing: str, path: str) -> Exception:
    if isinstance(error, (SidestreamError, FileNotFoundError)):
        return error  # what is missing means something else to each caller
    if error.errno == errno.ENOTDIR:
        return FileNotFoundError(errno.ENOENT, "no such directory", path)
    if error.errno == errno.ELOOP:
        return Corrupt(f"{path} is a symbolic link", file=os.path.basename(path))
    return from_os_error(error, doing, path)
