"""How long a thread waits for the interpreter beside an event loop that always has something to do.

    python benchmarks/turns.py [--seconds S] [--json FILE]

A thread naps for 15 to 25 ms in a system call, again and again, as one that reads, writes or copies does; ``wait ms``
is what passes between the end of a nap and the next line of Python. The loop takes steps of pure Python and polls after
each.
``kept %`` is the share of its speed without the thread. Without turns, and with the ones that sidestream's loops give
while threads work for them.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import random
import threading
import time
from concurrent.futures import Future
from typing import Any

from _common import describe, headline, quantile, write_json

from sidestream._runtime.gil import give_turns

NAP_S = (0.015, 0.025)  # not always the same, which would meet the turns of a loop at the same moment each time
STEPS = {"0.1 ms": 4000, "1 ms": 40_000}  # about


def nap_and_measure(stop: threading.Event, waits: list[float]) -> None:
    usleep, lengths = ctypes.CDLL(None).usleep, random.Random(0)
    while not stop.is_set():
        nap_s = lengths.uniform(*NAP_S)
        start = time.perf_counter()
        usleep(int(nap_s * 1e6))
        waits.append(time.perf_counter() - start - nap_s)


async def steps_per_s(size: int, seconds: float) -> float:
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        total = 0
        for number in range(size):
            total += number & 7
        await asyncio.sleep(0)
        count += 1
    return count / passed


async def measured(size: int, seconds: float, turns: bool) -> dict[str, float]:
    alone = await steps_per_s(size, seconds / 2)
    stop, waits = threading.Event(), list[float]()
    work: Future[None] = Future()
    thread = threading.Thread(target=nap_and_measure, args=(stop, waits))
    thread.start()
    if turns:
        give_turns(work)
    rate = await steps_per_s(size, seconds)
    stop.set()
    work.set_result(None)
    thread.join()
    return {
        "kept": rate / alone,
        "median_ms": 1e3 * quantile(waits, 0.5),
        "p90_ms": 1e3 * quantile(waits, 0.9),
        "per_s": len(waits) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    run = describe()
    print(headline(run))
    print(f"{'steps':8} {'turns':6} {'wait ms':>9} {'p90 ms':>9} {'naps/s':>7} {'kept %':>7}")
    results: dict[str, Any] = {"run": run, "lines": []}
    for name, size in STEPS.items():
        for turns in (False, True):
            found = asyncio.run(measured(size, options.seconds, turns))
            results["lines"].append({"step": name, "turns": turns, **found})
            word = "yes" if turns else "no"
            figures = (
                f"{found['median_ms']:9.2f} {found['p90_ms']:9.2f} {found['per_s']:7.1f} {100 * found['kept']:7.1f}"
            )
            print(f"{name:8} {word:6} {figures}", flush=True)
    write_json(options.json, results)


if __name__ == "__main__":
    main()
