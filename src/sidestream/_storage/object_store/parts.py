"""The size of the parts of a large object, and the checksum that S3 keeps of the whole object."""

from __future__ import annotations

from base64 import b64encode
from importlib import import_module
from importlib.util import find_spec

__all__ = ["Checksum", "part_bytes_for"]

_MOST_PARTS = 9_000  # S3 takes 10,000
_MIB = 1 << 20


def part_bytes_for(nbytes: int, part_bytes: int) -> int:
    """Return ``part_bytes``, or as many whole MiB as an object of ``nbytes`` needs to have at most 9,000 parts."""
    needed = -(-nbytes // _MOST_PARTS)
    return max(part_bytes, -(-needed // _MIB) * _MIB)


class Checksum:
    """The CRC-64/NVME of a sequence of bytes. S3 has this checksum of a whole object also after an upload in parts. It
    is computed by awscrt, at some 30 GB/s; ``known`` says whether awscrt is installed."""

    known = find_spec("awscrt") is not None

    def __init__(self) -> None:
        self._crc64 = import_module("awscrt.checksums").crc64nvme
        self._crc = 0

    def update(self, view: memoryview) -> None:
        self._crc = self._crc64(view, self._crc)

    @property
    def value(self) -> str:
        """The checksum in base64, as S3 writes it."""
        return b64encode(self._crc.to_bytes(8, "big")).decode()
