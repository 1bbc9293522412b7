"""Groups of ranks at a tenth of a second each: one process imports torch, and every rank is a fork of it.

Reads one JSON object per line: case, world, directory, options. Answers with one per line: what each rank returned, how
it ended, and what it said. A rank that takes longer than its deadline dumps all of its stacks and ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import _calls
import _cases
import _ends
import _hosts
import _latest
import _planned
import torch
import torch.distributed as dist

_RANK_S = 90


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _cases.warm_up()
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(run(number, **json.loads(line))), flush=True)


def run(number: int, case: str, world: int, directory: str, options: dict[str, Any]) -> dict[str, Any]:
    desk = Path(directory, f".group{number}")
    desk.mkdir(parents=True)
    started = time.monotonic()
    children = [fork(rank, case, world, directory, desk, options) for rank in range(world)]
    ended: dict[int, int] = {}
    while len(ended) < world and time.monotonic() < started + _RANK_S + 30:
        for rank, child in enumerate(children):
            if rank not in ended:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    ended[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for rank, child in enumerate(children):
        if rank not in ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            ended[rank] = -999
    return {
        "codes": [ended[rank] for rank in range(world)],
        "results": [read_json(desk / f"{rank}.json") for rank in range(world)],
        "said": [(desk / f"{rank}.err").read_text() for rank in range(world)],
        "seconds": time.monotonic() - started,
    }


def find(case: str) -> Any:
    return next(
        getattr(module, case) for module in (_cases, _hosts, _ends, _planned, _latest, _calls) if hasattr(module, case)
    )


def read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def fork(rank: int, case: str, world: int, directory: str, desk: Path, options: dict[str, Any]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (desk / f"{rank}.err").open("w") as errors:
            os.dup2(errors.fileno(), 1)
            os.dup2(errors.fileno(), 2)
        faulthandler.dump_traceback_later(_RANK_S, exit=True)
        store = dist.FileStore(str(desk / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        result = find(case)(rank, world, Path(directory), **options)
        (desk / f"{rank}.part").write_text(json.dumps(result))
        (desk / f"{rank}.part").rename(desk / f"{rank}.json")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
