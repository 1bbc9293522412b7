"""A save that a ``SavePlanner`` of the caller plans: staged first, then planned, written and committed as any other."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from ..._format.records import Manifest
from ..._layout.torch_planner import Asked, asked_save_planner
from ..._runtime.tasks import finish
from ..._runtime.threads import Stop, Threads, io_threads
from ..._staging import AsyncStager, Staging
from ..._staging.tree import StagedState
from ..._storage import WRITE_THREADS
from ...errors import InvalidOption, SidestreamError
from ..group import JointSave, maker_of_attempt, terms_of
from ..operation import SaveJob
from ..pending import SaveInfo, SaveProgress
from ..writing import SaveOrder, Stager, first_copy, resolve_staged
from .independent import commit_as_part, look_for_room, tag_of
from .items import Outgoing, warn_of_refused
from .metadata import complete, files_of_commit
from .plan import Decided, DecidingAlone, DecidingTogether

__all__ = ["PlannedWriting", "start_planned"]

_GRACE_S = 5.0


def start_planned(
    order: SaveOrder, state: Mapping[str, Any], planner: Any, stager: AsyncStager | Stager | None
) -> SaveJob | JointSave:
    """Launch the copies. ``planner`` is None where ranks save apart, and then DCP's own.

    Raises ``InvalidOption`` for what is no planner, and for what one cannot be combined with."""
    asked = asked_save_planner(DefaultSavePlanner() if planner is None else planner)
    if order.digest is not None:
        raise InvalidOption("digest= is not there for what a planner plans; leave one of them out")
    if order.budget_bytes is not None:
        raise InvalidOption("a planner plans what has been staged as a whole: leave out snapshot=False")
    url = order.location.url
    if order.apart is not None:
        if order.saver is not None:
            raise InvalidOption('saver="process" is not there for ranks that save apart: leave it out')
        rank = order.apart.rank
        alone = DecidingAlone(asked, url, rank, first=rank == 0)
        return PartJob(order=order, source=PlannedWriting(order, state, alone, stager))
    if order.operation is None:
        return PlannedJob(order=order, source=PlannedWriting(order, state, DecidingAlone(asked, url), stager))
    terms, prepare = terms_of(order, planner=True), maker_of_attempt(order)
    together = DecidingTogether(asked, url, order.operation, terms, prepare)
    source = PlannedWriting(order, state, together, stager)
    return PlannedJointSave(order=order, source=source, operation=order.operation, planning=together)


class Deciding(Protocol):
    """``decide`` is called once, in a worker thread, with the staged state."""

    planner: Asked

    def decide(self, state: Mapping[str, Any]) -> Decided: ...


class PlannedWriting:
    """A launched stage, and the thread that asks the planner about it and writes what it says."""

    def __init__(
        self, order: SaveOrder, state: Mapping[str, Any], deciding: Deciding, stager: AsyncStager | Stager | None
    ) -> None:
        self._order = order
        self._deciding = deciding
        self._stop = Stop()
        self._free: Future[None] = Future()
        self.may_write: Future[None] = Future()
        """Set when somebody has looked at the target that a part is written into."""
        self._own: AsyncStager | None = None
        if stager is None:
            stager = self._own = AsyncStager(timeout_s=order.deadline.timeout_s)
        self._stager: Any = stager
        self._staging: Staging[Any] | None = None
        """What can be made to give way. Of another stager's copies only their end is known."""
        self._staged: Any
        if isinstance(stager, AsyncStager):
            self._staging, self._staged = stager.launch_state(state, order.deadline)
        else:
            self._staged = first_copy(state, stager)
        self._threads = Threads("sidestream-plan", WRITE_THREADS)
        try:
            self._done = self._threads.submit(self._work)
        except BaseException:  # the system grants no more threads
            self._give_way()
            _let_go_when_there(self._staged)
            raise
        threads = self._threads  # not ``self``, which would create a reference cycle
        self._done.add_done_callback(lambda _: threads.close())

    async def launch(self) -> PlannedWriting:
        """It is launched."""
        return self

    def pass_on(self, staged: asyncio.Future[None]) -> None:
        free: Future[None] = self._free if self._staging is None else self._staging.free
        asyncio.wrap_future(free).add_done_callback(partial(resolve_staged, staged))

    async def ended(self) -> tuple[Decided, list[WriteResult]]:
        """When all data is on storage: what was decided, and a receipt for each item."""
        with self._stop.waking(self._give_way):
            return await self._threads.wait(self._done, "writing", stop=self._stop, deadline=self._order.deadline)

    def progress(self) -> SaveProgress:
        """Of a planner's save only its end is known."""
        if not self._done.done() or self._done.cancelled() or self._done.exception() is not None:
            return SaveProgress()
        nbytes = sum(_sizes(self._done.result()[1]).values())
        return SaveProgress(nbytes, nbytes, nbytes)

    async def release(self) -> None:
        """No copy reads a source any more when this returns, unless a device hangs beyond the deadline, or another
        stager goes on. The planner may keep the staged copy for as long as it likes."""
        self._give_way()
        copied: Any = self._staged if self._staging is None else self._staging.copied
        if isinstance(copied, Future):
            patience_s = _GRACE_S if self._staging is None else max(self._order.deadline.remaining_s(), _GRACE_S)
            ended = asyncio.wrap_future(copied)
            ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # told by other means
            await asyncio.wait([ended], timeout=patience_s)
        self._staging = self._staged = None
        if self._own is not None:
            await self._own.aclose()

    def interrupt(self) -> None:
        self._stop.set()
        self._give_way()

    def abandon(self) -> None:
        self.interrupt()

    def leave(self) -> None:
        patience_s = self._order.deadline.remaining_s() + _GRACE_S
        threads: list[Future[Any]] = [self._done]
        if self._staging is not None:
            threads.append(self._staging.copied)
        wait(threads, patience_s)
        self._staging = self._staged = None
        if self._own is not None:
            with suppress(SidestreamError):  # reported elsewhere
                self._own.close()

    def _give_way(self) -> None:
        """From any thread: a stage that waits for memory, or copies, ends. One that has ended stays what it is."""
        staging = self._staging
        if staging is not None:
            staging.release()

    # --- the thread ---

    def _work(self) -> tuple[Decided, list[WriteResult]]:
        state: Any = None
        staged = self._staged
        try:
            state = self._copied(staged)
            self._free.set_result(None)
            decided = self._deciding.decide(state)
            return decided, self._write(decided)
        except BaseException as error:
            if not self._free.done():
                self._free.set_exception(error)
            raise
        finally:
            _let_go_when_there(staged)
            del staged, state

    def _copied(self, staged: Any) -> Any:
        """The staged state, when it is there."""
        order = self._order
        if not isinstance(staged, Future):
            if getattr(self._stager, "should_synchronize_after_execute", False):
                self._stager.synchronize_staging()
            return staged
        woken: Future[None] = Future()
        with self._stop.waking(partial(_wake, woken)):
            self._stop.check()
            wait([staged, woken], order.deadline.remaining_s(), FIRST_COMPLETED)
        self._stop.check()
        if not staged.done():
            raise order.deadline.exceeded("staging")
        return staged.result(0)

    def _wait_to_write(self) -> None:
        """Until somebody has looked at the target; not for long, since that takes the loop, and code on the loop may
        block at a fence until this save gives memory back. The commit looks again."""
        woken: Future[None] = Future()
        with self._stop.waking(partial(_wake, woken)):
            self._stop.check()
            wait([self.may_write, woken], _GRACE_S, FIRST_COMPLETED)
        self._stop.check()

    def _write(self, decided: Decided) -> list[WriteResult]:
        order, transaction = self._order, self._order.transaction
        tag = "" if order.apart is None else tag_of(order.save_id)
        outgoing = Outgoing(
            decided.plan,
            self._deciding.planner,  # type: ignore[arg-type]
            decided.rank,
            (),
            order.deadline,
            shared=order.saver is not None,
            tag=tag,
        )
        write = transaction.write
        try:
            if order.apart is not None:
                self._wait_to_write()
            if order.saver is not None:
                order.saver.start()
                write = partial(order.saver.write, transaction, fall_back=order.fall_back, url=order.location.url)
            write(outgoing.files(), threads=self._threads, stop=self._stop)
            warn_of_refused(outgoing.refused, order.location.url, "Pass allow=[...] with the types to sidestream.load.")
            return outgoing.results(transaction.published_name)
        finally:
            outgoing.close()


