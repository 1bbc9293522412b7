"""Trains a small model with an ``Accelerator``, in forked processes for each request."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, os.path.dirname(__file__))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    save_fsdp_model,
    set_seed,
)
from lives import say, serve
from torch.distributed.fsdp import fully_shard

import sidestream
from sidestream import blocking
from sidestream.integrations.accelerate import (
    accelerator_state,
    restore_accelerator,
    restore_accelerator_blocking,
    save_accelerator,
    save_accelerator_blocking,
)


class Seen:
    """An object that a program registers."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples = state_dict["samples"]


def small_model(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)
    )


class Training:
    """What a program prepares, and one step of it."""

    def __init__(self, *, stateful: bool = False, width: int = 32) -> None:
        set_seed(0)
        loading = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful)
        self.accelerator = Accelerator(cpu=True, dataloader_config=loading, gradient_accumulation_steps=2)
        data = torch.utils.data.TensorDataset(torch.randn(96, 16))
        # A loader without a generator of its own draws a number from torch's when it is iterated over.
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator())
        model = small_model(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.seen = Seen()
        self.accelerator.register_for_checkpointing(self.seen)

    def step(self, batch: Any) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch[0]).square().mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.seen.samples += len(batch[0])

    def batches(self, start: int, steps: int, *, stateful: bool) -> Any:
        """Yield the batches after ``start`` with their numbers."""
        length, step = len(self.loader), start
        while step < steps:
            loader = self.loader
            loader.set_epoch(step // length)
            if step % length and not stateful:
                loader = self.accelerator.skip_first_batches(loader, step % length)
            for batch in loader:
                if step == steps:
                    break
                step += 1
                yield step, batch

    def weights(self) -> dict[str, Any]:
        model = self.accelerator.unwrap_model(self.model)
        return {"model": model.state_dict(), "seen": self.seen.samples, "rate": self.schedule.get_last_lr()}


def train(request: dict[str, Any]) -> None:
    """Train to step ``"steps"``, from the newest step of the run, save each ``"every"`` steps, and write what came out
    of it to ``"weights"``."""
    stateful = request.get("stateful", False)
    training = Training(stateful=stateful, width=request.get("width", 32))
    accelerator = training.accelerator
    with blocking.Checkpointer(request["out"], keep=sidestream.KeepLast(2)) as checkpoints:
        start = restore_accelerator_blocking(checkpoints, accelerator) or 0
        say(f"begins {start}")
        for step, batch in training.batches(start, request["steps"], stateful=stateful):
            training.step(batch)
            if step % request["every"] == 0:
                say(f"saving {step}")
                save_accelerator_blocking(checkpoints, accelerator, step=step)
                say(f"saved {step}")
    if accelerator.is_main_process:
        torch.save(training.weights(), request["weights"])


def train_with_save_state(request: dict[str, Any]) -> None:
    """Do what ``train`` does with accelerate's own calls."""
    training = Training()
    start = request.get("start", 0)
    if start:
        training.accelerator.load_state(f"{request['out']}/{start}")
    for step, batch in training.batches(start, request["steps"], stateful=False):
        training.step(batch)
        if step % request["every"] == 0:
            training.accelerator.save_state(f"{request['out']}/{step}")
    torch.save(training.weights(), request["weights"])


def train_on_a_loop(request: dict[str, Any]) -> None:
    """Do what ``train`` does on an event loop, and train on while the files are written."""
    training = Training()

    async def main() -> None:
        async with sidestream.Checkpointer(request["out"]) as checkpoints:
            start = await restore_accelerator(checkpoints, training.accelerator) or 0
            for step, batch in training.batches(start, request["steps"], stateful=False):
                training.step(batch)
                if step % (2 * request["every"]) == 0:
                    await save_accelerator(checkpoints, training.accelerator, step=step, metadata={"epoch": 0})
                elif step % request["every"] == 0:
                    pending = checkpoints.async_save(accelerator_state(training.accelerator), step=step)
                    await pending.staged

    asyncio.run(main())
    torch.save(training.weights(), request["weights"])


def shard(request: dict[str, Any]) -> None:
    """Train a model that FSDP2 shards over the ranks, or load it, and write its whole tensors to ``"weights"``."""
    dist.init_process_group("gloo")
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5))
    if request["load"]:  # what is loaded has to replace all of it
        torch.nn.init.zeros_(model[0].weight)
    fully_shard(model)
    model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # sharded already
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    with blocking.Checkpointer(request["out"] + "/run") as checkpoints:
        if request["load"]:
            if not request.get("stock"):
                assert restore_accelerator_blocking(checkpoints, accelerator) == 3
            else:
                load_fsdp_model(plugin, accelerator, model, request["out"] + "/stock", use_dcp=False)
        else:
            for step in range(1, 4):
                model(torch.full((2, 7), float(step))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            save_accelerator_blocking(checkpoints, accelerator, step=3)
            save_fsdp_model(plugin, accelerator, model, request["out"] + "/stock", use_dcp=False)
    whole = {name: one.full_tensor() for name, one in model.state_dict().items()}
    moments = [state["exp_avg_sq"].full_tensor() for state in optimizer.state.values()]
    if accelerator.is_main_process:
        torch.save({"model": whole, "moments": moments}, request["weights"])
    dist.destroy_process_group()


def work(request: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    Path(request["weights"]).parent.mkdir(exist_ok=True, parents=True)
    {"train": train, "save_state": train_with_save_state, "loop": train_on_a_loop, "shard": shard}[request["work"]](
        request
    )


if __name__ == "__main__":
    serve(work)
