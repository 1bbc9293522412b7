"""No memory to share with a writer process: a full ``/dev/shm``, which is not used for it; system calls that refuse
memory; a writer process that has reached its limit of descriptors or memory."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from _judge import Oracle
from _mounts import mounts_locked
from _no_shared_memory import LACKS
from _rows import HERE, SOURCE, Row, Size, cannot

SHORT, LONG = 1, 40
FULL = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && (yes > /dev/shm/full 2>/dev/null || true) && exec "$@"'


@pytest.mark.parametrize("saver", ["thread", "process", "auto"])
def test_a_full_dev_shm(saver: str, tmp_path: Path, judge: Oracle, row: Callable[..., Row], size: Size) -> None:
    """Run in a mount namespace of its own, so that ``/dev/shm`` of other processes is not filled."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        cannot("mounting needs root, and unshare(1)")
    counts = row("full /dev/shm", saver)
    total = size.of(SHORT, LONG)
    for number in range(total):
        run = tmp_path / str(number)
        program = [sys.executable, str(HERE / "_full_shm.py"), str(run), saver]
        with mounts_locked(fcntl.LOCK_EX):
            ended = subprocess.run(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", FULL, "sh", *program],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"},
            )
        if "unshare failed" in ended.stderr or "mount:" in ended.stderr:
            cannot(f"this machine allows no mounts: {ended.stderr}")
        told = json.loads(ended.stdout) if ended.stdout else {"wrong": [f"exit {ended.returncode}: {ended.stderr}"]}
        found = judge.look(run)
        wrong = [*told["wrong"], *found.violations]
        wrong += [] if told.get("free_bytes", 1) == 0 else [f"it was not full: {told}"]
        wrong += [] if found.steps == {1: 1, 2: 2} else [f"found {found.steps}, refused {told.get('refused')}"]
        counts.trial(number, wrong)
    counts.end(at_least=total)


LACKING = (len(LACKS), 20 * len(LACKS))


@pytest.mark.parametrize("saver", ["process", "auto"])
def test_no_memory_to_share(saver: str, tmp_path: Path, judge: Oracle, row: Callable[..., Row], size: Size) -> None:
    """Two saves that may be refused, with an error of ours, and one that lacks nothing; no signal ends the program."""
    counts = row("no memory to share", saver)
    total = size.of(*LACKING)
    for number in range(total):
        run, lack = tmp_path / str(number), LACKS[number % len(LACKS)]
        ended = warm.run(
            [sys.executable, str(HERE / "_no_shared_memory.py"), str(run), saver, lack],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"},
        )
        told = json.loads(ended.stdout) if ended.stdout else {}
        if "cannot" in told:
            cannot(told["cannot"])
        wrong = list(told.get("wrong", []))
        wrong += [] if ended.returncode == 0 else [f"exit {ended.returncode}: {ended.stderr[-3000:]}"]
        found = judge.look(run)
        wrong += found.violations
        wrong += [] if list(found.steps) == told.get("acked") else [f"found {found.steps}, told {told}"]
        wrong += [] if 3 in found.steps else ["a save that lacks nothing failed"]
        if not told.get("refused") and not told.get("replaced"):
            wrong.append(f"nothing was lacking: {told}")
        counts.trial(lack, wrong)
        counts.note("refused", len(told.get("refused", [])))
        counts.note("saved", len(told.get("acked", [])))
    counts.end(at_least=total)
