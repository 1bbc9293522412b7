"""Stores in local directories."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..._runtime.threads import Stop
from ...errors import CheckpointNotFoundError, StorageError, UnsupportedError, os_errors_as
from ...options import Capabilities, Durability, Storage
from ..bodies import Body, BytesBody
from ..names import (
    MARKER,
    NOTE,
    READ_FIRST,
    export_files,
    is_attempt_at,
    is_attempt_name,
    is_unfinished,
    parse_step,
    retired_files,
)
from ..replacing import Found, Use, refusal
from ..store import Leftover
from ..transaction import Attempt, StoreAddress, Transaction
from .attempt_lock import silence_s
from .directories import (
    RACES,
    is_retired,
    last_write,
    make_root,
    opened,
    remove_tree,
    storage_time,
    sync_directory,
    take_away,
    unlink,
    unlink_or_remove,
)
from .marking import MarkedTransaction, ages_of, collect, discard, is_torn, marked_id, sync_names, write_note
from .orphans import collect_orphans
from .publishing import files_in, look_at
from .read import LocalSource, read_tail, run_io, sizes_in
from .transaction import LocalTransaction, write_again, write_file


class LocalStore:
    """A ``Store`` in the directory ``root``, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    capabilities = Capabilities(create_only=True, listing=True, mapping=True, rename=True)

    _preallocates = True

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(f"file://{self.root}")

    async def connect(self) -> None:
        """Do nothing: there is no client."""

    def begin(self, attempt: Attempt) -> Transaction:
        return LocalTransaction(self.root, attempt, self.address)

    def check_replaces(self) -> None:
        """Do nothing: only the save can find out whether the file system exchanges directories or renames files."""

    async def put(self, name: str, content: bytes, *, durability: Durability) -> None:
        stop, body = Stop(), BytesBody(content)
        await run_io(_put, self.root, self.root / name, body, durability, self._preallocates, stop, stop=stop)

    async def discard(self, leftover: str) -> None:
        await run_io(_discard, self.root, leftover)

    async def look_at(self, directory: str) -> Found:
        return await run_io(look_at, self.root / directory)

    async def remove_directory(self, directory: str, *, durability: Durability, use: Use = "remove") -> bool:
        return await run_io(_remove_directory, self.root, directory, durability, use)

    async def collect(self, target: str, *, after_s: float) -> list[str]:
        return await run_io(_collect, self.root, target, after_s)

    async def leftovers(self) -> list[Leftover]:
        return await run_io(_leftovers, self.root)

    async def remove(self, names: Sequence[str]) -> None:
        await run_io(_remove, self.root, tuple(names))

    async def ages(self, directory: str) -> dict[str, float]:
        return await run_io(_ages, self.root / directory)

    def source(self, directory: str) -> LocalSource:
        return LocalSource(self.root / directory, directory)

    async def sizes(self, directory: str) -> dict[str, int]:
        return await run_io(sizes_in, self.root / directory, None)

    async def directories(self, directory: str = ".") -> list[str]:
        return await run_io(_directories, self.root / directory)


class MarkedStore(LocalStore):
    """A ``Store`` in the directory ``root``, for file systems that cannot rename directories. Directories are never
    renamed."""

    capabilities = Capabilities(create_only=True, listing=True, mapping=True)

    _preallocates = False

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(f"file://{self.root}", Storage(commit="marker"))

    def begin(self, attempt: Attempt) -> Transaction:
        return MarkedTransaction(self.root, attempt, self.address)

    def check_replaces(self) -> None:
        raise UnsupportedError(
            f'{self.root}: overwrite=True is not possible with Storage(commit="marker"): save under a new name and '
            "remove() the old checkpoint afterwards, or remove() it first"
        )

    async def discard(self, leftover: str) -> None:
        target, _, name = leftover.rpartition("/")
        if not target:
            await run_io(remove_tree, self.root / name)
        elif name == NOTE:
            await run_io(_finish_retiring, self.root / target)
        else:
            await run_io(discard, self.root / target, name)

    async def collect(self, target: str, *, after_s: float) -> list[str]:
        return await run_io(_collect_marked, self.root, target, after_s)

    async def look_at(self, directory: str) -> Found:
        return await run_io(_look_in_place, self.root / directory)

    async def remove_directory(self, directory: str, *, durability: Durability, use: Use = "remove") -> bool:
        return await run_io(_unmark, self.root / directory, durability, use)

    async def leftovers(self) -> list[Leftover]:
        return [*await super().leftovers(), *await run_io(_unmarked, self.root)]


