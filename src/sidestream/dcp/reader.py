"""``StorageReader``: DCP plans, sidestream reads, verifies and puts in place."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from .._format.records import Manifest
from .._layout.objects import allowed_types
from .._load.device_streams import current_streams
from .._load.open.manifest import open_manifest
from .._load.operation import LoadLifecycle
from .._load.planner.items import in_batches, metadata_of, read_bytes, targets_of, values_of
from .._load.reader import Reader
from .._runtime.threads import Deadline, io_threads
from .._storage import RangeSource
from ..blocking import run_anywhere
from ..errors import InvalidOptionError, SaveAbortedError
from ..events import LoadContext
from ..options import Storage, Trust, Verify, check_choice, check_timeout, check_verify, storage_of
from .session import Address, Sessions, is_located
from .stock_options import StockReaderOptions, check_stock_reader, one_url

__all__ = ["StorageReader"]


@dataclass(slots=True)
class _Load:
    """One load, as one rank sees it."""

    source: RangeSource
    url: str
    deadline: Deadline
    manifest: Manifest
    lifecycle: LoadLifecycle
    nbytes: int = 0
    touched: set[str] = field(default_factory=set)
    unverified: set[str] = field(default_factory=set)

    def add(self, reader: Reader) -> None:
        """Count what ``reader`` has read."""
        self.nbytes += reader.nbytes
        self.touched |= reader.touched
        self.unverified |= reader.unverified

    def release(self) -> None:
        run_anywhere(self.source.aclose)


@dataclass(slots=True)
class _Session:
    wanted: str | os.PathLike[str] | None = None
    load: _Load | None = None
    load_id: str = ""

    def end(self) -> None:
        """Release what the load has opened. A load that is still under way has failed."""
        if self.load is not None:
            self.load.lifecycle.failed(SaveAbortedError("DCP has not finished this load"), 0)
            self.load.release()
        self.load = None


class StorageReader(DcpStorageReader):
    """For ``dcp.load(state_dict, storage_reader=StorageReader(url))``: what sidestream or stock DCP wrote to ``url``.

    Nothing of the checkpoint is unpickled: metadata and values are decoded as data, checked, and only then used. Each
    rank reads the rows that it needs, several ranges at a time, verified as they arrive (``verify``). Where stock DCP
    goes on in silence this raises: ``CorruptCheckpointError`` for altered bytes, ``IncompleteTensorError`` for holes,
    ``DtypeMismatchError`` for a cast that torch would not make by itself, such as a float's to an integer.

    Objects of the types in ``safe_globals`` are made again by their own code; another value that is more than data is
    an ``UnsafeObjectError``. ``trust="pickle"`` hands the bytes of all values to the planner as they are: DCP's own
    unpickles them, which runs whatever code they hold, so it is for checkpoints that you trust, and for planners that
    write bytes of their own. ``checkpoint_id`` of DCP's call takes the place of ``url`` for that call;
    ``storage_options`` and ``storage`` (as for ``sidestream.load``) stay.

    The keywords of DCP's own readers are accepted too. ``path`` is ``url``. Each of the others has no effect and is
    named in a warning, or raises an ``InvalidOptionError`` that says what to use instead.

    When DCP returns, everything is in place. After an error some tensors may have been written to. DCP raises
    ``CheckpointException`` with the error of each rank in ``failures``; of an error in the metadata it keeps the words.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        verify: Verify = "always",
        safe_globals: Iterable[type] = (),
        trust: Trust = "data",
        timeout_s: float = 600.0,
        storage_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
        **stock: Unpack[StockReaderOptions],
    ) -> None:
        super().__init__()
        check_stock_reader(stock)
        url = one_url("StorageReader", url, stock)
        check_verify(verify)
        check_choice("trust", trust, Trust)
        check_timeout(timeout_s)
        self._address = Address(url, storage_of(storage_options, storage))
        self._verify: Verify = verify
        self._allow = allowed_types(safe_globals)
        self._trust: Trust = trust
        self._timeout_s = timeout_s
        self._sessions: Sessions[_Session] = Sessions(_Session)

    # --- what DCP calls, in this order ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        session = self._sessions.current()
        session.end()
        session.wanted, session.load_id = checkpoint_id if checkpoint_id else None, uuid.uuid4().hex

    # Without a parameter named kwargs, so that DCP does not ask once more for the metadata of one rank: they are read
    # as one checkpoint here, and with collectives.
    def read_metadata(self, *_: Any, **options: Any) -> Metadata:
        session = self._sessions.current()
        session.end()
        deadline = Deadline.after(self._timeout_s)
        location = self._address.located(session.wanted)
        lifecycle = LoadLifecycle(_context(location.url))

        async def read() -> Metadata:
            source, manifest = await open_manifest(location)
            session.load = _Load(source, location.url, deadline, manifest, lifecycle)
            return await io_threads().run(metadata_of, manifest, location.url)

        lifecycle.started()
        try:
            metadata = run_anywhere(read, deadline)
        except BaseException as error:
            lifecycle.failed(error, 0)
            session.end()
            raise
        assert session.load is not None
        lifecycle.opened(session.load.manifest)
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._load()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        session, load = self._sessions.current(), self._load()
        load.lifecycle.planned()
        try:
            self._read(load, plan, planner)
        except BaseException as error:
            load.lifecycle.failed(error, len(load.touched))
            raise
        finally:
            load.release()
            session.load = session.wanted = None
        load.lifecycle.read(load.nbytes)
        if self._verify == "always":
            load.lifecycle.verified(len(load.unverified))
        load.lifecycle.applied(load.nbytes)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_located(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """What the call in this thread reads, or would."""
        return self._address.located(self._sessions.current().wanted).url

    @property
    def load_id(self) -> str:
        """The id of the current or last load in this thread; each ``reset`` makes a new one."""
        session = self._sessions.current()
        if not session.load_id:
            session.load_id = uuid.uuid4().hex
        return session.load_id

    # --- inside ---

    def _load(self) -> _Load:
        load = self._sessions.current().load
        if load is None:
            raise InvalidOptionError("read_metadata() comes first; DCP's load() calls everything in its order")
        return load

    def _read(self, load: _Load, plan: LoadPlan, planner: LoadPlanner) -> None:
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        self._read_values(load, values, planner)
        for batch in in_batches([item for item in plan.items if item.type != LoadItemType.BYTE_IO]):
            self._read_tensors(load, batch, planner)

    def _read_values(self, load: _Load, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        entries = values_of(items, load.manifest, load.url)
        if not entries:
            return
        found = run_anywhere(
            lambda: read_bytes(load.source, load.manifest, entries, allow=self._allow, trust=self._trust),
            load.deadline,
        )
        for item in items:
            planner.load_bytes(item, io.BytesIO(found[item.storage_index.fqn]))

    def _read_tensors(self, load: _Load, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        asked_for = targets_of(items, planner, load.manifest, load.url)
        streams = current_streams({target.device for _, target in asked_for.targets})
        reader = Reader(load.source, self._verify, None, streams)
        try:
            with asked_for.telling(load.url):
                run_anywhere(lambda: reader.read(asked_for.wanted, own=load.manifest.own), load.deadline)
        finally:
            load.add(reader)
        asked_for.commit(planner)


def _context(url: str) -> LoadContext:
    if not dist.is_available() or not dist.is_initialized():
        return LoadContext("dcp.load", url)
    return LoadContext("dcp.load", url, rank=dist.get_rank(), world=dist.get_world_size())
