"""Memory and short messages among the processes of one machine, without names: both end with the processes.

A process finds what another one has opened by the number of that process and of the descriptor.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ...errors import Closed

__all__ = ["Mail", "Pages", "open_pages"]

_MESSAGE = struct.Struct("<IIQ")
_AT_ONCE = 4096
_NAME = "sidestream-read"


_open_here: weakref.WeakSet[Pages | Mail] = weakref.WeakSet()


class Pages:
    """Memory that other processes of this machine may open. Sealed: nobody can cut it off under another one. It is
    there until the last of them has let go of it."""

    def __init__(self, nbytes: int) -> None:
        """Raises ``OSError``; ``AttributeError`` where the system has no such memory."""
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, nbytes)
            fcntl.fcntl(
                self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            self._memory: mmap.mmap | None = _mapped(self._descriptor, nbytes)
            self.address = {"descriptor": self._descriptor, "file": _identity(self._descriptor), "nbytes": nbytes}
        except BaseException:
            os.close(self._descriptor)
            raise
        _open_here.add(self)

    @property
    def memory(self) -> mmap.mmap:
        if self._memory is None:
            raise Closed("this memory was let go of")
        return self._memory

    def close(self) -> None:
        """Nobody opens it any more. Whoever has it open keeps it, and so do views over it."""
        _open_here.discard(self)
        self._memory = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def open_pages(process: int, address: Mapping[str, Any]) -> mmap.mmap:
    """Those of another process. Raises ``OSError``, ``ProcessLookupError`` where they are gone."""
    descriptor = _open(process, address, os.O_RDWR)
    try:
        return _mapped(descriptor, int(address["nbytes"]))
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(descriptor, nbytes)
    with suppress(OSError):
        memory.madvise(mmap.MADV_DONTFORK)  # or a child would keep it
    return memory


def _open(process: int, address: Mapping[str, Any], flags: int) -> int:
    gone = ProcessLookupError(errno.ESRCH, f"process {process} has let go of it")
    try:
        descriptor = os.open(f"/proc/{process}/fd/{int(address['descriptor'])}", flags | os.O_CLOEXEC)
    except FileNotFoundError:  # which would be taken for a file of the checkpoint
        raise gone from None
    if _identity(descriptor) == list(address["file"]):
        return descriptor
    os.close(descriptor)
    raise gone


def _identity(descriptor: int) -> list[int]:
    status = os.fstat(descriptor)
    return [status.st_dev, status.st_ino]


class Mail:
    """One process's box, and those of the others. Belongs to the running loop; ``heard(kind, sender, number)`` is
    called there. A message is never lost while both processes live; to one that has ended it goes nowhere."""

    def __init__(self, heard: Callable[[int, int, int], None]) -> None:
        """Raises ``OSError``; ``NotImplementedError`` where the loop watches no descriptors."""
        self._loop = asyncio.get_running_loop()
        self._heard = heard
        self._box, self._slot = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._others: dict[int, int] = {}
        self._unsent: dict[int, deque[bytes]] = {}
        self.address = {"descriptor": self._slot, "file": _identity(self._slot)}
        try:
            self._loop.add_reader(self._box, self._read)
        except BaseException:
            os.close(self._box)
            os.close(self._slot)
            raise
        _open_here.add(self)

    def open(self, place: int, process: int, address: Mapping[str, Any]) -> None:
        """The box of another process, as number ``place``. Raises ``OSError``."""
        self._others[place] = _open(process, address, os.O_WRONLY | os.O_NONBLOCK)

    def send(self, place: int, kind: int, sender: int, number: int) -> None:
        waiting = self._unsent.setdefault(place, deque())
        waiting.append(_MESSAGE.pack(kind, sender, number))
        if len(waiting) == 1:
            self._write(place)

    def _write(self, place: int) -> None:
        descriptor, waiting = self._others[place], self._unsent[place]
        try:
            while waiting:
                os.write(descriptor, waiting[0])  # as a whole or not at all: it is short
                waiting.popleft()
        except BlockingIOError:
            self._loop.add_writer(descriptor, self._write, place)
            return
        except BrokenPipeError:  # its end is told by other means
            waiting.clear()
        self._loop.remove_writer(descriptor)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            for message in _MESSAGE.iter_unpack(os.read(self._box, _AT_ONCE * _MESSAGE.size)):
                self._heard(*message)

    def close(self) -> None:
        self._loop.remove_reader(self._box)
        for descriptor in self._others.values():
            self._loop.remove_writer(descriptor)
        self.let_go()

    def let_go(self) -> None:
        """Without a word to the loop, which in a child is its parent's."""
        _open_here.discard(self)
        others, self._others = self._others, {}
        for descriptor in (self._box, self._slot, *others.values()):
            os.close(descriptor)


def _after_fork() -> None:
    """A child (a worker of a data loader) would keep the memory, and the pipes open when this process has ended."""
    found = list(_open_here)
    for one in found:
        if isinstance(one, Pages):
            one.close()
        else:
            one.let_go()
    if found:
        _let_go_of_mappings()


def _let_go_of_mappings() -> None:
    """Each has a descriptor of its own, which it will close some time: until then that number is kept for it."""
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:{_NAME}"):
                    os.dup2(nothing, int(name), inheritable=False)
        os.close(nothing)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
