"""``PlannerLayout``: the manifest and ``.metadata`` of items that a ``SavePlanner`` has planned."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..layouts import about_save, sidecar_files
from ..operation import RankReceipt, SaveOrder
from .metadata import as_stock, complete, files_of_commit

__all__ = ["Decided", "PlannerLayout", "receipt_for"]


@dataclass(frozen=True, slots=True)
class Decided:
    """The plan of this rank. On the rank that commits, ``metadata`` is that of all ranks."""

    plan: SavePlan
    metadata: Metadata | None


class PlannerLayout:
    """The layout of a save that a planner plans. The content of a receipt is its list of ``WriteResult``."""

    def __init__(self, order: SaveOrder, metadata: Metadata | None = None) -> None:
        self._order = order
        self.metadata = metadata
        """The metadata of the planner, on the rank that commits. ``files`` adds the places of all items."""

    async def receipt(self, plan: Decided, written: Sequence[WriteResult]) -> RankReceipt:
        self.metadata = plan.metadata
        return receipt_for(written)

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        order = self._order
        assert self.metadata is not None
        results = [receipt.content for receipt in receipts]
        self.metadata = complete(self.metadata, results, order.location.url, order.save_id)
        about = about_save(order, receipts)
        files = files_of_commit(self.metadata, about, order.saved_at)
        return {**sidecar_files(order), **{name: [content] for name, content in files.items()}}

    def stock_metadata(self) -> Metadata:
        """Return what was written to ``.metadata``, as stock DCP reads it. Called after the commit."""
        assert self.metadata is not None
        return as_stock(self.metadata)

    def pack(self, receipt: RankReceipt) -> bytes:
        return pickle.dumps(receipt.content)

    def unpack(self, rank: int, content: bytes) -> Any:
        return pickle.loads(content)


def receipt_for(results: Sequence[WriteResult]) -> RankReceipt:
    """Return the receipt of a rank that has written these items."""
    written = [result.storage_data for result in results]
    files: Mapping[str, int] = {one.file: one.file_bytes for one in written}
    return RankReceipt(files, results, {one.file: one.file_crc for one in written})
