"""What the benchmarks share: the loop's ticker, medians, and the description of a run."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

TICK_S = 0.001


@asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """By how many seconds each tick of a 1 ms ticker on this loop was late, within the block."""
    late: list[float] = []
    ticker = asyncio.create_task(_tick(late))
    await asyncio.sleep(0.02)
    late.clear()
    try:
        yield late
        await asyncio.sleep(2 * TICK_S)  # so that a pause that has just ended is seen
    finally:
        ticker.cancel()


async def _tick(late: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - before - TICK_S)


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def median_and_best(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "best": min(values)}


def still_heap() -> None:
    """Take everything that is alive out of the collector's reach, for all rivals alike.

    A full collection walks the whole heap while it holds the GIL, which takes 100 ms and more with torch imported, and
    whoever happens to allocate the last object pays for it: it would be measured as the work of a random rival.
    """
    gc.collect()
    gc.freeze()


def available_bytes() -> int | None:
    """Host memory that can be had without swapping; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def describe(*packages: str) -> dict[str, Any]:
    """Date, machine, versions and command of this run."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "sidestream", *packages):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "from its sources" if package == "sidestream" else "not installed"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "system": platform.platform(),
            "load_average": os.getloadavg()[0],
        },
        "versions": versions,
    }


def headline(run: dict[str, Any]) -> str:
    machine = run["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return (
        f"{run['date']}: {machine['processor']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB, "
        f"load average {machine['load_average']:.1f}\n{versions}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def write_json(path: str | None, results: dict[str, Any]) -> None:
    if path:
        results["load_average_at_end"] = os.getloadavg()[0]
        Path(path).write_text(json.dumps(results, indent=1) + "\n")
