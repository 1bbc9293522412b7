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
    "_convert.convert": ("ConvertReport", "convert"),
    "_convert.copy": ("CopyReport", "copy", "remove"),
    "_convert.export": ("HF",),
    "_load.checkpoint": ("Checkpoint", "TensorInfo", "open_checkpoint"),
    "_load.operation": ("LoadReport", "PassedOver", "load"),
    "_load.verify": ("Damage", "VerifyReport", "verify"),
    "_run.health": ("Health",),
    "_run.retention": ("KeepAll", "KeepBest", "KeepEvery", "KeepLast", "Pruned", "Retention", "SavedStep"),
    "_run.watch": ("Watch",),
    "_save.api": ("async_save", "save"),
    "_save.pending": ("PendingSave", "SaveInfo", "SaveProgress"),
    "_save.sinks": ("PendingExport",),
    "_staging.arena": ("ArenaStatistics",),
    "_staging.blocking": ("BlockingAsyncStager",),
    "_staging.cached": ("set_cache_bytes",),
    "_staging.future": ("StagingFuture",),
    "_staging.stager": ("AsyncStager",),
    "_staging.tree": ("StagedState",),
    "checkpointer": ("Checkpointer",),
    "options": (
        "ConvertOptions",
        "LoadOptions",
        "SaveOptions",
        "Storage",
        "StorePolicy",
        "WriterProcess",
        "add_prefix",
        "strip_prefix",
    ),
}


def __getattr__(name: str) -> Any:
    if name in ("blocking", "dcp", "errors", "events", "options", "signing"):
        return import_module(f".{name}", __name__)
    if name == "__version__":
        return metadata.version("sidestream")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._runtime.imports import importing, make_old

    # All at once: a program that makes a Checkpointer at start-up should not import the rest during the first save.
    with importing():
        for home, names in _HOMES.items():
            module = import_module(f".{home}", __name__)
            globals().update({each: getattr(module, each) for each in names})
    make_old()
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
