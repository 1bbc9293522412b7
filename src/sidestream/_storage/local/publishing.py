"""Making an attempt in a local directory visible: one rename, or the exchange of two directories in one atomic step."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from ...errors import CheckpointExistsError, NotDurableError, SidestreamError, StorageError, from_os_error, os_errors_as
from ...options import Durability
from ..names import MARKER, id_of, is_attempt_name
from ..replacing import DECIDING_BYTES, Found, Use, deciding_file, kind_of, refusal
from .directories import RACES, exchange, is_retired, is_vacant, opened, sync_directory
from .read import read_tail

Step: TypeAlias = Callable[[Path, Path, frozenset[str], os.stat_result | None], None]
"""The function that makes an attempt visible. Its arguments are the attempt, the target, the files that must be there,
and the status of the attempt's directory when it was made."""


NO_RENAME = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL, errno.EXDEV, errno.EMFILE})
"""The errors of file systems that cannot rename a directory. EMFILE is that of gcsfuse for directories of many
files."""


_REMEDY = (
    "If this file system cannot rename a directory, as mounts of buckets cannot, pass "
    'storage=sidestream.Storage(commit="marker")'
)


_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


def publish(
    hidden: Path,
    target: Path,
    names: frozenset[str],
    made: os.stat_result | None,
    durability: Durability,
    move: Step,
) -> None:
    """Make the attempt visible. ``names`` are the files that must be in it.

    A concurrent ``rm -r`` of the run may remove files of the attempt, before the rename or just after it. Then the
    directory is not published, or is hidden again."""
    try:
        # The order makes the commit durable. The mode and the names of the files first, with the sync of the attempt.
        # Then the rename. Then the sync of the parent, in which the rename is recorded. In another order a power cut
        # could leave a visible directory that lacks files. The content of each file was synced when it was written.
        hidden.chmod(0o700 if made is None else stat.S_IMODE(made.st_mode))
        if durability == "fsync":
            sync_directory(hidden)
        move(hidden, target, names, made)
    except SidestreamError:
        raise
    except OSError as error:
        if error.errno in _OCCUPIED:
            raise occupied(target) from error
        if error.errno in NO_RENAME:
            raise StorageError(error.errno, f"publishing failed: {error.strerror}. {_REMEDY}", str(target)) from error
        raise from_os_error(error, "publishing", str(target)) from error
    if durability == "fsync":
        sync_visible(target.parent, target, "the checkpoint is committed, but the sync of its parent directory failed")


def sync_visible(directory: Path, path: Path, failed: str, sync: Callable[[Path], None] = sync_directory) -> None:
    """Sync ``directory``, in which ``path`` has become visible. Raises ``NotDurableError`` with the message
    ``failed``."""
    try:
        sync(directory)
    except OSError as error:
        raise NotDurableError(error.errno, failed, str(path)) from error


def move_there(hidden: Path, target: Path, names: frozenset[str], made: os.stat_result | None) -> None:
    """Rename the attempt to the target, which does not exist or is empty."""
    check_whole(hidden, names, target)
    os.rename(hidden, target)
    try:
        # Looked at again, because a ``rm -r`` of the run may have listed the attempt before the rename, and continue to
        # delete in it. What lacks files must not stay visible. The directory is hidden again if it is still ours.
        check_whole(target, names, target)
    except FileNotFoundError:
        pass  # retention or another process has removed the whole directory
    except StorageError:
        if made is None or _is(made, target):  # otherwise another save has replaced it already
            os.rename(target, hidden)
            raise


def replace(hidden: Path, target: Path, names: frozenset[str], made: os.stat_result | None, *, use: Use) -> None:
    """Exchange the attempt with the target, or rename the attempt if there is no target. Raises
    ``CheckpointExistsError`` if ``use`` may not replace the target.

    Another save, or a removal, may change the target between the check and the exchange. Then both are repeated."""
    for left in reversed(range(RACES)):
        vacant = is_vacant(target)
        try:
            if vacant:
                move_there(hidden, target, names, made)
            else:
                check_use(target, use)
                _exchange(hidden, target, names)
            return
        except SidestreamError:
            raise
        except OSError as error:
            # Two errors mean that the target has changed since it was looked at: it was vacant and has files now, or it
            # had some and is gone. Every other error is final, and so is the end of the attempt itself.
            lost = error.errno in (errno.ENOTEMPTY, errno.EEXIST) if vacant else error.errno == errno.ENOENT
            if not left or not lost or not os.path.isdir(hidden):
                raise


def _exchange(hidden: Path, target: Path, names: frozenset[str]) -> None:
    """Exchange the attempt with the target. The files of the attempt are listed through a descriptor, because another
    save may replace and delete the directory at once."""
    directory = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_whole(directory, names, target)
        exchange(hidden, target)
        try:
            check_whole(directory, names, target)
        except FileNotFoundError:
            pass  # it was visible, and has been removed since: ``hidden`` is now the old checkpoint, which stays hidden
        except StorageError:
            if _is(os.fstat(directory), target):
                exchange(hidden, target)
                raise
    finally:
        with suppress(OSError):  # raised here, it would be taken for an error of the exchange
            os.close(directory)


def _is(directory: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(directory, os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def check_whole(directory: Path | int, names: Iterable[str], target: Path) -> None:
    """Raise ``StorageError`` if files are missing, ``FileNotFoundError`` if the directory is missing."""
    gone = sorted(set(names).difference(os.listdir(directory)))
    if gone:
        listed = ", ".join(gone[:4])
        raise StorageError(
            errno.ENOENT,
            f"another process removed {len(gone)} files of this save while it was written ({listed}): no part of the "
            "save is visible; do not remove a run while a save is in progress",
            str(target),
        )


def occupied(target: Path) -> CheckpointExistsError:
    found = look_at(target)
    return CheckpointExistsError(refusal(found, "create", target) or f"{target} changes while it is looked at")


def files_in(directory: Path) -> list[str]:
    """Return the names in a directory. The result is empty if it does not exist."""
    with os_errors_as("listing", directory):
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise occupied(directory) from None


def look_at(path: Path, *, in_place: bool = False) -> Found:
    """Return what lies at ``path``. With ``in_place`` several saves write their files into one directory, and those
    with the id of a save do not count. Raises ``StorageError`` if it cannot be read."""
    for _ in range(RACES):
        with os_errors_as("looking at this path", path), suppress(FileNotFoundError):
            return _look_at(path, in_place)
        if not os.path.lexists(path):
            return "nothing"
    return "directory"  # it changes as often as it is looked at


def _look_at(path: Path, in_place: bool) -> Found:
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        return "link" if stat.S_ISLNK(mode) else "file"
    if is_retired(path.name) or is_attempt_name(path.name):
        return "leftover"
    with os.scandir(path) as entries:
        found = [(one.name, one.is_file(follow_symlinks=False)) for one in entries]
    if in_place and not any(name == MARKER for name, _ in found):
        found = [(name, plain) for name, plain in found if id_of(name) is None]
    if not found:
        return "empty"
    files = [name for name, plain in found if plain]
    name = deciding_file(files)
    if name is None:
        return kind_of(files, b"")
    if name == MARKER:
        return kind_of(files, read_tail(path / name, None, DECIDING_BYTES))
    with opened(path / name, os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor:
        return kind_of(files, os.read(descriptor, DECIDING_BYTES))


def check_use(target: Path, use: Use) -> None:
    """Raise ``CheckpointExistsError`` if ``use`` may not take what lies at the target."""
    if refused := refusal(look_at(target), use, target):
        raise CheckpointExistsError(refused)
