"""Our storage for DCP's calls and stock's two, behind one face, and planners as DCP's documentation shows them."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from sidestream.dcp import StorageReader, StorageWriter

TELLS_WHY = "metadata read failed" in inspect.getsource(state_dict_loader)
"""Whether DCP's load says what its reader said of the metadata. Torch 2.11 keeps that to itself."""

try:  # public since torch 2.15, which warns of the other name
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
except ImportError:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter


@dataclass(frozen=True)
class Kind:
    name: str
    writer: Callable[..., Any]
    reader: Callable[..., Any]

    @property
    def ours(self) -> bool:
        return self.name == "ours"

    def save(self, state: dict[str, Any], path: Path, planner: Any = None, **options: Any) -> Metadata:
        return dcp.save(state, storage_writer=self.writer(str(path), **options), planner=planner)

    def load(self, state: dict[str, Any], path: Path, planner: Any = None, **options: Any) -> dict[str, Any]:
        dcp.load(state, storage_reader=self.reader(str(path), **options), planner=planner)
        return state


OURS = Kind("ours", StorageWriter, StorageReader)
FILE = Kind("file", dcp.FileSystemWriter, dcp.FileSystemReader)
FSSPEC = Kind("fsspec", FsspecWriter, FsspecReader)
KINDS = [OURS, FILE, FSSPEC]


class HalfPlanner(DefaultSavePlanner):
    """Converts what it saves, and says so in its plan."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None and item.tensor_data.properties.dtype.is_floating_point:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) and data.is_floating_point() else data


class SilentHalfPlanner(HalfPlanner):
    """Converts, and does not say so."""

    def create_local_plan(self) -> SavePlan:
        return DefaultSavePlanner.create_local_plan(self)


class ExtraDataPlanner(DefaultSavePlanner):
    """Adds data of its own to the metadata."""

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data="of one rank")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        merged = [plan.planner_data for plan in all_plans]
        plans, metadata = super().create_global_plan([replace(plan, planner_data={}) for plan in all_plans])
        return plans, replace(metadata, planner_data=merged)


class ExtraDataLoadPlanner(DefaultLoadPlanner):
    seen: Any = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        ExtraDataLoadPlanner.seen = metadata.planner_data
        super().set_up_planner(state_dict, metadata, is_coordinator)


class JsonPlanner(DefaultSavePlanner):
    """Writes values in a form of its own."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(self.lookup_object(write_item.index)).encode())
        return super().resolve_data(write_item)


class JsonLoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = json.load(value)


class RenamingLoadPlanner(DefaultLoadPlanner):
    """Loads into names that begin with ``renamed_``, as the documentation's example does."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(
            {key.removeprefix("renamed_"): value for key, value in state_dict.items()}, metadata, is_coordinator
        )
        self.original_state_dict = state_dict

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        self.original_state_dict["renamed_" + read_item.dest_index.fqn] = loaded


class FailingPlanner(DefaultSavePlanner):
    """Fails at the tensor ``bad``."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index.fqn == "bad":
            raise RuntimeError("this tensor cannot be had")
        return super().resolve_data(write_item)
