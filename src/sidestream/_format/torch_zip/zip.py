"""A reader of the zips that ``torch.save`` writes. It refuses every feature of zips that ``torch.save`` never uses."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO
from zlib import crc32

from ...errors import CorruptCheckpointError, SidestreamError, UnsupportedCheckpointError

__all__ = ["TorchZip", "is_older", "is_zip", "other_zip"]

_MAX_DIRECTORY_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20
_ENCRYPTED = 0x01 | 0x40
_OLDER_NUMBER = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
_OLDER_BYTES = 32
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_BYTE_ORDERS = {(len(name), crc32(name)): name.decode() for name in (b"little", b"big")}


def is_zip(content: bytes | bytearray) -> bool:
    """Whether it begins as ``torch.save`` begins a zip; if not, it may be in torch's older format."""
    return content.startswith(b"PK\x03\x04")


def is_older(content: bytes | bytearray) -> bool:
    """Whether a file begins like those that ``torch.save`` wrote before it wrote zips."""
    return content[:1] == b"\x80" and _OLDER_NUMBER in content[:_OLDER_BYTES]


def other_zip(source: BinaryIO, nbytes: int) -> str | None:
    """Say what kind of zip this is, if ``torch.save`` did not write it, and what to do with it; None if the kind is
    unknown."""
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


class TorchZip:
    """The records of one item. ``source`` is a seekable binary file that holds the item and nothing else.

    Raises ``CorruptCheckpointError`` on entry and on every read where the zip is malformed, has compressed, encrypted,
    overlapping or repeated records, or claims bytes that it does not have; ``UnsupportedCheckpointError`` for
    big-endian items, and for those that are no zips but torch's older format. Errors of ``source`` itself (``OSError``)
    pass through.
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
        """All records lie in one folder, which is named after the file that ``torch.save`` was given."""
        prefixes = {name.partition("/")[0] for name in self._records}
        if len(prefixes) != 1:
            raise _malformed("its records do not lie in one folder")
        return prefixes.pop() + "/"

    def _check_byte_order(self) -> None:
        # the directory's checksum tells the two apart, which saves a read
        info = self._records.get(self._prefix + "byteorder")
        order = "little" if info is None else _BYTE_ORDERS.get((info.file_size, info.CRC))
        if order == "big":
            raise UnsupportedCheckpointError("written on a big-endian machine, which this version does not read")
        if order is None:
            raise _malformed("its byte order is none")

    def read(self, name: str, most_bytes: int) -> bytes:
        """The content of a record of at most ``most_bytes``, whose checksum was found right."""
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
        """Compare the checksum of every record ``but`` that one, reading them all."""
        for name, info in self._records.items():
            if name == f"{self._prefix}{but}":
                continue
            with _translated(), self._zip.open(info) as record:
                while record.read(_PIECE_BYTES):
                    pass

    def payload_offset(self, name: str) -> int:
        """Where the content of a record begins; all of it lies within the item, before the directory."""
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


class _Window(io.RawIOBase):
    """``source`` for ``zipfile``: whatever lengths the zip claims, a read asks for no more than there is.

    ``largest_read`` bounds the directory while that is read, as ``zipfile`` makes objects of all of it.
    """

    def __init__(self, source: BinaryIO, size: int) -> None:
        self._source = source
        self._size = size
        self._position = 0
        self.largest_read = _MAX_DIRECTORY_BYTES

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise _malformed("it points before its beginning")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._size - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > self.largest_read:
            raise _malformed(f"its directory has {wanted} bytes, more than {self.largest_read}")
        self._source.seek(self._position)
        parts = []
        while wanted:
            part = self._source.read(wanted)
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
            self._position += len(part)
        return b"".join(parts)


@contextmanager
def _translated() -> Iterator[None]:
    """``zipfile`` meets a malformed zip with more kinds of errors than its own."""
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
