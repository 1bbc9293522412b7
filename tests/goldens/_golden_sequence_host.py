"""Runs cases of ``_golden_sequence_cases`` under observation, each in forks of this process, which has imported all.

Reads a JSON object with ``case`` and ``folder`` per line; answers with the exit status of both forks.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pkgutil
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from _golden_calls import watch
from _golden_sequence_cases import CASES, Case, nothing
from _golden_table import Table, fixed

import sidestream


def main(descriptor: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # or the first threads of a fork race to do it
    for module in pkgutil.walk_packages(sidestream.__path__, "sidestream."):
        if "__main__" not in module.name and ".cli" not in module.name:
            importlib.import_module(module.name)
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
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


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
