"""What an exchange of served weights costs, and where.

    python benchmarks/swapping.py [--rounds N] [--json FILE]

``open`` reads what a new step says about itself. ``attach`` maps its files and makes a tensor over each; nothing is
verified here. ``fill`` points the parameters of a free copy at these tensors, in a thread. ``reference`` is what
readings wait for: the assignment under a lock. ``reading`` begins and ends a reading. ``pause`` is the latest tick of a
1 ms ticker on the loop during ``fill`` and ``reference``, ``idle`` that of a loop that does nothing, in the same round.
``copy`` is one copy of 256 MiB by numpy, in the same round: the unit that says how fast the machine was.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import aclosing
from typing import Any

import numpy as np
import torch
from _common import describe, headline, ticking, write_json

import sidestream
from sidestream._load.open.mmap import map_tensors
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._weights.live import ServedVersion

SHAPES = {"1,000 x 1 MiB": (1000, 1 << 18), "10,000 x 1 KiB": (10_000, 1 << 8)}


class Flat(torch.nn.Module):
    def __init__(self, count: int, elements: int, device: str) -> None:
        super().__init__()
        made = (torch.nn.Parameter(torch.empty(elements, device=device)) for _ in range(count))
        self.several = torch.nn.ParameterList(made)


async def one_round(live: sidestream.Live, url: str, names: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    async with ticking() as late:
        await asyncio.sleep(0.3)
        found["idle_ms"] = 1e3 * max(late)
    start = time.perf_counter()
    checkpoint = await sidestream.open_checkpoint(url, verify="manifest")
    found["open_ms"] = 1e3 * (time.perf_counter() - start)
    with time_limit(Deadline.after(60)):
        async with aclosing(checkpoint._location.source()) as source:
            start = time.perf_counter()
            mapped = await map_tensors(source, checkpoint._manifest, list(checkpoint))
            found["attach_ms"] = 1e3 * (time.perf_counter() - start)
    tensors = {name: mapped[name] for name in names}
    shell = await live._claim()
    async with ticking() as late:
        start = time.perf_counter()
        with time_limit(Deadline.after(60)):
            await live._shells.fill(shell, tensors)
        found["fill_ms"] = 1e3 * (time.perf_counter() - start)
        start = time.perf_counter()
        with live._lock:
            live._served = ServedVersion(shell, "step", None, "", 0.0)
        found["reference_ms"] = 1e3 * (time.perf_counter() - start)
    found["pause_ms"] = 1e3 * max(late, default=0.0)
    live._give_back(shell)
    start = time.perf_counter()
    for _ in range(1000):
        with live.reading() as reading:
            _ = reading.module
    found["reading_ms"] = time.perf_counter() - start
    ones, others = np.ones(1 << 26, np.float32), np.ones(1 << 26, np.float32)
    start = time.perf_counter()
    np.copyto(others, ones)
    found["copy_ms"] = 1e3 * (time.perf_counter() - start)  # of 256 MiB
    return found


async def measure(count: int, elements: int, rounds: int) -> list[dict[str, float]]:
    live = sidestream.Live(Flat(count, elements, "meta"))
    names = list(live._shells.places)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        url = f"{directory}/step"
        await sidestream.save({name: torch.ones(elements) for name in names}, url)
        await one_round(live, url, names)
        return [await one_round(live, url, names) for _ in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    run = describe()
    print(headline(run))
    results: dict[str, Any] = {"run": run, "lines": []}
    for name, (count, elements) in SHAPES.items():
        rounds = asyncio.run(measure(count, elements, options.rounds))
        line = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        line |= {f"best_{key}": min(one[key] for one in rounds) for key in rounds[0]}
        results["lines"].append({"what": name, **line})
        print(name)
        for key in rounds[0]:
            print(f"  {key:13} median {line[key]:9.3f}  best {line[f'best_{key}']:9.3f}")
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