# --- what runs in threads; each function owns the descriptors that it opens ---


def _put(root: Path, path: Path, body: Body, durability: Durability, preallocate: bool, stop: Stop) -> None:
    def make() -> None:
        with os_errors_as("creating a directory", path.parent), suppress(FileNotFoundError, FileExistsError):
            # Suppressed: another process has removed, or made, the directory meanwhile.
            if not root.exists():  # "fsync" in any case: later saves rely on durable parents
                make_root(root, "fsync", [], sync_directory)
            path.parent.mkdir()

    write_again(lambda: write_file(path, body, durability, stop, preallocate=preallocate), make, path.parent)


def _discard(root: Path, leftover: str) -> None:
    path = root / leftover if is_retired(leftover) else take_away(root, leftover)
    if path is not None:
        remove_tree(path)


def _may_retire(path: Path, use: Use, *, in_place: bool) -> bool:
    """Return whether there is something to delete. Raises ``CheckpointNotFoundError`` if ``use`` may not delete it, and
    ``StorageError`` for a link, which may name a checkpoint."""
    found = look_at(path, in_place=in_place)
    if found in ("nothing", "empty", "leftover"):
        return False
    if refused := refusal(found, use, path):
        raise StorageError(errno.ENOTDIR, refused) if found == "link" else CheckpointNotFoundError(refused)
    return True


def _remove_directory(root: Path, directory: str, durability: Durability, use: Use) -> bool:
    path = root / directory
    if not _may_retire(path, use, in_place=False):
        return False
    # In this order: invisible, durably so, and only then deleted. If the directory were deleted in place, a reader
    # could open a checkpoint that lacks files, and a power cut could bring back its name with a part of its files.
    hidden = take_away(root, directory)
    if hidden is None:  # another process has removed it meanwhile
        return True
    if durability == "fsync":
        with os_errors_as("removing", path):
            sync_directory(root)
    remove_tree(hidden)
    return True


def _collect(root: Path, target: str, after_s: float) -> list[str]:
    # Deletions that were interrupted are finished whatever target they had. Attempts of other targets stay for those
    # who save there.
    collected = [name for name in collect_orphans(root, after_s) if is_retired(name) or is_attempt_at(name, target)]
    return [*collected, *_collect_export(root / target, after_s)]


def _collect_marked(root: Path, target: str, after_s: float) -> list[str]:
    return [*collect(root, target, after_s), *_collect_export(root / target, after_s)]


def _collect_export(directory: Path, after_s: float) -> list[str]:
    """Delete the files of an export that did not become complete, or lost the file that readers look for, if none of
    them was written within ``after_s``. Return their names."""
    if is_retired(directory.name) or is_attempt_name(directory.name):
        return []
    if look_at(directory, in_place=True) != "leftover":
        return []
    # Both times are of the file system. The clock of this machine may differ from that of a file server by more than
    # the limit.
    if storage_time(directory.parent) - last_write(directory) <= after_s:
        return []
    names = files_in(directory)
    _delete_export(directory, names, "flush")
    return export_files(names)


def _leftovers(root: Path) -> list[Leftover]:
    # A name alone tells what is left over. A run of a thousand steps is listed once, and no step is opened.
    names = _directories(root)
    with os_errors_as("listing", root), suppress(FileNotFoundError):
        retired = [name for name in names if is_retired(name)]
        attempts = [name for name in names if is_attempt_name(name)]
        if not retired and not attempts:
            return []
        now = storage_time(root)
        return [
            *(Leftover(name, "retired", now - last_write(root / name)) for name in retired),
            *(Leftover(name, "attempt", silence_s(root / name, now)) for name in attempts),
        ]
    return []


