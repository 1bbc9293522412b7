"""Where bytes go: the Store contract and its engines. No torch."""

from __future__ import annotations

from .bodies import Body, BytesBody, ShardBody
from .local.store import LocalStore
from .names import parse_step, step_name, target_of_attempt
from .store import Files, Leftover, RangeSource, ReadRange, Store
from .transaction import WRITE_THREADS, Attempt, Kind, Outcome, StoreAddress, Transaction
from .urls import EVERYDAY, Location, Where, locate_directory, locate_run

__all__ = [
    "EVERYDAY",
    "WRITE_THREADS",
    "Attempt",
    "Body",
    "BytesBody",
    "Files",
    "Kind",
    "Leftover",
    "LocalStore",
    "Location",
    "Outcome",
    "RangeSource",
    "ReadRange",
    "ShardBody",
    "Store",
    "StoreAddress",
    "Transaction",
    "Where",
    "locate_directory",
    "locate_run",
    "parse_step",
    "step_name",
    "target_of_attempt",
]
