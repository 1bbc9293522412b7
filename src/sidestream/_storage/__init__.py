"""Where bytes go: the Store contract and its engines. No torch."""

from __future__ import annotations

from .local.store import LocalStore
from .store import Body, Leftover, MappingStore, Naming, Place, ReadRange, SharedStore, Store, StoreAddress
from .urls import EVERYDAY, Location, Where, locate_directory, locate_run

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
