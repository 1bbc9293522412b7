"""The other end of ``_forked.py``: runs trials, one forked child each, and collects what they told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _rows import HERE, SOURCE, Warm, warm

_FILL = ("open", "chmod", "write", "posix_fallocate", "pwrite")


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

    def points(self, quick: bool) -> list[int]:
        """Before which operations to kill the next one: before each, which is just after the one before it.

        In the quick form only where something that can be seen was done since the point before, for a kill would leave
        the same files again. Of what only fills an attempt it takes every other."""
        operations, seen = self.get("operations"), [True, *self.get("visible")]
        if not quick:
            return [*range(1, len(operations) + 1)]
        points, filled = [1], 0
        for at in range(2, len(operations) + 1):
            filled += seen[at - 1] and operations[at - 2] in _FILL
            if seen[at - 1] and (operations[at - 2] not in _FILL or filled % 2):
                points.append(at)
        return points

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
