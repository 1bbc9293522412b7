"""An attempt in local directories. It is a hidden sibling of its target, published by one rename, exchange or link."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..._runtime.threads import Stop, Threads, io_threads
from ...errors import (
    CheckpointExistsError,
    NoSpaceError,
    NotDurableError,
    SidestreamError,
    StorageError,
    StorageNotSharedError,
    from_os_error,
)
from ...options import Durability
from ..bodies import Body
from ..names import ABANDONED_AFTER_S
from ..transaction import Attempt, CommitFiles, MakeFiles, StoreAddress, Transaction, bodies_of
from .directories import (
    RACES,
    collect_orphans,
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

__all__ = ["NO_RENAME", "LocalTransaction", "Naming", "check_whole", "occupied", "unlink"]

_Step: TypeAlias = Callable[[Path, Path, frozenset[str], os.stat_result | None], None]
"""The function that makes an attempt visible. Its arguments are the attempt, the target, the files that must be there,
and the status of the attempt's directory when it was made."""

_REPLACEABLE = frozenset({".metadata", "model.safetensors", "model.safetensors.index.json"})
"""The files that mark a directory as a checkpoint or an export. Each of these has at least one of them."""
NO_RENAME = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL, errno.EXDEV, errno.EMFILE})
"""The errors of file systems that cannot rename a directory. EMFILE is that of gcsfuse for directories of many
files."""
_REMEDY = (
    "If this file system cannot rename a directory, as mounts of buckets cannot, pass "
    'storage=sidestream.Storage(commit="marker")'
)
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


class Naming(NamedTuple):
    """The operations on names, which differ between file systems.

    ``appear`` gives a complete file the name that readers look for, and raises ``FileExistsError`` if another file has
    the name. ``sync`` makes the names in a directory durable. ``take`` puts an attempt of a dead process where its
    process cannot publish it, if that is possible, and returns its path."""

    appear: Callable[[Path, Path], None]
    sync: Callable[[Path], None]
    take: Callable[[Path, str], Path | None]


