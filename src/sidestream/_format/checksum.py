"""CRC-32 (the zip's, IEEE 802.3) per block, and the arithmetic that joins blocks into the CRC of the whole."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import TypeAlias

from .records import BLOCK_BYTES

try:
    from isal.isal_zlib import crc32  # 27 GB/s where zlib gives 6

    CRC_ENGINE = "isal"
except ImportError:
    from zlib import crc32

    CRC_ENGINE = "zlib"

__all__ = ["CRC_ENGINE", "block_count", "block_crcs", "combine", "crc32", "join_blocks", "pack_crcs", "unpack_crcs"]

Burst: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Makes the context of many short calls that each release the GIL."""

_BURST_BLOCKS = 4
_POLYNOMIAL = 0xEDB88320  # bit-reversed: the highest bit is x**0


def block_count(nbytes: int) -> int:
    """How many CRCs a payload of ``nbytes`` carries."""
    return -(-nbytes // BLOCK_BYTES)


def block_crcs(view: memoryview, burst: Burst = nullcontext) -> list[int]:
    """The CRC of each block of a run of payload that begins with a block."""
    starts = range(0, len(view), BLOCK_BYTES)
    # isal needs some 40 us for a block, a fraction of what it costs to get the GIL back from a busy loop.
    with burst() if CRC_ENGINE == "isal" and len(starts) >= _BURST_BLOCKS else nullcontext():
        return [crc32(view[start : start + BLOCK_BYTES]) for start in starts]


def pack_crcs(crcs: list[int]) -> bytes:
    return struct.pack(f"<{len(crcs)}I", *crcs)


def unpack_crcs(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC of two runs of bytes, one after the other, from the CRC of each (after zlib's ``crc32_combine``)."""
    return _times(_power_of_x(8 * second_bytes), first) ^ second


def join_blocks(crcs: list[int], nbytes: int) -> int:
    """The CRC of a payload of ``nbytes`` from those of its blocks."""
    if not crcs:
        return 0
    total = crcs[0]
    for index in range(1, len(crcs)):
        total = combine(total, crcs[index], min(BLOCK_BYTES, nbytes - index * BLOCK_BYTES))
    return total


def _times(a: int, b: int) -> int:
    """Product of two polynomials over GF(2) modulo the CRC's."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    """``x ** exponent`` modulo the CRC's polynomial; appending n zero bits multiplies a CRC by ``x ** n``."""
    power = 0x80000000
    for bit in range(exponent.bit_length()):
        if exponent >> bit & 1:
            power = _times(power, _square(bit))
    return power


@cache
def _square(bit: int) -> int:
    """``x ** (2 ** bit)``."""
    return _times(_square(bit - 1), _square(bit - 1)) if bit else 0x40000000
