"""Too little disk, too little memory: a typed error or back-pressure, and the next save works."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from _judge import Oracle
from _memory_group import memory_group
from _mounts import mounted
from _rows import Row, Size
from _seeded import make_state
from _trials import Told, Trials

import sidestream
from sidestream import errors

MIB = 1 << 20
SIZES = (64, 512)
LIMITS = (24, 200)
PAGE = 4096


async def test_a_full_disk(place: Path, judge: Oracle, row: Callable[..., Row], size: Size) -> None:
    """Every size of a disk, from nothing to more than enough; then room is made, and the same save works."""
    counts = row("full disks")
    total = size.of(*SIZES)
    async with sidestream.AsyncStager(budget_bytes=1 << 22) as stager:
        for number in range(total):
            pages = 2 + number * 110 // total
            with mounted(place / "disk", "-t", "tmpfs", "-o", f"size={pages * PAGE}", "tmpfs") as disk:
                counts.trial(f"{pages} pages", await fill(disk, stager, judge, counts))
    counts.end(at_least=total)


async def fill(disk: Path, stager: sidestream.AsyncStager, judge: Oracle, counts: Row) -> list[str]:
    run, wrong = disk / "run", []
    for step in (1, 2):
        try:
            async with sidestream.Checkpointer(run, stager=stager) as checkpoints:
                await checkpoints.save(make_state(step), step=step)
        except errors.SidestreamError as error:
            counts.note("refused")
            if type(error) is not errors.NoSpaceError or error.errno != errno.ENOSPC or str(disk) not in str(error):
                wrong.append(f"a full disk is told as {error!r}")
            if [name for name in os.listdir(run) if name.startswith(".")] if run.exists() else []:
                wrong.append(f"left behind: {os.listdir(run)}")
            subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
            async with sidestream.Checkpointer(run, stager=stager) as checkpoints:
                await checkpoints.save(make_state(step), step=step)
        except Exception as error:
            return [f"untyped: {type(error).__name__}: {error}"]
        else:
            counts.note("saved")
    found = judge.look(run)
    return wrong + found.violations + ([] if found.seeds == {"step-1": 1, "step-2": 2} else [f"found {found.seeds}"])


# --- memory -----------------------------------------------------------------------------------------------------------


def of_python(told: Told, stacks: str) -> str:
    """What the interpreter and the C library themselves do where memory is short; "" if it was something else.

    ``Thread.start()`` waits for ever if the new thread has no memory to say that it has begun (CPython #140746).
    """
    error = told.error or {}
    if told.exit == 127:
        return "ended by the C library"  # which says: cannot allocate memory for thread-local data
    if told.exit == 1 and re.search(r'threading\.py", line \d+ in start\b', stacks):
        return "held by Thread.start()"
    if error.get("error") in ("MemoryError", "SystemError"):
        return "MemoryError"
    if error.get("error") == "RuntimeError" and error["message"] in ("can't start new thread", "can't allocate lock"):
        return "no more threads"
    return ""


def judged(told: Told, generous: bool, stacks: str) -> list[str]:
    """``generous``: there is as much as the options grant the save, so it has to work."""
    if generous and len(told.acked) != 2:
        return [f"within its budget, and it failed: exit {told.exit}, {told.error}\n{stacks}"]
    if of_python(told, stacks):
        return []
    if told.exit != 0:
        return [f"the process ended with {told.exit}\n{stacks}"]
    if told.error is not None and told.error.get("untyped"):
        return [f"untyped: {told.error}"]
    return []


def test_a_memory_group(tmp_path: Path, children: Trials, row: Callable[..., Row], size: Size) -> None:
    """As much memory as the budget allows and what Python needs besides: never more is taken, or the kernel kills."""
    counts, random = row("memory limits"), size.random("cgroup")
    with memory_group() as group:
        for number in range(size.of(*LIMITS) // 2):
            run, budget = tmp_path / str(number), random.choice([4, 8, 16]) * MIB
            told, stacks = tight(children, run, 48 * MIB, budget, budget + 40 * MIB, group)
            counts.trial(f"cgroup, budget {budget >> 20} MiB", judged(told, True, stacks))
            shutil.rmtree(run)
    counts.end(at_least=1)


def test_an_address_space(place: Path, children: Trials, row: Callable[..., Row], size: Size) -> None:
    """Far less than the budget, and far more: in between a thread that starts may find memory for its stack and for
    nothing else, and then Python waits for it for ever."""
    counts = row("memory limits", "address space")
    total = size.of(*LIMITS) // 2
    for number in range(total):
        limit = number * 40 * MIB // total if number % 2 else (128 + number * 96 // total) * MIB
        run = place / str(number)
        told, stacks = tight(children, run, 96 * MIB, 64 * MIB, limit, "")
        visible = {path.name for path in run.glob("tight-*")}
        wrong = judged(told, limit >= 128 * MIB, stacks)
        wrong += [f"{name} is not whole" for name in visible if not sidestream.blocking.verify(run / name).ok]
        wrong += [f"{name} was acknowledged, and is gone" for name in told.acked.keys() - visible]
        counts.trial(f"{limit >> 20} MiB more", wrong)
        counts.note(of_python(told, stacks) or ("refused" if told.error else "saved"))
        shutil.rmtree(run, ignore_errors=True)
    counts.end(at_least=total)


def tight(
    children: Trials, run: Path, state_bytes: int, budget_bytes: int, limit_bytes: int, group: Path | str
) -> tuple[Told, str]:
    stacks = run.with_suffix(".stacks")
    told = children.run(
        work="tight", root="/nonexistent", run=run, cgroup=group, stacks=stacks,
        state_bytes=state_bytes, budget_bytes=budget_bytes, limit_bytes=limit_bytes,
    )  # fmt: skip
    return told, stacks.read_text()
