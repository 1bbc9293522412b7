"""A quota that the kernel enforces: on what a subvolume of a btrfs may take. Needs root, and no programs."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _rows import cannot

# linux/btrfs.h: all have the type 0x94
_SUBVOL_CREATE = 0x5000940E  # _IOW, 14: a descriptor, a name
_INO_LOOKUP = 0xD0009412  # _IOWR, 18: a tree, an inode, a name
_QUOTA_CTL = 0xC0109428  # _IOWR, 40: a command, a status
_QUOTA_RESCAN_WAIT = 0x942E  # _IO, 46
_QGROUP_LIMIT = 0x8030942B  # _IOR, 43: a tree, flags, four limits
_SYNC = 0x9408  # _IO, 8
_ARGUMENT_BYTES = 4096
_ENABLE, _MAX_REFERENCED = 1, 1
_NO_LIMIT = (1 << 64) - 1


class Quota:
    """Of ``folder``, a new subvolume in the btrfs that is mounted at ``place``."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "limited"
        self._descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)  # where there is no limit, to change the other
        try:
            fcntl.ioctl(self._descriptor, _QUOTA_CTL, bytearray(struct.pack("2Q", _ENABLE, 0)))
        except OSError as error:
            os.close(self._descriptor)
            cannot(f"the kernel enables no quota on btrfs: {error}")
        fcntl.ioctl(self._descriptor, _QUOTA_RESCAN_WAIT)
        name = bytearray(struct.pack("q", 0) + self.folder.name.encode()).ljust(_ARGUMENT_BYTES, b"\0")
        fcntl.ioctl(self._descriptor, _SUBVOL_CREATE, name)
        self._tree = self._tree_of_folder()

    def _tree_of_folder(self) -> int:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = bytearray(struct.pack("2Q", 0, os.fstat(descriptor).st_ino)).ljust(_ARGUMENT_BYTES, b"\0")
            fcntl.ioctl(descriptor, _INO_LOOKUP, found)
        finally:
            os.close(descriptor)
        return int(struct.unpack_from("Q", found)[0])

    def limit(self, nbytes: int) -> None:
        """From now on there may be ``nbytes``, metadata included. What is there already stays."""
        limit = bytearray(struct.pack("6Q", self._tree, _MAX_REFERENCED, nbytes, 0, 0, 0))
        fcntl.ioctl(self._descriptor, _QGROUP_LIMIT, limit)

    def exhaust(self) -> None:
        """From now on nothing may be added."""
        self.limit(1)

    def lift(self) -> None:
        self.limit(_NO_LIMIT)

    def settle(self) -> None:
        """What was removed is not counted any more."""
        fcntl.ioctl(self._descriptor, _SYNC)

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def quota(place: Path) -> Iterator[Quota]:
    made = Quota(place)
    try:
        yield made
    finally:
        made.close()
