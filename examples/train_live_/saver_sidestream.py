"""Checkpoints with `sidestream.Checkpointer`: they are staged and written while the training goes on."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from sidestream import Checkpointer, PendingSave
from train_live_.records import Save, directory_size
from train_live_.saver import ALONE, SAVES_ALONE, STEPS, State, Worker


class SidestreamSaver(Worker):
    def __init__(self, checkpoints: Checkpointer, alone: Checkpointer) -> None:
        super().__init__()
        self._checkpoints = checkpoints
        self._alone = alone
        self._pending: PendingSave | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, directory: Path) -> AsyncIterator[Self]:
        async with Checkpointer(directory / STEPS) as checkpoints, Checkpointer(directory / ALONE) as alone:
            yield cls(checkpoints, alone)

    async def visible_steps(self) -> list[int]:
        return list(await self._checkpoints.steps())

    async def restore(self, state: State) -> int | None:
        return await self._checkpoints.restore(state)

    async def save(self, state: State, step: int) -> None:
        started = time.monotonic()
        self._pending = await self._checkpoints.async_save(state, step=step)
        self._watchers.append(asyncio.create_task(watch(self._pending, step, started)))

    async def before_update(self) -> None:
        if self._pending is not None:
            await self._pending.staged

    async def save_alone(self, state: State) -> list[Save]:
        saves = []
        for number in range(SAVES_ALONE):
            started = time.monotonic()
            pending = await self._alone.async_save(state, step=number)
            saves.append(await watch(pending, number, started))
        return saves


async def watch(pending: PendingSave, step: int, started: float) -> Save:
    """Note when `pending` is staged and when it is durable."""
    await pending.staged
    staged = time.monotonic()
    info = await pending
    durable = time.monotonic()
    return Save(step, info.url, directory_size(Path(info.url)), started, staged, durable)
