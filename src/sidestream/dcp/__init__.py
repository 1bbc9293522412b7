"""Storage for DCP's own calls.

``dcp.save(..., storage_writer=StorageWriter(url))`` and ``dcp.load(..., storage_reader=StorageReader(url))`` use it.

With ``dcp.async_save(..., async_stager=sidestream.AsyncStager())`` sidestream also makes the copies.
``docs/from_dcp.md`` maps every public name of ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

from .reader import StorageReader
from .writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]

StorageReader.__module__ = StorageWriter.__module__ = __name__  # where users import them from
