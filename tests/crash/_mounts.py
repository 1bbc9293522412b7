"""File systems of our own, for those who may mount."""

from __future__ import annotations

import fcntl
import lzma
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from _rows import HERE, cannot

_EXT4_BYTES = 64 << 20


@contextmanager
def mounts_locked(how: int) -> Iterator[None]:
    """Hold a lock among all processes of the tests: ``LOCK_SH`` to mount, ``LOCK_EX`` to have a mount namespace.

    A new namespace keeps what is mounted. Where another process unmounts it meanwhile and mounts it again, it gets the
    file system as it was left, also one that was shut down."""
    with Path(tempfile.gettempdir(), "sidestream-campaign-mounts.lock").open("w") as file:
        fcntl.flock(file, how)
        yield


@contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """``mount *arguments place``, undone at the end. Skips where that is not permitted."""
    if os.geteuid() != 0:
        cannot("only root may mount")
    place.mkdir(exist_ok=True)
    with mounts_locked(fcntl.LOCK_SH):
        done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, text=True, check=False)
        if done.returncode:
            cannot(f"mount {' '.join(arguments)} is not possible here: {done.stderr.strip()}")
        try:
            yield place
        finally:
            gone = subprocess.run(["umount", str(place)], capture_output=True, text=True, check=False)
            if gone.returncode:
                # So that the directory of the tests can be deleted.
                subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)
                pytest.fail(f"a file in {place} is still open: {gone.stderr.strip()}")


class Disk:
    """An image with an empty file system, ``renew``ed as often as one likes."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._base, self._image, self._place = folder / "base.img", folder / "trial.img", folder / "disk"
        self._options = "loop,nouuid" if kind == "xfs" else "loop"
        self._make_ext4() if kind == "ext4" else self._unpack(kind)

    def _make_ext4(self) -> None:
        make = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if make is None:
            cannot("mkfs.ext4 is not installed")
        with self._base.open("wb") as image:
            image.truncate(_EXT4_BYTES)
        subprocess.run([make, "-q", str(self._base)], check=True, capture_output=True)

    def _unpack(self, kind: str) -> None:
        """Few machines have the programs. The images are what these make:

        - xfsprogs 6.1: ``truncate -s 64M xfs.img; mkfs.xfs --unsupported xfs.img; xz -9e xfs.img``
        - btrfs-progs 6.2: ``truncate -s 128M btrfs.img; mkfs.btrfs -m single -d single btrfs.img; xz -9e btrfs.img``
        """
        with lzma.open(HERE / f"{kind}.img.xz") as packed, self._base.open("wb") as image:
            while block := packed.read(1 << 20):
                if block.count(0) == len(block):
                    image.truncate(image.seek(len(block), os.SEEK_CUR))
                else:
                    image.write(block)

    def renew(self) -> None:
        subprocess.run(["cp", "--sparse=always", str(self._base), str(self._image)], check=True)

    def mount(self) -> AbstractContextManager[Path]:
        return mounted(self._place, "-o", self._options, str(self._image))
