"""The frame around a payload. An item of a shard file is a ``torch.save`` zip: header, payload, trailer.

The central directory of a zip comes after the data, and the CRC of a record may follow the record in a descriptor. So
the header depends on dtype and shape alone, and the payload can be written before its CRC is known. An item has the
smallest set of records that torch reads: ``data.pkl``, ``byteorder``, ``version`` and ``data/0``. Tests compare the
result with ``torch.load``, ``zipfile`` and ``torch.save``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32

from .pickles import write as p
from .records import DTYPES, itemsize, row_major_strides, written_dtype

__all__ = ["CRC_FOLLOWS", "DOS_DATE", "MAX_32", "Frame", "end_of_directory", "frame_tensor", "frame_value"]

DOS_DATE = 0x21  # 1980-01-01, the earliest date of a zip, so that files do not depend on the clock
CRC_FOLLOWS = 0x08
MAX_32 = 0xFFFFFFFF
_ARCHIVE = "archive"


@dataclass(frozen=True, slots=True)
class Frame:
    """The frame of a payload of ``payload_bytes``: the ``header`` before it and ``trailer(crc)`` after it."""

    header: bytes
    payload_bytes: int
    blank: bytes
    """The trailer without the CRC."""
    crc_at: tuple[int, int]
    """The two offsets of the CRC in the trailer."""
    item_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "item_bytes", len(self.header) + self.payload_bytes + len(self.blank))

    def trailer(self, crc: int) -> bytes:
        """Return the trailer with the CRC-32 of the payload, in the descriptor and in the central directory."""
        trailer = bytearray(self.blank)
        for position in self.crc_at:
            struct.pack_into("<I", trailer, position, crc)
        return bytes(trailer)


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    nbytes: int
    crc: int
    offset: int  # of the local header in the zip
    flags: int

    @property
    def zip64(self) -> bool:
        return self.nbytes >= MAX_32

    def local_header(self) -> bytes:
        name = f"{_ARCHIVE}/{self.name}".encode()
        sizes = (0, 0) if self.flags & CRC_FOLLOWS else (self.nbytes, self.nbytes)
        # With a zip64 field in the local header, readers expect a descriptor with 8-byte sizes.
        extra = struct.pack("<HHQQ", 1, 16, 0, 0) if self.zip64 else b""
        if self.zip64:
            sizes = (MAX_32, MAX_32)
        fixed = (b"PK\x03\x04", 45 if self.zip64 else 20, self.flags, 0, 0, DOS_DATE, self.crc, *sizes)
        head = struct.pack("<4sHHHHHIIIHH", *fixed, len(name), len(extra))
        return head + name + extra

    def descriptor(self) -> bytes:
        return struct.pack("<4sIQQ" if self.zip64 else "<4sIII", b"PK\x07\x08", self.crc, self.nbytes, self.nbytes)

    def directory_entry(self) -> bytes:
        name = f"{_ARCHIVE}/{self.name}".encode()
        extra = struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if self.zip64 else b""
        size = MAX_32 if self.zip64 else self.nbytes
        version = 45 if self.zip64 else 20
        head = struct.pack(
            "<4sHHHHHHIII", b"PK\x01\x02", version, version, self.flags, 0, 0, DOS_DATE, self.crc, size, size
        )
        return head + struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, self.offset) + name + extra


@lru_cache(maxsize=65536)
def frame_tensor(dtype: str, shape: tuple[int, ...]) -> Frame:
    """Return the frame of a row-major tensor. ``dtype`` is one of ``SAVED_DTYPES``. Frames are cached, because a
    training run has few distinct ones."""
    payload_bytes = math.prod(shape) * itemsize(dtype)
    lead, records = _lead(b"\x80\x02" + tensor_pickle(written_dtype(dtype), shape, "0") + b".")
    header = b"".join(lead)
    payload = _Record("data/0", payload_bytes, 0, len(header), CRC_FOLLOWS)
    header += payload.local_header()
    trailer = payload.descriptor()
    directory_at = len(header) + payload_bytes + len(trailer)
    before = b"".join(record.directory_entry() for record in records)
    crc_at = (4, len(trailer) + len(before) + 16)
    directory = before + payload.directory_entry()
    trailer += directory + end_of_directory(len(records) + 1, len(directory), directory_at)
    return Frame(header, payload_bytes, trailer, crc_at)


def frame_value(pickled: bytes, storages: Sequence[bytes] = ()) -> bytes:
    """Return the whole item of a plain value. ``pickled`` refers to the i-th of ``storages`` by the key ``str(i)``."""
    pieces, records = _lead(pickled)
    nbytes = sum(map(len, pieces))
    for key, raw in enumerate(storages):
        record = _Record(f"data/{key}", len(raw), crc32(raw), nbytes, 0)
        pieces += [record.local_header(), raw]
        records.append(record)
        nbytes += len(pieces[-2]) + len(raw)
    directory = b"".join(record.directory_entry() for record in records)
    return b"".join([*pieces, directory, end_of_directory(len(records), len(directory), nbytes)])


def tensor_pickle(dtype: str, shape: tuple[int, ...], key: str) -> bytes:
    """Return the pickle of a row-major tensor over the storage ``key`` of its archive, as ``torch.save`` writes it."""
    itemsize, storage = DTYPES[dtype]
    elements = math.prod(shape)
    if storage is not None:
        rebuild, storage_type, numel = "_rebuild_tensor_v2", p.global_("torch", storage), elements
    else:
        rebuild, storage_type, numel = (
            "_rebuild_tensor_v3",
            p.global_("torch.storage", "UntypedStorage"),
            elements * itemsize,
        )
    persistent_id = p.tuple_of(p.text("storage"), storage_type, p.text(key), p.text("cpu"), p.integer(numel)) + b"Q"
    arguments = [
        persistent_id,
        p.integer(0),
        p.tuple_of(*map(p.integer, shape)),
        p.tuple_of(*map(p.integer, row_major_strides(shape))),
        p.FALSE,
        p.call(p.global_("collections", "OrderedDict")),
    ]
    if storage is None:
        arguments.append(p.global_("torch", dtype))
    return p.call(p.global_("torch._utils", rebuild), *arguments)


def _lead(pickled: bytes) -> tuple[list[bytes], list[_Record]]:
    """Return the records before any payload, first as pieces: a join of large ones releases the GIL."""
    pieces: list[bytes] = []
    records: list[_Record] = []
    for name, raw in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
        records.append(_Record(name, len(raw), crc32(raw), sum(map(len, pieces)), 0))
        pieces += [records[-1].local_header(), raw]
    return pieces, records


def end_of_directory(count: int, nbytes: int, offset: int) -> bytes:
    end = b""
    if offset >= MAX_32 or count >= 0xFFFF:
        end = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, offset)
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + nbytes, 1)
    shown = min(count, 0xFFFF)
    return end + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, shown, shown, nbytes, min(offset, MAX_32), 0)
