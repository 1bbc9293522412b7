"""Receipts: the places of the items that a rank has written for a planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..._format.records import Node

__all__ = ["PackedReceipt", "Receipt", "TensorReceipt", "ValueReceipt"]


@dataclass(frozen=True, slots=True)
class TensorReceipt:
    """The place of a tensor in ``file``, which has ``file_bytes`` and the CRC-32 ``file_crc``. Its payload is not
    transformed."""

    file: str
    file_bytes: int
    file_crc: int
    item_offset: int
    item_bytes: int
    payload_offset: int
    crcs: bytes
    dtype: str
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ValueReceipt:
    """The place of the bytes that a planner made of a value. ``node`` is the value as plain data."""

    file: str
    file_bytes: int
    file_crc: int
    item_offset: int
    item_bytes: int
    node: Node
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedReceipt:
    """The place of an item that went through ``transforms``."""

    file: str
    file_bytes: int
    file_crc: int
    item_offset: int
    item_bytes: int
    transforms: tuple[str, ...]
    dtype: str | None = None


Receipt: TypeAlias = TensorReceipt | ValueReceipt | PackedReceipt
