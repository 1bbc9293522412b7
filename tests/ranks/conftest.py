"""Groups of real ranks for tests."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_ANSWER_S = 240


class Ended(NamedTuple):
    """A group that has ended: exit codes (negative: the signal), what the ranks returned, and how long it all took."""

    codes: list[int]
    results: list[Any]
    said: list[str]
    seconds: float


class Groups:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str] = queue.Queue()
        self._begun = 0
        self._ended: dict[int, Ended] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self._line() == "ready\n"

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # it kills the ranks that are left, and ends
        self._process.wait(60)
        self._listener.join(60)
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _line(self) -> str:
        return self._lines.get(timeout=_ANSWER_S)

    def run(self, case: str, world: int, directory: Path, **options: Any) -> Ended:
        """Every rank does ``case`` of ``_cases.py``; a rank that raises fails the test, with what it said."""
        return self.begin(case, world, directory, **options).wait()

    def run_any(self, case: str, world: int, directory: Path, **options: Any) -> Ended:
        """As ``run``, however the ranks end; those that hang fail the test."""
        return self.begin(case, world, directory, **options).wait_any()

    def begin(self, case: str, world: int, directory: Path, **options: Any) -> Begun:
        """Begin a group and return at once: groups that mostly wait can wait at the same time."""
        assert self._process.stdin is not None
        number, self._begun = self._begun, self._begun + 1
        order = {"number": number, "case": case, "world": world, "directory": str(directory), "options": options}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Begun(self, number)

    def wait(self, number: int) -> Ended:
        while number not in self._ended:
            answer = json.loads(self._line())
            ended = answer.pop("number")
            self._ended[ended] = Ended(**answer)
        return self._ended.pop(number)


class Begun:
    """A group that has begun. Its outcome can be asked for once."""

    def __init__(self, groups: Groups, number: int) -> None:
        self._groups = groups
        self._number = number

    def wait(self) -> Ended:
        """Wait for its end; a rank that raised fails the test, with its output."""
        ended = self.wait_any()
        assert ended.codes == [0] * len(ended.codes), "\n".join(ended.said)
        return ended

    def wait_any(self) -> Ended:
        """Wait for its end, however the ranks end; those that hang fail the test."""
        ended = self._groups.wait(self._number)
        assert -999 not in ended.codes, "\n".join(ended.said)
        assert not any("Timeout (" in said for said in ended.said), "\n".join(ended.said)
        return ended


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    script = str(Path(__file__).with_name("_server.py"))
    process = subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(script).parents[1]), *sys.path))},
    )  # fmt: skip
    started = Groups(process)
    yield started
    started.close()
