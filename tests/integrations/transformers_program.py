"""Trains a small model with a Trainer of transformers, in a forked process for each request."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, os.path.dirname(__file__))

import torch
import transformers
from lives import say, serve

from sidestream.integrations.transformers import SidestreamTrainer

TRAINERS = {"sidestream": SidestreamTrainer, "stock": transformers.Trainer}


class Tokens(torch.utils.data.Dataset):
    """The same tokens each time. With ``noise`` some of them are drawn when an item is read."""

    def __init__(self, noise: bool = False, tokens: int = 16, vocabulary: int = 64) -> None:
        self._noise = noise
        self._shape = (vocabulary, (tokens,))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, *self._shape, generator=torch.Generator().manual_seed(index))
        if self._noise:
            tokens = torch.where(torch.rand(tokens.shape) < 0.3, 0, tokens)
        return {"input_ids": tokens, "labels": tokens}


def small_model(vocabulary: int = 64, width: int = 32) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=width, vocab_size=vocabulary, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def arguments(out: str, **changed: Any) -> transformers.TrainingArguments:
    defaults = {
        "per_device_train_batch_size": 4, "max_steps": 12, "save_steps": 3, "logging_steps": 4, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=out, **defaults | changed)


class _Says(transformers.TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say(f"begins {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say(f"saving {state.global_step}")


def train(request: dict[str, Any]) -> None:
    """Train, from the newest checkpoint if there is one, and write the weights to ``request["weights"]``."""
    torch.set_num_threads(1)
    out = request["out"]
    args = arguments(
        out,
        max_steps=request["steps"],
        save_steps=1,
        save_strategy=request.get("save", "steps"),
        save_total_limit=2,
        per_device_train_batch_size=2,
        logging_strategy="no",
    )
    model = small_model(vocabulary=4096, width=128)  # 20 MB with the optimizer
    trainer = TRAINERS[request["trainer"]](
        model=model, args=args, train_dataset=Tokens(vocabulary=4096), callbacks=[_Says()]
    )
    resumes = os.path.isdir(out) and transformers.trainer_utils.get_last_checkpoint(out) is not None
    trainer.train(resume_from_checkpoint=resumes)
    torch.save(trainer.model.state_dict(), request["weights"])


def train_ranks(request: dict[str, Any]) -> None:
    """Train on several ranks to step ``"steps"``, from the newest checkpoint if there is one."""
    torch.set_num_threads(1)
    out = request["out"]
    trainer = TRAINERS[request["trainer"]](
        model=small_model(),
        args=arguments(out, max_steps=request["steps"], save_total_limit=2, ddp_backend="gloo", seed=5),
        train_dataset=Tokens(),
        callbacks=[_Says()],
    )
    resumes = os.path.isdir(out) and transformers.trainer_utils.get_last_checkpoint(out) is not None
    trainer.train(resume_from_checkpoint=resumes)
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), request["weights"])


if __name__ == "__main__":
    serve(lambda request: (train_ranks if "world" in request else train)(request))
