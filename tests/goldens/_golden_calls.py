"""Sees the system calls of a process, its threads and its children, and can make them fail.

A seccomp filter hands chosen calls to a supervisor before the kernel does them (``seccomp_unotify(2)``), so calls of
Python, of a library in C and of other processes are all seen. It needs Linux 5.5 or newer on x86-64, no compiler and no
tracer. The process under observation calls ``watch``; the supervisor calls ``Supervisor.follow``.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

NUMBERS = {
    "write": 1, "open": 2, "pwrite64": 18, "writev": 20, "sendfile": 40, "fsync": 74, "fdatasync": 75, "truncate": 76,
    "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88,
    "openat": 257, "mkdirat": 258, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266, "fallocate": 285,
    "preadv": 295, "pwritev": 296, "renameat2": 316, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328,
    "openat2": 437,
}  # fmt: skip
_NAMES = {number: name for name, number in NUMBERS.items()}
_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER = 317, 1, 8
_PR_SET_NO_NEW_PRIVS = 38
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _USER_NOTIF = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION_BYTES = 80
_CONTINUE = 1
_AT_FDCWD = -100
_FOLLOW_S = 120.0


def available() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def watch(supervisor: socket.socket) -> None:
    """From now on every call in ``NUMBERS`` of this process, and of what it starts, waits for the supervisor."""
    numbers = list(NUMBERS.values())
    program = [_Instruction(_LOAD, 0, 0, 0)]
    program += [_Instruction(_JUMP_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    program += [_Instruction(_RETURN, 0, 0, _ALLOW), _Instruction(_RETURN, 0, 0, _USER_NOTIF)]
    code = _Program(len(program), (_Instruction * len(program))(*program))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    listener = libc.syscall(_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(code))
    if listener < 0:
        supervisor.send(b"x")
        raise OSError(ctypes.get_errno(), "seccomp")
    supervisor.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))])
    os.close(listener)
    supervisor.close()


@dataclass(frozen=True)
class Call:
    """One system call: its name, the thread, the path and the second path that it names."""

    name: str
    thread: int
    path: str
    target: str = ""
    flags: int = 0


@dataclass(frozen=True)
class Fault:
    """At the first call ``name`` whose path contains ``path`` and no word of ``besides``: the error ``number``, or with
    ``action`` the process is killed, or sent ``SIGUSR1``, and the call waits until a file ``cancelled`` is opened."""

    name: str
    path: str
    number: int = 0
    action: str = "fail"
    besides: str = "\0"

    def meets(self, call: Call) -> bool:
        return call.name.startswith(self.name) and self.path in call.path and self.besides not in call.path


class Supervisor:
    """Logs the calls on paths below ``root`` and lets them pass, apart from ``fault``."""

    def __init__(self, root: str, fault: Fault | None = None) -> None:
        self.log: list[Call] = []
        self._root = root
        self._fault = fault
        self._held: int | None = None

    def follow(self, channel: socket.socket) -> None:
        """Return when every process under observation has ended. ``channel`` is the other end of ``watch``."""
        channel.settimeout(_FOLLOW_S)
        _, ancillary, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(4))
        if not ancillary:
            raise OSError(errno.EPERM, "this kernel or container does not allow seccomp to notify a supervisor")
        listener = array.array("i", ancillary[0][2])[0]
        try:
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            deadline = time.monotonic() + _FOLLOW_S
            while time.monotonic() < deadline:
                for _, event in poll.poll(1000):
                    if event & select.POLLHUP:
                        return
                    with suppress(FileNotFoundError, ProcessLookupError):  # the thread has been killed meanwhile
                        self._one(listener)
            raise TimeoutError(f"a process under observation did not end within {_FOLLOW_S} s")
        finally:
            os.close(listener)

    def _one(self, listener: int) -> None:
        notification = bytearray(_NOTIFICATION_BYTES)
        fcntl.ioctl(listener, _RECEIVE, notification, True)
        identity, thread = struct.unpack_from("QI", notification)
        number, _, _, *arguments = struct.unpack_from("iIQ6Q", notification, 16)
        try:
            call = _DECODERS.get(_NAMES[number], _on_descriptor)(_NAMES[number], thread, arguments)
        except OSError:
            call = Call(_NAMES[number], thread, "")
        if self._held is not None and call.path.endswith("/cancelled"):
            held, self._held = self._held, None
            _answer(listener, held)
        if call.path == self._root or call.path.startswith(self._root + "/"):
            fault = self._fault
            struck = fault is not None and fault.meets(call)
            if not struck or fault.action == "cancel":  # otherwise it does not take place
                self.log.append(call)
            if struck:
                self._fault = None
                self._strike(listener, identity, thread, fault)
                return
        _answer(listener, identity)

    def _strike(self, listener: int, identity: int, thread: int, fault: Fault) -> None:
        process = _process_of(thread)
        if fault.action == "kill":
            os.kill(process, signal.SIGKILL)
        elif fault.action == "cancel":
            self._held = identity
            os.kill(process, signal.SIGUSR1)
        else:
            _answer(listener, identity, fault.number)


def _answer(listener: int, identity: int, number: int = 0) -> None:
    answer = struct.pack("QqiI", identity, 0, -number, 0 if number else _CONTINUE)
    try:
        fcntl.ioctl(listener, _SEND, bytearray(answer))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINPROGRESS):
            raise


def _process_of(thread: int) -> int:
    with open(f"/proc/{thread}/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith("Tgid:")))


_Arguments = list[int]
_Decoder = Callable[[str, int, _Arguments], Call]


def _on_descriptor(name: str, thread: int, arguments: _Arguments) -> Call:
    return Call(name, thread, _of_descriptor(thread, arguments[0]))


def _named(name: str, thread: int, arguments: _Arguments) -> Call:
    flags = arguments[1] if name == "open" else os.O_CREAT | os.O_WRONLY if name == "creat" else 0
    return Call(name, thread, _of_name(thread, _AT_FDCWD, arguments[0]), flags=flags)


def _named_at(name: str, thread: int, arguments: _Arguments) -> Call:
    flags = arguments[2] if name in ("openat", "unlinkat") else 0
    return Call(name, thread, _of_name(thread, arguments[0], arguments[1]), flags=flags)


def _two(name: str, thread: int, arguments: _Arguments) -> Call:
    paths = [_of_name(thread, _AT_FDCWD, address) for address in arguments[:2]]
    return Call(name, thread, *paths)


def _two_at(name: str, thread: int, arguments: _Arguments) -> Call:
    paths = [_of_name(thread, arguments[at], arguments[at + 1]) for at in (0, 2)]
    return Call(name, thread, *paths, flags=arguments[4])


_DECODERS: dict[str, _Decoder] = (
    dict.fromkeys(("open", "creat", "mkdir", "rmdir", "unlink", "truncate"), _named)
    | dict.fromkeys(("openat", "openat2", "mkdirat", "unlinkat"), _named_at)
    | dict.fromkeys(("rename", "link"), _two)
    | dict.fromkeys(("renameat", "renameat2", "linkat"), _two_at)
)


def _of_descriptor(thread: int, descriptor: int) -> str:
    return os.readlink(f"/proc/{thread}/fd/{descriptor & 0xFFFFFFFF}").removesuffix(" (deleted)")


def _of_name(thread: int, directory: int, address: int) -> str:
    directory = (directory & 0xFFFFFFFF) - (1 << 32 if directory & 0x80000000 else 0)
    name = os.fsdecode(_memory(thread, address, 4096).split(b"\0")[0]) if address else ""
    if name.startswith("/"):
        return name.rstrip("/") or "/"
    base = os.readlink(f"/proc/{thread}/cwd") if directory == _AT_FDCWD else _of_descriptor(thread, directory)
    return os.path.normpath(f"{base}/{name}")


def _memory(thread: int, address: int, nbytes: int) -> bytes:
    """``nbytes`` from there, fewer where the mapping ends."""
    found = b""
    with open(f"/proc/{thread}/mem", "rb", 0) as memory, suppress(OSError):
        while len(found) < nbytes:  # to the end of each page, as the next one may be missing
            memory.seek(address + len(found))
            found += memory.read(min(nbytes - len(found), 4096 - (address + len(found)) % 4096))
    return found
