"""Runs cases of ``_golden_sequence_cases`` under observation, each in forks of this process, which has imported all.

Reads a JSON object with ``case`` and ``folder`` per line; answers with the exit status of both forks.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from _golden_calls import watch
from _golden_host import fork, import_all
from _golden_sequence_cases import CASES, Case, nothing
from _golden_table import Table, fixed


def main(descriptor: int) -> None:
    import_all()
    channel = socket.socket(fileno=descriptor)
    for line in sys.stdin:
        asked = json.loads(line)
        case, folder = CASES[asked["case"]], Path(asked["folder"])
        # Not in the process that is watched: the filter does not reach threads that are there already.
        prepared = 0 if case.prepare is nothing else in_a_fork(lambda case=case, folder=folder: prepare(case, folder))
        watched = in_a_fork(lambda case=case, folder=folder: run(case, folder, channel))
        print(json.dumps([prepared, watched]), flush=True)


def in_a_fork(work: Callable[[], None]) -> int:
    """The exit status; negative: the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])


def prepare(case: Case, folder: Path) -> None:
    with fixed():
        asyncio.run(case.prepare(folder / "root"))


def run(case: Case, folder: Path, channel: socket.socket) -> None:
    table = Table(folder)
    watch(channel)
    with fixed(first=1001):
        asyncio.run(table.tries("result", lambda: case.work(folder / "root")))
    (folder / "result.json").write_text(json.dumps(table.entries["result"]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
