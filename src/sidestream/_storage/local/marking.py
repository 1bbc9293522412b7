"""An attempt with ``commit="marker"``: files with unique names in the target, and a marker that is created last.

A process may die while it writes the marker. So the last bytes of the marker are written when all others are durable.
Without them the marker is incomplete, and there is no checkpoint. The names of the other files tell to which save they
belong. A checkpoint is never replaced: the exclusive creation of the marker is what lets one of two saves commit.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..._format.marker import END, TAIL_BYTES, find_marker, is_complete
from ..._runtime.threads import Stop, Threads
from ...errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    SidestreamError,
    StorageError,
    os_errors_as,
)
from ..bodies import Body
from ..names import ABANDONED_AFTER_S, MARKER, NOTE, id_of, is_attempt_at, is_unfinished, sidecar_with_id
from ..transaction import Attempt, StoreAddress, being_removed
from .directories import (
    RACES,
    has_leases,
    is_vacant,
    make_root,
    move_new,
    storage_time,
    sync_directory,
    unlink,
)
from .orphans import collect_orphans
from .publishing import NO_RENAME, check_whole, files_in, look_at, occupied, sync_visible
from .read import read_tail
from .transaction import LocalTransaction, write_again, write_buffer

_NO_ID = "0" * 32


def marked_id(directory: Path) -> str | None:
    """Return the id of the save whose marker is in the directory; empty if the marker is incomplete, damaged or of
    another writer. Return None if there is no marker."""
    try:
        marker = find_marker(read_tail(directory / MARKER, None, TAIL_BYTES))
    except FileNotFoundError:
        return None
    except CorruptCheckpointError:
        return ""
    return "" if marker is None else marker.save_id


def write_note(directory: Path, save_id: str, *, durable: bool) -> None:
    """Write the note of a removal with this id. A removal that reads the note meanwhile never finds a part of it, but
    on file systems that cannot rename a file over another one."""
    note, hidden = directory / NOTE, directory / sidecar_with_id(NOTE, uuid.uuid4().hex)
    try:
        _write_id(hidden, save_id, durable)
        os.rename(hidden, note)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(hidden)
        if not isinstance(error, OSError) or error.errno not in NO_RENAME:
            raise
        _write_id(note, save_id, durable)
    if durable:
        sync_names(directory)


def _write_id(path: Path, save_id: str, durable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o666), "wb") as file:
        file.write(save_id.encode())
        if durable:
            file.flush()
            os.fsync(file.fileno())


def taken(target: Path) -> CheckpointExistsError:
    if not is_torn(target):
        return _occupied(target)
    return CheckpointExistsError(
        f"{target} has an incomplete {MARKER}: another save is committing there, or its process has ended. Save "
        f"to another directory, or try again {ABANDONED_AFTER_S / 60:.0f} minutes after the last write there"
    )


def _occupied(target: Path) -> CheckpointExistsError:
    """Return the error of ``occupied``, which does not offer ``overwrite=True``."""
    if look_at(target, in_place=True) not in ("checkpoint", "stock"):
        return occupied(target)
    return CheckpointExistsError(
        f"{target} is not empty: save to a new directory, or remove() the checkpoint there first"
    )


def is_torn(directory: Path) -> bool:
    """Return whether the marker of the directory lacks its last bytes."""
    return _torn_tail(directory) is not None


def _torn_tail(directory: Path) -> bytes | None:
    """Return the end of the marker of the directory; None if the marker is complete, or does not exist."""
    try:
        tail = read_tail(directory / MARKER, None, TAIL_BYTES)
    except FileNotFoundError:
        return None
    return None if is_complete(tail) else tail


def remove_torn(directory: Path, save_id: str = "") -> None:
    """Delete an incomplete marker; with ``save_id`` only one of this save, of which no more than its end is missing."""
    tail = _torn_tail(directory)
    if tail is not None and save_id.encode() in tail:
        unlink(directory / MARKER)


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
            elif name == MARKER:
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
        raise being_removed(target) if NOTE in names else _occupied(target)
    _discard_dead(target, names, ABANDONED_AFTER_S)
    if MARKER in names and is_torn(target):
        raise taken(target)


def _is_unmarked(directory: Path, names: list[str]) -> bool:
    """Return whether the directory, which contains ``names``, has no other files than those of saves without a complete
    marker."""
    return NOTE not in names and is_unfinished(names) and (MARKER not in names or is_torn(directory))


def _discard_dead(directory: Path, names: list[str], after_s: float) -> list[str]:
    dead = [save_id for save_id, age_s in ages_of(directory, names).items() if age_s > after_s]
    for save_id in dead:
        discard(directory, save_id)
    return dead


def collect(root: Path, target: str, after_s: float) -> list[str]:
    """Do ``collect_orphans``, and delete the files of such attempts in ``target`` itself. Return the names of what was
    deleted at ``target``. Nothing is renamed."""
    collected = [name for name in collect_orphans(root, after_s, Path) if is_attempt_at(name, target)]
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
    if MARKER in files_in(directory):
        return
    remove_files(directory, save_id)
    with suppress(OSError):
        directory.rmdir()


_NO_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_MOST_COMMIT_S = 600.0  # less than ABANDONED_AFTER_S, after which other processes delete the files of this one


def sync_names(path: Path) -> None:
    """Do ``sync_directory``, and nothing on file systems that cannot sync directories."""
    try:
        sync_directory(path)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _check_not_late(began: float, path: Path) -> None:
    if time.monotonic() - began > _MOST_COMMIT_S:
        raise StorageError(errno.ETIMEDOUT, "writing the marker took too long to go on", str(path))


class MarkedTransaction(LocalTransaction):
    """A ``Transaction`` whose directory is the target itself. Files of the kinds that keep their names (``"file"``,
    ``"files"``) are written where a ``LocalTransaction`` writes them. They are then moved one after the other."""

    _appear = staticmethod(move_new)
    _sync = staticmethod(sync_names)
    _take = Path
    _preallocates = False
    _locks = False  # each file of a mount of a bucket is an upload, and such mounts have no locks
    _adds_ids = True

    def __init__(self, root: Path, attempt: Attempt, address: StoreAddress) -> None:
        super().__init__(root, attempt, address)
        self._claimed = False  # whether this attempt has created the marker, which may be incomplete

    def _make(self) -> None:
        if not self._carries_id:
            super()._make()
            return
        make_vacant(self._target)
        with self._unless_discarded():
            self._made = self._make_and_look()

    def _make_and_look(self) -> os.stat_result:
        """Make the target, and return its status. Another attempt that failed, or a removal, may remove it while it is
        empty. Then it is made again."""
        for left in reversed(range(RACES)):
            try:
                self._make_target()
                return self._target.stat()
            except OSError as error:
                lost = error.errno in (errno.ENOENT, errno.EEXIST)
                if not lost or (not left and isinstance(error, SidestreamError)):
                    raise
        raise CheckpointExistsError(f"{self._target} is removed as often as it is made")

    def _write_file(self, name: str, body: Body, stop: Stop, threads: Threads | None = None) -> None:
        write = partial(super()._write_file, name, body, stop, threads)
        if self._carries_id and len(self._names) == 1:
            write_again(write, self._make_and_look, self._directory)
        else:  # where other files of this attempt were removed, making the directory again would not help
            write()

    def _make_visible(self) -> None:
        if self.attempt.kind == "files":
            self._publish_files()
            self._made = None
        elif not self._carries_id:
            super()._make_visible()
        else:
            self._publish_marker()
            self._last, self._made = None, None
            self._names.clear()

    def _publish_files(self) -> None:
        """Move the files that other ranks have written into the hidden directory, and then those of this rank in their
        order. Readers look for the last one."""
        hidden, target, names = self._hidden, self._target, [*self._names]
        durable, moved, last = self.attempt.durability == "fsync", [], names[-1]
        with os_errors_as("publishing", target):
            try:
                check_whole(hidden, names, target)
                names = [*sorted(set(os.listdir(hidden)).difference(names)), *names]
                if not is_vacant(target):
                    raise occupied(target)
                make_root(target, self.attempt.durability, self._new, sync_names)
                for name in names:
                    if durable and name is last:
                        sync_names(target)
                    move_new(hidden / name, target / name)
                    moved.append(name)
            except BaseException as error:
                for name in moved:
                    unlink(target / name)
                if isinstance(error, FileExistsError) and not isinstance(error, SidestreamError):
                    raise occupied(target) from error
                raise
        try:
            if durable:
                failed = "the files are complete, but the sync of their directory failed"
                sync_visible(target, target, failed, sync_names)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)

    def _publish_marker(self) -> None:
        assert self._last is not None
        name, pieces = self._last
        path, content, durable = self._target / name, b"".join(pieces), self.attempt.durability == "fsync"
        with os_errors_as("publishing", path):
            if durable:
                sync_names(self._target)  # makes the names of the files durable before there is a marker
            self._create_marker(path, content, durable)
        if durable:
            failed = "the checkpoint is committed, but the sync of its directory failed"
            sync_visible(self._target, self._target, failed, sync_names)

    def _create_marker(self, path: Path, content: bytes, durable: bool) -> None:
        """Write the marker: first all but its last bytes, then these. If anything fails before the last bytes are
        written, remove the marker. After that the outcome has to be read back.

        Another process may remove the marker meanwhile, and another save may create its own. The descriptor stays open
        until the markers have been compared, so that no other file has the same inode."""
        view, began = memoryview(content), time.monotonic()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileExistsError as error:
            raise taken(self._target) from error
        sent = False
        try:
            end = len(view) - len(END)
            write_buffer(descriptor, view[:end], 0)
            if durable:
                os.fsync(descriptor)
            check_whole(self._target, self._names, self._target)
            if os.path.lexists(self._target / NOTE):
                raise being_removed(self._target)
            _check_not_late(began, path)
            self._claimed = sent = True
            write_buffer(descriptor, view[end:], end)
            if durable:
                os.fsync(descriptor)
            os.close(os.dup(descriptor))  # reports errors, and a mount of a bucket uploads the file
            sent = False  # if another process has removed files of this attempt meanwhile, the marker is removed too
            check_whole(self._target, (*self._names, path.name), self._target)
        except BaseException:
            if not sent and time.monotonic() - began <= _MOST_COMMIT_S:
                with suppress(OSError):
                    if os.path.samestat(os.fstat(descriptor), path.lstat()):
                        os.unlink(path)
            raise
        finally:
            with suppress(OSError):
                os.close(descriptor)
        self._claimed = False

    def discard(self) -> None:
        if not self._carries_id:
            super().discard()
            return
        if not self._may_discard():
            return
        self._made, self._last = None, None
        if self._claimed:
            remove_torn(self._target, self.attempt.save_id)
        remove_files(self._target, self.attempt.save_id)
        if self._target in self._new:
            with suppress(OSError):  # not empty: other attempts have files in it
                self._target.rmdir()
