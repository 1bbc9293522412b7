"""An attempt in local directories: a hidden sibling of its target that one rename, exchange or link publishes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..._runtime.threads import Stop, Threads, io_threads
from ...errors import (
    CheckpointExistsError,
    NotDurableError,
    SidestreamError,
    StorageError,
    StorageNotSharedError,
    from_os_error,
)
from ...options import Durability
from ..bodies import Body
from ..transaction import Attempt, StoreAddress, Transaction
from .directories import (
    is_directory,
    is_vacant,
    link_new,
    make_root,
    remove_tree,
    sync_directory,
    take_away,
)
from .exchange import exchange, exchanges
from .read import read_tail
from .write import write_file

__all__ = ["LocalTransaction"]

_REPLACEABLE = frozenset({".metadata", "model.safetensors", "model.safetensors.index.json"})
"""Files of which a directory has one if it is a checkpoint or an export."""
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


class LocalTransaction(Transaction):
    """A ``Transaction`` below the directory ``root``, which need not exist yet."""

    def __init__(self, root: Path, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._root = root
        self._target = root / attempt.target
        self._hidden = root / attempt.name
        self._directory = self._target if attempt.kind == "part" else self._hidden
        self._mode: int | None = None  # what the umask gave the attempt that this transaction has made
        self._names: dict[str, None] = {}  # of the files written, in their order
        self._last: tuple[str, Body] | None = None

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(str(self._root))

    async def read_tail(self, name: str, nbytes: int) -> bytes:
        return await io_threads().run(read_tail, self._root / name, None, nbytes)

    def committed_name(self, name: str) -> str:
        return name

    def path_of(self, name: str = "") -> str:
        directory = self.attempt.target if self.attempt.kind == "part" else self.attempt.name
        return f"{directory}/{name}" if name else directory

    def write(self, files: Iterable[tuple[str, Body]], *, threads: Threads, stop: Stop) -> None:
        attempt = self.attempt
        stop.check()
        if attempt.kind == "part":
            with self._make_once():
                _make_shared(self._directory, attempt.durability)
        elif attempt.kind == "joined" or self._mode is not None:
            _check_joined(self._directory)
        else:
            self._make()
        for name, body in files:
            self._names[name] = None
            write_file(self._directory / name, body, attempt.durability, stop, threads, target=attempt.target)
            del body  # and with it the memory, while the next one is waited for

    def _make(self) -> None:
        vacant = is_vacant(self._target)
        replaces = self.attempt.kind == "replacement"
        if not vacant and not (replaces and is_directory(self._target)):
            raise _occupied(self._target)
        if not vacant:
            _check_replaceable(self._target)
        with self._make_once():
            self._mode = _create(self._root, self._hidden, self.attempt)
        if replaces and not vacant and not _exchanges(self._hidden):
            self.discard_here()
            raise CheckpointExistsError(
                f"{self._target} is not empty, and this file system cannot exchange two directories in one step: save "
                "to a new directory, or remove the old one first"
            )

    def wrote(self, sizes: Mapping[str, int]) -> None:
        self._names.update(dict.fromkeys(sizes))

    def clear(self, names: Sequence[str]) -> None:
        for name in names:
            _unlink(self._directory / name)

    async def put(self, name: str, body: Body) -> None:
        attempt, stop = self.attempt, Stop()
        self._names[name] = None
        await io_threads().run(_put, self._directory / name, body, attempt, stop, stop=stop)

    async def put_last(self, name: str, body: Body) -> None:
        if self.attempt.kind == "part":
            self._last = name, body
        else:
            await self.put(name, body)

    async def make_visible(self) -> None:
        attempt = self.attempt
        if attempt.kind == "file":
            await io_threads().run(_publish_file, self._hidden, self._target, attempt.durability)
            return
        if attempt.kind == "part":
            assert self._last is not None
            stop, (name, body) = Stop(), self._last
            path = self._target / name
            await io_threads().run(_publish_part, path, body, attempt.durability, stop, stop=stop)
            self._names.clear()
            self._last = None
            return
        mode = 0o700 if self._mode is None else self._mode
        names = frozenset(self._names)
        replaces = attempt.kind == "replacement"
        await io_threads().run(_publish, self._hidden, self._target, names, mode, attempt.durability, replaces)
        self._mode = None  # what is there under the name of the attempt, if anything, is what this one replaced

    async def discard(self) -> None:
        await io_threads().run(self.discard_here)

    def discard_here(self) -> None:
        if not self._end_making():
            return
        if self.attempt.kind == "part":  # others may be writing into that directory
            self._last = None
            for name in tuple(self._names):  # a thread that was left behind may add one
                _unlink(self._directory / name)
            return
        # Nobody else publishes an attempt of our own; any other is taken out of its writer's reach first.
        own, self._mode = self._mode is not None, None
        path = self._hidden if own else take_away(self._root, self.attempt.name)
        if path is not None:
            remove_tree(path)


# --- what runs in threads ---


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise from_os_error(error, "removing", str(path)) from error


def _put(path: Path, body: Body, attempt: Attempt, stop: Stop) -> None:
    # An attempt that is gone was taken away. Nothing of it may come back, so its directory is not made again.
    write_file(path, body, attempt.durability, stop, target=attempt.target)


def _create(root: Path, hidden: Path, attempt: Attempt) -> int:
    """Returns the mode that the umask gives a directory; until it is published nobody else looks into the attempt."""
    made: list[Path] = []
    try:
        make_root(root, attempt.durability, made)
        hidden.mkdir()
        made.append(hidden)
        mode = stat.S_IMODE(hidden.stat().st_mode)
        hidden.chmod(mode & ~0o077)
    except OSError as error:
        with suppress(OSError):  # not empty: another save has moved in meanwhile
            for path in reversed(made):
                path.rmdir()
        raise from_os_error(error, f"creating a directory for {attempt.target}", str(hidden)) from error
    return mode


def _publish(
    attempt: Path, target: Path, names: frozenset[str], mode: int, durability: Durability, replacing: bool
) -> None:
    """``names`` are files that must be in the directory. A concurrent ``rm -r`` of the run removes files from it,
    before the rename or just after: then the directory is, or becomes, invisible."""
    try:
        attempt.chmod(mode)
        if durability == "fsync":
            sync_directory(attempt)
        if replacing and not is_vacant(target):
            _exchange(attempt, target, names)
        else:
            _check_whole(attempt, names, target)
            os.rename(attempt, target)
            try:
                _check_whole(target, names, target)
            except FileNotFoundError:
                pass  # retention or another process has removed the whole directory
            except StorageError:
                os.rename(target, attempt)
                raise
    except SidestreamError:
        raise
    except OSError as error:
        if error.errno in _OCCUPIED:
            raise _occupied(target) from error
        raise from_os_error(error, "publishing", str(target)) from error
    if durability == "fsync":
        try:
            sync_directory(target.parent)
        except OSError as error:
            raise NotDurableError(
                error.errno, "the checkpoint is committed, but the sync of its parent directory failed", str(target)
            ) from error


def _exchange(attempt: Path, target: Path, names: frozenset[str]) -> None:
    """Exchange the attempt with the target. The attempt is looked at through a descriptor, because another save may
    replace this one at once, and delete it."""
    directory = os.open(attempt, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_whole(directory, names, target)
        exchange(attempt, target)
        try:
            _check_whole(directory, names, target)
        except StorageError:
            if _is_at(directory, target):
                exchange(attempt, target)
                raise
    finally:
        os.close(directory)


def _is_at(directory: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(directory), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _check_whole(directory: Path | int, names: frozenset[str], target: Path) -> None:
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
        link_new(attempt / target.name, target)
    except FileExistsError as error:
        raise CheckpointExistsError(f"{target} already exists: choose another name, or delete it first") from error
    except OSError as error:
        raise from_os_error(error, "publishing", str(target)) from error
    try:
        if durability == "fsync":
            sync_directory(target.parent)
    except OSError as error:
        raise NotDurableError(
            error.errno, "the file is complete, but the sync of its directory failed", str(target)
        ) from error
    finally:
        shutil.rmtree(attempt, ignore_errors=True)


def _make_shared(directory: Path, durability: Durability) -> None:
    """It is there when this returns, whoever has made it."""
    try:
        make_root(directory, durability, [])
    except OSError as error:
        raise from_os_error(error, "creating a checkpoint directory", str(directory)) from error


def _publish_part(path: Path, body: Body, durability: Durability, stop: Stop) -> None:
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        write_file(hidden, body, durability, stop)
        if durability == "fsync":
            sync_directory(path.parent)  # the names of what it speaks of
        link_new(hidden, path)
    except FileExistsError as error:
        if isinstance(error, SidestreamError):
            raise
        raise CheckpointExistsError(f"{path} exists already: save to a new directory") from error
    except OSError as error:
        if isinstance(error, SidestreamError):
            raise
        raise from_os_error(error, "publishing", str(path)) from error
    finally:
        with suppress(OSError):
            hidden.unlink()
    if durability == "fsync":
        try:
            sync_directory(path.parent)
        except OSError as error:
            raise NotDurableError(
                error.errno, "the part is committed, but the sync of its directory failed", str(path)
            ) from error


def _occupied(target: Path) -> CheckpointExistsError:
    if not os.path.isdir(target):
        return CheckpointExistsError(f"{target} already exists and is a file: choose another name, or delete it first")
    return CheckpointExistsError(
        f"{target} is not empty: save to a new directory, or let a Checkpointer make generations of a step"
    )


def _check_replaceable(target: Path) -> None:
    """Raise ``CheckpointExistsError`` if a directory is neither a checkpoint nor an export: what is replaced is deleted
    whole."""
    try:
        found = _REPLACEABLE.isdisjoint(os.listdir(target))
    except OSError as error:
        raise from_os_error(error, "listing", str(target)) from error
    if found:
        raise CheckpointExistsError(
            f"{target} is not empty, and no checkpoint (it has no .metadata), so it was not replaced: save to a new "
            "directory, or empty this one first"
        )


def _exchanges(attempt: Path) -> bool:
    try:
        return exchanges(attempt)
    except OSError as error:
        raise from_os_error(error, "trying to exchange two directories", str(attempt)) from error


def _check_joined(attempt: Path) -> None:
    try:
        there = is_directory(attempt)
    except FileNotFoundError:
        there = False
    if not there:
        raise StorageNotSharedError(
            errno.ENOENT, "rank 0 has made this directory, and it is not here: save to storage that all ranks share",
            str(attempt),
        )  # fmt: skip
