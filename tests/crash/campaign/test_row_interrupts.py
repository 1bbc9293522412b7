"""Storms of Ctrl-C: each interrupt ends one call soon, and a program that continues stays consistent.

Under ``asyncio.run`` only the first signal is a cancel; the next one raises ``KeyboardInterrupt`` wherever the thread
of the loop is. There, attempts may stay until the process ends, or until retention collects them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from _judge import Oracle
from _look import attempts_in
from _rows import HERE, SOURCE, Row, Size, spread

import sidestream

SHORT, LONG = 600, 30_000
WAYS = ("blocking", "blocking, by a process", "asyncio.run")
PATIENCE_S = 120.0


@pytest.mark.parametrize("way", WAYS)
def test_a_storm_of_interrupts(way: str, place: Path, judge: Oracle, row: Callable[..., Row], size: Size) -> None:
    counts, random = row("storms of SIGINT", way), size.random(way)
    signals = spread(size.of(SHORT, LONG), WAYS)[way]
    run, stop, said = place / "run", place / "stop", place / "said"
    with said.open("w") as errors:
        child = warm.Popen(
            [sys.executable, "-X", "faulthandler", str(HERE / "_storm.py"), way, str(run), str(stop)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"},
        )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n", said.read_text()
    for _ in range(signals):
        time.sleep(random.choice((0.0, 0.001, 0.005, 0.02)))
        child.send_signal(signal.SIGINT)
    stop.touch()
    try:
        out, _ = child.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)
        child.communicate()
        counts.trial(way, [f"it hangs: {said.read_text()}"], count=signals)
        counts.end(at_least=signals)
        return
    told = json.loads(out) if out else {"wrong": [f"it ended with {child.returncode}: {said.read_text()[-3000:]}"]}
    found = judge.look(run)
    wrong = [*told["wrong"], *found.violations]
    if way == "asyncio.run":
        counts.note("left until the process ended", len(told.pop("left", [])))
        counts.note("left afterwards", len(attempts_in(run)))
        asyncio.run(collect(run))
        wrong += [f"nobody collects {one}" for one in attempts_in(run)]
    if child.returncode != 0:
        wrong.append(f"exit status {child.returncode}: {said.read_text()[-3000:]}")
    wrong += [f"left: {told['left']}"] if told.get("left") else []
    wrong += [f"what was saved last is gone: {found.seeds}"] if told.get("last") not in found.seeds.values() else []
    wrong += [f"{name} holds {seed}" for name, seed in found.seeds.items() if name.partition("-")[2] != str(seed)]
    counts.trial(way, wrong, count=signals)
    counts.note("interrupted", told.get("interrupted", 0))
    counts.note("saved and loaded all the same", told.get("done", 0))
    counts.end(at_least=signals)


async def collect(run: Path) -> None:
    """What the process left is collected by retention."""
    async with sidestream.Checkpointer(run, lease_s=1e-3, abandoned_after_s=1e-3) as checkpoints:
        for _ in range(3):  # what is not known to be dead is looked at twice
            await checkpoints.prune()