def _let_go_when_there(staged: Any) -> None:
    """What was staged, or will be although nobody waits for it any more, gives its memory back."""

    def let_go(done: Future[Any]) -> None:
        if done.cancelled() or done.exception() is not None:  # told by other means
            return
        if isinstance(done.result(), StagedState):
            done.result().release()

    if isinstance(staged, Future):
        staged.add_done_callback(let_go)


def _wake(woken: Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


@dataclass(slots=True, kw_only=True)
class PlannedJob(SaveJob):
    """One save of one process."""

    async def _commit(self, plan: Any, written: Any) -> int:
        order = self.order
        sizes = _sizes(written)
        files = await io_threads().run(_files, order, plan, [written], sizes, deadline=order.deadline)
        await order.transaction.commit(files)
        self._mark("committed")
        return sum(sizes.values())


@dataclass(slots=True, kw_only=True)
class PartJob(SaveJob):
    """One save of one of several ranks that do not talk to each other: its part, in the target itself."""

    source: PlannedWriting
    _known: frozenset[str] = frozenset()

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        order = self.order
        assert order.apart is not None
        try:
            self._known = await look_for_room(order.location, order.apart, order.deadline)
        except BaseException:
            await finish(self._give_up)
            raise
        self.source.may_write.set_result(None)
        return await SaveJob.run(self, staged)

    async def _give_up(self) -> None:
        self.source.abandon()
        await io_threads().run(self._withdraw)

    def _withdraw(self) -> None:
        self.source.leave()
        self.order.transaction.discard_here()

    async def _commit(self, plan: Any, written: Any) -> int:
        order, sizes = self.order, _sizes(written)
        assert plan.metadata is not None
        assert order.apart is not None
        metadata = await io_threads().run(
            complete, plan.metadata, [written], order.location.url, order.apart.save_id, deadline=order.deadline
        )
        about = Manifest(order.save_id, {}, sizes, metadata=order.metadata)
        await commit_as_part(
            order.transaction,
            order.location,
            order.apart,
            metadata,
            about,
            saved_at=order.saved_at,
            known=self._known,
        )
        self._mark("committed")
        return sum(sizes.values())


@dataclass(slots=True, kw_only=True)
class PlannedJointSave(JointSave):
    """One save by all ranks of a group, as one rank sees it."""

    async def _receipt(self, planned: Any, written: Any) -> bytes:
        sizes = _sizes(written)
        told = {"files": sizes, "nbytes": sum(sizes.values()), "seconds": dict(self.seconds), "results": written}
        return await io_threads().run(pickle.dumps, told, deadline=self.order.deadline)

    def _take(self, receipts: Sequence[bytes], planned: Any) -> list[dict[str, Any]]:
        return [pickle.loads(receipt) for receipt in receipts]

    def _files(self, told: Sequence[Mapping[str, Any]], planned: Any) -> dict[str, list[bytes]]:
        sizes = {name: nbytes for one in told for name, nbytes in one["files"].items()}
        return _files(self.order, planned, [one["results"] for one in told], sizes)


def _sizes(results: Sequence[WriteResult]) -> dict[str, int]:
    return {result.storage_data.file: result.storage_data.file_bytes for result in results}


def _files(
    order: SaveOrder, decided: Decided, results: Sequence[Sequence[WriteResult]], sizes: dict[str, int]
) -> dict[str, list[bytes]]:
    """In a worker thread: manifest and ``.metadata``."""
    assert decided.metadata is not None
    metadata = complete(decided.metadata, results, order.location.url, order.save_id)
    about = Manifest(order.save_id, {}, sizes, order.step, order.generation, None, order.metadata)
    return {name: [content] for name, content in files_of_commit(metadata, about, order.saved_at).items()}
