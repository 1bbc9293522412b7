"""Storage for DCP's own calls.

``dcp.save(..., storage_writer=StorageWriter(url))`` and ``dcp.load(..., storage_reader=StorageReader(url))`` use it.

With ``dcp.async_save(..., async_stager=sidestream.AsyncStager())`` sidestream also makes the copies.
``docs/from_dcp.md`` maps every public name of ``torch.distributed.checkpoint``. ``async_save_part`` is DCP's mode
without collectives, on an event loop.
"""

from __future__ import annotations

from .._save.planner.save import async_save_part
from ..options import IndependentPart
from .reader import StorageReader
from .writer import StorageWriter

__all__ = ["IndependentPart", "StorageReader", "StorageWriter", "async_save_part"]

StorageReader.__module__ = StorageWriter.__module__ = async_save_part.__module__ = (
    __name__  # where users import them from
)
