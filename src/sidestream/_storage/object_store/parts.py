"""How a large object is cut into parts, and the checksum that S3 keeps of the whole."""

from __future__ import annotations

from base64 import b64encode
from importlib import import_module
from importlib.util import find_spec

__all__ = ["Checksum", "part_bytes_for"]

_MOST_PARTS = 9_000  # S3 takes 10,000
_MIB = 1 << 20


def part_bytes_for(nbytes: int, part_bytes: int) -> int:
    """``part_bytes``, or what an object of ``nbytes`` needs in order to have no more than 9,000 parts, in whole MiB."""
    needed = -(-nbytes // _MOST_PARTS)
    return max(part_bytes, -(-needed // _MIB) * _MIB)


class Checksum:
    """CRC-64/NVME as the bytes pass: the one that S3 has of a whole object however it was uploaded. Some 30 GB/s with
    awscrt, which has to be there (``known``)."""

    known = find_spec("awscrt") is not None

    def __init__(self) -> None:
        self._crc64 = import_module("awscrt.checksums").crc64nvme
        self._crc = 0

    def update(self, view: memoryview) -> None:
        self._crc = self._crc64(view, self._crc)

    @property
    def value(self) -> str:
        """In base64, as S3 writes it."""
        return b64encode(self._crc.to_bytes(8, "big")).decode()
