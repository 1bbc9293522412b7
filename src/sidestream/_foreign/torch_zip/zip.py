"""A reader of the zip files of ``torch.save``. It raises an error for everything that ``torch.save`` does not write,
because zip files can contain many kinds of attacks."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO
from zlib import crc32

from ...errors import CorruptCheckpointError, SidestreamError, UnsupportedCheckpointError

_MAX_DIRECTORY_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20
_ENCRYPTED = 0x01 | 0x40
_OLDER_NUMBER = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
_OLDER_BYTES = 32
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL_CRC = 14  # offset in a local header
_DIRECTORY_HEADER = struct.Struct("<4s6H3L5H2L")
_DIRECTORY_CRC = 16  # offset in an entry of the directory
_LENGTHS = slice(10, 13)  # of name, extra fields and comment, which follow the entry
_END = b"PK\x05\x06"
_END_BYTES = 22  # without a comment
_LOCATOR = struct.Struct("<4sLQL")  # before the end: where the end record with numbers of 64 bits is
_END_64_BYTES = 56
_DESCRIPTOR = b"PK\x07\x08"  # begins the checksum and the sizes after a record
_BYTE_ORDERS = {(len(name), crc32(name)): name.decode() for name in (b"little", b"big")}


def is_zip(content: bytes | bytearray) -> bool:
    """Return whether ``content`` begins like a zip of ``torch.save``. If not, it may be in the older format of
    torch."""
    return content.startswith(b"PK\x03\x04")


def is_older(content: bytes | bytearray) -> bool:
    """Return whether a file begins like those that ``torch.save`` wrote before it wrote zips."""
    return content[:1] == b"\x80" and _OLDER_NUMBER in content[:_OLDER_BYTES]


def other_zip(source: BinaryIO, nbytes: int) -> str | None:
    """Return text that says what kind of zip this is, and what to do with it, for a zip that ``torch.save`` did not
    write. None if the kind is unknown."""
    try:
        with _translated():
            names = zipfile.ZipFile(_Window(source, nbytes)).namelist()
    except CorruptCheckpointError:
        return None
    ends = {name.partition("/")[2] for name in names}
    if "constants.pkl" in ends and any(name.startswith("code/") for name in ends):
        return (
            "it is a TorchScript program (torch.jit.save), which is code: torch.jit.load it and torch.save its "
            "state_dict()"
        )
    if "archive_format" in ends and any(name.startswith("models/") for name in ends):
        return (
            "it is an exported program (torch.export.save), which is code: torch.export.load it and torch.save its "
            "state_dict"
        )
    if all(name.endswith(".npy") for name in names):
        return "it holds NumPy arrays: load it with numpy.load, and save the arrays as tensors"
    if not ends & {"data.pkl", "version", "byteorder"}:
        return "it is a zip file that torch.save did not write: extract it first"
    return None


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """The place of a record in an item: its content, and its checksum in the directory. ``free`` has the ranges of
    bytes that only the reading of this record depends on: the content, and all copies of the checksum."""

    start: int
    end: int
    crc_at: int
    free: tuple[tuple[int, int], ...]


class TorchZip:
    """The records of one item. ``source`` is a seekable binary file that holds only the item.

    The constructor and every read raise ``CorruptCheckpointError`` if the zip is malformed, has compressed, encrypted,
    overlapping or repeated records, or claims bytes that it does not have. The constructor raises
    ``UnsupportedCheckpointError`` for big-endian items, and for items in the older format of torch. Errors of
    ``source`` itself (``OSError``) pass through.
    """

    def __init__(self, source: BinaryIO, item_bytes: int) -> None:
        self._window = _Window(source, item_bytes)
        if is_older(self._window.read(_OLDER_BYTES)):
            raise UnsupportedCheckpointError(
                "written in the format that torch.save had before zips, which this version does not read; load it with "
                "torch.distributed.checkpoint"
            )
        with _translated():
            self._zip = zipfile.ZipFile(self._window)
        self._window.largest_read = item_bytes
        self._records = self._checked_records(item_bytes)
        self._prefix = self._find_prefix()
        self._check_byte_order()

    def _checked_records(self, item_bytes: int) -> dict[str, zipfile.ZipInfo]:
        records: dict[str, zipfile.ZipInfo] = {}
        total = 0
        for info in self._zip.infolist():
            if info.filename in records:
                raise _malformed(f"two records are named {info.filename[:80]!a}")
            if info.flag_bits & _ENCRYPTED or info.compress_type != zipfile.ZIP_STORED:
                raise _malformed(f"record {info.filename[:80]!a} is compressed or encrypted")
            total += info.file_size + _LOCAL_HEADER.size
            if info.file_size != info.compress_size or info.header_offset < 0 or total > item_bytes:
                raise _malformed(f"record {info.filename[:80]!a} claims bytes that the item does not have")
            records[info.filename] = info
        return records

    def _find_prefix(self) -> str:
        """Return the folder of all records. ``torch.save`` names it after the file."""
        prefixes = {name.partition("/")[0] for name in self._records}
        if len(prefixes) != 1:
            raise _malformed("its records do not lie in one folder")
        return prefixes.pop() + "/"

    def _check_byte_order(self) -> None:
        # the checksum in the directory distinguishes the two contents, so the record is not read
        info = self._records.get(self._prefix + "byteorder")
        order = "little" if info is None else _BYTE_ORDERS.get((info.file_size, info.CRC))
        if order == "big":
            raise UnsupportedCheckpointError("written on a big-endian machine, which this version does not read")
        if order is None:
            raise _malformed("its byte order is unknown")

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the content of a record of at most ``most_bytes``, after a comparison of its checksum."""
        info = self.info(name)
        if info.file_size > most_bytes:
            raise _malformed(f"record {name[:80]!a} has {info.file_size} bytes, more than {most_bytes}")
        with _translated():
            return self._zip.read(info)

    def info(self, name: str) -> zipfile.ZipInfo:
        info = self._records.get(self._prefix + name)
        if info is None:
            raise _malformed(f"it has no record {name[:80]!a}")
        return info

    def check(self, but: str | None = None) -> None:
        """Read every record except ``but``, and compare its checksum."""
        for name, info in self._records.items():
            if name == f"{self._prefix}{but}":
                continue
            with _translated(), self._zip.open(info) as record:
                while record.read(_PIECE_BYTES):
                    pass

    def payload_offset(self, name: str) -> int:
        """Return the offset of the content of a record. All of it lies within the item, before the directory."""
        info = self.info(name)
        self._window.seek(info.header_offset)
        header = self._window.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size:
            raise _malformed(f"record {name[:80]!a} lies outside of the item")
        signature, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        if signature != b"PK\x03\x04" or method != zipfile.ZIP_STORED or flags & _ENCRYPTED:
            raise _malformed(f"record {name[:80]!a} has no header")
        if self._window.read(name_bytes) != info.orig_filename.encode():
            raise _malformed(f"record {name[:80]!a} has another name in its header")
        start = info.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)
        if start + info.file_size > self._zip.start_dir:
            raise _malformed(f"record {name[:80]!a} reaches into the directory")
        return start

    def places(self) -> dict[str, RecordPlace]:
        """Return the places of all records, by name. Raises ``CorruptCheckpointError`` also if records overlap that
        nothing else reads, or if the zip does not end with its directory."""
        end = self._bytes_at(self._window.nbytes - _END_BYTES, _END_BYTES)
        if not end.startswith(_END) or not end.endswith(b"\0\0"):
            raise _malformed("it does not end with its directory")
        locator_at = self._window.nbytes - _END_BYTES - _LOCATOR.size
        signature, _, record_at, _ = _LOCATOR.unpack(self._bytes_at(max(locator_at, 0), _LOCATOR.size))
        if signature == b"PK\x06\x07" and record_at != locator_at - _END_64_BYTES:
            # From CPython issue 139700 on, zipfile follows this offset, which may lead into the content of a record.
            raise _malformed("its directory is not where torch.save writes it")
        places: dict[str, RecordPlace] = {}
        taken: list[tuple[int, int]] = [(self._zip.start_dir, self._window.nbytes)]
        entry_at = self._zip.start_dir
        for full_name, info in self._records.items():
            entry = self._bytes_at(entry_at, _DIRECTORY_HEADER.size)
            name = full_name.removeprefix(self._prefix)
            start = self.payload_offset(name)
            end_at = start + info.file_size
            free = [
                (info.header_offset + _LOCAL_CRC, info.header_offset + _LOCAL_CRC + 4),
                (start, end_at),
                (entry_at + _DIRECTORY_CRC, entry_at + _DIRECTORY_CRC + 4),
            ]
            taken.append((info.header_offset, end_at))
            if self._bytes_at(end_at, 4) == _DESCRIPTOR:
                free.append((end_at + 4, end_at + 8))
                taken.append((end_at, end_at + 8))
            places[name] = RecordPlace(start, end_at, entry_at + _DIRECTORY_CRC, tuple(free))
            entry_at += _DIRECTORY_HEADER.size + sum(_DIRECTORY_HEADER.unpack(entry)[_LENGTHS])
        taken.sort()
        if any(end_at > start for (_, end_at), (start, _) in pairwise(taken)):
            raise _malformed("its records overlap")
        return places

    def _bytes_at(self, offset: int, nbytes: int) -> bytes:
        self._window.seek(offset)
        return self._window.read(nbytes)


