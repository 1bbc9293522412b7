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
from pathlib import Path
from types import TracebackType
from typing import Any


def serve(work: Callable[[dict[str, Any]], None]) -> None:
    """Run ``work`` in a child for each line of the standard input."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                work(json.loads(line))
                say("ended")
            except BaseException:
                traceback.print_exc()
                say("failed")
            os._exit(0)
        say(f"pid {child}")
        os.waitpid(child, 0)
        say("gone")


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
    """A child, from its fork until it is gone."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.said: list[str] = []
        self._pid = int(self.until("pid").partition(" ")[2])

    def until(self, word: str) -> str:
        """Read lines up to the first that begins with ``word``."""
        while True:
            line = self._program.line()
            self.said.append(line)
            if line.startswith(word):
                return line
            assert not line.startswith(("failed", "gone")), self.said

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self.until("gone")

    def end(self) -> None:
        """Wait until the child has ended by itself."""
        self.until("ended")
        self.until("gone")
