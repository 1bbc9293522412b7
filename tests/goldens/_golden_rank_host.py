"""Runs cases of ``_golden_rank_cases`` in groups of processes. Every rank is a fork of this process, which has imported
everything.

Reads a JSON object per line. ``{"start": CASE, "folder": ..., "options": ...}`` forks the ranks of a case.
``{"finish": CASE}`` waits for them and answers with one JSON list: ``[exit status, entries]`` of each rank, and what it
wrote to its standard error.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import secrets
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from _golden_host import fork, import_all
from _golden_rank import Rank
from _golden_rank_cases import CASES
from _golden_table import fixed

_CASE_S = 120.0


def main() -> None:
    import_all("torch._dynamo", "s3fs", "blake3")  # these too, or every rank imports them at its first use
    gc.freeze()  # so that a rank collects garbage in a millisecond
    running: dict[str, list[int]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "start" in asked:
            name, desk = asked["start"], Path(asked["desk"])
            desk.mkdir(parents=True)
            ranks = range(CASES[name].world)
            running[name] = [
                fork(partial(take_part, name, rank, Path(asked["folder"]), desk, asked["options"])) for rank in ranks
            ]
        else:
            children = running.pop(asked["finish"])
            print(json.dumps(finish(children, Path(asked["desk"]))), flush=True)


def take_part(name: str, number: int, folder: Path, desk: Path, options: dict[str, Any]) -> None:
    with (desk / f"{number}.err").open("w") as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    faulthandler.dump_traceback_later(_CASE_S, exit=True)
    case = CASES[name]
    store = dist.FileStore(str(desk / "store"), case.world)
    dist.init_process_group("gloo", store=store, rank=number, world_size=case.world)
    rank = Rank(number, case.world, folder, desk / f"{number}.json", options)
    token = mock.patch.object(secrets, "token_hex", lambda nbytes: "a3c8103".rjust(2 * nbytes, "0"))
    with fixed(first=1 + 1000 * number), token:
        asyncio.run(case.work(rank))


def finish(children: list[int], desk: Path) -> list[Any]:
    deadline = time.monotonic() + _CASE_S + 10
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for number, child in enumerate(children):
            if number in codes:
                continue
            late = time.monotonic() > deadline
            if late:
                os.kill(child, signal.SIGKILL)
            pid, status = os.waitpid(child, 0 if late else os.WNOHANG)
            if pid:
                codes[number] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return [[codes[number], _entries(desk, number), _text(desk, number)] for number in range(len(children))]


def _entries(desk: Path, number: int) -> Any:
    path = desk / f"{number}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _text(desk: Path, number: int) -> str:
    return (desk / f"{number}.err").read_text(errors="replace")


if __name__ == "__main__":
    main()
