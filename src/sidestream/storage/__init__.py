"""Where bytes go: the Store contract and its engines. No torch."""

from __future__ import annotations

from .local import LocalStore
from .location import Location, locate_directory, locate_run
from .store import Body, MappingStore, ReadRange, Store

__all__ = ["Body", "LocalStore", "Location", "MappingStore", "ReadRange", "Store", "locate_directory", "locate_run"]
