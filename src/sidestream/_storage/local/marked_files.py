"""The files of a directory whose checkpoint is committed by its marker: the saves to which they belong, and which of
them are deleted."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..._format.marker import METADATA_NAME, TAIL_BYTES, find_marker, is_complete
from ...errors import CheckpointExistsError, CorruptCheckpointError, StorageError, from_os_error
from ..names import ABANDONED_AFTER_S
from ..object_store.names import NOTE, id_of, is_unfinished
from .directories import RACES, collect_orphans, has_leases, remove_tree, storage_time
from .read import read_tail
from .transaction import occupied, unlink

__all__ = [
    "ages_of",
    "being_removed",
    "collect",
    "delete_replaced",
    "discard",
    "discard_orphans",
    "files_in",
    "is_torn",
    "make_vacant",
    "marked_id",
    "remove_files",
    "remove_torn",
    "taken",
]

_NO_ID = "0" * 32


def marked_id(target: Path, *, removed: bool = False) -> str | None:
    """Return the id of the save whose checkpoint is in ``target``; None if there is no complete marker. Raises
    ``CheckpointExistsError`` if the checkpoint cannot be replaced. With ``removed``, a checkpoint that is being removed
    raises no error."""
    names = files_in(target)
    if METADATA_NAME not in names or (is_torn(target) and is_unfinished(names)):
        return None
    if NOTE in names and not removed:
        raise being_removed(target)
    try:
        marker = find_marker(read_tail(target / METADATA_NAME, None, TAIL_BYTES))
    except FileNotFoundError:
        return None
    except CorruptCheckpointError as error:
        raise CheckpointExistsError(f"{target}: {error}. remove() it first, or save to a new directory") from error
    if marker is None:
        raise CheckpointExistsError(
            f'{target} was written by another writer, and is not replaced with commit="marker": remove() it first, or '
            "save to a new directory"
        )
    return marker.save_id


def being_removed(target: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{target} is being removed: save when remove() has ended, and call it again if it was interrupted"
    )


def discard_orphans(target: Path, marked: str) -> None:
    """Delete the files of dead saves beside the checkpoint of the save ``marked``."""
    for save_id, age_s in ages_of(target, files_in(target)).items():
        if save_id != marked and age_s > ABANDONED_AFTER_S:
            remove_files(target, save_id)


def delete_replaced(target: Path, replaced: str) -> None:
    for name in files_in(target):
        path = target / name
        if name == METADATA_NAME or id_of(name.removesuffix(".sig")) not in (None, replaced):
            continue
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            unlink(path)


def taken(target: Path) -> CheckpointExistsError:
    if not is_torn(target):
        return occupied(target)
    return CheckpointExistsError(
        f"{target} has an incomplete {METADATA_NAME}: another save is committing there, or its process has ended. Save "
        f"to another directory, or try again {ABANDONED_AFTER_S / 60:.0f} minutes after the last write there"
    )


def files_in(directory: Path) -> list[str]:
    """Return the names in a directory. The result is empty if it does not exist."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise occupied(directory) from None
    except OSError as error:
        raise from_os_error(error, "listing", str(directory)) from error


def is_torn(directory: Path) -> bool:
    """Return whether the marker of the directory lacks its last bytes."""
    try:
        return not is_complete(read_tail(directory / METADATA_NAME, None, TAIL_BYTES))
    except FileNotFoundError:
        return False


def remove_torn(directory: Path) -> None:
    if is_torn(directory):
        unlink(directory / METADATA_NAME)


def ages_of(directory: Path, names: list[str]) -> Mapping[str, float]:
    """Return the age of the newest file of each save that has files in the directory, by the id of the save.

    An incomplete marker may belong to any of the saves, so it counts as a file of each. If no file has an id, the
    result has the age of the incomplete marker, or of the empty directory, with the id ``_NO_ID``."""
    newest: dict[str, float] = {}
    torn = 0.0
    for name in names:
        with suppress(FileNotFoundError):
            written = (directory / name).stat(follow_symlinks=False).st_mtime
            if (save_id := id_of(name)) is not None:
                newest[save_id] = max(newest.get(save_id, 0.0), written)
            elif name == METADATA_NAME:
                torn = written
    if not newest and (torn or not names):
        with suppress(FileNotFoundError):
            newest[_NO_ID] = torn or directory.stat().st_mtime
    if not newest:
        return {}
    now = storage_time(directory.parent)  # not ``directory``, to which this may write
    return {save_id: now - max(written, torn) for save_id, written in newest.items()}


def make_vacant(target: Path) -> None:
    """Remove the files of saves of dead processes from ``target``. Raises ``CheckpointExistsError`` if it contains
    other files than those of saves without a complete marker, or an incomplete marker that may still be written."""
    names = files_in(target)
    if not names:
        return
    if not _is_unmarked(target, names):
        raise occupied(target)
    _discard_dead(target, names, ABANDONED_AFTER_S)
    if METADATA_NAME in names and is_torn(target):
        raise taken(target)


def _is_unmarked(directory: Path, names: list[str]) -> bool:
    """Return whether the directory, which contains ``names``, has no other files than those of saves without a complete
    marker."""
    return NOTE not in names and is_unfinished(names) and (METADATA_NAME not in names or is_torn(directory))


def _discard_dead(directory: Path, names: list[str], after_s: float) -> list[str]:
    dead = [save_id for save_id, age_s in ages_of(directory, names).items() if age_s > after_s]
    for save_id in dead:
        discard(directory, save_id)
    return dead


def collect(root: Path, target: str, after_s: float) -> list[str]:
    """Do ``collect_orphans``, and delete the files of such attempts in ``target`` itself. Nothing is renamed."""
    collected = collect_orphans(root, target, after_s, Path)
    names = files_in(root / target)
    if not names or has_leases(root, target) or not _is_unmarked(root / target, names):
        return collected
    return [*collected, *_discard_dead(root / target, names, after_s)]


def remove_files(directory: Path, save_id: str) -> None:
    for _ in range(RACES):
        found = [name for name in files_in(directory) if id_of(name) == save_id]
        if not found:
            return
        for name in found:
            unlink(directory / name)
    raise StorageError(
        errno.EBUSY, "another process creates files of this save as fast as they are removed", str(directory)
    )


def discard(directory: Path, save_id: str) -> None:
    """Delete the files of a save of a dead process. An incomplete marker is deleted first, because the files may be
    incomplete from then on. Does nothing if there is a complete marker, which may be the marker of this save."""
    remove_torn(directory)
    if METADATA_NAME in files_in(directory):
        return
    remove_files(directory, save_id)
    with suppress(OSError):
        directory.rmdir()
