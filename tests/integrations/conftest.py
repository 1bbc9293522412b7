"""Frameworks in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class Server:
    """Runs functions of a module, each in a forked child."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-W", "ignore", str(HERE / "_server.py"), module]
        places = [str(HERE), str(HERE.parent)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def run(self, case: str, directory: Path, **options: Any) -> Any:
        """Return what the case has returned. What it raises fails the test."""
        answer = self._ask(case, directory, None, 0.0, options)
        assert "returned" in answer, answer.get("raised", "it was killed")
        return answer["returned"]

    def killed(self, case: str, directory: Path, after: int, delay_s: float, **options: Any) -> bool:
        """Kill the case when it has made ``after`` reports and ``delay_s`` has passed. False: it ended before that."""
        answer = self._ask(case, directory, after, delay_s, options)
        assert "raised" not in answer, answer["raised"]
        return "killed" in answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _ask(self, case: str, directory: Path, after: int | None, delay_s: float, options: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {
            "case": case, "directory": str(directory), "options": options, "kill_after": after, "delay_s": delay_s,
        }  # fmt: skip
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[str], Server]]:
    """Start a server for a module of cases, once."""
    found: dict[str, Server] = {}

    def server(module: str) -> Server:
        if module not in found:
            found[module] = Server(module)
        return found[module]

    yield server
    for one in found.values():
        one.close()
