"""Checkpoints of a PyTorch program that lives on an asyncio event loop, without stopping the loop or the model.

The names below are imported when they are first used, so that ``import sidestream`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import blocking, errors
    from .checkpoint import Checkpoint, TensorInfo, open_checkpoint
    from .checkpointer import Checkpointer
    from .loading import LoadReport, load
    from .pending import PendingSave, SaveInfo
    from .saving import async_save, save
    from .staging.blocking import BlockingAsyncStager
    from .staging.future import StagingFuture
    from .staging.stager import AsyncStager
    from .staging.tree import StagedState

__all__ = [
    "AsyncStager",
    "BlockingAsyncStager",
    "Checkpoint",
    "Checkpointer",
    "LoadReport",
    "PendingSave",
    "SaveInfo",
    "StagedState",
    "StagingFuture",
    "TensorInfo",
    "async_save",
    "blocking",
    "errors",
    "load",
    "open_checkpoint",
    "save",
]

_HOMES = {
    "AsyncStager": "staging.stager",
    "BlockingAsyncStager": "staging.blocking",
    "Checkpoint": "checkpoint",
    "Checkpointer": "checkpointer",
    "LoadReport": "loading",
    "PendingSave": "pending",
    "SaveInfo": "pending",
    "StagedState": "staging.tree",
    "StagingFuture": "staging.future",
    "TensorInfo": "checkpoint",
    "async_save": "saving",
    "load": "loading",
    "open_checkpoint": "checkpoint",
    "save": "saving",
}


def __getattr__(name: str) -> Any:
    if name in ("blocking", "errors"):
        return import_module(f".{name}", __name__)
    if name == "__version__":
        return metadata.version("sidestream")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # All at once: whoever makes a Checkpointer at start-up should not import the rest during the first save.
    globals().update({each: getattr(import_module(f".{home}", __name__), each) for each, home in _HOMES.items()})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