class LocalTransaction(Transaction):
    """A ``Transaction`` below the directory ``root``, which need not exist yet."""

    _naming = Naming(link_new, sync_directory, take_away)
    _preallocates = True

    def __init__(self, root: Path, attempt: Attempt, address: StoreAddress) -> None:
        super().__init__(attempt)
        self._root = root
        self._address = address
        self._target = root / attempt.target
        self._hidden = root / attempt.name
        self._directory = self._target if attempt.kind == "part" else self._hidden
        self._made: os.stat_result | None = None  # the directory that this transaction has made, as it was then
        self._replaceable = False  # whether the target was checked, and is a checkpoint or an export
        self._names: dict[str, None] = {}  # of the files written, in their order
        self._last: tuple[str, Body] | None = None

    @property
    def address(self) -> StoreAddress:
        return self._address

    @property
    def place(self) -> Path:
        return self._directory

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
                _make_shared(self._directory, attempt.durability, self._naming)
        elif attempt.kind in ("joined", "joined_files") or self._made is not None:
            _check_joined(self._directory)
        else:
            self._make()
        for given, body in files:
            name = self.committed_name(given)
            self._names[name] = None
            self._write_file(name, body, stop, threads)
            del body  # frees its memory while the loop waits for the next file

    def _write_file(self, name: str, body: Body, stop: Stop, threads: Threads | None = None) -> None:
        attempt = self.attempt
        path, preallocate = self._directory / name, self._preallocates
        write_file(path, body, attempt.durability, stop, threads, target=attempt.target, preallocate=preallocate)

    def _make(self) -> None:
        vacant = is_vacant(self._target)
        replaces = self.attempt.kind == "replacement"
        if not vacant and not (replaces and _may_be_replaced(self._target)):
            raise occupied(self._target)
        if not self.attempt.in_run:
            collect_orphans(self._root, self.attempt.target, ABANDONED_AFTER_S, self._naming.take)
        self._replaceable = not vacant
        with self._make_once():
            self._made = _create(self._root, self._hidden, self.attempt, self._naming)
        if replaces and not vacant and not _exchanges(self._hidden):
            self.discard_here()
            raise CheckpointExistsError(
                f"{self._target} is not empty, and this file system cannot exchange two directories in one step: save "
                "to a new directory, or remove the old one first"
            )

    def wrote(self, sizes: Mapping[str, int]) -> None:
        self._names.update(dict.fromkeys(map(self.committed_name, sizes)))

    def clear(self, names: Sequence[str]) -> None:
        for name in names:
            unlink(self._directory / self.committed_name(name))

    async def put(self, name: str, body: Body) -> None:
        stop = Stop()
        self._names[name] = None
        # The directory is not made again if it is gone: another process has removed the attempt.
        await io_threads().run(self._write_file, name, body, stop, stop=stop)

    async def put_all(self, files: CommitFiles | MakeFiles) -> CommitFiles:
        """In one call of a thread: each way there and back takes the GIL from a trainer in a thread several times."""
        stop = Stop()
        made, bodies = await io_threads().run(self._write_files, files, stop, stop=stop)
        if bodies and not self._writes_last:
            await self.put_last(*bodies[-1])
        return made

    @property
    def _writes_last(self) -> bool:
        """Whether the last file is written like the others."""
        return self.attempt.kind != "part"

    def _write_files(self, files: CommitFiles | MakeFiles, stop: Stop) -> tuple[CommitFiles, list[tuple[str, Body]]]:
        """Write the files, and return them. The last one may be left to ``put_last``."""
        made = files() if callable(files) else files
        bodies = bodies_of(made)
        for name, body in bodies if self._writes_last else bodies[:-1]:
            stop.check()
            self._names[name] = None
            self._write_file(name, body, stop)
        return made, bodies

    async def put_last(self, name: str, body: Body) -> None:
        if self.attempt.kind == "part":
            self._last = name, body
        else:
            await self.put(name, body)

    async def make_visible(self) -> None:
        attempt = self.attempt
        if attempt.kind == "file":
            await io_threads().run(_publish_file, self._hidden, self._target, attempt.durability, self._naming)
            return
        if attempt.kind == "part":
            assert self._last is not None
            stop, (name, body) = Stop(), self._last
            path = self._target / name
            await io_threads().run(_publish_part, path, body, attempt.durability, self._naming, stop, stop=stop)
            self._names.clear()
            self._last = None
            return
        names = frozenset(self._names)
        move: _Step = _move
        if attempt.kind == "replacement":
            move = partial(_replace, checked=self._replaceable)
        await io_threads().run(_publish, self._hidden, self._target, names, self._made, attempt.durability, move)
        self._made = None  # from now on the name of the attempt is that of the replaced checkpoint, if any

    def _note_replaced(self, error: NotDurableError) -> None:
        if self.attempt.kind == "replacement":
            error.add_note(f"what it has replaced may still be in {self._hidden}, until it is collected")

    async def _discard_replaced(self) -> None:
        await io_threads().run(self._discard_replaced_here)

    def _discard_replaced_here(self) -> None:
        if not self._end_making():
            return
        path: Path | None = self._hidden
        with suppress(NoSpaceError):  # a quota may refuse the rename but allow the removal, which frees space
            path = take_away(self._root, self.attempt.name)
        if path is not None:
            remove_tree(path)

    async def discard(self) -> None:
        await io_threads().run(self.discard_here)

    def discard_here(self) -> None:
        if not self._end_making():
            return
        if self.attempt.kind == "part":  # other processes may write into the same directory
            self._last = None
            for name in tuple(self._names):  # a thread that was left behind may add a name meanwhile
                unlink(self._directory / name)
            return
        # Only this process can publish an attempt that it has made. Any other attempt is renamed first, so that its
        # writer cannot publish what is left of it.
        own, self._made = self._made is not None, None
        path = self._hidden if own else take_away(self._root, self.attempt.name)
        if path is not None:
            remove_tree(path)


# --- what runs in threads ---


def unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise from_os_error(error, "removing", str(path)) from error


def _create(root: Path, hidden: Path, attempt: Attempt, naming: Naming) -> os.stat_result:
    """Make the directory of the attempt, and return its status with the mode that the umask gives. Until it is
    published, other users have no access to it."""
    made: list[Path] = []
    try:
        make_root(root, attempt.durability, made, naming.sync)
        hidden.mkdir()
        made.append(hidden)
        found = hidden.stat()
        hidden.chmod(stat.S_IMODE(found.st_mode) & ~0o077)
    except OSError as error:
        with suppress(OSError):  # not empty: another save uses the new directory already
            for path in reversed(made):
                path.rmdir()
        raise from_os_error(error, f"creating a directory for {attempt.target}", str(hidden)) from error
    return found


def _publish(
    attempt: Path,
    target: Path,
    names: frozenset[str],
    made: os.stat_result | None,
    durability: Durability,
    move: _Step,
) -> None:
    """Make the attempt visible. ``names`` are the files that must be in it.

    A concurrent ``rm -r`` of the run may remove files of the attempt, before the rename or just after it. Then the
    directory is not published, or is hidden again."""
    try:
        attempt.chmod(0o700 if made is None else stat.S_IMODE(made.st_mode))
        if durability == "fsync":
            sync_directory(attempt)
        move(attempt, target, names, made)
    except SidestreamError:
        raise
    except OSError as error:
        if error.errno in _OCCUPIED:
            raise occupied(target) from error
        if error.errno in NO_RENAME:
            raise StorageError(error.errno, f"publishing failed: {error.strerror}. {_REMEDY}", str(target)) from error
        raise from_os_error(error, "publishing", str(target)) from error
    if durability == "fsync":
        try:
            sync_directory(target.parent)
        except OSError as error:
            raise NotDurableError(
                error.errno, "the checkpoint is committed, but the sync of its parent directory failed", str(target)
            ) from error


