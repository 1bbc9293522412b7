"""``StorageReader``: DCP plans a load, sidestream reads, verifies and places the data."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from .._engine.calls import call_from_thread
from .._format.records import Manifest
from .._layout.values import allowed_types
from .._load.open.manifest import all_there, open_manifest
from .._load.operation import LoadLifecycle
from .._load.reader import Reader
from .._runtime.threads import Deadline, io_threads
from .._staging.streams import current_streams
from .._storage import RangeSource
from ..errors import InvalidOptionError, SaveAbortedError
from ..events import LoadContext
from ..options import Storage, Trust, Verify, check_choice, check_timeout, check_verify, storage_of
from .planned import in_batches, metadata_of, read_bytes, targets_of, values_of
from .session import Address, Session, is_located
from .stock_options import StockReaderOptions, check_stock_reader, one_url

__all__ = ["StorageReader"]


@dataclass(slots=True)
class _Load:
    """One load on one rank."""

    source: RangeSource
    url: str
    deadline: Deadline
    manifest: Manifest
    lifecycle: LoadLifecycle
    nbytes: int = 0
    touched: set[str] = field(default_factory=set)
    unverified: set[str] = field(default_factory=set)

    def add(self, reader: Reader) -> None:
        """Add the counts of ``reader``."""
        self.nbytes += reader.nbytes
        self.touched |= reader.touched
        self.unverified |= reader.unverified

    def release(self) -> None:
        call_from_thread(self.source.aclose)


@dataclass(eq=False)
class _Session(Session):
    """The state of one DCP call. ``wanted``: its ``checkpoint_id``."""

    wanted: str | os.PathLike[str] | None = None
    load: _Load | None = None
    load_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def end(self) -> None:
        """Release the resources of the load. A load that has not ended has failed."""
        if self.load is not None:
            self.load.lifecycle.failed(SaveAbortedError("DCP has not finished this load"), 0)
            self.load.release()
        self.load = None


class StorageReader(DcpStorageReader):
    """Reads checkpoints of sidestream and stock DCP in ``dcp.load(state_dict, storage_reader=StorageReader(url))``.

    Nothing of the checkpoint is unpickled: metadata and values are decoded as data and checked before they are used.
    Each rank reads the rows that it needs, several ranges at a time. When DCP returns, all tensors and values are in
    place. After an error some tensors may have been written to.

    Args:
        url: The checkpoint. ``checkpoint_id`` of a DCP call replaces it for that call; all other options stay.
        verify: Whether every byte that is used is checked against its checksum, as for ``sidestream.load``.
        safe_globals: Types whose objects are rebuilt by their own code. Other values that are more than data raise
            ``UnsafeObjectError``.
        trust: ``"pickle"`` passes the bytes of all values to the planner unchanged. DCP's planner unpickles them, which
            runs any code in them, so use it only for checkpoints that you trust. Planners that write bytes of their own
            need it too.
        timeout_s: The deadline of a load, in seconds.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage is reached.
        **stock: Keywords of DCP's own readers. ``path`` is ``url``. Each of the others has no effect and is named in a
            warning, or raises an ``InvalidOptionError`` that names its replacement.

    Raises:
        InvalidOptionError: An option is wrong.

    A load raises these errors, where stock DCP reports no error: ``CorruptCheckpointError`` for altered bytes,
    ``IncompleteTensorError`` for tensors with holes, ``DtypeMismatchError`` for a cast that torch does not make by
    itself, such as from a float to an integer. DCP raises ``CheckpointException`` with the error of each rank in
    ``failures``; for an error in the metadata it keeps only the message.
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
        self._session = _Session()

    # --- what DCP calls, in this order ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load of ``checkpoint_id``, or of the URL of this reader."""
        self._session.end()
        self._session.wanted = checkpoint_id if checkpoint_id else None
        self._session.load_id = uuid.uuid4().hex

    # Without a parameter named kwargs, so that DCP does not call it again for the metadata of one rank: here the
    # metadata of all ranks are read as one checkpoint, and with collectives.
    def read_metadata(self, *_: Any, **options: Any) -> Metadata:
        """Open the checkpoint and return its metadata."""
        self._session.end()
        deadline = Deadline.after(self._timeout_s)
        location = self._address.located(self._session.wanted)
        lifecycle = LoadLifecycle(_context(location.url))
        load: _Load | None = None

        async def read() -> Metadata:
            nonlocal load
            source, manifest = await open_manifest(location)
            load = _Load(source, location.url, deadline, manifest, lifecycle)
            return await io_threads().run(metadata_of, manifest, location.url)

        lifecycle.started()
        try:
            metadata = call_from_thread(read, deadline)
        except BaseException as error:
            lifecycle.failed(error, 0)
            if load is not None:
                load.release()
            raise
        assert load is not None
        self._session.load = load
        lifecycle.opened(load.manifest)
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that the metadata have been read."""
        self._load()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return ``plan`` unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return ``plans`` unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything in ``plan`` into its place. The future that is returned is done."""
        load = self._load()
        load.lifecycle.planned()
        try:
            self._read(load, plan, planner)
        except BaseException as error:
            load.lifecycle.failed(error, len(load.touched))
            raise
        finally:
            # Here and not later: DCP makes no call after this one. A reader is used again for the next load.
            load.release()
            self._session.load = self._session.wanted = None
        load.lifecycle.read(load.nbytes)
        if self._verify == "always":
            load.lifecycle.verified(len(load.unverified))
        load.lifecycle.applied()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether sidestream has a store for this URL."""
        return is_located(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The URL that a DCP call in this thread reads."""
        return self._address.located(self._session.wanted).url

    @property
    def load_id(self) -> str:
        """The id of the current or last load in this thread. Each ``reset`` creates a new one."""
        return self._session.load_id

    # --- implementation ---

    def _load(self) -> _Load:
        load = self._session.load
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
        read = partial(read_bytes, allow=self._allow, trust=self._trust)
        with all_there(load.url, "is missing"):
            found = call_from_thread(lambda: read(load.source, load.manifest, entries), load.deadline)
        for item in items:
            planner.load_bytes(item, io.BytesIO(found[item.storage_index.fqn]))

    def _read_tensors(self, load: _Load, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        targets = targets_of(items, planner, load.manifest, load.url)
        streams = current_streams({target.device for _, target in targets.targets})
        reader = Reader(load.source, self._verify, None, streams)
        try:
            with targets.naming(), all_there(load.url, "is missing"):
                call_from_thread(lambda: reader.read(targets.wanted, own=load.manifest.own), load.deadline)
        finally:
            load.add(reader)
        targets.commit(planner)


def _context(url: str) -> LoadContext:
    if not dist.is_available() or not dist.is_initialized():
        return LoadContext("dcp.load", url)
    return LoadContext("dcp.load", url, rank=dist.get_rank(), world=dist.get_world_size())
