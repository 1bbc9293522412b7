"""Saving to and loading from a local directory, beside stock DCP on the same bytes in the same run.

    python benchmarks/local_files.py [--directory DIR] [--rounds N] [--json FILE]

Rounds are interleaved and medians are shown, because shared machines drift: trust the ratios. "call" is how long the
call itself holds the loop (``dcp.save`` and ``dcp.load`` hold it for as long as they take), "pause" the longest pause
of a 1 ms ticker on the loop meanwhile. Saves are durable (DCP syncs its files, but no directory). Loads verify every
checksum (DCP verifies nothing) and go from the page cache into existing tensors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import sidestream

State = dict[str, torch.Tensor]
Row = dict[str, float]
SHAPES: dict[str, tuple[int, int]] = {  # tensors, elements of each
    "32 x 16 MiB": (32, 4 << 20),
    "1,000 x 512 KiB": (1000, 128 << 10),
    "10,000 x 1 KiB": (10_000, 256),
}


async def timed(work: Callable[[], Awaitable[Row]]) -> Row:
    """The seconds that ``work`` takes and the longest pause of a ticker meanwhile."""
    pauses: list[float] = []
    ticker = asyncio.create_task(tick(pauses))
    await asyncio.sleep(0.02)
    pauses.clear()
    start = time.perf_counter()
    row = await work()
    seconds = time.perf_counter() - start
    await asyncio.sleep(0.002)  # so that a pause that has just ended is seen
    ticker.cancel()
    return {"seconds": seconds, "pause": max(pauses, default=seconds), **row}


async def tick(pauses: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        pauses.append(time.perf_counter() - before - 0.001)


class Rivals:
    """The four rows of the table, each a coroutine function that gives what is special about it."""

    def __init__(self, state: State, directory: Path, stager: sidestream.AsyncStager) -> None:
        self.state, self.directory, self.stager = state, directory, stager
        self.target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def prepare(self, row: str) -> None:
        """Before the clock runs: no target for a save, files in the page cache for a load."""
        rival, _, verb = row.partition("_")
        if verb == "save":
            shutil.rmtree(self.directory / rival, ignore_errors=True)
            os.sync()
        else:
            for path in (self.directory / rival).iterdir():
                path.read_bytes()

    async def sidestream_save(self) -> Row:
        start = time.perf_counter()
        pending = sidestream.async_save(self.state, self.directory / "sidestream", stager=self.stager)
        call = time.perf_counter() - start
        info = await pending
        return {"call": call, "staged": info.seconds["staged"]}

    async def dcp_save(self) -> Row:
        dcp.save(self.state, checkpoint_id=self.directory / "dcp", no_dist=True)
        return {}

    async def sidestream_load(self) -> Row:
        await sidestream.load(self.target, self.directory / "sidestream")
        return {}

    async def dcp_load(self) -> Row:
        dcp.load(self.target, checkpoint_id=self.directory / "dcp", no_dist=True)
        return {}


async def measure(name: str, directory: Path, rounds: int) -> dict[str, Row]:
    tensors, elements = SHAPES[name]
    state = {f"layers.{index}.weight": torch.randn(elements) for index in range(tensors)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    found: dict[str, list[Row]] = {}
    async with sidestream.AsyncStager() as stager:
        rivals = Rivals(state, directory, stager)
        rows = (rivals.sidestream_save, rivals.dcp_save, rivals.sidestream_load, rivals.dcp_load)
        for number in range(rounds + 1):
            for row in rows:
                rivals.prepare(row.__name__)
                result = await timed(row)
                if number:  # the first round warms memory, caches and imports
                    found.setdefault(row.__name__, []).append(result)
        for tensor_name, tensor in state.items():
            assert torch.equal(tensor, rivals.target[tensor_name])
    medians = {
        row: {key: statistics.median(result[key] for result in results) for key in results[0]}
        for row, results in found.items()
    }
    for figures in medians.values():
        figures["GB/s"] = nbytes / figures["seconds"] / 1e9
    return medians


def show(name: str, medians: dict[str, Row]) -> None:
    print(f"\n{name}")
    print(f"  {'':16} {'seconds':>9} {'GB/s':>6} {'call ms':>8} {'staged ms':>10} {'pause ms':>9} {'x DCP':>6}")
    for row, figures in medians.items():
        rival = medians[row.replace("sidestream", "dcp")]
        call, staged = (figures.get(key, figures["seconds"]) * 1e3 for key in ("call", "staged"))
        print(
            f"  {row:16} {figures['seconds']:9.3f} {figures['GB/s']:6.2f} {call:8.1f} {staged:10.1f} "
            f"{figures['pause'] * 1e3:9.1f} {rival['seconds'] / figures['seconds']:6.1f}"
        )


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    results: dict[str, Any] = {"machine": machine, "rounds": arguments.rounds}
    print(f"torch {machine['torch']}, Python {machine['python']}, {machine['cores']} cores, {arguments.rounds} rounds")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        for name in SHAPES:
            results[name] = await measure(name, Path(scratch), arguments.rounds)
            show(name, results[name])
    return results


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".", help="where to write, on the disk that is to be measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write all figures to this file too")
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")
