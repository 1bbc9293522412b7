"""``StorageWriter``: DCP plans a save, sidestream writes and commits it."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Unpack

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .._engine.calls import call_from_thread
from .._layout.values import allowed_types
from .._runtime.threads import Deadline, Stop, time_limit, write_threads
from .._save.running import Save, SaveOrder
from .._save.task import run_here
from .._save.writer import write_files
from .._storage import Kind, Location
from .._storage.clients.requests import in_io_thread
from .._worker.client import choose_worker
from ..errors import InvalidOptionError, SaveAbortedError, SidestreamError
from ..options import (
    Durability,
    Storage,
    Trust,
    WriterChoice,
    check_choice,
    check_timeout,
    check_writer,
    storage_of,
)
from .items import Outgoing, warn_of_refused
from .layout import PlannerLayout
from .orders import SentOrder, forget_order, order_received
from .session import Address, Sessions, is_located
from .stock_options import StockWriterOptions, check_extensions, check_stock_writer, durability_of, one_url

__all__ = ["StorageWriter"]

_REMEDY = (
    'Pass safe_globals=[...] with the types, or trust="pickle", to StorageReader or LoadOptions; pass it to '
    "StorageWriter too, and this warning is not shown."
)


@dataclass(slots=True)
class _Call:
    """The state of one call of ``dcp.save`` on one rank. ``sent``: the order that rank 0 has sent to this rank."""

    location: Location
    deadline: Deadline
    sent: SentOrder | None = None
    save: Save | None = None
    alone: bool = True
    cleanup: Any = None
    """A finalizer that removes what is left of the attempt, on the rank that commits."""


class StorageWriter(DcpStorageWriter):
    """Writes the checkpoints of ``dcp.save(state_dict, storage_writer=StorageWriter(url))`` and ``dcp.async_save``,
    with any number of ranks.

    When DCP returns, the checkpoint at ``url`` is visible and durable, as after ``sidestream.save``: ranks write into a
    hidden directory, and the ``finish()`` of rank 0 commits it in one step. ``dcp.load`` and ``sidestream.load`` read
    it. If a rank fails, nothing is visible. What was written is then removed when the writer is used again, closed
    (``with``) or collected. Calls in several threads are independent of each other.

    A value that is not plain data is saved as DCP's planner has pickled it. sidestream's readers refuse such a value by
    default, so a warning names it, once for each name.

    Args:
        url: The target. It must be empty, unless ``overwrite`` is set. ``checkpoint_id`` of a DCP call replaces it for
            that call; all other options stay.
        overwrite: Exchange the new checkpoint with the old one in one step, and then delete the old one. Raises
            ``CheckpointExistsError`` if the file system cannot exchange directories, and ``InvalidOptionError`` with
            ``Storage(commit="marker")``. See ``sidestream.save`` for object storage.
        durability: ``"fsync"`` (the default) or ``"flush"``, as for ``sidestream.save``.
        timeout_s: The deadline of a whole save, in seconds.
        extensions: DCP's ``StreamTransformExtension`` objects. Only ``ZStandard`` is supported.
        writer: Threads or a writer process, as for ``sidestream.save``.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage is reached.
        safe_globals: The types that readers will pass as ``safe_globals``. No warning names their objects.
        trust: ``"pickle"`` if readers will pass ``trust="pickle"``. Then no value is named in a warning.
        **stock: Keywords of DCP's own writers. ``path`` is ``url``; ``sync_files`` and ``_extensions`` have their
            meaning. Each of the others has no effect and is named in a warning, or raises an ``InvalidOptionError``
            that names its replacement.

    Raises:
        InvalidOptionError: An option is wrong, or options contradict each other.

    A save raises the errors of ``sidestream.save``, ``CheckpointExistsError`` before anything is written if the target
    is not empty, ``StorageNotSharedError`` if ranks write to different storage, and ``InvalidOptionError`` for a plan
    that is not supported. DCP raises its own ``CheckpointException`` with the error of each rank in ``failures``.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        durability: Durability | None = None,
        timeout_s: float = 600.0,
        extensions: Sequence[Any] = (),
        writer: WriterChoice = "thread",
        storage_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
        safe_globals: Iterable[type] = (),
        trust: Trust = "data",
        **stock: Unpack[StockWriterOptions],
    ) -> None:
        super().__init__()
        check_stock_writer(stock)
        url, durability = one_url("StorageWriter", url, stock), durability_of(durability, stock)
        extensions = tuple(extensions) + tuple(stock.get("_extensions") or ())
        check_extensions(extensions)
        check_choice("durability", durability, Durability)
        check_choice("trust", trust, Trust)
        check_timeout(timeout_s)
        self._address = Address(url, storage_of(storage_options, storage))
        check_writer(writer)
        self._writer: WriterChoice = writer
        self._kind: Kind = "replacement" if overwrite else "directory"
        self._durability: Durability = durability
        self._timeout_s = timeout_s
        self._extensions = extensions
        self._allow = frozenset(allowed_types(safe_globals))
        self._trust: Trust = trust
        self._warned: set[str] = set()
        self._sessions: Sessions[_Session] = Sessions(_Session)

    # --- what DCP calls, in this order ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save to ``checkpoint_id``, or to the URL of this writer."""
        session = self._sessions.current()
        session.wanted, session.save_id = checkpoint_id if checkpoint_id else None, uuid.uuid4().hex

    def storage_meta(self) -> StorageMeta | None:
        """Return the URL and the save id."""
        return StorageMeta(checkpoint_id=self._wanted().url, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check how the ranks save, and start the deadline of the save."""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        together = kwargs.get("use_collectives", True)
        if not together and ranks > 1:
            raise InvalidOptionError(
                "use_collectives=False: ranks that exchange no messages cannot commit one checkpoint; leave it out, or "
                "save with torch.distributed.checkpoint.FileSystemWriter, whose files of ranks are read"
            )
        # An order of an earlier save may have been received in this thread. This save must not write by it.
        forget_order()
        session, location = self._sessions.current(), self._wanted()
        if self._kind == "replacement":
            location.store.check_replaces()
        session.drop()
        session.call, session.wanted = _Call(location, Deadline.after(self._timeout_s)), None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return ``plan`` unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the attempt, and send it to every rank in its plan."""
        call = self._call()
        session, target = self._sessions.current(), call.location.name
        # The id names the attempt, so it must be new in each save. ``reset`` makes it, and DCP does not call that in
        # every case.
        if session.used == self.save_id:  # the id of an earlier save, if reset() was not called
            session.save_id = uuid.uuid4().hex
        save_id = session.used = session.save_id
        # The id of the save reaches the ranks in the plans that DCP scatters: DCP gives a storage no other way to talk
        # to its ranks.
        sent = [SentOrder(save_id, target, rank) for rank in range(len(plans))]
        call.sent, call.alone = sent[0], len(plans) == 1
        save = call.save = self._begin(call, sent[0], self._kind)
        save.lifecycle.started(len(plans))
        save.lifecycle.planned(save.save_id)
        try:
            with time_limit(call.deadline):
                # Before any rank writes, so that a rank that does not find the attempt knows that its storage is
                # another one.
                save.make_attempt()
        except BaseException as error:
            save.lifecycle.failed(error, save.outcome)
            raise
        # DCP notifies the writer of success only. A failure on another rank ends the call without a call of the writer,
        # so the attempt is removed when the writer is used again, closed or collected.
        call.cleanup = weakref.finalize(self, _discard, save)
        return [replace(plan, storage_data=one) for plan, one in zip(plans, sent, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write everything in ``plan`` into the attempt. The future that is returned is done."""
        call = self._call()
        # Rank 0 knows what it has sent. The other ranks have it from the plan, and note it when the plan is unpickled:
        # a planner that caches plans may throw this one away and continue with an earlier one.
        sent = call.sent or order_received()
        if sent is None or sent.target != call.location.name:
            meant = "nothing" if sent is None else repr(sent.target)
            raise InvalidOptionError(f"this rank saves to {call.location.name!r}, rank 0 to {meant}: pass the same URL")
        if call.save is None:
            call.save = self._begin(call, sent, "joined")
        self._sessions.current().save_id = sent.save_id
        try:
            with time_limit(call.deadline):
                results = self._write_items(call.save, sent.rank, plan, planner)
        except BaseException as error:
            call.save.lifecycle.failed(error, call.save.outcome)
            # With several ranks the attempt stays until DCP has ended the call on all of them. Until then they may be
            # writing into it.
            if call.alone:
                self._sessions.current().drop()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written."""
        call = self._call()
        save = call.save
        assert save is not None
        layout = PlannerLayout(save, metadata)
        written = [result for each in results for result in each]
        # DCP calls this on any thread, also on that of a running loop, which its own storage blocks as well.
        call_from_thread(lambda: _commit(save, written, layout), call.deadline)
        # DCP returns this object, as it was written.
        vars(metadata).update(vars(layout.stock_metadata()))
        self._sessions.current().drop()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether sidestream has a store for this URL."""
        return is_located(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The URL that a DCP call in this thread writes to."""
        session = self._sessions.current()
        if session.call is not None and session.wanted is None:
            return session.call.location.url
        return self._wanted().url

    @property
    def save_id(self) -> str:
        """The id of the current or last save in this thread. Once ``write_data`` has begun it is the same on every
        rank, and readers identify the checkpoint by it."""
        return self._sessions.current().save_id

    # --- implementation ---

    def _wanted(self) -> Location:
        return self._address.located(self._sessions.current().wanted)

    def _call(self) -> _Call:
        call = self._sessions.current().call
        if call is None:
            raise InvalidOptionError("set_up_storage_writer() comes first; DCP's save() calls everything in its order")
        return call

    def _begin(self, call: _Call, sent: SentOrder, kind: Kind) -> Save:
        worker, fall_back = choose_worker(self._writer, call.location.store)
        return Save(
            call.location,
            call.deadline,
            SaveOrder(durability=self._durability),
            worker=worker,
            fall_back=fall_back,
            kind=kind,
            own_id=sent.save_id,
        )

    def _write_items(self, save: Save, rank: int, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        outgoing = Outgoing(plan, planner, rank, self._extensions, save, allow=self._allow)
        stop = Stop()
        try:
            write_files(save, outgoing.files(), stop)
            self._warn(outgoing, save.location.url)
            return outgoing.results(save.transaction.committed_name)
        finally:
            stop.set()
            outgoing.close()

    def _warn(self, outgoing: Outgoing, url: str) -> None:
        """Warn of values that readers refuse by default, once for each name."""
        if self._trust == "pickle":
            return
        refused = {fqn: why for fqn, why in {**outgoing.refused, **outgoing.opaque}.items() if fqn not in self._warned}
        self._warned.update(refused)
        warn_of_refused(refused, url, _REMEDY)

    # --- the end ---

    def close(self) -> None:
        """Remove the leftovers of a save that failed in this thread. The writer can be used again."""
        self._sessions.current().drop()

    def __enter__(self) -> StorageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True)
class _Session:
    """The state of one DCP call. ``wanted``: its ``checkpoint_id``, until the save begins. ``used``: the save id of the
    last attempt."""

    wanted: str | os.PathLike[str] | None = None
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    used: str | None = None
    call: _Call | None = None

    def drop(self) -> None:
        """Forget the save, and remove the leftovers of its attempt."""
        call, self.call = self.call, None
        if call is not None and call.cleanup is not None:
            call.cleanup()


async def _commit(save: Save, written: Sequence[WriteResult], layout: PlannerLayout) -> None:
    """Commit what all ranks have written."""

    async def checked() -> Sequence[WriteResult]:
        receipt = await write_threads().run(layout.receipt, None, written, Stop())
        await save.check_shared(receipt.files)
        return written

    await run_here(save, checked, layout)


def _discard(save: Save) -> None:
    """Remove the leftovers of an attempt. Called once, after DCP has sent the outcome to every rank, so that no rank
    writes there any more.

    The garbage collector may call it in any thread. In the thread of the storage clients' loop, it must not wait for
    that loop.
    """
    save.lifecycle.failed(SaveAbortedError("DCP has not finished this save"), save.outcome)
    if save.outcome != "absent":
        return
    if in_io_thread():
        write_threads().submit(save.transaction.discard)
        return
    with suppress(SidestreamError):
        save.transaction.discard()
