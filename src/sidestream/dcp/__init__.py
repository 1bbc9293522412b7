"""Inside DCP's own calls: ``dcp.save(..., storage_writer=StorageWriter(url))``, ``dcp.load(..., storage_reader=...)``.

With ``dcp.async_save(..., async_stager=sidestream.AsyncStager())`` the copies are ours as well. ``docs/from_dcp.md``
maps every public name of ``torch.distributed.checkpoint``. ``async_save_part`` is DCP's mode without collectives, from
an event loop.
"""

from __future__ import annotations

from .._save.planner.save import async_save_part
from ..options import IndependentPart
from .reader import StorageReader
from .writer import StorageWriter

__all__ = ["IndependentPart", "StorageReader", "StorageWriter", "async_save_part"]

StorageReader.__module__ = StorageWriter.__module__ = async_save_part.__module__ = __name__  # what users import
