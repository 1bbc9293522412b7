"""Saves that a ``SavePlanner`` plans. They are staged first, then planned, and written and committed like other saves.

The planner is that of the caller. If a rank saves its part without the others, it may be DCP's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from ..._group import Operation, this_process
from ..._layout.torch_planner import Asked, local_save_plan, packed, unpacked
from ..._runtime.threads import Stop, result_of
from ..._staging import AsyncStager, StagedState
from ..._storage import Body
from ...errors import InvalidOptionError, PlannerError
from ...options import Stager
from ..group import Group
from ..layouts import check_terms, terms_of
from ..operation import Coordinator, SaveOperation, SaveOrder, Solo
from ..pending import SaveProgress
from ..writer import FirstCopy, LiveWriter, Stage
from .items import Outgoing, warn_of_refused
from .layout import Decided, PlannerLayout

__all__ = ["start_planned"]

_REMEDY = "Pass safe_globals=[...] with the types to sidestream.load."


def start_planned(
    order: SaveOrder,
    state: Mapping[str, Any],
    planner: Any,
    stager: AsyncStager | Stager | None,
) -> SaveOperation:
    """Launch the copies of a save that ``planner`` plans.

    Raises ``InvalidOptionError`` if ``planner`` is not a planner, and for options that cannot be used with one."""
    asked = Asked(planner, SavePlanner)
    _check(order)
    coordinator: Coordinator
    if order.operation is not None:
        coordinator = Group(order)
    else:
        coordinator = Solo(order)
    writer, layout = LiveWriter(order, PlannedStage(order, state, asked, stager)), PlannerLayout(order)
    return SaveOperation(order=order, writer=writer, layout=layout, coordinator=coordinator)


def _check(order: SaveOrder) -> None:
    if order.digest is not None:
        raise InvalidOptionError("digest= is not there for what a planner plans; leave one of them out")
    if order.budget_bytes is not None:
        raise InvalidOptionError("a planner plans what has been staged as a whole: leave out streaming=True")


class PlannedStage(Stage):
    """The stage of a save that a planner plans. The planner may keep references to the staged copy."""

    def __init__(
        self, order: SaveOrder, state: Mapping[str, Any], planner: Asked, stager: AsyncStager | Stager | None
    ) -> None:
        super().__init__()
        self._order = order
        self._planner = planner
        self._state: Mapping[str, Any] | None = state
        if stager is None:
            stager = self.own = AsyncStager(timeout_s=order.deadline.timeout_s)
        self._stager = stager
        self._staged: Future[StagedState] | None = None
        self._copy: Any = None
        self._outgoing: Outgoing | None = None
        self._results: list[WriteResult] = []

    def launch(self) -> None:
        state, self._state = self._state, None
        assert state is not None
        if isinstance(self._stager, AsyncStager):
            self._staging, self._staged = self._stager.launch_state(state, self._order.deadline)
        else:
            self._first = FirstCopy(state, self._stager)

    def settle(self) -> None:
        """Do nothing: ``launch_state`` has settled the stage."""

    def plan(self, stop: Stop) -> Decided:
        order = self._order
        self._copy = self._when_copied(stop)
        decided = _decide(self._planner, order, self._copy)
        self._outgoing = Outgoing(decided.plan, self._planner, order.rank, (), order)  # type: ignore[arg-type]
        return decided

    def _when_copied(self, stop: Stop) -> Any:
        """Wait until the staged state is complete, and return it."""
        if self._first is None:
            assert self._staged is not None
            return result_of(self._staged, stop, "staging")
        try:
            copy = self._first.wait(stop)
        except BaseException as error:
            self._first_free.set_exception(error)
            raise
        self._first_free.set_result(None)
        return copy

    def files(self, plan: Decided) -> Iterator[tuple[str, Body]]:
        assert self._outgoing is not None
        return self._outgoing.files()

    def written(self) -> list[WriteResult]:
        """Return a receipt for each item."""
        assert self._outgoing is not None
        warn_of_refused(self._outgoing.refused, self._order.location.url, _REMEDY)
        self._results = self._outgoing.results(self._order.transaction.committed_name)
        return self._results

    def end(self) -> None:
        if self._outgoing is not None:
            self._outgoing.close()
        staged = self.first or self._staged
        if staged is not None:
            staged.add_done_callback(_release)
        copy, self._copy = self._copy, None
        if isinstance(copy, StagedState):
            copy.release()

    def give_way(self) -> None:
        """Stop a stage that copies or waits for memory. A copy that is complete is kept."""
        staging = self._staging
        if staging is not None:
            staging.release()

    def drop(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.drop()
        self._staging = self._staged = self._outgoing = None

    def progress(self) -> SaveProgress:
        """Return the size of what was written, when everything is written. Before that the sizes are not known."""
        nbytes = sum({result.storage_data.file: result.storage_data.file_bytes for result in self._results}.values())
        return SaveProgress(nbytes, nbytes, nbytes)


def _release(staged: Future[Any]) -> None:
    """Release the memory of a staged copy that is not used any more."""
    if staged.cancelled() or staged.exception() is not None:
        return
    if isinstance(staged.result(), StagedState):
        staged.result().release()


# --- the planning ---


def _decide(planner: Asked, order: SaveOrder, state: Mapping[str, Any]) -> Decided:
    """Return the plan of this rank for the staged ``state``. Called once, in a worker thread. Raises ``PlannerError``,
    and ``Stopped`` if another rank has failed."""
    local = local_save_plan(planner, state, order.location.url, first=order.rank == 0)
    if order.operation is not None:
        return _decide_together(planner, order, order.operation, local)
    plans, metadata = _merged(planner, [local])
    return Decided(planner.finish_plan(plans[0]), metadata)


def _decide_together(planner: Asked, order: SaveOrder, operation: Operation, local: SavePlan) -> Decided:
    decided: Metadata | None = None

    def agree(parts: Sequence[bytes]) -> bytes:
        """Compare the terms of all ranks. Called on rank 0. A plan is only unpickled after all ranks have agreed to use
        a planner."""
        check_terms([json.loads(part) for part in parts])
        order.make_attempt()
        return json.dumps(this_process()).encode()

    def merge(parts: Sequence[bytes]) -> Sequence[bytes]:
        nonlocal decided
        plans, decided = _merged(planner, [unpacked(planner, part) for part in parts])
        return [packed(planner, plan) for plan in plans]

    terms = json.dumps({"terms": terms_of(order, planner=True)}).encode()
    operation.first = json.loads(operation.exchange("plan", terms, agree))
    raw = operation.exchange("merge plans", packed(planner, local), merge)
    final = planner.finish_plan(unpacked(planner, raw))
    operation.step = "write"
    return Decided(final, decided)


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
