"""The frame around a payload. An item of a shard file is a ``torch.save`` zip: header, payload, trailer.

The central directory of a zip comes after the data, and the CRC of a record may follow the record in a descriptor. So
the header depends on dtype and shape alone, and the payload can be written before its CRC is known. An item has the
smallest set of records that torch reads: ``data.pkl``, ``byteorder``, ``version`` and ``data/0``. Tests compare the
result with ``torch.load``, ``zipfile`` and ``torch.save``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeAlias
from zlib import crc32

from . import pickles as p
from .records import DTYPES, itemsize, row_major_strides, written_dtype

_DOS_DATE = 0x21  # 1980-01-01, the earliest date of a zip, so that files do not depend on the clock
_CRC_FOLLOWS = 0x08
_MAX_32 = 0xFFFFFFFF
_PADDING = 0x4246  # the extra field that torch also uses for padding


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
    """A record of a zip. ``offset`` is that of its local header. If ``crc`` is None, the CRC follows the content. The
    content begins at a multiple of ``align`` bytes, or anywhere if that is 0.

    Two fields that no reader needs differ between aligned records and others. They stay as they are, so that the same
    save or conversion gives the same bytes in every version."""

    name: bytes
    nbytes: int
    offset: int
    crc: int | None
    align: int

    @property
    def zip64(self) -> bool:
        return self.nbytes >= _MAX_32

    @property
    def flags(self) -> int:
        return _CRC_FOLLOWS if self.crc is None else 0

    def local_header(self) -> bytes:
        size, extra = 0 if self.crc is None else self.nbytes, b""
        if self.zip64:  # with this field, readers expect a descriptor with 8-byte sizes
            size = self.nbytes if self.align else size
            size, extra = _MAX_32, struct.pack("<HHQQ", 1, 16, size, size)
        if self.align:
            padding = -(self.offset + 30 + len(self.name) + len(extra) + 4) % self.align
            extra += struct.pack("<HH", _PADDING, padding) + bytes(padding)
        fixed = (b"PK\x03\x04", 45 if self.zip64 else 20, self.flags, 0, 0, _DOS_DATE, self.crc or 0, size, size)
        return struct.pack("<4sHHHHHIIIHH", *fixed, len(self.name), len(extra)) + self.name + extra

    def descriptor(self, crc: int) -> bytes:
        return struct.pack("<4sIQQ" if self.zip64 else "<4sIII", b"PK\x07\x08", crc, self.nbytes, self.nbytes)

    def directory_entry(self, crc: int) -> bytes:
        size, offset, version, extra = self.nbytes, self.offset, 20, b""
        if size >= _MAX_32 or offset >= _MAX_32:
            large = [field for field in (size, size, offset) if field >= _MAX_32]
            extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large)
            size, offset, version = min(size, _MAX_32), min(offset, _MAX_32), 45
        made_by = 45 if self.align else version
        fixed = (b"PK\x01\x02", made_by, version, self.flags, 0, 0, _DOS_DATE, crc, size, size)
        rest = (len(self.name), len(extra), 0, 0, 0, 0, offset)
        return struct.pack("<4sHHHHHHIIIHHHHHII", *fixed, *rest) + self.name + extra


Content: TypeAlias = bytes | int | Callable[[Mapping[int, int]], bytes]
"""The content of a piece of an archive: bytes, the number of a payload, or a function that returns the bytes, given the
checksums of the payloads before it by their numbers."""


class Archive:
    """The layout of a zip as ``torch.save`` writes it, of ``nbytes``.

    ``pickled`` refers to the payloads, of ``sizes`` bytes each, as storages ``"0"``, ``"1"`` and so on, and then to
    ``storages``. With ``align``, the content of every record begins at a multiple of so many bytes. ``pieces`` are
    offset, number of bytes, and content; large contents are pieces of their own, because a join of them releases the
    GIL.
    """

    def __init__(self, pickled: bytes, storages: Sequence[bytes], sizes: Sequence[int] = (), align: int = 0) -> None:
        self.pieces: list[tuple[int, int, Content]] = []
        self.records: list[_Record] = []
        self.nbytes = 0
        known = [("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")]
        known += [(f"data/{number}", raw) for number, raw in enumerate(storages, len(sizes))]
        for name, raw in known:
            self._start(name, len(raw), crc32(raw), align)
            self._add(len(raw), raw)
        # What is known comes first: records with the CRC in their header. The CRC of a payload is known only when the
        # payload has passed, so it follows the content, and stands once more in the directory.
        for number, nbytes in enumerate(sizes):
            record = self._start(f"data/{number}", nbytes, None, align)
            self._add(nbytes, number)
            self._add(len(record.descriptor(0)), partial(_descriptor, record, number))
        # No method, which would refer to this object: it would be in a reference cycle.
        self.end = partial(_end_of_archive, self.records, len(known), self.nbytes)
        end = self.end({})
        self._add(len(end), self.end if sizes else end)

    def _start(self, name: str, nbytes: int, crc: int | None, align: int) -> _Record:
        record = _Record(f"archive/{name}".encode(), nbytes, self.nbytes, crc, align)
        self.records.append(record)
        header = record.local_header()
        self._add(len(header), header)
        return record

    def _add(self, nbytes: int, content: Content) -> None:
        self.pieces.append((self.nbytes, nbytes, content))
        self.nbytes += nbytes

    def known(self) -> list[bytes]:
        """Return the pieces that do not depend on payloads."""
        return [content for _, _, content in self.pieces if isinstance(content, bytes)]


def _end_of_archive(records: Sequence[_Record], first: int, at: int, crcs: Mapping[int, int]) -> bytes:
    """Return the last piece of an archive: the directory, which begins at ``at``, and its end. The payloads are those
    of the records from the number ``first`` on."""
    directory = b"".join(
        [
            record.directory_entry(crcs.get(number, 0) if record.crc is None else record.crc)
            for number, record in enumerate(records, -first)
        ]
    )
    return directory + _end_of_directory(len(records), len(directory), at)


def _descriptor(record: _Record, number: int, crcs: Mapping[int, int]) -> bytes:
    return record.descriptor(crcs.get(number, 0))


@lru_cache(maxsize=65536)
def frame_tensor(dtype: str, shape: tuple[int, ...]) -> Frame:
    """Return the frame of a row-major tensor. ``dtype`` is one of ``SAVED_DTYPES``. Frames are cached, because a
    training run has few distinct ones."""
    payload_bytes = math.prod(shape) * itemsize(dtype)
    pickled = b"\x80\x02" + tensor_pickle(written_dtype(dtype), shape, "0") + b"."
    archive = Archive(pickled, (), [payload_bytes])
    *others, payload = archive.records
    descriptor = payload.descriptor(0)
    # Only the two places of the CRC differ between two tensors of one dtype and shape. So the trailer is made once,
    # with zeros there.
    crc_at = (4, len(descriptor) + sum(len(record.directory_entry(0)) for record in others) + 16)
    return Frame(b"".join(archive.known()), payload_bytes, descriptor + archive.end({}), crc_at)


def frame_value(pickled: bytes, storages: Sequence[bytes] = ()) -> bytes:
    """Return the whole item of a plain value. ``pickled`` refers to the i-th of ``storages`` by the key ``str(i)``."""
    return b"".join(Archive(pickled, storages).known())


def tensor_pickle(dtype: str, shape: tuple[int, ...], key: str) -> bytes:
    """Return the pickle of a row-major tensor over the storage ``key`` of its archive, as ``torch.save`` writes it."""
    itemsize, storage = DTYPES[dtype]
    elements = math.prod(shape)
    # Old dtypes have a storage class of their own in torch's pickles, and their size counts elements. Newer ones are
    # over an untyped storage, whose size counts bytes, and name the dtype at the end.
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


def _end_of_directory(count: int, nbytes: int, offset: int) -> bytes:
    end = b""
    if offset >= _MAX_32 or count >= 0xFFFF:
        end = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, offset)
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + nbytes, 1)
    shown = min(count, 0xFFFF)
    return end + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, shown, shown, nbytes, min(offset, _MAX_32), 0)
