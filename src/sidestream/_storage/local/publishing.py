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
from ..names import MARKER, READ_FIRST
from .directories import RACES, exchange, exchanges, is_directory, is_vacant, sync_directory

__all__ = [
    "NO_RENAME",
    "Step",
    "can_exchange",
    "check_whole",
    "files_in",
    "may_be_replaced",
    "move_there",
    "occupied",
    "publish",
    "replace",
]

Step: TypeAlias = Callable[[Path, Path, frozenset[str], os.stat_result | None], None]
"""The function that makes an attempt visible. Its arguments are the attempt, the target, the files that must be there,
and the status of the attempt's directory when it was made."""


_REPLACEABLE = READ_FIRST | {MARKER}
"""The files that mark a directory as a checkpoint or an export. Each of these has at least one of them."""


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
        check_whole(target, names, target)
    except FileNotFoundError:
        pass  # retention or another process has removed the whole directory
    except StorageError:
        if made is None or _is(made, target):  # otherwise another save has replaced it already
            os.rename(target, hidden)
            raise


def replace(hidden: Path, target: Path, names: frozenset[str], made: os.stat_result | None, *, checked: bool) -> None:
    """Exchange the attempt with the target, or rename the attempt if there is no target. Raises
    ``CheckpointExistsError`` if the target may not be replaced.

    Another save, or a removal, may change the target between the check and the exchange. Then both are repeated.
    ``checked`` says that the present target may be replaced."""
    for left in reversed(range(RACES)):
        vacant = is_vacant(target)
        checked = checked and not vacant  # a target that appears from now on was not checked
        try:
            if vacant:
                move_there(hidden, target, names, made)
            else:
                if not checked:
                    _check_replaceable(target)
                _exchange(hidden, target, names)
            return
        except SidestreamError:
            raise
        except OSError as error:
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
    if not os.path.isdir(target):
        return CheckpointExistsError(f"{target} already exists and is a file: choose another name, or delete it first")
    return CheckpointExistsError(
        f"{target} is not empty: save to a new directory, or pass overwrite=True to a save that replaces a checkpoint"
    )


def files_in(directory: Path) -> list[str]:
    """Return the names in a directory. The result is empty if it does not exist."""
    with os_errors_as("listing", directory):
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise occupied(directory) from None


def may_be_replaced(target: Path) -> bool:
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
    found = files_in(target)
    if found and _REPLACEABLE.isdisjoint(found):
        raise CheckpointExistsError(
            f"{target} is not empty, and no checkpoint (it has no .metadata), so it was not replaced: save to a new "
            "directory, or empty this one first"
        )


def can_exchange(directory: Path) -> bool:
    with os_errors_as("trying to exchange two directories", directory):
        return exchanges(directory)
