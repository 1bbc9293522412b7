"""What observers cost: an event in the thread that emits it, and a save of many tensors.

    python benchmarks/observing.py [--rounds N] [--tensors N] [--directory DIR] [--json FILE]

``emit``: the time of ``events.emit`` with no observer, and with Prometheus, OpenTelemetry (its SDK, spans batched in
memory), a journal, DCP's log and costs at once: the median over the events of one save. ``save``: a durable save of
``--tensors`` tensors of 1 KiB, with and without all of them, in turns, after a save of one: medians, and their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from _common import describe, headline, write_json
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import sidestream
from sidestream import events
from sidestream.observability import Costs, DCPLog, Journal, OpenTelemetry, Prometheus


def everyone(directory: Path) -> ExitStack:
    """Return all observers, which observe until it is closed."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    stack = ExitStack()
    for one in (
        Prometheus(CollectorRegistry()),
        OpenTelemetry(provider, MeterProvider([InMemoryMetricReader()])),
        Journal(directory / "journal.jsonl"),
        DCPLog(),
        Costs(),
    ):
        stack.enter_context(one)
    return stack


def of_one_save(number: int) -> list[events.Event]:
    save = events.SaveContext("save", f"run/step-{number}", step=number, run="run")
    kinds = (events.SaveStarted, events.SavePlanned, events.SaveStaged)
    return [
        *(kind(save) for kind in kinds),
        events.CallerWaited("staged", 0.01, {"copies": 0.009}, save),
        events.SaveWritten(save, 1000),
        events.SaveCommitted(save, 1000, {"staged": 0.01, "written": 0.02, "committed": 0.03}),
    ]


def emit_us(count: int) -> float:
    """Return the microseconds of one ``emit``, the median over saves."""
    found = []
    for number in range(count):
        mine = of_one_save(number)
        began = time.perf_counter()
        for event in mine:
            events.emit(event)
        found.append((time.perf_counter() - began) / len(mine))
    return 1e6 * statistics.median(found)


async def save_s(state: dict[str, Any], target: Path) -> tuple[float, float]:
    """Return the time and the processor time of one save."""
    began, cpu = time.perf_counter(), time.process_time()
    await sidestream.save(state, target)
    found = time.perf_counter() - began, time.process_time() - cpu
    shutil.rmtree(target)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json")
    asked = parser.parse_args()
    state = {f"w{number}": torch.ones(256) for number in range(asked.tensors)}
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
        directory = Path(folder)
        alone = emit_us(2000)
        with everyone(directory):
            observed = emit_us(500)
        await save_s(state, directory / "first")
        for turn in range(asked.rounds):
            for name in ("without", "with") if turn % 2 else ("with", "without"):
                with everyone(directory) if name == "with" else ExitStack():
                    await save_s({"w": state["w0"]}, directory / "small")  # the first use of each instrument makes it
                    found[name].append(await save_s(state, directory / f"{name}-{turn}"))
    ratios = [
        statistics.median(b[which] / a[which] for a, b in zip(found["without"], found["with"], strict=True))
        for which in (0, 1)
    ]
    seconds = {name: statistics.median(wall for wall, _ in saves) for name, saves in found.items()}
    run = describe("prometheus_client", "opentelemetry-sdk")
    print(headline(run))
    print(f"emit, no observer: {alone:.2f} us; with all observers: {observed:.1f} us")
    print(f"save without: {seconds['without']:.4f} s; with all observers: {seconds['with']:.4f} s")
    print(f"ratio of neighbours: {ratios[0]:.3f} of the time, {ratios[1]:.3f} of the processor time")
    write_json(asked.json, run | {"emit_us": alone, "observed_us": observed, "saves": found})


if __name__ == "__main__":
    asyncio.run(main())
