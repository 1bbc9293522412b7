"""From live tensors to host memory: the arena, the engines, the stagers."""

from __future__ import annotations

from .arena import PAGE_BYTES, Allocation, Arena, ArenaStatistics, Backing
from .cached import borrow, give_back, set_cache_bytes
from .captured import Captured, Composite, Form, Sharding, capture, consists_of_others, dismantle, settled
from .device import DeviceEngine, StageMode
from .driver import CudaDriver, TorchDriver
from .fill import Filler, FillPart, FillPiece, FillTable, table_of
from .future import StagingFuture
from .host import HostEngine, memory_behind, raw_start
from .image import Columns, Copies, Copy, CopyTable, ImageLayout, StagedImage
from .plans import Places, PlanCache, fingerprint
from .small import columns_of, move_small
from .stage import SnapshotReader, Staging, clean
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
    "Columns",
    "Composite",
    "Copies",
    "Copy",
    "CopyTable",
    "CudaDriver",
    "DeviceEngine",
    "FillPart",
    "FillPiece",
    "FillTable",
    "Filler",
    "Form",
    "HostEngine",
    "ImageLayout",
    "Places",
    "PlanCache",
    "Sharding",
    "SnapshotReader",
    "StageMode",
    "StagedImage",
    "StagedState",
    "Staging",
    "StagingFuture",
    "TorchDriver",
    "borrow",
    "capture",
    "clean",
    "columns_of",
    "consists_of_others",
    "dismantle",
    "fingerprint",
    "give_back",
    "memory_behind",
    "move_small",
    "raw_start",
    "set_cache_bytes",
    "settled",
    "table_of",
]
