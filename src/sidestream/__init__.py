"""Checkpoints of a PyTorch program that lives on an asyncio event loop, without stopping the loop or the model.

The names below are imported when they are first used, so that ``import sidestream`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import blocking, dcp, errors, events, options, signing
    from ._convert.convert import ConvertReport, convert
    from ._convert.copy import CopyReport, copy, remove
    from ._convert.export import HF
    from ._load.checkpoint import Checkpoint, TensorInfo, open_checkpoint
    from ._load.operation import LoadReport, PassedOver, load
    from ._load.verify import Damage, VerifyReport, verify
    from ._run.health import Health
    from ._run.retention import KeepAll, KeepBest, KeepEvery, KeepLast, Pruned, Retention, SavedStep
    from ._run.watch import Watch
    from ._save.api import async_save, save
    from ._save.pending import PendingSave, SaveInfo, SaveProgress
    from ._save.sinks import PendingExport
    from ._staging.arena import ArenaStatistics
    from ._staging.blocking import BlockingAsyncStager
    from ._staging.cached import set_cache_bytes
    from ._staging.future import StagingFuture
    from ._staging.stager import AsyncStager
    from ._staging.tree import StagedState
    from .checkpointer import Checkpointer
    from .options import (
        ConvertOptions,
        LoadOptions,
        SaveOptions,
        Storage,
        StorePolicy,
        WriterProcess,
        add_prefix,
        strip_prefix,
    )

__all__ = [
    "HF",
    "ArenaStatistics",
    "AsyncStager",
    "BlockingAsyncStager",
    "Checkpoint",
    "Checkpointer",
    "ConvertOptions",
    "ConvertReport",
    "CopyReport",
    "Damage",
    "Health",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "LoadOptions",
    "LoadReport",
    "PassedOver",
    "PendingExport",
    "PendingSave",
    "Pruned",
    "Retention",
    "SaveInfo",
    "SaveOptions",
    "SaveProgress",
    "SavedStep",
    "StagedState",
    "StagingFuture",
    "Storage",
    "StorePolicy",
    "TensorInfo",
    "VerifyReport",
    "Watch",
    "WriterProcess",
    "add_prefix",
    "async_save",
    "blocking",
    "convert",
    "copy",
    "dcp",
    "errors",
    "events",
    "load",
    "open_checkpoint",
    "options",
    "remove",
    "save",
    "set_cache_bytes",
    "signing",
    "strip_prefix",
    "verify",
]

_HOMES = {
    "HF": "_convert.export",
    "ArenaStatistics": "_staging.arena",
    "AsyncStager": "_staging.stager",
    "BlockingAsyncStager": "_staging.blocking",
    "Checkpoint": "_load.checkpoint",
    "Checkpointer": "checkpointer",
    "ConvertOptions": "options",
    "ConvertReport": "_convert.convert",
    "CopyReport": "_convert.copy",
    "Damage": "_load.verify",
    "Health": "_run.health",
    "KeepAll": "_run.retention",
    "KeepBest": "_run.retention",
    "KeepEvery": "_run.retention",
    "KeepLast": "_run.retention",
    "LoadOptions": "options",
    "LoadReport": "_load.operation",
    "PassedOver": "_load.operation",
    "PendingExport": "_save.sinks",
    "PendingSave": "_save.pending",
    "Pruned": "_run.retention",
    "Retention": "_run.retention",
    "SaveInfo": "_save.pending",
    "SaveOptions": "options",
    "SaveProgress": "_save.pending",
    "SavedStep": "_run.retention",
    "StagedState": "_staging.tree",
    "StagingFuture": "_staging.future",
    "WriterProcess": "options",
    "Storage": "options",
    "StorePolicy": "options",
    "TensorInfo": "_load.checkpoint",
    "VerifyReport": "_load.verify",
    "Watch": "_run.watch",
    "add_prefix": "options",
    "async_save": "_save.api",
    "convert": "_convert.convert",
    "copy": "_convert.copy",
    "load": "_load.operation",
    "open_checkpoint": "_load.checkpoint",
    "remove": "_convert.copy",
    "save": "_save.api",
    "set_cache_bytes": "_staging.cached",
    "strip_prefix": "options",
    "verify": "_load.verify",
}


def __getattr__(name: str) -> Any:
    if name in ("blocking", "dcp", "errors", "events", "options", "signing"):
        return import_module(f".{name}", __name__)
    if name == "__version__":
        return metadata.version("sidestream")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._runtime.imports import importing, make_old

    # All at once: a program that makes a Checkpointer at start-up should not import the rest during the first save.
    with importing():
        globals().update({each: getattr(import_module(f".{home}", __name__), each) for each, home in _HOMES.items()})
    make_old()
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
