"""The items that one rank writes for a planner. They are resolved when they are needed, staged, framed and written."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .._foreign.items import MAX_VALUE_BYTES
from .._foreign.torch_zip.file import check_value_item, open_value_item
from .._format.checksum import crc32
from .._format.records import DTYPES, Node
from .._format.shard import BlockSums, ShardLayout
from .._layout.save_layout import PlannedFiles, images_of, window_bytes_for
from .._runtime.threads import by_size, pause_point
from .._runtime.torch_probes import check_tensor, dtype_name, storage_key, transformed_stream
from .._save.running import Save
from .._staging import AsyncStager, Captured, Staging, capture
from .._storage import Body, BytesBody, ShardBody
from ..errors import (
    CorruptCheckpointError,
    InvalidOptionError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
from .metadata import PackedReceipt, Receipt, TensorReceipt, ValueReceipt

__all__ = ["Outgoing"]

_BUDGET_BYTES = 256 << 20
_GROUP_BYTES = 512 << 20  # a planner may make tensors when it resolves them: two groups of them exist at a time
_VALUES_BYTES = 64 << 20
_NODE_BYTES = 1 << 20  # a larger value is only in its item, and not in the manifest too
_NO_LIMIT = 1 << 62
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Group:
    """A group that is being staged."""

    items: Sequence[WriteItem]
    dtypes: Sequence[str]
    staging: Staging[PlannedFiles]


class Outgoing:
    """The items that one rank has to write by ``plan``. Call ``files`` for the store, then ``results``, and ``close``
    in any case.

    Tensors are resolved in groups of some 512 MiB, each while the group before it is written. If the planner makes the
    tensors, that limits the host memory for them. All of them are staged through 256 MiB of memory. Values, and all
    items with ``extensions``, are written one after the other, because their sizes are not known before.
    """

    def __init__(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        rank: int,
        extensions: Sequence[object],
        save: Save,
        allow: Set[str],
    ) -> None:
        """``allow`` has the names of the types that readers will be allowed to make."""
        self.refused: dict[str, str] = {}
        """The reason why a reader without options refuses a value, by FQN. Complete when ``files`` is exhausted."""
        self._allow = allow
        self._planner = planner
        self._rank = rank
        self._deadline = save.deadline
        self._extensions = extensions
        self._in_order = [item for item in plan.items if extensions or item.type == WriteItemType.BYTE_IO]
        self._tensors = [] if extensions else [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        stager = partial(AsyncStager, budget_bytes=_BUDGET_BYTES, timeout_s=save.deadline.timeout_s)
        self._stager = stager(backing="private" if save.worker is None else "shared") if self._tensors else None
        self._stagings: list[Staging[PlannedFiles]] = []
        self._receipts: list[Callable[[], Iterable[tuple[WriteItem, Receipt]]]] = []
        self._files = 0

    def files(self) -> Iterator[tuple[str, Body]]:
        """Yield the name and the content of each file. The planner is called in the thread that iterates."""
        # Values first, because their sizes are known only when they were resolved: they are written as they come.
        yield from self._sequential()
        group: _Group | None = None
        for items in by_size(self._tensors, _planned_bytes, _GROUP_BYTES):
            # Two groups at a time: while one is written, the planner resolves the tensors of the next, and their copies
            # begin. More would hold more tensors of a planner that makes them.
            following = self._stage(items)
            if group is not None:
                yield self._shard(group)
            group = following
        if group is not None:
            yield self._shard(group)

    def results(self, published: Callable[[str], str]) -> list[WriteResult]:
        """Return a receipt for each item, when everything has been written. ``published`` returns the name that a file
        will have in the checkpoint."""
        return [
            WriteResult(item.index, receipt.item_bytes, replace(receipt, file=published(receipt.file)))
            for receipts in self._receipts
            for item, receipt in receipts()
        ]

    def close(self) -> None:
        """Release the memory. When this returns, no thread reads a tensor any more, unless a device hangs beyond the
        deadline."""
        for staging in self._stagings:
            staging.release()
        for staging in self._stagings:
            with suppress(TimeoutError):  # a copy that hangs keeps its memory
                # The caller may change its tensors when DCP's call has returned, also after a failure. So the copies
                # are awaited, and not only stopped.
                staging.copied.exception(max(self._deadline.remaining_s(), _GRACE_S))
        if self._stager is not None:
            self._stager.close()

    def _name(self) -> str:
        self._files += 1
        return f"__{self._rank}_{self._files - 1}.distcp"

    # --- values, and items with extensions ---

    def _sequential(self) -> Iterator[tuple[str, Body]]:
        content = io.BytesIO()
        pending: list[tuple[WriteItem, Receipt]] = []
        for item in self._in_order:
            pending.append((item, self._append(item, content)))
            if content.tell() >= _VALUES_BYTES:
                yield self._close_file(content, pending)
                content, pending = io.BytesIO(), []
        if pending:
            yield self._close_file(content, pending)

    def _append(self, item: WriteItem, content: io.BytesIO) -> Receipt:
        data = self._planner.resolve_data(item)
        node = self._inspected(item.index.fqn, data) if isinstance(data, io.BytesIO) else None
        start = content.tell()
        if self._extensions:
            descriptors = self._pack(item, data, content)
            dtype = dtype_name(data.dtype) if isinstance(data, torch.Tensor) else None
            return PackedReceipt("", 0, 0, start, content.tell() - start, descriptors, dtype)
        if not isinstance(data, io.BytesIO):
            raise InvalidOptionError(
                f"{item.index.fqn}: the planner resolved a BYTE_IO item to a {type(data).__name__}"
            )
        content.write(data.getbuffer())
        return ValueReceipt("", 0, 0, start, content.tell() - start, node)

    def _inspected(self, fqn: str, data: io.BytesIO) -> Node:
        """Return the bytes of a planner as data, if they are a pickle of plain data."""
        nbytes = len(data.getbuffer())
        if bytes(data.getbuffer()[:4]) != b"PK\x03\x04":
            self.refused[fqn] = "bytes in the planner's own format"
            return {"stored": "bytes"}
        if nbytes > MAX_VALUE_BYTES:
            self.refused[fqn] = f"it has {nbytes} bytes, more than the {MAX_VALUE_BYTES} that are read"
        elif nbytes > _NODE_BYTES:
            self._try(fqn, lambda: check_value_item(io.BytesIO(data.getbuffer()), nbytes, self._allow))
        else:
            try:
                return open_value_item(io.BytesIO(data.getbuffer()), nbytes)
            except (CorruptCheckpointError, UnsafeObjectError, UnsupportedCheckpointError):
                self._try(fqn, lambda: open_value_item(io.BytesIO(data.getbuffer()), nbytes, self._allow))
        return {"stored": "pickle"}

    def _try(self, fqn: str, read: Callable[[], object]) -> None:
        try:
            read()
        except (CorruptCheckpointError, UnsafeObjectError, UnsupportedCheckpointError) as error:
            self.refused[fqn] = str(error)

    def _pack(self, item: WriteItem, data: torch.Tensor | io.BytesIO, content: io.BytesIO) -> tuple[str, ...]:
        stream, descriptors = transformed_stream(self._extensions, item, content)
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
        else:
            _check(data, item, held=False)
            torch.save(data.detach().cpu().clone(), stream)  # of a view torch.save would write the whole storage
        stream.close()
        return descriptors

    def _close_file(self, content: io.BytesIO, pending: list[tuple[WriteItem, Receipt]]) -> tuple[str, Body]:
        name, raw = self._name(), content.getvalue()
        crc = crc32(raw)
        done = [(item, replace(receipt, file=name, file_bytes=len(raw), file_crc=crc)) for item, receipt in pending]
        self._receipts.append(lambda: done)
        return name, BytesBody(raw)

    # --- tensors ---

    def _stage(self, items: Sequence[WriteItem]) -> _Group:
        assert self._stager is not None
        tensors: dict[str, torch.Tensor] = {}
        for number, item in enumerate(items):
            data = self._planner.resolve_data(item)
            if not isinstance(data, torch.Tensor):
                raise InvalidOptionError(f"{item.index.fqn}: the planner resolved a tensor to a {type(data).__name__}")
            _check(data, item, held=False)
            tensors[str(number)] = data
        staging = self._stager.launch(capture(tensors), partial(_plan_group, items), self._deadline)
        self._stagings.append(staging)
        return _Group(items, [dtype_name(tensor.dtype) for tensor in tensors.values()], staging)

    def _shard(self, group: _Group) -> tuple[str, Body]:
        (shard,) = self._deadline.result(group.staging.planned, "planning a file").shards
        name, body = self._name(), ShardBody(shard, group.staging.images, None)
        self._receipts.append(lambda: _receipts(name, group, shard, body.sums))
        return name, body


def _receipts(
    name: str, group: _Group, shard: ShardLayout, sums: BlockSums
) -> Iterator[tuple[WriteItem, TensorReceipt]]:
    file_crc = sums.whole(shard)
    for item, dtype, placed, packed in zip(group.items, group.dtypes, shard.items, sums.crcs, strict=True):
        place = placed.item_offset, placed.frame.item_bytes, placed.payload_offset
        yield item, TensorReceipt(name, shard.nbytes, file_crc, *place, packed, dtype)


def _plan_group(items: Sequence[WriteItem], captured: Captured) -> PlannedFiles:
    """Return the file of a group. Called in the stager's thread."""
    tensors = list(captured.root.values())
    for item, tensor in zip(items, tensors, strict=True):
        pause_point()
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedTensorError(
                f"{item.index.fqn}: cannot save {tensor.kind}; save the tensors that it is made of"
            )
        _check(tensor, item, held=bool(captured.held) and storage_key(tensor) in captured.held)
    looks = ((dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)
    window_bytes = window_bytes_for(sum(tensor.nbytes for tensor in tensors), _BUDGET_BYTES)
    (shard,) = ShardLayout.lay_out(looks, _NO_LIMIT, window_bytes)
    images = images_of((shard,), tensors, [None] * len(tensors))
    return PlannedFiles(0, (shard,), images, b"")


def _check(tensor: torch.Tensor, item: WriteItem, *, held: bool) -> None:
    fqn = item.index.fqn
    check_tensor(tensor, fqn, held=held)
    if dtype_name(tensor.dtype) not in DTYPES:
        raise UnsupportedTensorError(
            f"{fqn}: torch cannot serialize a tensor of dtype {tensor.dtype}; save a view of it"
        )
    planned = item.tensor_data
    if planned is not None and tensor.shape != planned.chunk.sizes:
        raise InvalidOptionError(
            f"{fqn}: the planner resolved a tensor of shape {tuple(tensor.shape)}, its plan says "
            f"{tuple(planned.chunk.sizes)}; nothing was saved"
        )


def _planned_bytes(item: WriteItem) -> int:
    planned = item.tensor_data
    return 0 if planned is None else math.prod(planned.chunk.sizes) * planned.properties.dtype.itemsize
