"""What the tests of runs share: small states that tell their step, damage, and other processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from warm import Popen

import sidestream

PATIENCE_S = 120.0
_SOURCE = str(Path(sidestream.__file__).parents[1])
_TESTS = [str(folder) for folder in Path(__file__).parents[:2]]


def state_of(step: int) -> dict[str, Any]:
    return {"t": torch.full((4096,), float(step)), "step": step}


def blank() -> dict[str, Any]:
    return {"t": torch.zeros(4096), "step": None}


def is_state_of(state: dict[str, Any], step: int) -> bool:
    return state["step"] == step and bool((state["t"] == float(step)).all())


async def save_steps(checkpoints: sidestream.Checkpointer, *steps: int, **metadata: Any) -> None:
    for step in steps:
        await checkpoints.save(state_of(step), step=step, metadata=metadata or None)


def flip(directory: Path, file: str = "__0_1.distcp") -> None:
    """One bit of a tensor."""
    path = directory / file
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def leases_in(run: Path) -> list[str]:
    return sorted(os.listdir(run / ".leases")) if (run / ".leases").exists() else []


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


@contextmanager
def process(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A Python program beside this one; its lines come from ``stdout``. It is killed at the end."""
    running = Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([_SOURCE, str(Path(__file__).parent), str(Path(__file__).parents[1])]),
        },
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


async def line_of(running: subprocess.Popen[str]) -> str:
    """Its next line, without the newline; empty when it has ended."""
    assert running.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        return (await asyncio.to_thread(running.stdout.readline)).rstrip("\n")


async def ended(running: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it said on stderr."""
    _, said = await asyncio.to_thread(running.communicate, None, PATIENCE_S)
    return running.returncode, said
