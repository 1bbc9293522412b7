"""Rows of the campaign: what a trial is, how many there are, and what came of them.

The short form takes minutes, ``--long`` hours. ``--quick``, a tenth of the short form, runs in CI. ``--seed N`` replays
one. A row counts its trials and violations; the counts of all rows stand in the summary at the end of the run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest

import sidestream

T = TypeVar("T")

HERE = Path(__file__).parent
SOURCE = Path(sidestream.__file__).parents[1]
_SHOWN = 20


def full_ci() -> bool:
    """Whether nothing may be skipped."""
    return os.environ.get("SIDESTREAM_CI_FULL") == "1"


def cannot(reason: str) -> NoReturn:
    """This machine lacks what the test needs: a skip, and a failure where nothing may be skipped."""
    if full_ci():
        pytest.fail(f"SIDESTREAM_CI_FULL=1 allows no skip, but {reason}")
    pytest.skip(reason)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is to be done, and the seed of all chance in it."""

    long: bool
    seed: int
    quick: bool = False

    def of(self, short: int, long: int) -> int:
        return long if self.long else -(-short // 10) if self.quick else short

    def random(self, *name: object) -> random.Random:
        return random.Random(f"{self.seed} {name}")


@dataclass
class Row:
    """One line of the table: ``name``, and the part of it that this test is."""

    name: str
    part: str
    seed: int
    trials: int = 0
    violations: list[Any] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def trial(self, where: Any, wrong: Iterable[Any] = (), *, count: int = 1) -> None:
        """``count`` more trials, and what was wrong in them."""
        self.trials += count
        self.violations += [(where, one) for one in wrong]

    def note(self, what: str, count: int = 1) -> None:
        """Something worth counting that is no violation."""
        self.notes[what] = self.notes.get(what, 0) + count

    def told(self) -> dict[str, Any]:
        return {
            "row": self.name,
            "part": self.part,
            "trials": self.trials,
            "violations": len(self.violations),
            "seconds": round(time.monotonic() - self.started, 1),
            "seed": self.seed,
            "notes": self.notes,
        }

    def end(self, *, at_least: int) -> None:
        """Tell the counts, and fail if there were violations, or fewer trials than a row of this name stands for."""
        print(json.dumps(self.told()))
        if self.violations:
            lines = "\n".join(f"  {one}" for one in self.violations[:_SHOWN])
            pytest.fail(
                f"{self.name} ({self.part}), --seed {self.seed}: {len(self.violations)} violations in {self.trials} "
                f"trials:\n{lines}",
                pytrace=False,
            )
        if self.trials < at_least:
            pytest.fail(f"{self.name} ({self.part}): {self.trials} trials, {at_least} were meant", pytrace=False)


def spread(total: int, parts: Iterable[T]) -> dict[T, int]:
    """``total`` trials over ``parts``, so that they add up."""
    names = list(parts)
    return {name: total // len(names) + (number < total % len(names)) for number, name in enumerate(names)}


def stable(text: str) -> int:
    """A number that is the same in every process."""
    return zlib.crc32(text.encode())


# --- processes that are warm ------------------------------------------------------------------------------------------


class Warm:
    """A process that has imported everything and answers a line of JSON with a line of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what, default=str) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process that was asked {what} has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def warm(script: Path, *arguments: str, source: Path = SOURCE, alone: bool = False) -> Iterator[Warm]:
    """``alone``: it has imported nothing but what it imports itself."""
    popen: type[subprocess.Popen[str]] = subprocess.Popen
    if (
        source == SOURCE and not alone
    ):  # or sidestream would come from elsewhere than the process that forks has imported it from
        from warm import Popen as popen
    process = popen(
        [sys.executable, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(source), str(HERE), str(HERE.parent))),
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        yield Warm(process)
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
        process.stdout.close()  # type: ignore[union-attr]
