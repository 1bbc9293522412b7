"""Local directories that cannot be renamed, such as mounts of buckets: the store of ``commit="marker"``."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..._format.marker import METADATA_NAME
from ...errors import InvalidOption, SidestreamError, from_os_error
from ...options import Capabilities, Durability
from ..object_store.names import NOTE, is_unfinished
from ..store import Leftover
from ..transaction import Attempt, StoreAddress, Transaction
from .attempts import NO_REPLACEMENT, ages_of, discard, files_in, is_torn
from .directories import remove_tree
from .marking import ADDRESS, MarkedTransaction, sync_names
from .read import run_io
from .store import LocalStore
from .transaction import unlink

__all__ = ["MarkedStore"]


class MarkedStore(LocalStore):
    """A ``Store`` over the directory ``root``, in which no directory is ever renamed."""

    capabilities = Capabilities(create_only=True, listing=True, mapping=True)

    retired_note = NOTE

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(str(self.root), ADDRESS)

    def begin(self, attempt: Attempt) -> Transaction:
        return MarkedTransaction(self.root, attempt)

    def check_replaces(self) -> None:
        raise InvalidOption(f"{self.root}: {NO_REPLACEMENT}")

    async def discard(self, leftover: str) -> None:
        target, _, name = leftover.rpartition("/")
        if not target:
            await run_io(remove_tree, self.root / name)
        elif name == NOTE:
            await run_io(_finish_retiring, self.root / target)
        else:
            await run_io(discard, self.root / target, name)

    async def retire(self, directory: str, *, durability: Durability) -> None:
        await run_io(_retire, self.root / directory, durability)

    async def leftovers(self) -> list[Leftover]:
        return [*await super().leftovers(), *await run_io(_leftovers, self.root)]


# --- what runs in threads ---


def _retire(directory: Path, durability: Durability) -> None:
    if not files_in(directory):
        return
    try:
        os.close(os.open(directory / NOTE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
        if durability == "fsync":
            sync_names(directory)
        unlink(directory / METADATA_NAME)
        if durability == "fsync":
            sync_names(directory)
    except SidestreamError:
        raise
    except OSError as error:
        raise from_os_error(error, "removing", str(directory)) from error
    _finish_retiring(directory)


def _finish_retiring(directory: Path) -> None:
    """The note goes last: it says that the rest is no attempt."""
    names = files_in(directory)
    if METADATA_NAME in names:
        return
    for name in names:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        elif name != NOTE:
            unlink(path)
    unlink(directory / NOTE)
    with suppress(OSError):
        directory.rmdir()


def _leftovers(root: Path) -> list[Leftover]:
    try:
        with os.scandir(root) as entries:
            directories = [one.name for one in entries if one.name[0] != "." and one.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, "listing", str(root)) from error
    found = []
    for name in directories:
        files = files_in(root / name)
        if NOTE in files and METADATA_NAME not in files:
            found.append(Leftover(f"{name}/{NOTE}", "retired", 0.0))
        elif is_unfinished(one for one in files if one != METADATA_NAME) and not _is_marked(root / name, files):
            ages = ages_of(root / name, files).items()
            found += [Leftover(f"{name}/{save_id}", "attempt", age_s) for save_id, age_s in ages]
    return found


def _is_marked(directory: Path, files: list[str]) -> bool:
    return METADATA_NAME in files and not is_torn(directory)
