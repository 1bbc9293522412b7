"""What each rank of a group does: ranks that do not make a call, do not answer, or end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from _golden_rank import Gate, Rank, tree
from _golden_users import DIED, Holder, Lethal
from keywords import for_load, for_run, for_save

import sidestream
import sidestream.blocking
from sidestream import events


async def _until_all_have_tried(rank: Rank) -> None:
    """Wait for all ranks. The connections of a process that ends are closed, and the others would see a dead rank."""
    Gate(rank, f"ended-{rank.number}").open()
    for one in range(rank.world):
        await asyncio.to_thread(Gate(rank, f"ended-{one}").wait)


def absent(verb: str, number: int, rank_wait_s: float, *, before: bool = False) -> Callable[[Rank], Awaitable[None]]:
    """Rank ``number`` does not make the call."""

    async def work(rank: Rank) -> None:
        folder, limit = rank.folder, {"rank_wait_s": rank_wait_s, "timeout_s": 60.0}
        if rank.number == 0:
            await sidestream.save({"n": 1}, folder / "saved", process_group="alone")
            async with sidestream.Checkpointer(folder / "run", process_group="alone") as checkpoints:
                await checkpoints.save({"n": 1}, step=1)
        await rank.together()
        if before:
            await sidestream.save(rank.state(), folder / "before")
        await rank.together()

        async def call() -> Any:
            if verb == "save":
                return await sidestream.save(rank.state(), folder / "bad", **for_save(**limit))
            if verb == "load":
                return await sidestream.load({"n": 0}, folder / "saved", **for_load(**limit))
            async with sidestream.Checkpointer(folder / "run", **for_run(**limit)) as checkpoints:
                if verb == "restore":
                    return await checkpoints.restore({"n": 0})
                return await checkpoints.save(rank.state(), step=2)

        if rank.number != number:
            await rank.tries_alone("call", call)
        await _until_all_have_tried(rank)
        if rank.number == 0:
            rank.note("there", sorted(tree(folder)))

    return work


def dies(number: int, make: Callable[[Rank, bool], Any]) -> Callable[[Rank], Awaitable[None]]:
    """The process of rank ``number`` ends in a call. ``make`` makes the call; its second argument: whether in this
    process."""

    async def work(rank: Rank) -> None:
        await sidestream.save(rank.state() | {"o": Holder()}, rank.folder / "before")
        await rank.together()
        await rank.tries_alone("call", lambda: make(rank, rank.number == number))
        await rank.tries_alone("after that", lambda: sidestream.save(rank.state(), rank.folder / "after"))

    return work


def save_dying(rank: Rank, here: bool) -> Any:
    return sidestream.save(
        {"o": Lethal("state_dict") if here else Holder()},
        rank.folder / "bad",
        options=sidestream.SaveOptions(timeout_s=60.0),
    )


async def write_dying(rank: Rank, here: bool) -> Any:
    def die(event: events.Event) -> None:
        if here and isinstance(event, events.SavePlanned):
            os._exit(DIED)

    with events.observe(die):
        return await sidestream.save(rank.state(), rank.folder / "bad", options=sidestream.SaveOptions(timeout_s=60.0))


def load_dying(rank: Rank, here: bool) -> Any:
    target = rank.blank() | {"o": Lethal("load_state_dict") if here else Holder()}
    return sidestream.load(target, rank.folder / "before", options=sidestream.LoadOptions(timeout_s=60.0))
