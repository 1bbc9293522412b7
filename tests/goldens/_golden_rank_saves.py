"""What each rank of a group does: saves."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _golden_rank import (
    Gate,
    GatedNames,
    Rank,
    awaited,
    loaded,
    one_of,
    short_files,
)
from _golden_save import _described, dropped
from _golden_states import counted
from _golden_users import (
    Custom,
    Holder,
    Refusing,
)
from keywords import for_save
from torch.distributed.tensor import Shard

import sidestream
import sidestream.blocking


async def save(rank: Rank) -> None:
    """What works, and the files of it."""
    folder = rank.folder
    ways: dict[str, dict[str, Any]] = {
        "first": {},
        "second": {},  # with the plan of the first one
        "metadata and digest": {"metadata": {"loss": 0.5}, "digest": "blake3"},
        "flush": {"durability": "flush"},
        "streaming": {"streaming": True},
        "other timeouts": {"timeout_s": 60.0 + rank.number, "rank_wait_s": 60.0 - rank.number},
        "other metadata": {"metadata": {"rank": rank.number}},
    }
    for number, (name, options) in enumerate(ways.items()):
        state = rank.state(float(number))
        await rank.tries(name, lambda n=name, s=state, o=options: sidestream.save(s, folder / n, **for_save(**o)))
        await rank.tries(f"{name}, loaded", lambda n=name, s=state: loaded(rank, folder / n, s))
    async with sidestream.AsyncStager(budget_bytes=1 << 22) as stager:
        pending = sidestream.async_save(rank.state(), folder / "async", stager=stager)
        await rank.tries_alone("async_save, staged", lambda: pending.staged)
        await rank.tries("async_save", lambda: awaited(pending))
        rank.note("async_save, outcome", [pending.outcome, pending.done(), pending.progress])
    if rank.number == 0:
        await rank.tries_alone("alone", lambda: sidestream.save({"n": 1}, folder / "alone", process_group="alone"))
    group = dist.new_group([0])
    await rank.tries("a group of rank 0", lambda: sidestream.save({"n": 1}, folder / "sub", process_group=group))
    await rank.tries("uneven keys", lambda: sidestream.save({f"k{rank.number}": 1}, folder / "uneven"))
    await rank.tries("nothing", lambda: sidestream.save({}, folder / "nothing"))
    values = {"n": rank.number, "t": counted(2, plus=rank.number)}
    await rank.tries("one key, other contents", lambda: sidestream.save(values, folder / "values"))
    await rank.together()
    if rank.number == 0:
        for name in ("first", "second"):
            for path in sorted((folder / name).iterdir()):
                described = _described(path)
                rank.table.entries[f"{name}, {rank.table.text(path.name)}"] = described
        rank._write()


async def three(rank: Rank) -> None:
    """Seven rows over three ranks."""
    folder = rank.folder
    await rank.tries("save", lambda: sidestream.save(rank.state(), folder / "c"))
    await rank.tries("load", lambda: loaded(rank, folder / "c", rank.state()))
    bad = one_of(rank, 2, {"a": Custom()}, {})
    await rank.tries("a value on rank 2", lambda: sidestream.save(rank.state() | bad, folder / "bad"))
    both = {} if rank.number == 0 else {"a": Custom()}
    await rank.tries(
        "values on ranks 1 and 2", lambda: sidestream.save(rank.state() | both, folder / "bad"), by_any=True
    )
    await rank.tries("after that", lambda: sidestream.save(rank.state(), folder / "after"))


async def save_refused(rank: Rank) -> None:
    """What one rank gives is refused, or differs from what the others give. Every call uses the same group."""
    folder = rank.folder
    good = rank.state()

    def other(here: Any, elsewhere: Any, number: int = 1) -> Any:
        return one_of(rank, number, here, elsewhere)

    states: dict[str, Any] = {
        "a value on rank 1": good | other({"a": {"c": Custom()}}, {}),
        "a value on rank 0": good | other({"a": {"c": Custom()}}, {}, 0),
        "a meta tensor on rank 1": good | other({"m": torch.empty(1, device="meta")}, {}),
        "two keys with one name on rank 1": good | other({0: 1, "0": 2}, {}),
        "an object that raises on rank 1": good | {"o": other(Refusing("state_dict"), Holder())},
        "an object that raises on rank 0": good | {"o": other(Refusing("state_dict"), Holder(), 0)},
        "a list on rank 1": other([1, 2], good),
        "another shape on rank 1": good | {"rows": rank.placed(counted(7, 4 + rank.number), Shard(0))},
        "another dtype on rank 1": good
        | {"rows": rank.placed(counted(7, 4).to(other(torch.float64, torch.float32)), Shard(0))},
        "a value and a tensor of one name": good | {"x": other(1, torch.ones(2))},
        "a name within another one": good | {"x": other(1, {"y": 1})},
    }
    for name, state in states.items():
        await rank.tries(f"state: {name}", lambda s=state: sidestream.save(s, folder / "bad"))
        await asyncio.to_thread(shutil.rmtree, folder / "bad", ignore_errors=True)
    options: dict[str, dict[str, Any]] = {
        "durability": {"durability": other("flush", "fsync")},
        "digest": {"digest": other("blake3", None)},
        "bad metadata": {"metadata": other({"loss": torch.tensor(1.0)}, None)},
        "a bad stager": {"stager": other(3, None)},
    }
    for name, option in options.items():
        await rank.tries(f"option: {name}", lambda o=option: sidestream.save(good, folder / "bad", **for_save(**o)))
        await asyncio.to_thread(shutil.rmtree, folder / "bad", ignore_errors=True)
    urls: dict[str, Any] = {
        "other directories": folder / other("one", "another"),
        "other parents": folder / other("a/c", "b/c"),
        "another store on rank 1": other("memory://golden/c", folder / "bad"),
        "memory of each process": "memory://golden/c",
        "a bad one on rank 1": other("s3://bucket", folder / "bad"),
        "a bad one on rank 0": other("", folder / "bad", 0),
    }
    for name, url in urls.items():
        await rank.tries(f"url: {name}", lambda u=url: sidestream.save(good, u))
    await rank.tries("good", lambda: sidestream.save(good, folder / "good"))
    await rank.tries("target: there", lambda: sidestream.save(good, folder / "good"))
    if rank.number == 0:
        (folder / "file").write_text("mine")
    await rank.tries("target: a file", lambda: sidestream.save(good, folder / "file"))
    await rank.tries("target: below a file", lambda: sidestream.save(good, folder / "file" / "c"))
    for number in range(2):
        await rank.tries(f"short files on rank {number}", lambda n=number: _save_short(rank, folder / "bad", n))
    await rank.tries("after all", lambda: sidestream.save(good, folder / "after"))
    group: Any = other("all", None)  # rank 1 does not even reach the group, so the ranks do not count alike any more
    await rank.tries(
        "no group on rank 1",
        lambda: sidestream.save(
            good, folder / "bad", process_group=group, options=sidestream.SaveOptions(rank_wait_s=0.5)
        ),
    )


async def _save_short(rank: Rank, url: Path, number: int) -> Any:
    large = rank.state() | {"large": rank.placed(torch.zeros(1000, 4), Shard(0))}
    with short_files(here=rank.number == number):
        return await sidestream.save(large, url)


async def cancelled(rank: Rank) -> None:
    """One rank cancels: at once, while another rank plans, and by its own task."""
    folder = rank.folder
    for number in range(2):
        pending = None

        async def call(number: int = number) -> Any:
            nonlocal pending
            pending = sidestream.async_save(rank.state(), folder / "bad")
            if rank.number == number:
                pending.cancel()
            return await pending

        await rank.tries(f"at once, by rank {number}", call)
        assert pending is not None
        rank.note(f"at once, by rank {number}, outcome", pending.outcome)
    for number in range(2):
        began, gate = Gate(rank, f"began-{number}"), Gate(rank, f"cancelled-{number}")
        names = one_of(rank, 1 - number, GatedNames(gate, began), None)

        async def call(number: int = number, names: Any = names, began: Gate = began, gate: Gate = gate) -> Any:
            task = asyncio.ensure_future(
                sidestream.save(rank.state(), folder / "bad", options=sidestream.SaveOptions(names=names))
            )
            if rank.number == number:
                await asyncio.to_thread(began.wait)
                task.cancel()
                for _ in range(50):  # turns of the loop, in which the cancel reaches the other ranks
                    await asyncio.sleep(0)
                gate.open()
            return await task

        await rank.tries(f"while rank {1 - number} plans, by rank {number}", call)
    await rank.tries("after that", lambda: sidestream.save(rank.state(), folder / "after"))


async def objects(rank: Rank) -> None:
    """Objects in a state, and in which threads their methods are called."""
    folder = rank.folder
    saved, target = Holder(3.0), Holder()
    await rank.tries("save", lambda: sidestream.save({"o": saved, "deep": [saved]}, folder / "c"))
    await rank.tries("load", lambda: sidestream.load({"o": target, "deep": [Holder()]}, folder / "c"))
    rank.note("threads", {"save": saved.threads, "load": target.threads})
    rank.note("loaded", target.loaded)
    for number in range(2):
        state = {"o": one_of(rank, number, Refusing("load_state_dict"), Holder()), "deep": [Holder()]}
        for atomic in (False, True):
            name = f"load, an object that raises on rank {number}{', atomic' if atomic else ''}"
            await rank.tries(
                name,
                lambda s=state, a=atomic: sidestream.load(s, folder / "c", options=sidestream.LoadOptions(atomic=a)),
            )
        state = {"o": one_of(rank, number, Refusing("state_dict"), Holder()), "deep": [Holder()]}
        name = f"load, an object whose state_dict raises on rank {number}"
        await rank.tries(name, lambda s=state: sidestream.load(s, folder / "c"))
    missing = {"o": Holder()} | one_of(rank, 1, {}, {"deep": [Holder()]})
    await rank.tries("save, an object that rank 1 lacks", lambda: sidestream.save(missing, folder / "fewer"))
    await rank.tries("load, an object that rank 1 lacks", lambda: sidestream.load(missing, folder / "c"))


async def not_awaited(rank: Rank) -> None:
    """Failed saves that nobody awaits."""
    bad = rank.state() | one_of(rank, 1, {"a": Custom()}, {})
    await rank.tries("async_save", lambda: dropped(bad, rank.folder / "bad"))
    checkpoints = sidestream.Checkpointer(rank.folder / "run")
    async with checkpoints:
        pending = checkpoints.async_save(bad, step=1)
        await pending.ended()
        await rank.tries(
            "Checkpointer, the next save", lambda: checkpoints.async_save(rank.state(), step=2), by_any=True
        )
        pending = checkpoints.async_save(rank.state(), step=3)
        await rank.tries("Checkpointer, the one after that", lambda: awaited(pending))
        pending = checkpoints.async_save(bad, step=4)
        await pending.ended()
        await rank.tries("Checkpointer, closed", checkpoints.aclose)


async def worker_for(rank: Rank) -> None:
    folder = rank.folder
    await rank.tries(
        "save", lambda: sidestream.save(rank.state(), folder / "c", options=sidestream.SaveOptions(writer="process"))
    )
    await rank.tries("load", lambda: loaded(rank, folder / "c", rank.state()))
    other = one_of(rank, 1, "process", "thread")
    await rank.tries(
        "on rank 1 only",
        lambda: sidestream.save(rank.state(), folder / "d", options=sidestream.SaveOptions(writer=other)),
    )
    value = rank.state() | one_of(rank, 1, {"a": Custom()}, {})
    await rank.tries(
        "a value on rank 1",
        lambda: sidestream.save(value, folder / "bad", options=sidestream.SaveOptions(writer="process")),
    )
    large = rank.state() | {"large": rank.placed(torch.zeros(1000, 4), Shard(0))}
    await rank.tries(
        "the target is there",
        lambda: sidestream.save(large, folder / "c", options=sidestream.SaveOptions(writer="process")),
    )
    if rank.number == 0:
        first, second = ([path.read_bytes() for path in sorted((folder / one).glob("__*"))] for one in "cd")
        rank.note("the same bytes as a thread writes", [a == b for a, b in zip(first, second, strict=True)])
