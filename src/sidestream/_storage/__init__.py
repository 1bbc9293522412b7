"""Where bytes go: the Store contract and its engines. No torch."""

from __future__ import annotations

from .bodies import Body
from .local.store import LocalStore
from .store import Files, Leftover, RangeSource, ReadRange, Store
from .transaction import WRITE_THREADS, Attempt, Kind, Outcome, StoreAddress, Transaction
from .urls import EVERYDAY, Location, Where, locate_directory, locate_run

__all__ = [
    "EVERYDAY",
    "WRITE_THREADS",
    "Attempt",
    "Body",
    "Files",
    "Kind",
    "Leftover",
    "LocalStore",
    "Location",
    "Outcome",
    "RangeSource",
    "ReadRange",
    "Store",
    "StoreAddress",
    "Transaction",
    "Where",
    "locate_directory",
    "locate_run",
]
