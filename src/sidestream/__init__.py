"""Checkpoints of a PyTorch program that lives on an asyncio event loop, without stopping the loop or the model.

All names are imported with the package, so that no call on a running loop has to import anything. There are
exceptions. ``sidestream.dcp`` needs ``torch.distributed.checkpoint``, which takes as long again as everything else.
``sidestream.observability`` and ``sidestream.integrations`` are for programs that want them.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from . import blocking, errors, events, options, signing, weights

# The packages are ``_save``, ``_load`` and so on, and not ``save`` and ``load``. Importing a submodule sets it as an
# attribute of its package, and ``sidestream.save`` has to be the function whatever was imported first.
from ._convert.convert import ConvertReport, convert
from ._convert.copy import CopyReport, copy, remove
from ._convert.export import HF
from ._engine.loop import set_exit_timeout
from ._load.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from ._load.operation import load
from ._load.report import LoadReport, PassedOver
from ._load.verification import Damage, VerifyReport
from ._load.verify import verify
from ._run.bundles import PerRank, RandomState
from ._run.health import Health
from ._run.retention import KeepAll, KeepBest, KeepEvery, KeepLast, Pruned, Retention, SavedStep
from ._run.watch import Watch
from ._save.api import async_save, save
from ._save.pending import PendingSave, SaveInfo, SaveProgress
from ._save.sinks import PendingExport, PendingVersion
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
from .weights import (
    AppliedReport,
    Candidate,
    Follower,
    FollowerHealth,
    Live,
    LiveHealth,
    PublishedVersion,
    Publisher,
    PublisherHealth,
    ServedReading,
    Subscriber,
    VersionImage,
)

if TYPE_CHECKING:
    from . import dcp, integrations, observability

__all__ = [
    "HF",
    "AppliedReport",
    "ArenaStatistics",
    "AsyncStager",
    "BlockingAsyncStager",
    "Candidate",
    "Checkpoint",
    "Checkpointer",
    "ConvertOptions",
    "ConvertReport",
    "CopyReport",
    "Damage",
    "Follower",
    "FollowerHealth",
    "Health",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Live",
    "LiveHealth",
    "LoadOptions",
    "LoadReport",
    "PassedOver",
    "PendingExport",
    "PendingSave",
    "PendingVersion",
    "PerRank",
    "Pruned",
    "PublishedVersion",
    "Publisher",
    "PublisherHealth",
    "RandomState",
    "Retention",
    "SaveInfo",
    "SaveOptions",
    "SaveProgress",
    "SavedStep",
    "ServedReading",
    "StagedState",
    "StagingFuture",
    "Storage",
    "StorePolicy",
    "Subscriber",
    "TensorInfo",
    "VerifyReport",
    "VersionImage",
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
    "integrations",
    "load",
    "observability",
    "open_checkpoint",
    "options",
    "remove",
    "save",
    "set_cache_bytes",
    "set_exit_timeout",
    "signing",
    "strip_prefix",
    "verify",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name in ("dcp", "integrations", "observability"):
        return import_module(f".{name}", __name__)
    if name == "__version__":
        return metadata.version("sidestream")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
