"""``PlannerLayout``: the manifest and ``.metadata`` of items that a ``SavePlanner`` has planned."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from .._runtime.threads import Stop
from .._save.layouts import about_save
from .._save.operation import RankReceipt
from .._save.running import Save
from .metadata import as_stock, complete, files_of_commit

__all__ = ["PlannerLayout"]


class PlannerLayout:
    """The layout of a save that a planner plans. The content of a receipt is its list of ``WriteResult``. ``metadata``
    is that of the planner; ``files`` adds the places of all items."""

    def __init__(self, save: Save, metadata: Metadata) -> None:
        self._save = save
        self.metadata = metadata
        self._receipt: RankReceipt | None = None

    def receipt(self, plan: None, written: Sequence[WriteResult], stop: Stop) -> RankReceipt:
        """Return the receipt for these items, which all ranks have written. DCP has the plan."""
        if self._receipt is None:
            places = [result.storage_data for result in written]
            sizes = {one.file: one.file_bytes for one in places}
            self._receipt = RankReceipt(sizes, written, {one.file: one.file_crc for one in places})
        return self._receipt

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        save = self._save
        results = [receipt.content for receipt in receipts]
        self.metadata = complete(self.metadata, results, save.location.url, save.save_id)
        about = about_save(save, receipts)
        files = files_of_commit(self.metadata, about, save.order.saved_at)
        return {**save.sidecar_files(), **{name: [content] for name, content in files.items()}}

    def stock_metadata(self) -> Metadata:
        """Return what was written to ``.metadata``, as stock DCP reads it. Called after the commit."""
        return as_stock(self.metadata)
