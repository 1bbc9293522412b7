"""What each rank of a group does: loads, and runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _golden_rank import Gate, GatedNames, Rank, altered, awaited, damaged, local, one_of, same
from _golden_users import Custom
from damages import DAMAGE
from keywords import for_load, for_run, for_save
from torch.distributed.tensor import Shard

import sidestream
import sidestream.blocking
from sidestream import KeepLast


async def load(rank: Rank) -> None:
    """What works, and what does not fit on one rank."""
    folder = rank.folder
    saved = folder / "saved"
    await rank.tries("save", lambda: sidestream.save(rank.state(), saved))
    ways: dict[str, dict[str, Any]] = {
        "atomic": {"atomic": True},
        "unverified": {"verify": "manifest"},
        "other verify": {"verify": one_of(rank, 1, "manifest", "always")},
        "other strict": {"allow_missing": one_of(rank, 1, True, ())},
        "atomic on rank 1": {"atomic": rank.number == 1},
        "other timeouts": {"timeout_s": 60.0 + rank.number},
        "a bad strict": {"strict": one_of(rank, 1, {"loosely"}, True)},
        "progress that raises": {"progress": one_of(rank, 1, _bad_progress, None)},
    }
    for name, options in ways.items():
        target = rank.blank()
        await rank.tries(name, lambda t=target, o=options: sidestream.load(t, saved, **for_load(**o)))
        if "raises" in rank.table.entries[name] and "progress" not in options:
            changed = sorted(
                str(key) for key, item in local(target).items() if not same(item, local(rank.blank())[key])
            )
            rank.note(f"{name}, changed", changed)
    blank = rank.blank()
    wide = {"rows": rank.placed(torch.zeros(8, 4), Shard(0))}
    targets: dict[str, Any] = {
        "a key is missing": blank | one_of(rank, 1, {"more": torch.zeros(1)}, {}),
        "a key is missing on rank 0": blank | one_of(rank, 0, {"more": torch.zeros(1)}, {}),
        "a shape": blank | one_of(rank, 1, wide, {}),
        "a dtype": blank | one_of(rank, 1, {"whole": torch.zeros(2, 2).double()}, {}),
        "a value for a tensor": blank | one_of(rank, 1, {"whole": 1}, {}),
        "not asked for by any": blank | {"deep": {"plain": torch.zeros(5)}},
        "asked for by rank 1 only": one_of(rank, 1, blank, blank | {"deep": {"plain": torch.zeros(5)}}),
        "nothing on rank 1": one_of(rank, 1, {}, blank),
        "whole": {"rows": torch.zeros(7, 4)},
        "no mapping on rank 1": one_of(rank, 1, [1], blank),
    }
    for name, target in targets.items():
        await rank.tries(f"target: {name}", lambda t=target: sidestream.load(t, saved))
    both = blank | {"more": torch.zeros(1)}
    await rank.tries("target: a key is missing on both", lambda: sidestream.load(both, saved), by_any=True)
    await sidestream.save(rank.state(1.0), folder / "other")
    urls: dict[str, Any] = {
        "another checkpoint on rank 1": folder / one_of(rank, 1, "other", "saved"),
        "nothing there on rank 1": folder / one_of(rank, 1, "none", "saved"),
        "nothing there on rank 0": folder / one_of(rank, 0, "none", "saved"),
        "a bad one on rank 1": one_of(rank, 1, "s3://bucket", saved),
    }
    for name, url in urls.items():
        await rank.tries(f"url: {name}", lambda u=url: sidestream.load(rank.blank(), u))
    await rank.tries("url: nothing there", lambda: sidestream.load(rank.blank(), folder / "none"), by_any=True)
    for number in range(2):
        await rank.tries(f"cancelled by rank {number}", lambda n=number: _cancelled_load(rank, saved, n))
    await rank.tries("after all", lambda: sidestream.load(rank.blank(), saved))


def _bad_progress(done: int, total: int) -> None:
    raise ArithmeticError("no progress")


async def _cancelled_load(rank: Rank, url: Path, number: int) -> Any:
    task = asyncio.ensure_future(sidestream.load(rank.blank(), url))
    await asyncio.sleep(0)
    if rank.number == number:
        task.cancel()
    return await task


async def load_damaged(rank: Rank) -> None:
    folder = rank.folder
    saved = folder / "saved"
    await rank.tries("save", lambda: sidestream.save(rank.state(), saved))
    kinds: dict[str, Callable[[Path], object]] = {
        "a shard of rank 0": altered("__0_1.distcp"),
        "a shard of rank 1": altered("__1_1.distcp"),
        "a shard of rank 1 is gone": lambda path: (path / "__1_1.distcp").unlink(),
        "a part of the manifest": altered("manifest-*.1"),
        "a part of the manifest is gone": lambda path: next(path.glob("manifest-*.1")).unlink(),
        "metadata gone": DAMAGE["metadata gone"],
        "metadata cut off": DAMAGE["metadata cut off"],
    }
    for name, damage in kinds.items():
        path = damaged(rank, saved, name, damage)
        await rank.together()
        more = {f"{name}, atomic": {"atomic": True}, f"{name}, unverified": {"verify": "manifest"}}
        for word, options in {name: {}, **(more if name == "a shard of rank 1" else {})}.items():
            mine = rank.own()  # of two damaged tensors of a rank, either could be named
            await rank.tries(
                word, lambda t=mine, p=path, o=options: sidestream.load(t, p, **for_load(**o)), by_any=True
            )
    path = damaged(rank, saved, "more", altered("__0_1.distcp"))
    await rank.tries("own keys of the other rank", lambda: sidestream.load(rank.own(), path))


async def run(rank: Rank) -> None:
    folder = rank.folder / "run"
    async with sidestream.Checkpointer(folder) as checkpoints:

        async def saved(step: int, state: Any = None, **options: Any) -> Any:
            state = rank.state(float(step)) if state is None else state
            return await checkpoints.save(state, step=step, **for_save(**options))

        async def restored(**options: Any) -> Any:
            target = rank.blank()
            return [await checkpoints.restore(target, **for_load(**options)), local(target)]

        bad = rank.state() | one_of(rank, 1, {"a": Custom()}, {})
        calls: dict[str, Callable[[], Any]] = {
            "restore, an empty run": restored,
            "save 1": lambda: saved(1, metadata={"loss": 0.5}),
            "save 2": lambda: saved(2),
            "save 2 again": lambda: saved(2),
            "other steps": lambda: saved(10 + rank.number),
            "a bad step on rank 1": lambda: saved(one_of(rank, 1, -1, 3)),
            "a bad step on rank 0": lambda: saved(one_of(rank, 0, "3", 3)),
            "bad metadata on rank 1": lambda: saved(3, metadata=one_of(rank, 1, {"a": torch.ones(1)}, None)),
            "other metadata": lambda: saved(3, metadata={"rank": rank.number}),
            "a value on rank 1": lambda: saved(4, bad),
            "save 4": lambda: saved(4),
            "steps": lambda: checkpoints.steps(),
            "latest": lambda: checkpoints.latest(),
            "metadata": lambda: checkpoints.read_metadata(3),
            "restore": restored,
            "restore 3": lambda: restored(step=3),
            "restore 77": lambda: restored(step=77),
            "other steps to restore": lambda: restored(step=3 + rank.number),
            "restore, mismatch on rank 1": lambda: checkpoints.restore(
                rank.blank() | one_of(rank, 1, {"more": torch.zeros(1)}, {})
            ),
            "health": lambda: _health(checkpoints),
        }
        for name, call in calls.items():
            await rank.tries(name, call)
        rank.note("restored", checkpoints.restored)
        pending = checkpoints.async_save(rank.state(9.0), step=9)
    await rank.tries("a save that the exit has awaited", lambda: awaited(pending))
    async with sidestream.Checkpointer(folder, keep=KeepLast(3)) as pruning:
        for name, dry_run in {"prune, a dry run": True, "prune": False, "prune again": False}.items():
            await rank.together()
            if rank.number == 0:
                await rank.tries_alone(name, lambda d=dry_run: pruning.prune(dry_run=d))
        await rank.tries("prune, by all", pruning.prune)
        pending = pruning.async_save(rank.state(10.0), step=10)
    await rank.tries("a save after which the exit has pruned", lambda: awaited(pending))
    await rank.tries("closed", lambda: _started(checkpoints, rank.state(), 10))


async def _health(checkpoints: sidestream.Checkpointer) -> Any:
    return checkpoints.health()


async def run_damaged(rank: Rank) -> None:
    folder = rank.folder / "run"
    async with sidestream.Checkpointer(folder) as checkpoints:
        for step in (1, 2, 3):
            await checkpoints.save(rank.state(float(step)), step=step)
    await rank.together()
    if rank.number == 0:
        altered("__1_1.distcp")(folder / "step-3")
        altered(".metadata")(folder / "step-2")
    await rank.together()

    async def restored(**options: Any) -> Any:
        async with sidestream.Checkpointer(folder) as checkpoints:
            target = rank.own()
            step = await checkpoints.restore(target, **for_load(**options))
            return [step, checkpoints.restored, local(target), sorted(checkpoints.health().passed_over)]

    for name, options in {
        "restore": {},
        "restore, fallback": {"fallback": "older"},
        "restore 3": {"step": 3},
        "restore 2": {"step": 2},
        "restore 2, fallback": {"step": 2, "fallback": "older"},
    }.items():
        await rank.tries(name, lambda o=options: restored(**o), by_any=True)
    await rank.together()
    if rank.number == 0:
        altered("__0_1.distcp")(folder / "step-1")
    await rank.tries("restore, none is good", lambda: restored(fallback="older"), by_any=True)
    await rank.tries("save over a damaged step", lambda: _one_step(rank, folder, 3))
    await rank.tries("restore that", restored)


async def _one_step(rank: Rank, folder: Path, step: int, **options: Any) -> Any:
    async with sidestream.Checkpointer(folder, **for_run(**options)) as checkpoints:
        return await checkpoints.save(rank.state(float(step)), step=step)


async def _started(checkpoints: sidestream.Checkpointer, state: Any, step: int) -> Any:
    return checkpoints.async_save(state, step=step)


async def run_overlapping(rank: Rank) -> None:
    """A save while the only slot is taken: ``names=`` of rank 1 hold the first one up."""
    for policy in ("wait", "skip", "latest", "fail"):
        gate, began = Gate(rank, f"go-{policy}"), Gate(rank, f"began-{policy}")
        names = one_of(rank, 1, GatedNames(gate, began), None)
        async with sidestream.Checkpointer(rank.folder / policy, when_full=policy, slots=1) as checkpoints:
            first = checkpoints.async_save(rank.state(), step=1, options=sidestream.SaveOptions(names=names))
            await asyncio.to_thread(began.wait)
            if policy == "wait":
                await rank.together()
                gate.open()
            second = await rank.tries(
                f"{policy}: save", lambda c=checkpoints: _started(c, rank.state(), 2), files=False
            )
            third = None
            if policy == "latest":
                third = await rank.tries(
                    f"{policy}: a third one", lambda c=checkpoints: _started(c, rank.state(), 3), files=False
                )
            await rank.together()
            gate.open()
            for name, pending in {"first": first, "second": second, "third": third}.items():
                if pending is not None:
                    await rank.tries(f"{policy}: {name}", lambda p=pending: awaited(p), files=False)
                    rank.note(f"{policy}: {name}, outcome", pending.outcome)
    await rank.tries("the runs", lambda: None)
