"""A pytest plugin for ``nox -s integrations-torchtitan`` with TorchTitan's own tests: their checkpoint manager is
sidestream's."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.components import checkpointer
from torchtitan.components.checkpointer import dcp

from sidestream.integrations.torchtitan import SidestreamCheckpointManager


class CheckpointManager(SidestreamCheckpointManager):
    """It accepts the one setting of TorchTitan's manager that this one does not have."""

    @dataclass(kw_only=True, slots=True)
    class Config(SidestreamCheckpointManager.Config):
        async_mode: str = "disabled"


checkpointer.CheckpointManager = dcp.CheckpointManager = CheckpointManager