def _remove(root: Path, names: tuple[str, ...]) -> None:
    for name in names:
        unlink(root / name)
    for parent in {(root / name).parent for name in names} - {root}:
        # Removed as soon as the last file is gone, so an empty directory does not look like a target that is in use.
        with suppress(OSError):  # not empty
            parent.rmdir()


def _ages(directory: Path) -> dict[str, float]:
    ages: dict[str, float] = {}
    with os_errors_as("listing", directory), suppress(FileNotFoundError):
        with os.scandir(directory) as entries:
            found = list(entries)
        if not found:
            return {}
        now = storage_time(directory)
        for one in found:
            with suppress(FileNotFoundError):
                ages[one.name] = now - one.stat(follow_symlinks=False).st_mtime
    return ages


def _directories(root: Path) -> list[str]:
    with os_errors_as("listing", root), suppress(FileNotFoundError), os.scandir(root) as entries:
        return [one.name for one in entries if one.is_dir(follow_symlinks=False)]
    return []


# --- the same for ``MarkedStore``, where the files of an attempt are in its target ---


def _look_in_place(directory: Path) -> Found:
    return look_at(directory, in_place=True)


def _unmark(directory: Path, durability: Durability, use: Use) -> bool:
    names = files_in(directory)
    with os_errors_as("removing", directory):
        if NOTE in names and MARKER not in names:
            _finish_retiring(directory)
            return True
        if not _may_retire(directory, use, in_place=True):
            return MARKER in names  # another process has removed it meanwhile
        if MARKER in names:
            _finish_retiring(directory, _delete_marker(directory, durability))
        else:
            _delete_export(directory, names, durability)
    return True


def _delete_export(directory: Path, names: list[str], durability: Durability) -> None:
    """Delete the export in the directory, if there is one: first what readers look for."""
    found = export_files(names)
    for name in found:
        if durability == "fsync" and name not in READ_FIRST:
            sync_names(directory)
            durability = "flush"
        unlink_or_remove(directory / name)
    if found:
        with suppress(OSError):  # not empty
            directory.rmdir()


def _delete_marker(directory: Path, durability: Durability) -> str | None:
    """Write the note, delete the marker, and return what the note contains. Return None if another process has deleted
    the marker, or the directory.

    Another process may remove the checkpoint meanwhile, and a save may create its own marker. The descriptor stays open
    until the markers have been compared, so that no other file has the same inode. A save that creates its marker after
    that finds the note."""
    marker = directory / MARKER
    for _ in range(RACES):
        try:
            with opened(marker, os.O_NONBLOCK) as descriptor:
                save_id = marked_id(directory)
                if save_id is None:
                    continue
                write_note(directory, save_id, durable=durability == "fsync")
                if not os.path.samestat(os.fstat(descriptor), os.stat(marker)):
                    continue
                unlink(marker)
            if durability == "fsync":
                sync_names(directory)
        except FileNotFoundError:
            return None
        return save_id
    raise StorageError(errno.EBUSY, "other saves commit here as often as the checkpoint is removed", str(directory))


def _finish_retiring(directory: Path, save_id: str | None = None) -> None:
    """Delete the files of a retired checkpoint, whose marker was deleted before. ``save_id`` is the content of the
    note, if it is known."""
    names = files_in(directory)
    if save_id is None:
        try:
            save_id = bytes(read_tail(directory / NOTE, None, 32)).decode()
        except FileNotFoundError:  # another process has finished it
            return
    for name in retired_files(names, save_id):
        unlink_or_remove(directory / name)
    with suppress(OSError):
        directory.rmdir()


def _unmarked(root: Path) -> list[Leftover]:
    found = []
    for name in _directories(root):
        if name.startswith("."):
            continue
        files = files_in(root / name)
        if NOTE in files and MARKER not in files:
            if parse_step(name) is not None:
                found.append(Leftover(f"{name}/{NOTE}", "retired", 0.0))
        elif is_unfinished(files) and (MARKER not in files or is_torn(root / name)):
            ages = ages_of(root / name, files).items()
            found += [Leftover(f"{name}/{save_id}", "attempt", age_s) for save_id, age_s in ages]
    return found
