"""What it costs to stage a state dict from host memory: the call, the rate, and the pauses of the event loop.

    python benchmarks/staging.py [--bytes N] [--rounds N] [--directory DIR] [--json FILE]

Three tables, with rivals in interleaved rounds over the same tensors:

- "call": how long ``stage()`` holds its caller for 10 to 10,000 tensors of 1 KiB, and when everything has been copied.
  "first" is the first call of a new stager on tensors that it has not seen, "warm" a later one.
- "rate": ``--bytes`` in 64 tensors, against one plain copy of the same bytes (``memmove`` in chunks of 16 MiB, in one
  thread, into memory that has been touched). Each rival has rounds of its own beside the plain copy and sidestream,
  so that at most four copies of the state are in memory.
- "pauses": of a 1 ms ticker on the loop from the call until everything has been copied, against the same ticker idle.

The rivals are stagers that are used again and again, as their authors advise. Stock ``DefaultStager`` runs with
``StagingOptions(False, False, True, False)``: a thread of its own, without pinned or shared memory and non-blocking
copies, which are for accelerators and other processes. ``BlockingAsyncStager`` runs without its cache, which asks for
an accelerator. ``dcp.async_save`` runs with the stager that it makes when it is given none; its call is measured
alone, because what follows is a save. ``torch_checkpointing`` and TensorStore take part if they are installed.

Before anything is measured the heap is collected and frozen, for all alike: a full collection walks every object with
the GIL held, which takes 100 ms and more with torch imported, and whoever allocates the last object pays for it.
Medians and bests are shown: shared machines drift, trust the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _common import (
    available_bytes,
    describe,
    headline,
    median_and_best,
    quantile,
    still_heap,
    ticking,
    write_json,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import sidestream

State = dict[str, torch.Tensor]
COUNTS = (10, 64, 1_000, 10_000)
WARM_CALLS = 3
CHUNK_BYTES = 16 << 20


class Rival:
    """Stages one state again and again. ``stage`` is what is measured as the call; the rest waits, and cleans up."""

    name: str
    needs: str | None = None
    """A package that has to be installed."""

    def __init__(self, state: State, scratch: Path) -> None: ...

    def stage(self, state: State) -> Any:
        raise NotImplementedError

    def finish(self, staged: Any) -> None:
        """Until everything has been copied (or saved, for a rival that saves)."""
        if isinstance(staged, Future):
            staged.result()

    async def finished(self, staged: Any) -> None:
        """The same on the loop."""
        if isinstance(staged, Future):
            await asyncio.wrap_future(staged)

    def close(self) -> None: ...


class Sidestream(Rival):
    name = "sidestream"

    def __init__(self, state: State, scratch: Path) -> None:
        self._stager = sidestream.AsyncStager()

    def stage(self, state: State) -> Any:
        return self._stager.stage(state)

    def finish(self, staged: Any) -> None:
        staged.result().release()

    async def finished(self, staged: Any) -> None:
        (await staged).release()

    def close(self) -> None:
        self._stager.close()


class Plain(Rival):
    """Nothing but the bytes, on the caller's time."""

    name = "plain copy"

    def __init__(self, state: State, scratch: Path) -> None:
        self._target = torch.zeros(sum(tensor.nbytes for tensor in state.values()), dtype=torch.uint8)

    def stage(self, state: State) -> None:
        target = self._target.data_ptr()
        for tensor in state.values():
            source = tensor.data_ptr()
            for start in range(0, tensor.nbytes, CHUNK_BYTES):
                ctypes.memmove(target + start, source + start, min(CHUNK_BYTES, tensor.nbytes - start))
            target += tensor.nbytes


class StockDefault(Rival):
    name = "DefaultStager"

    def __init__(self, state: State, scratch: Path) -> None:
        self._stager = DefaultStager(StagingOptions(False, False, True, False))

    def stage(self, state: State) -> Any:
        return self._stager.stage(state)

    def close(self) -> None:
        self._stager.close()


