"""The other end of ``_child.py``: runs trials, one forked child each, and collects what they told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sidestream

_HERE = Path(__file__).parent


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

    @property
    def error(self) -> dict[str, Any] | None:
        return next((report for report in self.reports if "error" in report), None)


class Trials:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, **trial: Any) -> Told:
        trial = {"at": 0, "when": "before", "work": "steps", **trial}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(trial, default=str) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"exit": null, "told": []}')
        assert answer["exit"] not in (None, 70), f"the harness failed in trial {trial}"
        return Told(answer["exit"], answer["told"])


@contextmanager
def trials() -> Iterator[Trials]:
    """A warm process for trials."""
    source = str(Path(sidestream.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", str(_HERE / "_child.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    try:
        yield Trials(process)
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(30)
        process.stdout.close()  # type: ignore[union-attr]
