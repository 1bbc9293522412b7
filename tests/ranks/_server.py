"""Groups of ranks at a tenth of a second each: one process imports torch, and every rank is a fork of it.

Reads one JSON object per line: number, case, world, directory, options. Writes one per group when it has ended: number,
what each rank returned, how it ended, and its output. Several groups can run at once. A rank that takes longer than its
deadline dumps all of its stacks and ends.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import _bundles
import _calls
import _cases
import _composites
import _ends
import _exports
import _held
import _latest
import _publishing
import _replaced
import torch
import torch.distributed as dist

_RANK_S = 240


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # or the first threads of a fork race to do it
    _cases.warm_up()
    gc.collect()
    gc.freeze()  # a collection in a rank would otherwise copy the pages of every object that is here already
    print("ready", flush=True)
    orders, running = b"", list[Group]()
    while True:
        if select.select([0], [], [], 0.01 if running else None)[0]:
            received = os.read(0, 1 << 16)
            if not received:
                break
            *lines, orders = (orders + received).split(b"\n")
            running += [Group(**json.loads(line)) for line in lines]
        for group in [one for one in running if one.has_ended()]:
            running.remove(group)
            print(json.dumps(group.outcome()), flush=True)
    for group in running:
        group.end()


class Group:
    """The processes of one group, and the directory for what they return and print."""

    def __init__(self, number: int, case: str, world: int, directory: str, options: dict[str, Any]) -> None:
        self._number = number
        self._desk = Path(directory, f".group{number}")
        self._desk.mkdir(parents=True)
        self._began_at = time.monotonic()
        self._codes: list[int | None] = [None] * world
        self._children = [fork(rank, case, world, directory, self._desk, options) for rank in range(world)]

    def has_ended(self) -> bool:
        """Return whether every rank has ended. Ranks that have not ended long after their deadline are killed."""
        for rank, child in enumerate(self._children):
            if self._codes[rank] is None:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    self._codes[rank] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > self._began_at + _RANK_S + 30:
            self.end()
        return None not in self._codes

    def end(self) -> None:
        for rank, child in enumerate(self._children):
            if self._codes[rank] is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                self._codes[rank] = -999

    def outcome(self) -> dict[str, Any]:
        ranks = range(len(self._children))
        return {
            "number": self._number,
            "codes": self._codes,
            "results": [read_json(self._desk / f"{rank}.json") for rank in ranks],
            "said": [(self._desk / f"{rank}.err").read_text() for rank in ranks],
            "seconds": time.monotonic() - self._began_at,
        }


def find(case: str) -> Any:
    return next(
        getattr(module, case)
        for module in (_cases, _bundles, _composites, _ends, _exports, _held, _latest, _calls, _publishing, _replaced)
        if hasattr(module, case)
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
