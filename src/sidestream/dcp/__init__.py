"""Inside DCP's own calls: ``dcp.save(..., storage_writer=StorageWriter(url))``, ``dcp.load(..., storage_reader=...)``.

With ``dcp.async_save(..., async_stager=sidestream.AsyncStager())`` the copies are ours as well. ``docs/from_dcp.md``
maps every public name of ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

from .reader import StorageReader
from .writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]

StorageReader.__module__ = StorageWriter.__module__ = __name__  # what users import
