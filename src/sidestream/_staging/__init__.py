"""From live tensors to host memory: the arena, the engines, the stagers."""

from __future__ import annotations

from .arena import PAGE_BYTES, Allocation, Arena, ArenaStatistics, Backing
from .captured import Captured, capture
from .composite import Composite, Sharding
from .device import DeviceEngine, StageMode
from .driver import CudaDriver, Driver, TorchDriver
from .fill import Filler, FillPiece
from .future import StagingFuture
from .host import HostEngine, memory_behind, move, raw_start
from .image import Copy, ImageLayout, StagedImage
from .plans import PlanCache, fingerprint
from .snapshot import SnapshotReader
from .stage import Staging, clean
from .stager import AsyncStager
from .tree import StagedState

__all__ = [
    "PAGE_BYTES",
    "Allocation",
    "Arena",
    "ArenaStatistics",
    "AsyncStager",
    "Backing",
    "Captured",
    "Composite",
    "Copy",
    "CudaDriver",
    "DeviceEngine",
    "Driver",
    "FillPiece",
    "Filler",
    "HostEngine",
    "ImageLayout",
    "PlanCache",
    "Sharding",
    "SnapshotReader",
    "StageMode",
    "StagedImage",
    "StagedState",
    "Staging",
    "StagingFuture",
    "TorchDriver",
    "capture",
    "clean",
    "fingerprint",
    "memory_behind",
    "move",
    "raw_start",
]
