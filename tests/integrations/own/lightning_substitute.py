"""A pytest plugin for ``nox -s integrations-lightning`` with Lightning's own tests: where a program chooses no
``CheckpointIO``, Lightning uses sidestream's."""

from __future__ import annotations

from lightning.fabric.strategies import strategy as of_fabric
from lightning.pytorch.strategies import strategy

from sidestream.integrations.lightning import SidestreamCheckpointIO

of_fabric.TorchCheckpointIO = strategy.TorchCheckpointIO = SidestreamCheckpointIO
