"""A pytest plugin for ``nox -s integrations-accelerate`` with accelerate's own tests: ``Accelerator.save_state`` and
``load_state`` do what a program with sidestream does in their place."""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator

from sidestream import KeepLast, blocking
from sidestream.integrations.accelerate import restore_accelerator_blocking, save_accelerator_blocking


def save_state(self: Accelerator, output_dir: str | None = None, **_: Any) -> None:
    settings = self.project_configuration
    step, keep = 0, None
    if settings.automatic_checkpoint_naming:
        output_dir, step, keep = (
            os.path.join(self.project_dir, "checkpoints"),
            self.save_iteration,
            settings.total_limit,
        )
    with blocking.Checkpointer(output_dir, keep=KeepLast(keep) if keep else None) as checkpoints:
        save_accelerator_blocking(checkpoints, self, step=step)
    settings.iteration += 1


def load_state(self: Accelerator, input_dir: str | None = None, **_: Any) -> None:
    step: Any = "latest"
    if self.project_configuration.automatic_checkpoint_naming:
        if input_dir is not None:
            step = int(input_dir.rpartition("_")[2])
        input_dir = os.path.join(self.project_dir, "checkpoints")
    with blocking.Checkpointer(input_dir) as checkpoints:
        assert restore_accelerator_blocking(checkpoints, self, step) is not None


Accelerator.save_state, Accelerator.load_state = save_state, load_state
