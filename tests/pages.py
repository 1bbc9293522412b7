"""Programs and commands that a page shows: what runs them, and compares what they print with what the page says.

A page has ``console`` blocks, in which ``$ `` precedes a command and what follows is its standard output. A ``python``
block with a title is a file: one in ``examples/`` has to contain the block as it stands, any other is written into the
directory in which the commands run. A block that cannot run here stands after ``<!-- skip: the reason -->``.

    python tests/pages.py docs/quickstart.md    # runs the commands, writes what they print into the page
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SKIP = r"(?P<skip><!--\s*skip:.+?-->\s*\n)?"
_CONSOLE = re.compile(_SKIP + r"```console\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_TITLED = re.compile(_SKIP + r'```python title="(?P<title>[^"]+)"\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
_END = "--- end of a command ---"


@dataclass(frozen=True)
class Command:
    text: str
    output: str


def commands(page: str) -> list[Command]:
    """Return the commands of a page that can run here, with the output that it shows."""
    found = []
    for block in _CONSOLE.finditer(page):
        if block["skip"] is None:
            _, *parts = re.split(r"^\$ ", block["text"], flags=re.MULTILINE)
            found += [Command(*part.split("\n", 1)) for part in parts]
    return found


def titled(page: str) -> dict[str, list[str]]:
    """Return the blocks of a page that are files, or parts of examples, by their title."""
    found: dict[str, list[str]] = {}
    for block in _TITLED.finditer(page):
        found.setdefault(block["title"], []).append(block["text"])
    return found


def is_part(block: str, source: str) -> bool:
    """Whether ``source`` contains the lines of ``block``, at any depth of indentation."""
    return any(textwrap.indent(block, " " * depth) in source for depth in range(0, 24, 4))


def run(page: str, directory: Path) -> list[str]:
    """Run the commands of a page, in one shell and an empty directory. Return what each of them printed."""
    for title, blocks in titled(page).items():
        if "/" not in title:
            (directory / title).write_text("".join(blocks))
    (directory / "examples").symlink_to(ROOT / "examples")
    programs = directory / ".programs"
    programs.mkdir()
    starts = {
        "python": "", "torchrun": "-m torch.distributed.run",
        "sidestream": "-c 'from sidestream_cli import main; main()'",
    }  # fmt: skip
    for name, arguments in starts.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    script = "".join(f"{one.text}\necho '{_END}'\n" for one in commands(page))
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    shell = subprocess.Popen(
        ["bash", "-c", script], cwd=directory, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        output, errors = shell.communicate(timeout=840)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # also what a page leaves in the background
        shell.wait()
    printed = output.split(f"{_END}\n")[:-1]
    if len(printed) != len(commands(page)):
        raise AssertionError(output + errors)
    return printed


def shape(output: str) -> list[str]:
    """Return the lines without their numbers, which differ between runs, and each of several equal lines once."""
    lines = (" ".join(_NUMBER.sub("N", line).split()) for line in output.splitlines())
    return [line for line, _ in groupby(line for line in lines if line)]


def refreshed(page: str, printed: list[str]) -> str:
    """Return the page with the output of its commands replaced."""
    rest = iter(printed)

    def block(found: re.Match[str]) -> str:
        if found["skip"] is not None:
            return found[0]
        _, *parts = re.split(r"^\$ ", found["text"], flags=re.MULTILINE)
        lines = "".join(f"$ {part.splitlines()[0]}\n{next(rest)}" for part in parts).splitlines()
        return "\n".join(["```console", *(line.rstrip() for line in lines), "```"])

    return _CONSOLE.sub(block, page)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        text = Path(name).read_text()
        with tempfile.TemporaryDirectory() as empty:
            Path(name).write_text(refreshed(text, run(text, Path(empty))))