class StockBlocking(Rival):
    name = "BlockingAsyncStager"

    def __init__(self, state: State, scratch: Path) -> None:
        self._stager = BlockingAsyncStager()

    def stage(self, state: State) -> Any:
        return self._stager.stage(state)


class StockSave(Rival):
    name = "dcp.async_save"

    def __init__(self, state: State, scratch: Path) -> None:
        self._directory = Path(tempfile.mkdtemp(dir=scratch))
        self._saves = 0

    def stage(self, state: State) -> Any:
        self._saves += 1
        return dcp.async_save(state, checkpoint_id=self._directory / str(self._saves), no_dist=True)

    def close(self) -> None:
        shutil.rmtree(self._directory)


class TorchCheckpointing(Rival):
    name = needs = "torch_checkpointing"

    def __init__(self, state: State, scratch: Path) -> None:
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.staging import DefaultStager as Stager

        plain = {"use_pinned_memory": False, "use_shared_memory": False, "use_non_blocking_copy": False}
        self._stager = Stager(CheckpointStagerConfig(use_async_staging=True, **plain))

    def stage(self, state: State) -> Any:
        return self._stager.stage(state)

    def close(self) -> None:
        self._stager.close()


class TensorStore(Rival):
    """Its in-memory arrays, opened before the clock runs; done when its ``copy`` futures say so."""

    name = needs = "tensorstore"

    def __init__(self, state: State, scratch: Path) -> None:
        import tensorstore

        self._arrays = {name: tensorstore.array(tensor.numpy().copy()) for name, tensor in state.items()}

    def stage(self, state: State) -> Any:
        return [self._arrays[name].write(tensor.numpy()) for name, tensor in state.items()]

    def finish(self, staged: Any) -> None:
        for write in staged:
            write.copy.result()

    async def finished(self, staged: Any) -> None:
        for write in staged:
            await write.copy


RIVALS: tuple[type[Rival], ...] = (Sidestream, StockDefault, StockBlocking, TorchCheckpointing, TensorStore)
ALONE = (Sidestream, Plain)  # the two of the rate table that everybody else is measured beside


def present(rivals: tuple[type[Rival], ...]) -> list[type[Rival]]:
    return [rival for rival in rivals if rival.needs is None or find_spec(rival.needs)]


