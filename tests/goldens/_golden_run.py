"""``Checkpointer``: its options, its calls, steps that are damaged, retention."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _golden_checkpoints import CHECKPOINTS
from _golden_states import counted
from _golden_table import Table
from keywords import for_run, for_save

import sidestream
from sidestream import Checkpointer, KeepBest, KeepEvery, KeepLast

STATE = {"w": counted(3, 4), "n": 1}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(3, 4), "n": 0}


async def _saved(run: Path, *steps: int, **options: Any) -> None:
    async with Checkpointer(run, **for_run(**options)) as checkpoints:
        for step in steps:
            await checkpoints.save(STATE, step=step, metadata={"loss": 1.0 / (step + 1)})


def _alter(step: Path) -> None:
    shard = step / "__0_1.distcp"
    shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))


async def checkpointer(table: Table) -> None:
    folder = table.folder
    for name, options in {
        "keep": {"keep": 3},
        "keep, a class": {"keep": KeepLast},
        "in_flight": {"slots": 0},
        "overlap": {"when_full": "drop"},
        "durability": {"durability": "sync"},
        "verify": {"verify": "yes"},
        "timeout_s": {"timeout_s": 0},
        "lease_s": {"lease_s": -1},
        "digest": {"digest": "md5"},
        "saver": {"writer": "fork"},
    }.items():
        await table.tries(f"option: {name}", lambda o=options: Checkpointer(folder / "run", **for_run(**o)))
    for name, make in {
        "KeepLast(0)": lambda: KeepLast(0),
        "KeepEvery()": lambda: KeepEvery(),
        "KeepEvery(steps=0)": lambda: KeepEvery(steps=0),
        "KeepBest mode": lambda: KeepBest("loss", mode="best"),  # type: ignore[arg-type]
    }.items():
        await table.tries(f"retention: {name}", make)
    for url in ("s3://bucket", "nowhere://bucket/run", "", "a\0b"):
        await table.tries(f"url: {url!r}", lambda url=url: Checkpointer(url))
    await table.tries("not entered", lambda: Checkpointer(folder / "run").steps())
    await _empty(table, folder / "none")
    await _full(table, folder / "run")
    await _overlapping(table, folder / "overlap")
    await _damaged(table, folder / "damaged")
    await _retention(table, folder / "retention")
    await _opened_on_a_step(table, folder / "step")
    await _ends(table, folder / "ends")


async def _empty(table: Table, run: Path) -> None:
    async with Checkpointer(run) as checkpoints:
        for name, call in {
            "restore": lambda: checkpoints.restore(blank()),
            "restore, a step": lambda: checkpoints.restore(blank(), 3),
            "steps": lambda: checkpoints.steps(),
            "latest": lambda: checkpoints.latest(),
            "metadata": lambda: checkpoints.read_metadata(),
            "verify": lambda: checkpoints.verify(),
            "prune": lambda: checkpoints.prune(),
            "health": lambda: checkpoints.health(),
        }.items():
            await table.tries(f"an empty run: {name}", call)


async def _full(table: Table, run: Path) -> None:
    async with Checkpointer(run) as checkpoints:
        await table.tries("save", _saved_by(checkpoints, 1))
        await table.tries("save, the same step again", _saved_by(checkpoints, 1))
        await table.tries("save, metadata", _saved_by(checkpoints, 2, metadata={"loss": 0.5}))
        calls: dict[str, Callable[[], Any]] = {
            "save, step -1": lambda: checkpoints.async_save(STATE, step=-1),
            "save, step True": lambda: checkpoints.async_save(STATE, step=True),
            "save, step '1'": lambda: checkpoints.async_save(STATE, step="1"),  # type: ignore[arg-type]
            "save, an object": lambda: _saved_by(checkpoints, 3, {"a": object()}),
            "save, metadata with a tensor": lambda: checkpoints.async_save(
                STATE, step=3, metadata={"a": torch.ones(1)}
            ),
            "restore": lambda: checkpoints.restore(blank()),
            "restore, a step": lambda: checkpoints.restore(blank(), 1),
            "restore, another step": lambda: checkpoints.restore(blank(), 7),
            "restore, step -1": lambda: checkpoints.restore(blank(), -1),
            "restore, fallback": lambda: checkpoints.restore(blank(), fallback="newer"),  # type: ignore[arg-type]
            "restore, mismatch": lambda: checkpoints.restore({"v": torch.zeros(1)}),
            "steps": lambda: checkpoints.steps(),
            "latest": lambda: checkpoints.latest(),
            "metadata": lambda: checkpoints.read_metadata(),
            "metadata, another step": lambda: checkpoints.read_metadata(7),
            "verify": lambda: checkpoints.verify(),
            "prune": lambda: checkpoints.prune(),
            "watch, poll_s": lambda: checkpoints.watch(poll_s=0),
            "preemption, a signal": lambda: checkpoints.on_preemption(9),
            "health": lambda: checkpoints.health(),
        }
        for name, call in calls.items():
            await table.tries(name, call)
        table.note("restored", checkpoints.restored)
    for name in ("steps", "save, step -1", "restore"):
        await table.tries(f"closed: {name}", calls[name])
    table.note("the run", sorted(path.name for path in run.iterdir() if path.name != ".leases"))


async def _saved_by(checkpoints: Checkpointer, step: int, state: Any = STATE, **options: Any) -> Any:
    return await checkpoints.save(state, step=step, **for_save(**options))


async def _overlapping(table: Table, run: Path) -> None:
    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        for policy in ("skip", "fail"):
            held = await stager.stage({"t": torch.zeros(200_000)})
            run_of = run / policy
            async with Checkpointer(run_of, when_full=policy, slots=1, stager=stager) as checkpoints:
                first = checkpoints.async_save({"t": torch.zeros(200_000)}, step=1)
                second = await table.tries(f"overlap={policy}: save", _started(checkpoints, STATE, 2))
                if second is not None:
                    await table.tries(f"overlap={policy}: saved", _awaited(second))
                    table.note(f"overlap={policy}: outcome", second.outcome)
                held.release()
                await first
            table.note(f"overlap={policy}: the run", sorted(path.name for path in run_of.iterdir()))


async def _started(checkpoints: Checkpointer, state: Any, step: int) -> Any:
    return checkpoints.async_save(state, step=step)


async def _awaited(pending: Any) -> Any:
    return await pending


async def _damaged(table: Table, run: Path) -> None:
    await _saved(run, 1, 2, 3)
    _alter(run / "step-3")
    (run / "step-2" / ".metadata").write_bytes((run / "step-2" / ".metadata").read_bytes()[:-3])
    async with Checkpointer(run) as checkpoints:
        for name, call in {
            "restore": lambda: checkpoints.restore(blank()),
            "restore, fallback": lambda: checkpoints.restore(blank(), fallback="older"),
            "steps": lambda: checkpoints.steps(),
            "verify": lambda: checkpoints.verify(),
            "verify, the marker": lambda: checkpoints.verify(2),
            "metadata, the marker": lambda: checkpoints.read_metadata(2),
            "health": lambda: checkpoints.health(),
        }.items():
            await table.tries(f"damaged: {name}", call)
        table.note("damaged: restored", checkpoints.restored)
    _alter(run / "step-1")
    async with Checkpointer(run) as checkpoints:
        await table.tries("damaged: all of them", checkpoints.restore(blank(), fallback="older"))


async def _retention(table: Table, run: Path) -> None:
    await _saved(run, 1, 2, 3, 4)
    for name, keep in {"last": KeepLast(2), "best": KeepBest("loss"), "every": KeepEvery(steps=3)}.items():
        async with Checkpointer(run, keep=keep) as checkpoints:
            await table.tries(f"retention, dry run: {name}", checkpoints.prune(dry_run=True))
    async with Checkpointer(run, keep=KeepBest("accuracy")) as checkpoints:
        await table.tries("retention, no such metric", checkpoints.prune(dry_run=True))
    async with Checkpointer(run, keep=KeepLast(1)) as checkpoints:
        async with checkpoints.reading(3):
            await table.tries("retention, one is leased", checkpoints.prune())
        table.note("retention, health", checkpoints.health())
    _alter(run / "step-4")
    async with Checkpointer(run, keep=KeepLast(1)) as checkpoints:
        await table.tries("retention, the newest is damaged", checkpoints.prune())
    table.note("retention, the run", sorted(path.name for path in run.iterdir() if path.name != ".leases"))


async def _opened_on_a_step(table: Table, folder: Path) -> None:
    shutil.copytree(CHECKPOINTS / "run" / "step-1", folder / "step-1")
    await table.tries("opened on a step", _restored_from(folder / "step-1"))
    before = asyncio.all_tasks()
    unheard = Checkpointer(folder)
    async with unheard:
        pending = unheard.async_save({"a": object()}, step=9)
        await pending.ended()
        await table.tries("a failed save that nobody awaited", unheard.aclose)
    assert asyncio.all_tasks() <= before


async def _restored_from(path: Path) -> Any:
    async with Checkpointer(path) as checkpoints:
        return await checkpoints.restore(blank())


async def _ends(table: Table, run: Path) -> None:
    """Failed saves, cancelled calls and bodies that raise."""
    async with Checkpointer(run) as checkpoints:
        pending = checkpoints.async_save({"a": object()}, step=1)
        await pending.ended()
        await table.tries("after a failed save: the next one", _started(checkpoints, STATE, 2))
        await table.tries("after a failed save: the one after that", _saved_by(checkpoints, 3))
        await table.tries("after a failed save: health", lambda: checkpoints.health())
        await table.tries("after a failed save: awaited", _awaited(pending))
    await table.tries("the body raises", _body_raises(run))
    table.note("the body raises: the run", sorted(path.name for path in run.iterdir() if path.name != ".leases"))
    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        held = await stager.stage({"t": torch.zeros(200_000)})
        async with Checkpointer(run, slots=1, stager=stager) as checkpoints:
            first = checkpoints.async_save({"t": torch.zeros(200_000)}, step=5)
            waiting = checkpoints.async_save(STATE, step=6)  # waits for the slot
            await asyncio.sleep(0)
            waiting.cancel()
            await table.tries("cancelled while it waits for a slot", _awaited(waiting))
            table.note("cancelled: the first one", first.cancel())
            await table.tries("cancelled: the first one, awaited", _awaited(first))
            held.release()
            await table.tries("cancelled: the next one", _saved_by(checkpoints, 7))
    table.note("ends: the run", sorted(path.name for path in run.iterdir() if path.name != ".leases"))


async def _body_raises(run: Path) -> None:
    async with Checkpointer(run) as checkpoints:
        await checkpoints.save(STATE, step=4)
        raise KeyError("the body")
