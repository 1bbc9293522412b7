"""The home of a publisher: a directory of one host, with its lock, its epoch and its socket."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from .._runtime.descriptors import Descriptor, close_in_children, no_fork
from ..errors import CorruptCheckpointError, InvalidOptionError, PublisherRunningError, UnsupportedError

SCHEME = "unix:"
_LOCK, _EPOCH, _SOCKET = "lock", "epoch", "socket"
_WAITING = 128


class Home:
    """A home that this process has locked. ``epoch`` is higher than that of every publisher before."""

    def __init__(self, path: Path) -> None:
        """Make the directory, lock it and raise the epoch. Blocks. Raises ``PublisherRunningError``,
        ``InvalidOptionError`` and ``CorruptCheckpointError``."""
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise InvalidOptionError(f"{path} has to be a directory of this user alone: chmod 700 {path}")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with no_fork():  # a child would keep the lock when this process has died
            self._lock = Descriptor(os.open(path / _LOCK, flags, 0o600))
        try:
            # A lock of the system: it ends with the process, however that ends.
            fcntl.flock(self._lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise PublisherRunningError(
                f"another publisher uses {path}: give this one a home of its own, or end the other one"
            ) from None
        try:
            self.epoch = self._raise_epoch()
        except BaseException:
            self._lock.close()
            raise

    def _raise_epoch(self) -> int:
        # Synced before anything is published: after a power cut no epoch comes twice.
        file, new = self.path / _EPOCH, self.path / f"{_EPOCH}.new"
        try:
            epoch = int(file.read_text()) + 1 if file.exists() else 1
        except ValueError:
            raise CorruptCheckpointError(
                f"{file} is not a number: write one into it that is higher than all epochs before"
            ) from None
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, f"{epoch}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(new, file)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return epoch

    def listen(self) -> socket.socket:
        """Return the socket that subscribers connect to."""
        with suppress(FileNotFoundError):
            os.unlink(self.path / _SOCKET)  # of a publisher that has died: this one has the lock
        with no_fork():
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            close_in_children(listener)
        with _Address(self.path) as address:
            listener.bind(address)
        listener.listen(_WAITING)
        return listener

    def close(self) -> None:
        """Remove the socket, and release the lock."""
        with suppress(FileNotFoundError):
            os.unlink(self.path / _SOCKET)
        self._lock.close()


class _Address:
    """The address of the socket in a home, while this is entered. The path itself may be longer than the 107 bytes that
    the address of a socket may have."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> str:
        self._directory = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._directory}/{_SOCKET}"

    def __exit__(self, *_: object) -> None:
        os.close(self._directory)


def path_of(url: Any) -> Path:
    """Return the home that ``unix:PATH`` names. Raises ``InvalidOptionError``, and ``UnsupportedError`` where there is
    no hand-over of memory."""
    if not isinstance(url, str) or not url.startswith(SCHEME) or not url.removeprefix(SCHEME):
        raise InvalidOptionError(f"{url!r} has to be unix:PATH, with the home of a Publisher as its path")
    check_system()
    return Path(url.removeprefix(SCHEME)).absolute()


def check_system() -> None:
    """Raise ``UnsupportedError`` on systems other than Linux."""
    if not hasattr(os, "memfd_create"):
        raise UnsupportedError("weights are handed over in memory on Linux only; let servers follow a run")


def connect(path: Path) -> socket.socket:
    """Connect to the publisher in a home. Blocks for a moment. Raises ``OSError`` if there is none."""
    with no_fork():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(sock)
    try:
        sock.settimeout(1.0)
        with _Address(path) as address:
            sock.connect(address)
        check_peer(sock)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def check_peer(sock: socket.socket) -> None:
    """Raise ``PermissionError`` unless the process on the other side belongs to this user."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        raise PermissionError(f"the process on the other side belongs to user {uid}")
