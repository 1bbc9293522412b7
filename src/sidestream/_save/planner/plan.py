"""The planning of a save by a ``SavePlanner``, in one process and in a group, where rank 0 merges the plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ..._group import Operation, this_process
from ..._layout.torch_planner import Asked, local_save_plan, packed, unpacked
from ...errors import PlannerError
from ..layouts import Terms, check_terms

__all__ = ["Decided", "DecidingAlone", "DecidingTogether"]


@dataclass(frozen=True, slots=True)
class Decided:
    """The plan of this rank. On rank 0, ``metadata`` is that of all ranks. ``first`` is the process of rank 0."""

    plan: SavePlan
    rank: int
    metadata: Metadata | None
    first: Mapping[str, Any]


@dataclass(slots=True)
class DecidingAlone:
    """The planning in one process. The names of files contain ``rank``."""

    planner: Asked
    url: str
    rank: int = 0
    first: bool = True
    planned: Decided | None = None

    def decide(self, state: Mapping[str, Any]) -> Decided:
        """Return the plan of this process. Called in a worker thread. Raises ``PlannerError``."""
        local = local_save_plan(self.planner, state, self.url, first=self.first)
        plans, metadata = _merged(self.planner, [local])
        final = self.planner.finish_plan(plans[0])
        self.planned = Decided(final, self.rank, metadata, this_process())
        return self.planned


@dataclass(slots=True)
class DecidingTogether:
    """The planning in a group. ``prepare`` makes the attempt on rank 0 before other ranks write into it."""

    planner: Asked
    url: str
    operation: Operation
    terms: Terms
    prepare: Callable[[], None]
    planned: Decided | None = None
    _metadata: list[Metadata] = field(default_factory=list)

    def decide(self, state: Mapping[str, Any]) -> Decided:
        """Return the plan of this rank. Called in a worker thread. Raises ``PlannerError``, and ``Stopped`` if another
        rank has failed."""
        operation = self.operation
        local = local_save_plan(self.planner, state, self.url, first=operation.rank == 0)
        first = operation.exchange("plan", json.dumps(asdict(self.terms)).encode(), self._agree)
        raw = operation.exchange("merge plans", packed(self.planner, local), self._merge)
        final = self.planner.finish_plan(unpacked(self.planner, raw))
        metadata = self._metadata[0] if self._metadata else None
        self.planned = Decided(final, operation.rank, metadata, json.loads(first)["first"])
        operation.step = "write"
        return self.planned

    def _agree(self, parts: Sequence[bytes]) -> bytes:
        """Compare the terms of all ranks. Called on rank 0. A plan is only unpickled after all ranks have agreed to use
        a planner."""
        check_terms([json.loads(part) for part in parts])
        self.prepare()
        return json.dumps({"first": this_process()}).encode()

    def _merge(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        plans, metadata = _merged(self.planner, [unpacked(self.planner, part) for part in parts])
        self._metadata.append(metadata)
        return [packed(self.planner, plan) for plan in plans]


def _merged(planner: Asked, local: list[SavePlan]) -> tuple[Sequence[SavePlan], Metadata]:
    answer = planner.create_global_plan(local)
    if not (len(answer) == 2 and isinstance(answer[0], Sequence) and isinstance(answer[1], Metadata)):
        raise PlannerError(
            f"{type(planner.planner).__qualname__}.create_global_plan returned something else than plans and a Metadata"
        )
    plans, metadata = answer
    if len(plans) != len(local):
        raise PlannerError(
            f"{type(planner.planner).__qualname__}.create_global_plan made {len(plans)} plans of {len(local)}"
        )
    return plans, metadata
