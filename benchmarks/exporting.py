"""What an export adds to a save: beside the save, and by a conversion afterwards.

    python benchmarks/exporting.py --gib 1

In each round, in turn: a save alone, a save with ``export=``, and a save followed by ``convert``, each with a warm
stager and into new directories, which are deleted before the next one. The table has the medians of the times until the
checkpoint was durable and until the export was complete.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

import sidestream

Row = tuple[float, float]
"""Seconds until the checkpoint is durable, and until the export is complete."""


async def alone(state: dict[str, torch.Tensor], stager: sidestream.AsyncStager, at: Path, dtype: torch.dtype) -> Row:
    began = time.perf_counter()
    await sidestream.save(state, at / "step", stager=stager)
    return time.perf_counter() - began, 0.0


async def beside(state: dict[str, torch.Tensor], stager: sidestream.AsyncStager, at: Path, dtype: torch.dtype) -> Row:
    began = time.perf_counter()
    pending = sidestream.async_save(
        state, at / "step", stager=stager, export=sidestream.HF(at / "hf", dtype=dtype, max_shard_bytes=256 << 20)
    )
    await pending
    durable = time.perf_counter() - began
    await pending.exports[0]
    return durable, time.perf_counter() - began


async def afterwards(
    state: dict[str, torch.Tensor], stager: sidestream.AsyncStager, at: Path, dtype: torch.dtype
) -> Row:
    began = time.perf_counter()
    await sidestream.save(state, at / "step", stager=stager)
    durable = time.perf_counter() - began
    await sidestream.convert(
        at / "step",
        at / "hf",
        format="safetensors",
        dtype=dtype,
        options=sidestream.ConvertOptions(max_shard_bytes=256 << 20),
    )
    return durable, time.perf_counter() - began


WAYS: dict[str, Callable[..., Awaitable[Row]]] = {
    "save": alone,
    "save with export=": beside,
    "save, then convert": afterwards,
}


async def measure(gib: float, rounds: int, dtype: torch.dtype, base: Path) -> dict[str, list[Row]]:
    count = int(gib * (1 << 30)) // (16 << 20)
    state = {f"layer.{number}": torch.randn(4 << 20) for number in range(count)}
    found: dict[str, list[Row]] = {name: [] for name in WAYS}
    async with sidestream.AsyncStager() as stager:
        for number in range(rounds + 1):  # the first one warms up
            for name, way in WAYS.items():
                at = base / f"{number}"
                at.mkdir()
                row = await way(state, stager, at, dtype)
                shutil.rmtree(at)
                if number:
                    found[name].append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", help="of the export; the state is float32")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where files go meanwhile")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as base:
        found = asyncio.run(measure(options.gib, options.rounds, getattr(torch, options.dtype), Path(base)))
    print(f"{options.gib:g} GiB of float32, export as {options.dtype}, medians of {options.rounds}, seconds\n")
    print("| | checkpoint durable | export complete |\n|---|---|---|")
    for name, rows in found.items():
        durable, complete = (statistics.median(one) for one in zip(*rows, strict=True))
        print(f"| {name} | {durable:.2f} | {f'{complete:.2f}' if complete else '-'} |")


if __name__ == "__main__":
    main()