def _move(attempt: Path, target: Path, names: frozenset[str], made: os.stat_result | None) -> None:
    """Rename the attempt to the target, which does not exist or is empty."""
    check_whole(attempt, names, target)
    os.rename(attempt, target)
    try:
        check_whole(target, names, target)
    except FileNotFoundError:
        pass  # retention or another process has removed the whole directory
    except StorageError:
        if made is None or _is(made, target):  # otherwise another save has replaced it already
            os.rename(target, attempt)
            raise


def _replace(attempt: Path, target: Path, names: frozenset[str], made: os.stat_result | None, *, checked: bool) -> None:
    """Exchange the attempt with the target, or rename the attempt if there is no target. Raises
    ``CheckpointExistsError`` if the target may not be replaced.

    Another save, or a removal, may change the target between the check and the exchange. Then both are repeated.
    ``checked`` says that the present target may be replaced."""
    for left in reversed(range(RACES)):
        vacant = is_vacant(target)
        checked = checked and not vacant  # a target that appears from now on was not checked
        try:
            if vacant:
                _move(attempt, target, names, made)
            else:
                if not checked:
                    _check_replaceable(target)
                _exchange(attempt, target, names)
            return
        except SidestreamError:
            raise
        except OSError as error:
            lost = error.errno in (errno.ENOTEMPTY, errno.EEXIST) if vacant else error.errno == errno.ENOENT
            if not left or not lost or not os.path.isdir(attempt):
                raise


def _exchange(attempt: Path, target: Path, names: frozenset[str]) -> None:
    """Exchange the attempt with the target. The files of the attempt are listed through a descriptor, because another
    save may replace and delete the directory at once."""
    directory = os.open(attempt, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_whole(directory, names, target)
        exchange(attempt, target)
        try:
            check_whole(directory, names, target)
        except StorageError:
            if _is(os.fstat(directory), target):
                exchange(attempt, target)
                raise
    finally:
        os.close(directory)


def _is(directory: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(directory, os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def check_whole(directory: Path | int, names: frozenset[str], target: Path) -> None:
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


def _publish_file(attempt: Path, target: Path, durability: Durability, naming: Naming) -> None:
    try:
        naming.appear(attempt / target.name, target)
    except FileExistsError as error:
        raise CheckpointExistsError(f"{target} already exists: choose another name, or delete it first") from error
    except OSError as error:
        raise from_os_error(error, "publishing", str(target)) from error
    try:
        if durability == "fsync":
            naming.sync(target.parent)
    except OSError as error:
        raise NotDurableError(
            error.errno, "the file is complete, but the sync of its directory failed", str(target)
        ) from error
    finally:
        shutil.rmtree(attempt, ignore_errors=True)


def _make_shared(directory: Path, durability: Durability, naming: Naming) -> None:
    """Make the directory if it does not exist. Another process may make it at the same time."""
    try:
        make_root(directory, durability, [], naming.sync)
    except OSError as error:
        raise from_os_error(error, "creating a checkpoint directory", str(directory)) from error


def _publish_part(path: Path, body: Body, durability: Durability, naming: Naming, stop: Stop) -> None:
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        write_file(hidden, body, durability, stop)
        if durability == "fsync":
            naming.sync(path.parent)  # makes the names of the files durable before the last one appears
        naming.appear(hidden, path)
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
            naming.sync(path.parent)
        except OSError as error:
            raise NotDurableError(
                error.errno, "the part is committed, but the sync of its directory failed", str(path)
            ) from error


def occupied(target: Path) -> CheckpointExistsError:
    if not os.path.isdir(target):
        return CheckpointExistsError(f"{target} already exists and is a file: choose another name, or delete it first")
    return CheckpointExistsError(
        f"{target} is not empty: save to a new directory, or pass overwrite=True to a save that replaces a checkpoint"
    )


def _may_be_replaced(target: Path) -> bool:
    """Return whether the target is a directory or was removed meanwhile. Raises ``CheckpointExistsError`` if the
    directory may not be replaced."""
    with suppress(FileNotFoundError):
        if not is_directory(target):
            return False
        _check_replaceable(target)
    return True


def _check_replaceable(target: Path) -> None:
    """Raise ``CheckpointExistsError`` if the directory is not empty and neither a checkpoint nor an export. Replacing a
    directory deletes everything in it."""
    try:
        found = os.listdir(target)
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, "listing", str(target)) from error
    if found and _REPLACEABLE.isdisjoint(found):
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
