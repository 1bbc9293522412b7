"""Checkpoints with stock `dcp.async_save`, called on the loop as its users do, one at a time.

With its default stager it returns once everything has been copied; from then on the weights may change.
"""

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path

import torch.distributed.checkpoint as dcp

from train_live_.records import Save, directory_size
from train_live_.saver import ALONE, SAVES_ALONE, STEPS, State, Worker


class DcpSaver(Worker):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    async def save(self, state: State, step: int) -> None:
        await asyncio.gather(*self._watchers)  # DCP leaves it to its user that saves do not overlap
        path = self._directory / STEPS / f"step-{step}"
        started = time.monotonic()
        future = dcp.async_save(state, checkpoint_id=path)
        assert isinstance(future, Future)  # a response of two futures belongs to stagers of another kind
        staged = time.monotonic()
        self.activity = f"step {step} staged, is being written"
        self._watchers.append(asyncio.create_task(self._watch(future, path, step, started, staged)))

    async def _watch(self, future: Future[None], path: Path, step: int, started: float, staged: float) -> Save:
        """Note when `future` is resolved."""
        await asyncio.wrap_future(future)
        durable = time.monotonic()
        self.activity = f"step {step} resolved after {durable - started:.2f} s"
        return Save(step, str(path), directory_size(path), started, staged, durable)

    async def save_alone(self, state: State) -> list[Save]:
        """Time plain `dcp.save`, in a thread, as nobody would call it on a loop."""
        return [await asyncio.to_thread(self._save_blocking, state, number) for number in range(1, SAVES_ALONE + 1)]

    def _save_blocking(self, state: State, number: int) -> Save:
        path = self._directory / ALONE / f"step-{number}"
        self.activity = f"dcp.save alone {number} is being made"
        started = time.monotonic()
        dcp.save(state, checkpoint_id=path)
        durable = time.monotonic()
        return Save(number, str(path), directory_size(path), started, durable, durable)
