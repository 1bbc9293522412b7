"""Storage: the ``Store`` contract and its implementations. Imports no torch."""

from __future__ import annotations

from .bodies import Body, BytesBody, ShardBody
from .jobs import Batches, Memory, Reads, Scratch
from .local.sources import check_sources, is_plain_name, read_sources
from .local.store import LocalStore
from .names import (
    ABANDONED_AFTER_S,
    LEASES,
    MARKER,
    NOTE,
    id_of,
    is_unfinished,
    parse_step,
    step_name,
    target_of_attempt,
)
from .space import Space
from .store import PIECE_BYTES, Files, Leftover, RangeSource, ReadRange, Store
from .transaction import Attempt, CommitFiles, Kind, MakeFiles, StoreAddress, Transaction
from .urls import DEFAULT_STORAGE, Location, locate_by_caller, locate_directory, locate_run

__all__ = [
    "ABANDONED_AFTER_S",
    "DEFAULT_STORAGE",
    "LEASES",
    "MARKER",
    "NOTE",
    "PIECE_BYTES",
    "Attempt",
    "Batches",
    "Body",
    "BytesBody",
    "CommitFiles",
    "Files",
    "Kind",
    "Leftover",
    "LocalStore",
    "Location",
    "MakeFiles",
    "Memory",
    "RangeSource",
    "ReadRange",
    "Reads",
    "Scratch",
    "ShardBody",
    "Space",
    "Store",
    "StoreAddress",
    "Transaction",
    "check_sources",
    "id_of",
    "is_plain_name",
    "is_unfinished",
    "locate_by_caller",
    "locate_directory",
    "locate_run",
    "parse_step",
    "read_sources",
    "step_name",
    "target_of_attempt",
]
