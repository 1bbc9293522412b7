"""What the workers of the tests of Ray Train run."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist

import sidestream
from sidestream import blocking
from sidestream.errors import InvalidOptionError
from sidestream.integrations.ray import report


def experiment() -> str:
    return str(ray.train.get_context().get_storage().experiment_fs_path)


def train(config: dict[str, Any]) -> None:
    """Train with workers that save each step together. Worker 0 notes each life, each the bits of its last state."""
    torch.manual_seed(0)
    wide = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Dropout(0.1), torch.nn.Linear(1024, 256))
    model = torch.nn.parallel.DistributedDataParallel(wide)
    optimizer = torch.optim.AdamW(model.parameters())
    random = sidestream.PerRank(sidestream.RandomState(), on_resize="skip")
    state = {"model": wide, "optimizer": optimizer, "random": random}
    with blocking.Checkpointer(experiment()) as checkpoints:
        there = checkpoints.steps()
        start = checkpoints.restore(state) or 0
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        note = {"start": start, "there": there, "pids": pids}
        if dist.get_rank() == 0:
            with open(config["lives"], "a") as lives:
                lives.write(json.dumps(note) + "\n")
        for step in range(start + 1, config["steps"] + 1):
            loss = model(torch.randn(8, 256)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pending = checkpoints.async_save(state, step=step)
            pending.staged.result()  # the weights may change
            report(pending, {"loss": loss.item(), "step": step})
    Path(f"{config['result']}.{dist.get_rank()}").write_text(digest(model, optimizer))


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Every bit of the weights and moments, and the next random number."""
    found = hashlib.sha256(torch.rand(4).numpy().tobytes())
    for tensor in [*model.state_dict().values(), *(one["exp_avg_sq"] for one in optimizer.state.values())]:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def refused(config: dict[str, Any]) -> None:
    """Save outside of the experiment directory, and then to a directory for each worker."""
    state, rank = {"x": torch.ones(8)}, dist.get_rank()
    pending = blocking.async_save(state, f"{config['result']}.elsewhere")
    try:
        report(pending, {})
    except InvalidOptionError as error:
        Path(f"{config['result']}.{rank}").write_text(str(error))
    pending.result()
    report(blocking.async_save(state, f"{experiment()}/step-1-of-{rank}", process_group="alone"), {})


def one_worker_saves(config: dict[str, Any]) -> None:
    """Save on worker 0 alone, twice under one number. Cancel the save after that, if the configuration says so."""
    state, leads = {"x": torch.ones(8)}, dist.get_rank() == 0
    if not leads:
        for number in range(3):
            report(None, {"number": number})
        return
    with blocking.Checkpointer(f"{experiment()}/steps", process_group="alone") as checkpoints:
        for number in range(2):
            report(checkpoints.async_save(state, step=1), {"number": number})
    pending = blocking.async_save(state, f"{experiment()}/last", process_group="alone")
    if config["cancel"]:
        pending.cancel()
    report(pending, {"number": 2})
