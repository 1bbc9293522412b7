"""A mount that renames no directory, makes no links and syncs no directory: it passes everything else to ROOT.

pip install mfusepy          # and libfuse 2: libfuse2 in Debian
mkdir ROOT MOUNT
python tests/storage/no_renames.py ROOT MOUNT &
SIDESTREAM_TEST_MOUNT=MOUNT pytest tests/storage/test_marked.py -k real_mount
umount MOUNT
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import mfusepy


class NoRenames(mfusepy.Operations):
    use_ns = True

    def __init__(self, root: str) -> None:
        self._root = root

    def _at(self, path: str) -> str:
        return self._root + path

    def getattr(self, path: str, fh: Any = None) -> dict[str, int]:
        found = os.lstat(self._at(path))
        numbers = ("st_gid", "st_mode", "st_nlink", "st_size", "st_uid", "st_ino", "st_blocks")
        times = ("st_atime", "st_ctime", "st_mtime")
        return {name: getattr(found, name) for name in numbers} | {name: getattr(found, f"{name}_ns") for name in times}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rename(self, old: str, new: str) -> None:
        if os.path.isdir(self._at(old)):
            raise mfusepy.FuseOSError(errno.ENOTSUP)
        os.rename(self._at(old), self._at(new))

    def link(self, target: str, source: str) -> None:
        raise mfusepy.FuseOSError(errno.ENOTSUP)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~os.O_DIRECT)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: Any = None) -> None:
        os.truncate(self._at(path), length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def utimens(self, path: str, times: Any = None) -> None:
        os.utime(self._at(path), ns=times)


if __name__ == "__main__":
    mfusepy.FUSE(NoRenames(os.path.abspath(sys.argv[1])), sys.argv[2], foreground=True)
