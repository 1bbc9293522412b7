"""How a training is checkpointed: the methods that the training loop calls. This one does not save at all."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from train_live_.records import Save

State = dict[str, Any]

STEPS = "steps"
ALONE = "alone"
"""Folders of a run: the checkpoints of the training, and those made after it to time a save alone."""

SAVES_ALONE = 3


class Worker:
    """Saves nothing. The subclasses save, with sidestream and with stock DCP."""

    def __init__(self) -> None:
        self._watchers: list[asyncio.Task[Save]] = []
        self.activity = ""
        """What the saver is doing, for the progress line."""

    async def visible_steps(self) -> list[int]:
        """Return the steps that can be restored."""
        return []

    async def restore(self, state: State) -> int | None:
        """Restore the newest step into `state` and return its number, or None where there is none."""
        return None

    async def save(self, state: State, step: int) -> None:
        """Begin to save; return as soon as the next gradients may be computed."""

    async def before_update(self) -> None:
        """Return when the weights may change again."""

    def step(self) -> AbstractContextManager[None]:
        """Return a context around one training step."""
        return nullcontext()

    def cost_s(self) -> float | None:
        """Return the seconds that the training has lost to the saves so far. None if nothing measures them."""
        return None

    async def saves(self) -> list[Save]:
        """Wait until everything is durable, and return what it took."""
        return await asyncio.gather(*self._watchers)

    async def save_alone(self, state: State) -> list[Save]:
        """Save a few times while nothing is training, each time until durable."""
        return []
