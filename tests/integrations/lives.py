"""Processes that are killed, one after the other, and the process that forks them.

A program that imports frameworks for seconds calls ``serve(work)``. It then forks a child for each request, in which
``work`` runs, so that twenty lives cost their imports once. Before a fork it has used neither torch nor sidestream.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any


def serve(work: Callable[[dict[str, Any]], None]) -> None:
    """Run ``work`` for each line of the standard input, in as many children as ``"world"`` says: the ranks of a job."""
    for line in sys.stdin:
        request = json.loads(line)
        world = request.get("world", 1)
        port = _free_port()
        children = [_fork(work, request, rank, world, port) for rank in range(world)]
        say(f"pids {' '.join(map(str, children))}")
        for child in children:
            os.waitpid(child, 0)
        say("gone")


def _fork(work: Callable[[dict[str, Any]], None], request: dict[str, Any], rank: int, world: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    if "world" in request:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {name: str(number) for name, number in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        work(request)
        say(f"ended {rank}")
    except BaseException:
        traceback.print_exc()
        say(f"failed {rank}")
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # whole lines, whatever the other process writes


class Program:
    """A program that serves."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
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

    def until(self, word: str) -> str:
        """Read lines up to the first that begins with ``word``."""
        while True:
            line = self._program.line()
            self.said.append(line)
            if line.startswith(word):
                return line
            if line.startswith("failed"):
                while self._program.line() != "gone":
                    pass
            assert not line.startswith(("failed", "gone")), self.said

    def kill(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):  # on a busy machine it may have ended first
                os.kill(pid, signal.SIGKILL)
        self.until("gone")

    def end(self) -> None:
        """Wait until all of them have ended by themselves."""
        for _ in self._pids:
            self.until("ended")
        self.until("gone")
