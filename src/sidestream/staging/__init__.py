"""From live tensors to host memory: the arena, the engines, the stagers."""

from __future__ import annotations

from .arena import PAGE_BYTES, Arena, ArenaStatistics, Lease
from .engine import Engine, HostEngine
from .future import StagingFuture
from .image import Copy, ImageLayout, StagedImage
from .stager import AsyncStager, StageMode, Staging
from .tree import StagedState

__all__ = [
    "PAGE_BYTES",
    "Arena",
    "ArenaStatistics",
    "AsyncStager",
    "Copy",
    "Engine",
    "HostEngine",
    "ImageLayout",
    "Lease",
    "StageMode",
    "StagedImage",
    "StagedState",
    "Staging",
    "StagingFuture",
]
