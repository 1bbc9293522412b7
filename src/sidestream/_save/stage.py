"""``LaidOutStage``: a live state that is staged window by window, in the layout of the files of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeAlias

from .._format.digest import digest_of
from .._format.shard import BlockSums, ShardLayout
from .._layout.renamed_state import renamed_state
from .._layout.values import copy_value
from .._runtime.threads import Stop, run_sliced
from .._staging import AsyncStager, Captured, PlanCache, SnapshotReader, Staging, borrow, capture, give_back
from .._storage import Body, BytesBody, ShardBody
from ..errors import InvalidOptionError
from ..options import Dtypes, Names
from .order import SaveOrder
from .pending import SaveProgress
from .writer import FirstCopy, Stage, Stager

__all__ = ["LaidOutStage", "SavedAs"]

_PATIENCE_S = 20.0


class FilePlan(Protocol):
    """The parts of a plan that a writer needs: the content of the file of plain values (empty if there is no such
    file), the shards, and the names of the files."""

    @property
    def values(self) -> bytes: ...

    @property
    def values_file(self) -> str: ...

    @property
    def shards(self) -> tuple[ShardLayout, ...]: ...

    def shard_file(self, index: int) -> str: ...


LayOut: TypeAlias = Callable[[PlanCache, int, Captured], Any]
"""A function that plans a save, in the stager's thread. Its arguments are the stager's cache of plans, the stager's
budget in bytes, and the captured state."""


@dataclass(frozen=True, slots=True)
class SavedAs:
    """The names and dtypes that a state gets in the checkpoint (``SaveOptions``)."""

    names: Names | None = None
    dtype: Dtypes | None = None

    def check(self, *, own: bool) -> None:
        """Raise ``InvalidOptionError`` if names or dtypes are given and the stager is not our ``own``."""
        given = [name for name, one in (("names=", self.names), ("dtype=", self.dtype)) if one is not None]
        if given and not own:
            raise InvalidOptionError(
                f"{' and '.join(given)} need a stager of sidestream, which renames and converts while it copies: leave "
                "out stager=, or pass a sidestream.AsyncStager()"
            )

    def applied(self, lay_out: LayOut, url: str, *, others: bool) -> LayOut:
        """Return a function that plans the state with its new names and dtypes. With ``others``, a mapping of names may
        contain names of other ranks."""
        if self.names is None and self.dtype is None:
            return lay_out
        names, dtype = self.names, self.dtype

        def renamed(plans: PlanCache, budget_bytes: int, captured: Captured) -> object:
            captured = run_sliced(renamed_state(captured, names, dtype, url, others=others))
            return lay_out(plans, budget_bytes, captured)

        return renamed


class LaidOutStage(Stage):
    """The stage of a save that plans its files itself. If the caller has passed no ``AsyncStager``, one is borrowed for
    this save.

    ``readers`` is the number of sinks that read the staged memory too. ``captured`` is None if a stager of another kind
    makes a first copy. That stager may use its memory again for the next stage. So a second copy is made from the
    first one, and the sources are free when the second copy has ended.
    """

    def __init__(
        self,
        order: SaveOrder,
        state: Mapping[str, Any],
        captured: Captured | None,
        stager: AsyncStager | Stager | None,
        lay_out: LayOut,
        readers: int = 0,
    ) -> None:
        super().__init__()
        if order.digest is not None:
            digest_of(order.digest)  # raises MissingExtraError where it is not installed
        self._order = order
        self._lay_out = lay_out
        self._captured = captured
        self._foreign: tuple[Mapping[str, Any], Stager] | None = None
        if isinstance(stager, AsyncStager):
            self._stager = stager
        else:
            shared, timeout_s = order.worker is not None, order.deadline.timeout_s
            self._stager = self.own = borrow(order.budget_bytes, shared=shared, timeout_s=timeout_s)
            self._foreign = None if stager is None else (state, stager)
        self._second_free: Future[None] = Future()
        self._given_way = False
        self._readers = readers
        self.snapshots: tuple[SnapshotReader[Any] | None, ...] = (None,) * readers
        """The reader of the snapshot for each sink; None if the sink has to read the checkpoint."""
        self._sums: list[BlockSums] = []
        self._written: list[set[int]] = []  # of each shard

    @property
    def free(self) -> Future[None]:
        if self._first is None and self._staging is not None:
            return self._staging.free
        return self._second_free

    def launch(self) -> None:
        if self._foreign is not None:
            (state, stager), self._foreign = self._foreign, None
            self._first = FirstCopy(state, stager)
            return
        captured, self._captured = self._captured, None
        assert captured is not None
        staging = self._launch(captured, self._readers)
        self.snapshots = tuple(SnapshotReader(staging, number) for number in range(self._readers))

    def _launch(self, captured: Captured, readers: int = 0) -> Staging[Any]:
        stager, worker = self._stager, self._order.worker
        if worker is not None:
            stager.share()
        planned = partial(self._lay_out, stager.plans, stager.budget_bytes)
        filler = None if worker is None else worker.filler()
        staging = self._staging = stager.launch(
            captured, planned, self._order.deadline, filler=filler, readers=readers, passes=worker is None
        )
        if self._given_way:
            staging.release()
        return staging

    def settle(self) -> None:
        if self._staging is not None:
            self._stager.settle(self._staging)

    def plan(self, stop: Stop) -> FilePlan:
        staging, deadline = self._staging, self._order.deadline
        if staging is None:
            staging = self._launch_second(stop)
        # In a group rank 0 raises at the deadline, and its error names the ranks that have not made the call.
        patience_s = 0.0 if self._order.operation is None else _PATIENCE_S
        try:
            plan: FilePlan = staging.laid.result(deadline.remaining_s() + patience_s)
        except TimeoutError as error:
            if staging.laid.done():
                raise
            raise deadline.exceeded("waiting for earlier stages") from error
        return plan

    def _launch_second(self, stop: Stop) -> Staging[Any]:
        assert self._first is not None
        try:
            copy = self._first.wait(stop)
            staging = self._launch(capture(copy, copy_value))
        except BaseException as error:
            self._second_free.set_exception(error)
            raise
        staging.free.add_done_callback(partial(_follow, self._second_free))
        self._stager.settle(staging)
        return staging

    def files(self, plan: FilePlan) -> list[tuple[str, Body]]:
        """Return the file of plain values, and then the shards in the order in which they are staged."""
        assert self._staging is not None
        found: list[tuple[str, Body]] = []
        if plan.values:
            found.append((plan.values_file, BytesBody(plan.values)))
        images = iter(self._staging.images)
        for index, layout in enumerate(plan.shards):
            body = ShardBody(layout, tuple(islice(images, len(layout.windows))), self._order.digest)
            self._sums.append(body.sums)
            self._written.append(body.written)
            found.append((plan.shard_file(index), body))
        return found

    def written(self) -> list[BlockSums]:
        """Return the checksums of each shard's blocks."""
        return self._sums

    def end(self) -> None:
        """Do nothing: each window is released when it has been written."""

    def give_way(self) -> None:
        self._given_way = True
        if self._staging is not None:
            self._staging.release()

    def drop(self) -> None:
        if self._first is not None:
            self._first.drop()

    def give_back(self) -> bool:
        order = self._order
        return self.own is not None and give_back(self.own, order.budget_bytes, shared=order.worker is not None)

    def progress(self) -> SaveProgress:
        laid = None if self._staging is None else self._staging.laid
        if laid is None or not laid.done() or laid.cancelled() or laid.exception() is not None:
            return SaveProgress()
        assert self._staging is not None
        shards: Sequence[ShardLayout] = laid.result().shards
        written = 0
        for layout, numbers in zip(shards, list(self._written), strict=False):
            written += sum(layout.windows[number].end - layout.windows[number].start for number in list(numbers))
        total = sum(layout.nbytes for layout in shards)
        return SaveProgress(total, sum(image.staged_bytes for image in self._staging.images), written)


def _follow(future: Future[None], other: Future[None]) -> None:
    """Resolve ``future`` as ``other``, which has ended."""
    error = None if other.cancelled() else other.exception()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
