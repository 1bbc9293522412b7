"""Processes that are killed, one after the other, and the process that forks them.

A program that imports frameworks for seconds calls ``serve(work)``. It then forks a child for each request, in which
``work`` runs, so that twenty lives cost their imports once. Before a fork it has used neither torch nor sidestream.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

_lines = 1
"""The descriptor that ``say`` writes to."""


def serve(work: Callable[[dict[str, Any]], object]) -> None:
    """Run ``work`` for each line of the standard input, in as many children as ``"world"`` says: the ranks of a job.
    What it returns is plain data."""
    global _lines
    _lines = os.dup(1)
    os.dup2(2, 1)  # what frameworks print
    for line in sys.stdin:
        request = json.loads(line)
        environments, store = [{}], None
        if "world" in request:
            store, port = _fork_store()
            environments = [_rank_environment(rank, request["world"], port) for rank in range(request["world"])]
        children = [_fork(work, request, rank, environment) for rank, environment in enumerate(environments)]
        say(f"pids {' '.join(map(str, children))}")
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if store is not None:
            os.kill(store, signal.SIGKILL)
            os.waitpid(store, 0)
        say(f"gone {codes}")


def _fork(work: Callable[[dict[str, Any]], object], request: dict[str, Any], rank: int, more: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    os.environ |= more
    try:
        result = work(request)
        say(f"ended {rank} {json.dumps(result)}")
    except BaseException:
        traceback.print_exc()
        say(f"failed {rank}")
        os._exit(1)  # saves that are still in progress would keep the process
    sys.exit(0)  # as a program ends, with what runs at exit


def _fork_store() -> tuple[int, int]:
    """Return a process that has the store of a process group, and its port, which the kernel has chosen."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        os.close(write)
        signal.pause()
    os.close(write)
    with os.fdopen(read) as port:
        return child, int(port.read())


def _rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    # With the last one, rank 0 connects to a store that is there, and makes none.
    others = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(number) for name, number in ranks.items()} | others


def say(line: str) -> None:
    os.write(_lines, f"{line}\n".encode())  # whole lines, whatever the other process writes


class Program:
    """A program that serves."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # with what a failed test has left
        self._process.communicate()

    def life(self, **request: Any) -> Life:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Life(self)

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program has ended"
        return line.strip()


class Life:
    """The children of one request, from their fork until all are gone."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.said: list[str] = []
        self._pids = [int(one) for one in self.until("pids").split()[1:]]

    def until(self, *words: str) -> str:
        """Read lines up to the first that begins with one of ``words``."""
        while True:
            line = self._next()
            if line.startswith(words):
                return line
            if line.startswith("failed"):
                while not self._next().startswith("gone"):
                    pass
            assert not line.startswith(("failed", "gone")), self.said

    def kill(self, *ranks: int) -> bool:
        """Kill ``ranks``, or all, and wait until all are gone: those that were not killed may fail. Return whether none
        had come to its end."""
        for rank in ranks or range(len(self._pids)):
            with suppress(ProcessLookupError):  # on a busy machine it may have ended first
                os.kill(self._pids[rank], signal.SIGKILL)
        while not self._next().startswith("gone"):
            pass
        return not any(line.startswith("ended") for line in self.said)

    def end(self) -> list[Any]:
        """Wait until all of them have ended by themselves. Return what ``work`` has returned on each rank."""
        ends = sorted(self.until("ended").split(" ", 2)[1:] for _ in self._pids)
        assert self.until("gone") == f"gone {[0] * len(self._pids)}"
        return [json.loads(result) for _, result in ends]

    def _next(self) -> str:
        line = self._program.line()
        self.said.append(line)
        return line
