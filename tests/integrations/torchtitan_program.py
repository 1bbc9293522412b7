# ruff: noqa: E402  TorchTitan's device is changed before the rest of it is imported
"""Trains a small Llama with TorchTitan's trainer on the CPU, in a forked process for each request.

TorchTitan 0.3.0 is made for GPUs and for a nightly build of torch. ``on_the_cpu`` has all that is changed here so that
its trainer runs with gloo: the device that it finds, a function that torch 2.13 has under a private name, and the way
in which FSDP adds gradients.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, os.path.dirname(__file__))

import torch
import torch.distributed as dist
from lives import say, serve


def on_the_cpu() -> None:
    """Called before anything else of TorchTitan is imported."""
    from torchtitan.tools import utils

    def nothing(*_: Any, **__: Any) -> None: ...

    properties = SimpleNamespace(name="CPU", total_memory=1 << 34)
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(
        set_device=nothing, synchronize=nothing, empty_cache=nothing, reset_peak_memory_stats=nothing,
        current_device=lambda: 0, device_count=lambda: 1, get_device_name=lambda *_: "CPU",
        get_device_properties=lambda *_: properties, memory_stats=lambda *_: {},
    )  # fmt: skip
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout


on_the_cpu()

from datasets import load_dataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from sidestream import events
from sidestream.integrations.torchtitan import SidestreamCheckpointManager

MANAGERS = {"sidestream": SidestreamCheckpointManager, "stock": CheckpointManager}


def llama(folder: str, assets: str, steps: int, manager: str, noise: bool = False, **checkpoint: Any) -> Trainer.Config:
    """A configuration as the functions in TorchTitan's ``config_registry`` return it."""

    def words(sample: dict[str, str]) -> str:
        """Leave out words, others each time, if the training has noise."""
        found = sample["text"].split()
        return " ".join(word for word in found if not noise or torch.rand(()) < 0.8)

    def read(path: str) -> Any:
        return load_dataset("json", data_files=f"{path}/data.jsonl", split="train", cache_dir=f"{path}/cache")

    DATASETS["words"] = DatasetConfig(path=assets, loader=read, sample_processor=words)
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # flex attention is compiled for a GPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=assets,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2, seq_len=32, steps=steps, disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="words"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=MANAGERS[manager].Config(
            **{"enable": True, "interval": 1, "last_save_model_only": False, **checkpoint}
        ),
        debug=DebugConfig(seed=1, deterministic=True, enable_structured_logging=False),
    )


def train(request: dict[str, Any]) -> None:
    """Train, and write a digest of the state of this rank. Rank 0 tells on the standard output what happens."""
    rank, _ = os.environ["RANK"], request.pop("world")
    result, stop_at = Path(request.pop("result") + "." + rank), request.pop("stop_at", None)
    trainer = llama(**request).build()
    for part in trainer.model_parts:
        for module in part.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no sum that multiplies
                module.set_force_sum_reduction_for_comms(True)
    if stop_at is not None:
        trainer.should_continue_training = lambda: trainer.step < stop_at
    with events.observe(_tell):
        trainer.train()
        trainer.close()
    result.write_text(json.dumps({"step": trainer.step, "state": digest(trainer)}))
    dist.destroy_process_group()


def _tell(event: events.Event) -> None:
    if os.environ["RANK"] != "0":
        return
    if isinstance(event, events.SaveStarted):
        say(f"saving {event.save.step}")
    if isinstance(event, events.LoadApplied):
        say(f"restored {event.load.step}")


def digest(trainer: Trainer) -> str:
    """Every bit of the weights and moments of this rank."""
    found = hashlib.sha256()
    model = {name: tensor for part in trainer.model_parts for name, tensor in part.state_dict().items()}
    for name, value in sorted({**model, **trainer.optimizers.state_dict()}.items()):
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())
        found.update(name.encode())
    return found.hexdigest()


if __name__ == "__main__":
    serve(train)
