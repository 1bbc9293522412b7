"""The other end of ``_child.py`` and ``_oracle.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm import Popen

import sidestream

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Told:
    """How a child ended: its exit code (negative: the signal that killed it) and its reports."""

    exit: int
    reports: list[dict[str, Any]]

    def get(self, key: str) -> Any:
        return next((report[key] for report in self.reports if key in report), None)

    @property
    def acked(self) -> dict[str, int]:
        """Seeds of the acknowledged saves by directory."""
        return {report["acked"]: report["seed"] for report in self.reports if "acked" in report}


@dataclass(frozen=True, slots=True)
class Seen:
    """What the oracle sees of a run; see there."""

    ours: dict[str, int | str]
    stock: dict[str, int | str]
    unmarked: list[str]
    uploads: list[str]


class Program:
    """A Python program that answers each line of JSON with lines of JSON."""

    def __init__(self, name: str) -> None:
        source = str(Path(sidestream.__file__).parents[1])
        self._process = Popen(
            [sys.executable, str(HERE / name)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent), source))},
        )  # fmt: skip

    def say(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the harness ended; its error stands on stderr"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
        self._process.stdout.close()


class Children(Program):
    """One trial at a time; ``several`` of them run as many at once."""

    def start(self, **trial: Any) -> int:
        """The pid of a child that waits for ``finish``."""
        self.say(trial)
        return int(self.hear()["pid"])

    def begin(self) -> None:
        self.say({})

    def finish(self) -> Told:
        answer = self.hear()
        assert answer["exit"] != 70, "the harness failed in a trial; its error stands on stderr"
        return Told(answer["exit"], answer["told"])

    def run(self, started: Callable[[int], object] = lambda _: None, **trial: Any) -> Told:
        started(self.start(**trial))
        self.begin()
        return self.finish()


class Oracle(Program):
    def look(self, options: dict[str, Any], run: str, mib: int, known: Collection[str] = ()) -> Seen:
        self.say({"options": options, "run": run, "mib": mib, "known": list(known)})
        answer = self.hear()
        assert "failed" not in answer, answer.get("failed")
        return Seen(**answer)


@contextmanager
def children() -> Iterator[Children]:
    running = Children("_child.py")
    try:
        yield running
    finally:
        running.close()


@contextmanager
def oracle() -> Iterator[Oracle]:
    running = Oracle("_oracle.py")
    try:
        yield running
    finally:
        running.close()
