"""The check, before a save writes, that its files fit on the file system together with the rest of the save."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import NoSpaceError
from .local.orphans import collect_orphans
from .names import ABANDONED_AFTER_S
from .transaction import Transaction

_EXACT = frozenset({"ext2", "ext3", "ext4", "xfs", "tmpfs"})
"""File systems that store bytes without compressing them: files that are larger than the free space do not fit. Other
file systems may compress files, or store them on a server whose free space is unknown."""
_BLOCK_BYTES = 512  # the unit of st_blocks


class Space:
    """The space that a save and its exports need. Any thread may use it.

    Files that may fit are never refused. What other processes write or delete meanwhile is unknown, and so are quotas.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, tuple[Transaction, int]] = {}

    def expect(self, transaction: Transaction, nbytes: int) -> None:
        """Count ``nbytes`` that ``transaction`` will write, without a check."""
        with self._lock:
            self._taken.setdefault(id(transaction), (transaction, nbytes))

    def take(self, transaction: Transaction, nbytes: int, *, alone: bool = False) -> None:
        """Raise ``NoSpaceError`` if ``nbytes`` certainly do not fit; otherwise count them. With ``alone``, the bytes of
        the other transactions are left out of the check."""
        directory = transaction.place
        if directory is None:
            return
        with self._lock:
            try:
                place = _existing(directory)
                device, free = os.stat(place).st_dev, _free(place)  # first, or bytes written meanwhile count twice
                kind = _kind(device)
            except OSError:
                return  # nothing is certain, and the first write reports what is wrong
            others = 0 if alone else sum(self._left(device, id(transaction)))
            if nbytes + others > free and kind in _EXACT and collect_orphans(directory.parent, ABANDONED_AFTER_S):
                with suppress(OSError):  # if the file system does not show it any more
                    free = _free(place)
            if nbytes + others > free and kind in _EXACT:
                beside = f", beside {others} bytes that this save still writes there" if others else ""
                raise NoSpaceError(
                    errno.ENOSPC,
                    f"{nbytes} bytes are needed{beside}, and {free} are free: free space, or write elsewhere",
                    str(directory.parent),
                )
            self._taken[id(transaction)] = transaction, nbytes

    def _left(self, device: int, own: int) -> Iterator[int]:
        """Yield how many bytes each other transaction will still write to ``device``."""
        for number, (transaction, nbytes) in self._taken.items():
            place = transaction.place
            if number == own or place is None or transaction.over:
                continue
            with suppress(OSError):
                if os.stat(_existing(place)).st_dev == device:
                    yield max(0, nbytes - _allocated(place))


def _existing(path: Path) -> Path:
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))


def _free(place: Path) -> int:
    """Return the free space. Raises ``OSError`` also if the file system tells nothing about it."""
    found = os.statvfs(place)
    if not found.f_blocks:  # a tmpfs without a limit
        raise OSError(errno.ENOTSUP, "the file system has no size", str(place))
    return found.f_bavail * found.f_frsize


def _allocated(directory: Path) -> int:
    try:
        with os.scandir(directory) as entries:
            return sum(one.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES for one in entries)
    except FileNotFoundError:
        return 0


def _kind(device: int) -> str | None:
    """Return the type of the file system on ``device``; None if the system does not list it."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            return rest.split()[0]
    return None