class Seekable(io.RawIOBase):
    """A readable and seekable file of ``nbytes``. Subclasses implement ``readinto`` or ``read``. A position before its
    beginning, which only a malformed zip leads to, raises ``CorruptCheckpointError``."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = (0, self._position, self.nbytes)[whence] + offset
        if position < 0:
            raise _malformed("it points before its beginning")
        self._position = position
        return position


class _Window(Seekable):
    """``source`` as a file for ``zipfile``. No read extends beyond the item, whatever lengths the zip claims.

    While the directory is read, ``largest_read`` limits it, because ``zipfile`` makes objects for all of it.
    """

    def __init__(self, source: BinaryIO, nbytes: int) -> None:
        super().__init__(nbytes)
        self._source = source
        self.largest_read = _MAX_DIRECTORY_BYTES

    def read(self, size: int | None = -1) -> bytes:
        left = max(self.nbytes - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > self.largest_read:
            raise _malformed(f"its directory has {wanted} bytes, more than {self.largest_read}")
        self._source.seek(self._position)
        content = self._source.read(wanted)
        self._position += len(content)
        return content


@contextmanager
def _translated() -> Iterator[None]:
    """Convert errors of ``zipfile`` to ``CorruptCheckpointError``. For a malformed zip it raises many kinds of
    errors."""
    try:
        yield
    except SidestreamError:
        raise
    except (
        zipfile.BadZipFile,
        ArithmeticError,
        EOFError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        struct.error,
    ) as error:
        raise _malformed(f"{type(error).__name__}: {ascii(str(error)[:200])[1:-1]}") from None


def _malformed(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"malformed torch.save zip: {what}")
