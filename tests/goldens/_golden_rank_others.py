"""What each rank of a group does: ``sidestream.blocking``, ``sidestream.dcp`` and object stores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _golden_rank import Rank, altered, damaged, local, one_of, short_files
from _golden_users import Custom, Holder, failing
from keywords import for_load, for_run, for_save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Shard

import sidestream
import sidestream.blocking
from sidestream.dcp import StorageReader, StorageWriter


async def blocking(rank: Rank) -> None:
    """``sidestream.blocking`` in a thread without a loop."""
    folder = rank.folder
    bad = rank.state() | one_of(rank, 1, {"a": Custom()}, {})

    def in_run() -> Any:
        with sidestream.blocking.Checkpointer(folder / "run") as checkpoints:
            saved = checkpoints.save(rank.state(), step=1)
            target = rank.blank()
            return [saved, checkpoints.restore(target), local(target), checkpoints.steps()]

    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: sidestream.blocking.save(rank.state(), folder / "c"),
        "save, the target is there": lambda: sidestream.blocking.save(rank.state(), folder / "c"),
        "save, a value on rank 1": lambda: sidestream.blocking.save(bad, folder / "bad"),
        "async_save": lambda: sidestream.blocking.async_save(rank.state(), folder / "a").result(),
        "async_save, a value on rank 1": lambda: sidestream.blocking.async_save(bad, folder / "bad").result(),
        "load": lambda: sidestream.blocking.load(rank.blank(), folder / "c"),
        "load, nothing there": lambda: sidestream.blocking.load(rank.blank(), folder / "none"),
        "Checkpointer": in_run,
    }
    for name, call in calls.items():
        await rank.tries(name, lambda c=call: asyncio.to_thread(c), by_any="nothing there" in name)
    saved, target = Holder(1.0), Holder()
    for name, call in {
        "save, an object": lambda: sidestream.blocking.save({"o": saved}, folder / "o"),
        "load, an object": lambda: sidestream.blocking.load({"o": target}, folder / "o"),
    }.items():
        await rank.tries(name, lambda c=call: asyncio.to_thread(c))
    rank.note("threads", {"save": saved.threads, "load": target.threads})  # made in the thread of the loop


async def storages(rank: Rank) -> None:
    """``dcp.save`` and ``dcp.load`` with ``StorageWriter`` and ``StorageReader``."""
    folder = rank.folder

    def state() -> dict[str, Any]:
        return {key: item for key, item in rank.state().items() if not key.startswith("of ")}

    def save(name: str, planner: Any = None, **options: Any) -> None:
        writer = StorageWriter(folder / name, **options)
        try:
            dcp.save(state(), storage_writer=writer, planner=planner)
        finally:
            writer.close()

    def load(name: str, **changes: Any) -> Any:
        target = state() | changes
        dcp.load(target, storage_reader=StorageReader(folder / name))
        return local(target)

    def short() -> None:
        with short_files(here=rank.number == 1):
            large = state() | {"large": rank.placed(torch.zeros(1000, 4), Shard(0))}
            with StorageWriter(folder / "bad") as writer:
                dcp.save(large, storage_writer=writer)

    kept: list[StorageWriter] = []

    def unclosed() -> None:
        kept.append(StorageWriter(folder / "bad"))
        dcp.save(state(), storage_writer=kept[0], planner=bad)

    bad = one_of(rank, 1, failing(DefaultSavePlanner, "resolve_data"), DefaultSavePlanner())
    worse = one_of(rank, 1, failing(DefaultSavePlanner, "create_local_plan"), DefaultSavePlanner())
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: save("c"),
        "load": lambda: load("c"),
        "save, the target is there": lambda: save("c"),
        "save, overwrite": lambda: save("c", overwrite=True),
        "save, a planner that raises while planning": lambda: save("bad", worse),
        "save, a planner that raises while writing": lambda: save("bad", bad),
        "save, overwrite, a planner that raises": lambda: save("c", bad, overwrite=True),
        "save, other urls": lambda: save(one_of(rank, 1, "one", "another")),
        "save, short files on rank 1": short,
        "save, not closed": unclosed,
        "save, closed": lambda: kept[0].close(),
        "save, writer process": lambda: save("process", writer="process"),
        "load, a key is missing on rank 1": lambda: load("c", **one_of(rank, 1, {"more": torch.zeros(1)}, {})),
        "load, nothing there": lambda: load("none"),
        "load, nothing there on rank 1": lambda: load(one_of(rank, 1, "none", "c")),
    }
    executor = ThreadPoolExecutor(1)  # a writer keeps the state of a save for its thread

    async def thread(call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    for name, call in calls.items():
        await rank.tries(name, lambda c=call: thread(c))
    path = damaged(rank, folder / "c", "shard", altered("__1_1.distcp"))
    await rank.together()
    few = one_of(rank, 1, {"rows": rank.blank()["rows"]}, {"step": 0})
    reader = StorageReader(path)
    await rank.tries("load, damaged", lambda: thread(lambda: dcp.load(few, storage_reader=reader)))


def stored(kind: str) -> Callable[[Rank], Awaitable[None]]:
    """To an object store."""

    async def work(rank: Rank) -> None:
        url = rank.options["url"]
        policy = sidestream.StorePolicy(engine="obstore", retries=1)
        keywords: dict[str, Any] = {"storage": sidestream.Storage(rank.options["storage_options"], policy=policy)}
        bad = rank.state() | one_of(rank, 1, {"a": Custom()}, {})
        if kind == "save":
            await rank.tries("call", lambda: sidestream.save(rank.state(), f"{url}/c", **for_save(**keywords)))
        elif kind == "load":
            await sidestream.save(rank.state(), f"{url}/c", **for_save(**keywords))
            await rank.tries("call", lambda: sidestream.load(rank.blank(), f"{url}/c", **for_load(**keywords)))
        elif kind == "a value":
            await rank.tries("call", lambda: sidestream.save(bad, f"{url}/c", **for_save(**keywords)))
        elif kind == "a run":
            async with sidestream.Checkpointer(f"{url}/run", **for_run(**keywords)) as checkpoints:
                for step in (1, 2):
                    await rank.tries(f"step {step}", partial(_saved_in, checkpoints, rank, step))

    return work


async def _saved_in(checkpoints: sidestream.Checkpointer, rank: Rank, step: int) -> Any:
    return await checkpoints.save(rank.state(), step=step)
