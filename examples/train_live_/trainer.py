"""The trainer process: training, server, ticker and checkpoints on one asyncio loop."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from train_live_.loop import serving, ticking
from train_live_.model import Size, Training
from train_live_.progress import Progress, reporting
from train_live_.records import Run
from train_live_.saver import State, Worker


async def train(
    size: Size, *, saver_name: str, directory: Path, steps: int, save_every: int, measure_alone: bool
) -> Run:
    """Train up to `steps`, from the newest checkpoint in `directory` if there is one."""
    torch.set_num_threads(1)
    training = Training(size)
    run = Run(saver_name, parameters=sum(parameter.numel() for parameter in training.model.parameters()))
    async with open_saver(saver_name, directory) as saver:
        state: State = {"model": training.model, "optimizer": training.optimizer, "step": 0}
        run.steps_seen = await saver.visible_steps()
        run.resumed_from = await saver.restore(state)
        meter = Meter(run, saver, steps=steps, tokens_per_step=size.batch * size.context)
        async with reporting(meter.progress):
            async with serving(lambda: status(run), run.answers), ticking(run.ticks):
                load = load_average()
                run.began = time.monotonic()
                await take_steps(training, saver, state, run, steps=steps, save_every=save_every)
                run.saves = await saver.saves()
                run.ended = time.monotonic()
                run.cost_s = saver.cost_s()
                run.load_training = load, load_average()
            if measure_alone:
                load = load_average()
                run.saves_alone = await saver.save_alone(state)
                run.load_alone = load, load_average()
    run.digest = training.digest()
    return run


async def take_steps(training: Training, saver: Worker, state: State, run: Run, *, steps: int, save_every: int) -> None:
    """Take the missing steps, in one worker thread; save after every `save_every`-th and after the last."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="train") as worker:
        for step in range(state["step"] + 1, steps + 1):
            with saver.step():
                loss = await loop.run_in_executor(worker, training.compute_gradients, step)
                await saver.before_update()
                await loop.run_in_executor(worker, training.apply_update)
            run.losses[step] = loss
            state["step"] = step
            if step % save_every == 0 or step == steps:
                await saver.save(state, step)


def load_average() -> float:
    """Return how many threads ran or waited for a processor or a disk, on average over the last minute."""
    return os.getloadavg()[0]


def status(run: Run) -> dict[str, Any]:
    """Return what the server answers: the last step and its loss."""
    step = max(run.losses, default=0)
    return {"step": step, "loss": run.losses.get(step)}


class Meter:
    """Tells the progress of a run from its record."""

    def __init__(self, run: Run, saver: Worker, *, steps: int, tokens_per_step: int) -> None:
        self._run = run
        self._saver = saver
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._taken = 0
        self._tokens_per_s: float | None = None

    def progress(self) -> Progress:
        losses = self._run.losses
        if len(losses) > self._taken:
            self._taken = len(losses)
            self._tokens_per_s = self._taken * self._tokens_per_step / (time.monotonic() - self._run.began)
        step = max(losses, default=self._run.resumed_from or 0)
        return Progress(step, self._steps, losses.get(step), self._tokens_per_s, self._saver.activity)


@asynccontextmanager
async def open_saver(name: str, directory: Path) -> AsyncIterator[Worker]:
    """Open the saver of this name. Only its own library is imported."""
    if name == "sidestream":
        from train_live_.saver_sidestream import SidestreamSaver

        async with SidestreamSaver.open(directory) as saver:
            yield saver
    elif name == "dcp":
        from train_live_.saver_dcp import DcpSaver

        yield DcpSaver(directory)
    else:
        yield Worker()
