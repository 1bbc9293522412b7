"""The other end of ``_forked.py``: runs trials, one forked child each, and collects what they told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _rows import HERE, SOURCE, Warm, warm


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
    def __init__(self, process: Warm) -> None:
        self._process = process

    def run(self, **trial: Any) -> Told:
        answer = self._process.ask(**{"at": 0, "when": "before", "work": "steps", **trial})
        assert answer["exit"] != 70, f"the harness failed in trial {trial}"
        return Told(answer["exit"], answer["told"])


@contextmanager
def trials(source: Path = SOURCE) -> Iterator[Trials]:
    """A warm process for trials."""
    with warm(HERE / "_forked.py", source=source) as process:
        yield Trials(process)
