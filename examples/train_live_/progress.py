"""Progress of a run: the trainer process reports it on its stdout, the script shows it in one line of a terminal."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import IO, Self, TextIO

MARK = "progress "
"""The lines of a process that begin with it are progress. All others are for the user, as those of an error."""

REPORT_EVERY_S = 0.1
CLEAR_LINE = "\r\x1b[K"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a trainer process is doing."""

    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    saver: str
    """What the saver is doing, or what it has done last."""

    def report(self) -> str:
        return MARK + json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Self:
        return cls(**json.loads(line.removeprefix(MARK)))

    def __str__(self) -> str:
        parts = [f"step {self.step} of {self.steps}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.2f}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.0f} tokens/s")
        if self.saver:
            parts.append(self.saver)
        return " | ".join(parts)


@asynccontextmanager
async def reporting(progress: Callable[[], Progress]) -> AsyncIterator[None]:
    """Print the progress whenever it has changed, at most ten times in a second."""
    reporter = asyncio.create_task(report(progress))
    try:
        yield
    finally:
        reporter.cancel()


async def report(progress: Callable[[], Progress]) -> None:
    before = None
    while True:
        now = progress()
        if now != before:
            print(now.report(), flush=True)
        before = now
        await asyncio.sleep(REPORT_EVERY_S)


class Display:
    """Where the script writes: lines that stay, and on a terminal below them one line that is rewritten."""

    def __init__(self, out: TextIO = sys.stdout, errors: TextIO = sys.stderr) -> None:
        self._out = out
        self._errors = errors
        self._rewrites = out.isatty() and os.environ.get("TERM") != "dumb"

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self.clear()
        print(line, file=self._out, flush=True)

    def show(self, text: str) -> None:
        """Rewrite the line of the terminal. Without a terminal nothing is written."""
        if self._rewrites:
            width = shutil.get_terminal_size().columns - 1  # a longer line would continue on the next one, and stay
            self._out.write(CLEAR_LINE + text[:width])
            self._out.flush()

    def clear(self) -> None:
        """Remove the line that is rewritten."""
        if self._rewrites:
            self._out.write(CLEAR_LINE)
            self._out.flush()

    def follow(self, name: str, output: IO[bytes]) -> None:
        """Show the progress that a process reports on `output`, and pass its other lines on, until it ends."""
        for raw in output:
            line = raw.decode(errors="replace").rstrip("\n")
            if line.startswith(MARK):
                self.show(f"   {name}: {Progress.parse(line)}")
            else:
                self.clear()
                print(line, file=self._errors, flush=True)
