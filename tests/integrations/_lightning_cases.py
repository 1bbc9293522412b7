"""Trainers of Lightning that a test starts, kills and compares."""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any

import torch

import sidestream
from sidestream import blocking
from sidestream.integrations.lightning import SidestreamCheckpointIO

ROOTS = {name: importlib.import_module(name) for name in ("lightning.pytorch", "pytorch_lightning")}
importlib.import_module("torch._dynamo")  # which the first optimizer of every child would import
torch.set_num_threads(1)
WIDTH = 256


def digest(value: Any) -> str:
    """The bytes of all tensors in ``value``, and its other values."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, dict):
            for key in sorted(one, key=str):
                found.update(str(key).encode())
                add(one[key])
        elif isinstance(one, list | tuple):
            for item in one:
                add(item)
        elif isinstance(one, torch.Tensor):
            found.update(one.detach().cpu().contiguous().numpy().tobytes())
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()


def module_of(pl: Any, kind: str) -> Any:
    """A module whose batches depend on the step alone (``"steps"``), or on a shuffled loader and on dropout."""

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int, note: str = "a.b") -> None:
            super().__init__()
            self.save_hyperparameters()
            drop = torch.nn.Dropout(0.2 if kind != "steps" else 0.0)
            layers = (torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), drop, torch.nn.Linear(width, width))
            self.net = torch.nn.Sequential(*layers)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if kind == "steps":
                seed = 1000 * self.global_step + self.global_rank
                batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
            loss = self.net(batch).square().mean()
            self.log("train.loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

        def train_dataloader(self) -> Any:
            rows = torch.randn(80, WIDTH, generator=torch.Generator().manual_seed(0))
            return torch.utils.data.DataLoader(rows, batch_size=8, shuffle=kind != "steps")  # type: ignore[arg-type]

        if kind == "random states":

            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["random"] = sidestream.RandomState().state_dict()

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                sidestream.RandomState().load_state_dict(checkpoint["random"])

    torch.manual_seed(0)
    return Module(WIDTH)


def trainer_of(pl: Any, plugin: str, steps: int, every: int, **more: Any) -> Any:
    class Reports(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            os.write(int(os.environ["SIDESTREAM_REPORTS"]), b".")

    plugins = [SidestreamCheckpointIO()] if plugin == "sidestream" else []
    saves = {"every_n_train_steps": every} if every else {}
    keep = pl.callbacks.ModelCheckpoint("saved", monitor="train.loss", save_top_k=2, save_last=True, **saves)
    return pl.Trainer(
        plugins=plugins, callbacks=[keep, Reports()], max_steps=steps, logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **more,
    )  # fmt: skip


def train(
    root: str = "lightning.pytorch", plugin: str = "sidestream", kind: str = "steps", steps: int = 24, every: int = 2
) -> list[str]:
    """Train, from the last checkpoint if there is one. Returns digests of the weights and of the optimizer."""
    pl = ROOTS[root]
    pl.seed_everything(7, verbose=False)
    model, trainer = module_of(pl, kind), trainer_of(pl, plugin, steps, every)
    trainer.fit(model, ckpt_path="last")
    assert trainer.global_step == steps
    return [digest(model.state_dict()), digest(trainer.optimizers[0].state_dict())]


def good() -> list[str]:
    """The names of all checkpoints, each of which has to be complete."""
    names = sorted(path.name for path in Path("saved").glob("*.ckpt"))
    for name in names:
        assert blocking.verify(f"saved/{name}").ok, name
        assert set(blocking.open_checkpoint(f"saved/{name}").state_dict()) >= {
            "state_dict",
            "optimizer_states",
            "loops",
        }
    return names
