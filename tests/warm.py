"""``run`` and ``Popen`` of subprocess for Python programs that import torch, without the 1.6 seconds of that import.

Each program is a fork of one process that has imported torch and the command line. It has its own pid, streams,
environment, directory and signals, and the interpreter ends as always. What depends on how an interpreter starts (its
options except ``-c``, ``-m``, ``-P``, ``-W`` and ``-X faulthandler``; the locale; what has been imported) needs
subprocess itself.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

_IMPORTS = ("torch", "torch.distributed.checkpoint", "sidestream.blocking", "sidestream_cli.app", "rich.console")
_LARGEST = 1 << 17


@dataclass(frozen=True)
class _Program:
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    own_session: bool


class Popen(subprocess.Popen[Any]):
    """Like its base class; ``args`` begin with ``sys.executable``."""

    def _execute_child(  # type: ignore[override]
        self, args: Sequence[str], executable: object, preexec_fn: object, close_fds: bool, pass_fds: Sequence[int],
        cwd: str | os.PathLike[str] | None, env: dict[str, str] | None, startupinfo: object, creationflags: object,
        shell: bool, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        *others: Any,
    ) -> None:  # fmt: skip
        if args[0] != sys.executable or preexec_fn or pass_fds or shell:
            raise ValueError(f"only plain Python programs: {args}")
        program = _Program(
            [os.fspath(one) for one in args[1:]],
            dict(os.environ if env is None else env),
            os.fspath(cwd or os.getcwd()),
            own_session=others[-2],  # `start_new_session`, before `process_group`
        )
        message = json.dumps(asdict(program)).encode()
        assert len(message) < _LARGEST, "too long for one message"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        with theirs:
            socket.send_fds(start(), [message], [*streams, theirs.fileno()])
        self._status = ours
        self.pid = int(ours.recv(64))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._take_status()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        self._take_status()
        return 0, 0  # the base class looks at `returncode` next

    def _take_status(self) -> None:
        if self.returncode is None:
            self.returncode = int(self._status.recv(64))
            self._status.close()


def run(
    args: Sequence[str], *, timeout: float, check: bool = False, **streams: Any
) -> subprocess.CompletedProcess[Any]:
    """Like ``subprocess.run``; ``args`` begin with ``sys.executable``."""
    if streams.pop("capture_output", False):
        streams.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(args, **streams) as child:
        try:
            out, err = child.communicate(timeout=timeout)
        except BaseException:
            child.kill()
            raise
    done = subprocess.CompletedProcess(child.args, child.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@cache
def start() -> socket.socket:
    """Start the process that forks, once, and return the connection to it. It ends when this process ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    atexit.register(ours.close)
    command = [sys.executable, __file__, str(theirs.fileno())]
    with theirs:
        # Nothing waits for it: a finalizer of Popen would warn of a process that still runs.
        subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL).returncode = 0
    return ours


# --- the process that forks ----------------------------------------------------------------------------------------


def serve(requests: socket.socket) -> _Program | None:
    """Fork a child for each request and send its pid, then its exit status. Return in each child, and at the end."""
    children: dict[int, tuple[int, socket.socket]] = {}  # by descriptor of the process: pid, where its status goes
    with selectors.DefaultSelector() as waiting:
        waiting.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not requests:
                    waiting.unregister(key.fileobj)
                    pid, status = children.pop(key.fd)
                    with status:
                        _, code = os.waitpid(pid, 0)
                        os.close(key.fd)
                        _send(status, os.waitstatus_to_exitcode(code))
                    continue
                message, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, 4)
                if not message:
                    return None
                pid = os.fork()
                if pid == 0:
                    return _become(_Program(**json.loads(message)), descriptors)
                for descriptor in descriptors[:3]:
                    os.close(descriptor)
                status = socket.socket(fileno=descriptors[3])
                _send(status, pid)
                descriptor = os.pidfd_open(pid)
                children[descriptor] = pid, status
                waiting.register(descriptor, selectors.EVENT_READ)


def _send(status: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # nothing waits for that child any more
        status.send(str(number).encode())


def _become(program: _Program, descriptors: list[int]) -> _Program:
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, 4096)
    os.chdir(program.directory)
    if program.own_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(program.environment)
    encoding, _, handler = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    modes = (("stdin", "r", None), ("stdout", "w", None), ("stderr", "w", "backslashreplace"))
    for number, (name, mode, errors) in enumerate(modes):
        stream = open(number, mode, encoding=encoding, errors=errors or handler or None, closefd=False)  # noqa: SIM115
        if mode == "w":
            stream.reconfigure(line_buffering=name == "stderr" or stream.isatty())  # type: ignore[attr-defined]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return program


def execute(program: _Program, base: list[str]) -> None:
    """Do what the interpreter does with these arguments."""
    arguments = list(program.arguments)
    first = [""]
    while arguments[0] in ("-W", "-X", "-P"):
        option = arguments.pop(0)
        if option == "-P":
            first = []
        elif option == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
        elif arguments.pop(0) == "faulthandler":
            faulthandler.enable()
        else:
            raise ValueError(f"not supported here: {program.arguments}")
    added = [path for path in program.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*first, *added, *(path for path in base if path not in added)]
    what, *rest = arguments
    if what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if what == "-c":
        sys.argv, source, name = ["-c", *rest[1:]], rest[0], "<string>"
    else:
        sys.argv, source, name = arguments, Path(what).read_text(encoding="utf-8"), what
        main.__file__ = what
        if first:
            sys.path[0] = str(Path(what).absolute().parent)
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    interpreter = sys.path[1:]  # without the folder of this file
    sys.path[:] = interpreter
    for module in _IMPORTS:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or each child would copy the pages of all that was imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the tests
    chosen = serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if chosen is not None:
        execute(chosen, interpreter)
