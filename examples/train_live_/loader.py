"""The loader process: reads a checkpoint of sidestream as somebody does who has never heard of it."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from train_live_.model import Size, Training
from train_live_.records import StockLoad


def load_with_stock_dcp(size: Size, checkpoint: Path) -> StockLoad:
    """Load `checkpoint` with `dcp.load` into a fresh model and optimizer."""
    torch.set_num_threads(1)
    training = Training(size)
    training.allocate_optimizer_state()
    state: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer, "step": 0}
    dcp.load(state, checkpoint_id=checkpoint)
    return StockLoad(state["step"], training.digest(), sidestream_imported="sidestream" in sys.modules)
