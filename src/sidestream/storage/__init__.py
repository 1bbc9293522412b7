"""Where bytes go: the Store contract and its engines. No torch."""

from __future__ import annotations

from .local import LocalStore
from .location import Location, Where, locate_directory, locate_run
from .store import Body, FileStore, Leftover, MappingStore, Place, ReadRange, SharedStore, Store, StoreAddress

__all__ = [
    "Body",
    "FileStore",
    "Leftover",
    "LocalStore",
    "Location",
    "MappingStore",
    "Place",
    "ReadRange",
    "SharedStore",
    "Store",
    "StoreAddress",
    "Where",
    "locate_directory",
    "locate_run",
]
