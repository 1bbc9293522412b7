"""What a conversion holds in memory: a state far larger than its budget goes from format to format.

    python benchmarks/converting.py --gib 4 --budget-mib 256

Each conversion, and a copy, runs in a process of its own, whose peak of resident memory is compared with what the same
process has after it has converted a tiny state. Needs some 2.2 times the state on the disk of ``--directory``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import sidestream

MIB = 1 << 20
CHAIN = ("a", "b.safetensors", "c", "d.pt", "e")
"""DCP, safetensors, DCP, ``torch.save``, DCP; the last one is copied."""


def peak_bytes() -> int:
    """Of this program: ``ru_maxrss`` still has the peak of the process that started it."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


async def one(source: Path, target: Path, budget_bytes: int) -> None:
    """In a child: convert, or copy where both have one name, and say what that took."""
    work = sidestream.copy if source.suffix == target.suffix == "" else sidestream.convert
    bounded: dict[str, Any] = {"budget_bytes": budget_bytes}
    if work is sidestream.convert:
        bounded = {"options": sidestream.ConvertOptions(**bounded)}
    with tempfile.TemporaryDirectory(dir=target.parent) as small:
        tiny = Path(small, f"tiny{source.suffix}")
        await sidestream.save({"w": torch.ones(3)}, Path(small, "first"))
        if source.suffix:
            await sidestream.convert(Path(small, "first"), tiny)
        await work(tiny if source.suffix else Path(small, "first"), Path(small, f"other{target.suffix}"))
    before = peak_bytes()
    began = time.perf_counter()
    await work(source, target, **bounded)
    seconds = time.perf_counter() - began
    print(json.dumps({"grown_bytes": peak_bytes() - before, "seconds": seconds, "verb": work.__name__}))


def chain(directory: Path, gib: float, budget_bytes: int) -> bool:
    """Whether every step stayed within the budget."""
    print("| from | to | GiB | seconds | memory beyond the imports, MiB |\n|---|---|---|---|---|")
    count = int(gib * (1 << 30)) // 4 // 8
    state = {f"t{number}": torch.full((count,), float(number)) for number in range(7)}
    state["large"] = torch.arange(count // 2, dtype=torch.int64)
    sidestream.blocking.save(state, directory / CHAIN[0], options=sidestream.SaveOptions(streaming=True))
    del state
    within = True
    for source, target in zip(CHAIN, (*CHAIN[1:], "f"), strict=True):
        words = [sys.executable, __file__, "--one", str(directory / source), str(directory / target)]
        done = subprocess.run(
            [*words, "--budget-mib", str(budget_bytes // MIB)], check=True, stdout=subprocess.PIPE, text=True
        )
        told = json.loads(done.stdout)
        within = within and told["grown_bytes"] <= budget_bytes
        print(
            f"| {source} | {target} | {gib:g} | {told['seconds']:.1f} | {told['grown_bytes'] / MIB:.0f} |", flush=True
        )
        _remove(directory / source)
    return within


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the state")
    parser.add_argument("--budget-mib", type=int, default=256, help="what it may take")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where files go meanwhile")
    parser.add_argument("--one", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        asyncio.run(one(*options.one, options.budget_mib * MIB))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        if not chain(Path(directory), options.gib, options.budget_mib * MIB):
            sys.exit("more memory was used than the budget allows")


if __name__ == "__main__":
    main()
