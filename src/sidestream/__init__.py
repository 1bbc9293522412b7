"""Checkpoints of a PyTorch program that lives on an asyncio event loop, without stopping the loop or the model.

The names below are imported when they are first used, so that ``import sidestream`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import blocking, dcp, errors, events, signing
    from .checkpoint import Checkpoint, TensorInfo, open_checkpoint
    from .checkpointer import Checkpointer
    from .converting.convert import ConvertReport, convert
    from .converting.copying import CopyReport, copy
    from .loading import LoadReport, PassedOver, load
    from .options import Apart, PerHost, SaverProcess, StorePolicy
    from .pending import PendingSave, SaveInfo, SaveProgress
    from .runs.health import Health
    from .runs.pruning import Pruned
    from .runs.retention import KeepAll, KeepBest, KeepEvery, KeepLast, Retention, SavedStep
    from .saving import async_save, save
    from .staging.blocking import BlockingAsyncStager
    from .staging.future import StagingFuture
    from .staging.stager import AsyncStager
    from .staging.tree import StagedState
    from .verifying import Damage, VerifyReport, verify

__all__ = [
    "Apart",
    "AsyncStager",
    "BlockingAsyncStager",
    "Checkpoint",
    "Checkpointer",
    "ConvertReport",
    "CopyReport",
    "Damage",
    "Health",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "LoadReport",
    "PassedOver",
    "PendingSave",
    "PerHost",
    "Pruned",
    "Retention",
    "SaveInfo",
    "SaveProgress",
    "SavedStep",
    "SaverProcess",
    "StagedState",
    "StagingFuture",
    "StorePolicy",
    "TensorInfo",
    "VerifyReport",
    "async_save",
    "blocking",
    "convert",
    "copy",
    "dcp",
    "errors",
    "events",
    "load",
    "open_checkpoint",
    "save",
    "signing",
    "verify",
]

_HOMES = {
    "Apart": "options",
    "AsyncStager": "staging.stager",
    "BlockingAsyncStager": "staging.blocking",
    "Checkpoint": "checkpoint",
    "Checkpointer": "checkpointer",
    "ConvertReport": "converting.convert",
    "CopyReport": "converting.copying",
    "Damage": "verifying",
    "Health": "runs.health",
    "KeepAll": "runs.retention",
    "KeepBest": "runs.retention",
    "KeepEvery": "runs.retention",
    "KeepLast": "runs.retention",
    "LoadReport": "loading",
    "PassedOver": "loading",
    "PendingSave": "pending",
    "PerHost": "options",
    "Pruned": "runs.pruning",
    "Retention": "runs.retention",
    "SaveInfo": "pending",
    "SaveProgress": "pending",
    "SavedStep": "runs.retention",
    "StagedState": "staging.tree",
    "StagingFuture": "staging.future",
    "SaverProcess": "options",
    "StorePolicy": "options",
    "TensorInfo": "checkpoint",
    "VerifyReport": "verifying",
    "async_save": "saving",
    "convert": "converting.convert",
    "copy": "converting.copying",
    "load": "loading",
    "open_checkpoint": "checkpoint",
    "save": "saving",
    "verify": "verifying",
}


def __getattr__(name: str) -> Any:
    if name in ("blocking", "dcp", "errors", "events", "signing"):
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
