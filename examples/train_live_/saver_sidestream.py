"""Checkpoints with `sidestream.Checkpointer`: they are staged and written while the training goes on.

An observer notes the time of each event of a save: the picture draws the phases from it.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Self

from sidestream import Checkpointer, PendingSave, events
from sidestream.observability import Costs
from train_live_.records import Save, directory_size
from train_live_.saver import ALONE, SAVES_ALONE, STEPS, State, Worker

PHASES: dict[type[events.Event], tuple[str, str]] = {
    events.SaveStarted: ("started", "is being copied"),
    events.SavePlanned: ("planned", "is being copied and written"),
    events.SaveStaged: ("staged", "staged, is being written"),
    events.SaveWritten: ("written", "written, is being committed"),
    events.SaveCommitted: ("committed", "committed"),
}
"""What the record of a save and the progress line call each event."""


class SidestreamSaver(Worker):
    def __init__(self, checkpoints: Checkpointer, alone: Checkpointer, costs: Costs) -> None:
        super().__init__()
        self._checkpoints = checkpoints
        self._alone = alone
        self._costs = costs
        self._pending: PendingSave | None = None
        self._what = "step"
        self._phases: defaultdict[str, dict[str, float]] = defaultdict(dict)

    @classmethod
    @asynccontextmanager
    async def open(cls, directory: Path) -> AsyncIterator[Self]:
        async with Checkpointer(directory / STEPS) as checkpoints, Checkpointer(directory / ALONE) as alone:
            with Costs() as costs:
                saver = cls(checkpoints, alone, costs)
                with events.observe(saver.observe):
                    yield saver

    def observe(self, event: events.Event) -> None:
        """Note when a phase of a save ended. This is called in the thread in which it happens."""
        if isinstance(event, events.SaveEvent) and type(event) in PHASES:
            name, doing = PHASES[type(event)]
            self._phases[event.save.url][name] = event.monotonic_ns / 1e9
            self.activity = f"{self._what} {event.save.step} {doing}"

    def step(self) -> AbstractContextManager[None]:
        return self._costs.step()

    def cost_s(self) -> float | None:
        return self._costs.report().lost_s

    async def visible_steps(self) -> list[int]:
        return list(await self._checkpoints.steps())

    async def restore(self, state: State) -> int | None:
        return await self._checkpoints.restore(state)

    async def save(self, state: State, step: int) -> None:
        started = time.monotonic()
        self._pending = self._checkpoints.async_save(state, step=step)
        self._watchers.append(asyncio.create_task(self._watch(self._pending, step, started)))

    async def before_update(self) -> None:
        if self._pending is not None:
            await self._pending.staged

    async def save_alone(self, state: State) -> list[Save]:
        saves = []
        self._what = "save alone"
        for number in range(1, SAVES_ALONE + 1):
            started = time.monotonic()
            pending = self._alone.async_save(state, step=number)
            saves.append(await self._watch(pending, number, started))
        return saves

    async def _watch(self, pending: PendingSave, step: int, started: float) -> Save:
        """Note when `pending` is staged and when it is durable. The training awaits `pending.staged` where it needs it:
        only that wait is a cost."""
        info = await pending
        durable = time.monotonic()
        phases = self._phases.pop(info.url)
        return Save(step, info.url, directory_size(Path(info.url)), started, phases["staged"], durable, phases)
