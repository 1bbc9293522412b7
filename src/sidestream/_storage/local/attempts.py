"""Attempts whose files lie in their target: what is there, whose it is, and how it is removed."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..._format.marker import METADATA_NAME, TAIL_BYTES, is_complete
from ...errors import Conflict, StorageError, from_os_error
from ..object_store.names import NOTE, id_of, is_unfinished
from .directories import RACES
from .read import read_tail
from .store import storage_time
from .transaction import occupied, unlink

__all__ = [
    "NO_REPLACEMENT",
    "ages_of",
    "discard",
    "files_in",
    "is_torn",
    "make_vacant",
    "remove_files",
    "remove_torn",
    "taken",
]

NO_REPLACEMENT = (
    'with commit="marker" nothing can be replaced in one step, so overwrite=True is refused: save to a new directory, '
    "and remove() the old one afterwards"
)

_ABANDONED_S = 3600.0  # what nobody has written to for so long belongs to a dead process
_NO_ID = "0" * 32


def taken(target: Path) -> Conflict:
    if not is_torn(target):
        return occupied(target)
    return Conflict(
        f"{target} has an incomplete {METADATA_NAME}: another save is committing there, or died while it did. Save to "
        f"another directory, or try again when nobody has written there for {_ABANDONED_S / 60:.0f} minutes"
    )


def files_in(directory: Path) -> list[str]:
    """The names in a directory; none if it does not exist."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise occupied(directory) from None
    except OSError as error:
        raise from_os_error(error, "listing", str(directory)) from error


def is_torn(directory: Path) -> bool:
    """Whether its marker lacks the last bytes."""
    try:
        return not is_complete(read_tail(directory / METADATA_NAME, None, TAIL_BYTES))
    except FileNotFoundError:
        return False


def remove_torn(directory: Path) -> None:
    if is_torn(directory):
        unlink(directory / METADATA_NAME)


def ages_of(directory: Path, names: list[str]) -> Mapping[str, float]:
    """By the id of each save that has files there, how long ago the last of them was written. A marker without its last
    bytes may be anybody's."""
    newest: dict[str, float] = {}
    torn = 0.0
    for name in names:
        with suppress(FileNotFoundError):
            written = (directory / name).stat(follow_symlinks=False).st_mtime
            if (save_id := id_of(name)) is not None:
                newest[save_id] = max(newest.get(save_id, 0.0), written)
            elif name == METADATA_NAME:
                torn = written
    if torn and not newest:
        newest[_NO_ID] = torn
    if not newest:
        return {}
    now = storage_time(directory)
    return {save_id: now - max(written, torn) for save_id, written in newest.items()}


def make_vacant(target: Path) -> None:
    """Raise ``Conflict`` if more is in ``target`` than files of saves without a marker; remove those of dead
    processes."""
    names = files_in(target)
    if not names:
        return
    unfinished = is_unfinished(name for name in names if name != METADATA_NAME)
    if NOTE in names or not unfinished or (METADATA_NAME in names and not is_torn(target)):
        raise occupied(target)
    ages = ages_of(target, names)
    for save_id, age_s in ages.items():
        if age_s > _ABANDONED_S:
            discard(target, save_id)
    if METADATA_NAME in names and is_torn(target):
        raise taken(target)


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
    """Of a dead process. The marker goes first: what it stands for may be incomplete from now on."""
    remove_torn(directory)
    remove_files(directory, save_id)
    with suppress(OSError):
        directory.rmdir()