def make_state(tensors: int, nbytes: int) -> State:
    """``tensors`` of ``nbytes`` each, touched."""
    return {f"layers.{index}.weight": torch.full((nbytes // 4,), float(index)) for index in range(tensors)}


# --- the call ---


def calls(state: State, rounds: int, scratch: Path) -> dict[str, Any]:
    """Seconds that the call holds its caller, for each rival."""
    found: dict[str, dict[str, list[float]]] = {}
    rivals = present((*RIVALS[:3], StockSave, *RIVALS[3:]))
    for number in range(rounds + 1):
        for kind in rivals:
            rival = kind(state, scratch)
            times = [call(rival, state) for _ in range(1 + WARM_CALLS)]
            rival.close()
            if number:  # the first round warms the allocator and imports what is imported late
                row = found.setdefault(kind.name, {"first": [], "warm": [], "copied": []})
                row["first"].append(times[0][0])
                row["warm"] += [held for held, _ in times[1:]]
                row["copied"] += [ended for _, ended in times[1:]]
    return {name: {key: median_and_best(values) for key, values in row.items()} for name, row in found.items()}


def call(rival: Rival, state: State) -> tuple[float, float]:
    start = time.perf_counter()
    staged = rival.stage(state)
    held = time.perf_counter() - start
    rival.finish(staged)
    return held, time.perf_counter() - start


def show_calls(results: dict[str, Any]) -> None:
    print("\ncall, in ms: first | warm | best warm | until everything has been copied (a save: written)")
    for tensors, rows in results.items():
        print(f"  {int(tensors):,} tensors of 1 KiB")
        for name, row in rows.items():
            columns = (row["first"]["median"], row["warm"]["median"], row["warm"]["best"], row["copied"]["median"])
            print(f"    {name:22}" + "".join(f"{value * 1e3:11.3f}" for value in columns))


# --- the rate ---


def rates(state: State, rounds: int, scratch: Path) -> dict[str, Any]:
    nbytes = sum(tensor.nbytes for tensor in state.values())
    found: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for kind in present(RIVALS[1:]):
        if (free := available_bytes()) is not None and free < 3.3 * nbytes:
            print(f"  {kind.name}: left out of the rate, {free / 1e9:.1f} GB of memory are free: lower --bytes")
            continue
        group = [made(state, scratch) for made in (*ALONE, kind)]
        for number in range(rounds + 1):
            seconds = {rival.name: call(rival, state)[1] for rival in group}
            if number:
                for name, value in seconds.items():
                    found.setdefault(name, []).append(value)
                    ratios.setdefault(name, []).append(seconds[Plain.name] / value)
        for rival in group:
            rival.close()
        del group, rival  # its memory serves the next one
    return {
        name: {
            "GB/s": {"median": nbytes / statistics.median(values) / 1e9, "best": nbytes / min(values) / 1e9},
            "x plain copy": statistics.median(ratios[name]),
            "rounds": len(values),
        }
        for name, values in found.items()
    }


def show_rates(results: dict[str, Any], nbytes: int) -> None:
    print(f"\nrate, {nbytes / 1e9:.2f} GB: GB/s | best | x plain copy of the same round")
    for name, row in results.items():
        print(f"    {name:22}{row['GB/s']['median']:11.2f}{row['GB/s']['best']:11.2f}{row['x plain copy']:11.2f}")


# --- the loop ---


async def pauses(state: State, rounds: int, scratch: Path) -> dict[str, Any]:
    """How late a ticker on the loop was, in seconds, with nothing else and with each rival."""
    found: dict[str, list[list[float]]] = {}
    for kind in (None, *present(RIVALS)):
        rival = kind(state, scratch) if kind else None
        for number in range(rounds + 1):
            async with ticking() as late:
                start = time.perf_counter()
                while time.perf_counter() - start < 0.5:  # enough ticks for a p99
                    if rival is None:
                        await asyncio.sleep(0.1)
                    else:
                        await rival.finished(rival.stage(state))
                        await asyncio.sleep(0.005)  # so that one pause of the loop does not hide another
            if number:
                found.setdefault(kind.name if kind else "idle", []).append(late)
        if rival is not None:
            rival.close()
        del rival
    return {
        name: {
            "p50": quantile([tick for late in runs for tick in late], 0.5),
            "p99": quantile([tick for late in runs for tick in late], 0.99),
            "longest": statistics.median(max(late) for late in runs),
            "longest of all": max(max(late) for late in runs),
        }
        for name, runs in found.items()
    }


def show_pauses(what: str, results: dict[str, Any]) -> None:
    print(f"\npauses, {what}, in ms: p50 | p99 | longest of a round | longest of all")
    for name, row in results.items():
        print(f"    {name:22}" + "".join(f"{value * 1e3:11.2f}" for value in row.values()))


def run(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    results = describe("torch_checkpointing", "tensorstore")
    print(headline(results))
    small = {tensors: make_state(tensors, 1 << 10) for tensors in COUNTS}
    large = make_state(64, arguments.bytes // 64 // 4 * 4)
    nbytes = sum(tensor.nbytes for tensor in large.values())
    still_heap()
    results |= {"rounds": arguments.rounds, "bytes": nbytes}
    results["call"] = {str(count): calls(small[count], arguments.rounds, scratch) for count in COUNTS}
    show_calls(results["call"])
    results["rate"] = rates(large, arguments.rounds, scratch)
    show_rates(results["rate"], nbytes)
    for what, state in ((f"{nbytes / 1e9:.2f} GB", large), ("10,000 tensors of 1 KiB", small[10_000])):
        results[f"pauses, {what}"] = asyncio.run(pauses(state, arguments.rounds, scratch))
        show_pauses(what, results[f"pauses, {what}"])
    return results


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=lambda text: int(float(text)), default=4_000_000_000, help="of the large state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="for what dcp.async_save writes (default: the system's)")
    parser.add_argument("--json", help="write all figures to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        write_json(arguments.json, run(arguments, Path(directory)))
