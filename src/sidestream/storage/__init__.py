"""Where bytes go: the Store contract and its engines. No torch."""

from __future__ import annotations

from .local import LocalStore
from .location import EVERYDAY, Location, Where, locate_directory, locate_run
from .store import Body, Leftover, MappingStore, Naming, Place, ReadRange, SharedStore, Store, StoreAddress

__all__ = [
    "EVERYDAY",
    "Body",
    "Leftover",
    "LocalStore",
    "Location",
    "MappingStore",
    "Naming",
    "Place",
    "ReadRange",
    "SharedStore",
    "Store",
    "StoreAddress",
    "Where",
    "locate_directory",
    "locate_run",
]
