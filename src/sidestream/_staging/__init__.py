"""From live tensors to host memory: the arena, the engines, the stagers."""

from __future__ import annotations

from .arena import Allocation, MappedMemory
from .cached import borrow, give_back
from .captured import Captured, Composite, Form, Sharding, capture, consists_of_others, dismantle, settled
from .device import DeviceEngine
from .driver import CudaDriver, TorchDriver
from .host import HostEngine, memory_behind, raw_start
from .image import Columns, Copies, Copy, ImageLayout
from .plans import PlanCache, fingerprint
from .small import columns_of
from .stage import FirstReader, SnapshotReader, Staging, clean
from .stager import AsyncStager
from .tree import StagedState

__all__ = [
    "Allocation",
    "AsyncStager",
    "Captured",
    "Columns",
    "Composite",
    "Copies",
    "Copy",
    "CudaDriver",
    "DeviceEngine",
    "FirstReader",
    "Form",
    "HostEngine",
    "ImageLayout",
    "MappedMemory",
    "PlanCache",
    "Sharding",
    "SnapshotReader",
    "StagedState",
    "Staging",
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
    "raw_start",
    "settled",
]
