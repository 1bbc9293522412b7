"""Saves that overlap, from a model that goes on: how many checkpoints are not what was live at their own call?

    python benchmarks/overlap.py [--saves N] [--in-flight N] [--directory DIR] [--json FILE]

One loop, one stager, used again and again: save (32 tensors of 16 KiB), wait until the sources may change (``staged``,
or DCP's ``staging_completion``), change every tensor, save again; up to ``--in-flight`` saves are being written
meanwhile. In the end each checkpoint is read, both libraries' by stock ``dcp.load``, and compared with what its call
saw.

Through sidestream none may differ, and the exit status says so. Stock ``DefaultStager`` keeps its copies for the next
stage and does not know who still reads them (the library says nothing against reusing it, and caches for that purpose).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from _common import describe, headline, write_json
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import sidestream

State = dict[str, torch.Tensor]
Save = Callable[[Path], Awaitable[Awaitable[object]]]
"""Saves to a directory; returns when the sources may change, with something that resolves when all is written."""


@dataclass
class Tally:
    """``wrong`` checkpoints hold another value than the one at their call, or several; ``lost`` cannot be read."""

    saves: int = 0
    wrong: int = 0
    lost: int = 0
    seconds: float = 0.0


async def overlapping(save: Save, state: State, saves: int, in_flight: int, directory: Path) -> Tally:
    tally = Tally(saves)
    start = time.perf_counter()
    writing: deque[tuple[int, Awaitable[object]]] = deque()
    for number in range(saves):
        for tensor in state.values():
            tensor.fill_(number)
        writing.append((number, await save(directory / str(number))))
        if len(writing) == in_flight:
            await settle(*writing.popleft())
    while writing:
        await settle(*writing.popleft())
    tally.seconds = time.perf_counter() - start
    for number in range(saves):
        look_at(directory / str(number), number, state, tally)
    return tally


async def settle(number: int, written: Awaitable[object]) -> None:
    try:
        await written
    except Exception as error:  # the point is to count what becomes of checkpoints, whatever it is
        print(f"  save {number}: {error!r:.200}")


def look_at(target: Path, number: int, state: State, tally: Tally) -> None:
    found = {name: torch.full_like(tensor, -1.0) for name, tensor in state.items()}
    try:
        dcp.load(found, checkpoint_id=target, no_dist=True)
    except Exception as error:
        print(f"  load {number}: {error!r:.200}")
        tally.lost += 1
    else:
        tally.wrong += any(bool((tensor != number).any()) for tensor in found.values())
    shutil.rmtree(target, ignore_errors=True)


async def through_sidestream(state: State, arguments: argparse.Namespace, directory: Path) -> Tally:
    async with sidestream.AsyncStager() as stager:

        async def save(target: Path) -> Awaitable[object]:
            pending = sidestream.async_save(state, target, stager=stager)
            await pending.staged
            return pending

        return await overlapping(save, state, arguments.saves, arguments.in_flight, directory)


async def through_dcp(state: State, arguments: argparse.Namespace, directory: Path) -> Tally:
    stager = DefaultStager(StagingOptions(False, False, True, False))  # without what needs an accelerator

    async def save(target: Path) -> Awaitable[object]:
        response = dcp.async_save(state, checkpoint_id=target, async_stager=stager, no_dist=True)
        await asyncio.wrap_future(response.staging_completion)
        return asyncio.wrap_future(response.upload_completion)

    try:
        return await overlapping(save, state, arguments.saves, arguments.in_flight, directory)
    finally:
        stager.close()


def run(arguments: argparse.Namespace) -> bool:
    """Whether every checkpoint that went through sidestream is right."""
    results = describe() | {"in_flight": arguments.in_flight}
    print(headline(results))
    print(f"\n{arguments.saves:,} saves, up to {arguments.in_flight} in flight: wrong | lost | seconds")
    state = {f"layers.{index}.weight": torch.zeros(64, 64) for index in range(32)}
    tallies = {}
    for name, through in (("sidestream", through_sidestream), ("DCP, one DefaultStager", through_dcp)):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
            tally = tallies[name] = asyncio.run(through(state, arguments, Path(scratch)))
        print(f"  {name:24}{tally.wrong:7}{tally.lost:7}{tally.seconds:9.1f}")
    results["tallies"] = {name: asdict(tally) for name, tally in tallies.items()}
    write_json(arguments.json, results)
    return tallies["sidestream"].wrong == tallies["sidestream"].lost == 0


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=1_000)
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--directory", help="where to write (default: the system's temporary directory)")
    parser.add_argument("--json", help="write all figures to this file too")
    sys.exit(0 if run(parser.parse_args()) else 1)
