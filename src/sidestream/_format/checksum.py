"""CRC-32 (that of zip files, IEEE 802.3) for each block, the CRC of a payload from the CRCs of its blocks, and
cryptographic digests of the blocks, for which the extra ``digest`` installs blake3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, TypeAlias

from ..errors import MissingExtraError
from ..options import Digest
from .records import BLOCK_BYTES

__all__ = [
    "CRC_ENGINE",
    "DIGEST_BYTES",
    "DigestOf",
    "block_count",
    "block_crcs",
    "combine",
    "crc32",
    "digest_of",
    "installed_digest",
    "join_blocks",
    "pack_crcs",
    "unpack_crcs",
]


try:
    from blake3 import blake3 as _installed

    _blake3: Callable[[memoryview], Any] | None = _installed
except ImportError:  # the extra ``digest``
    _blake3 = None

try:
    from isal.isal_zlib import crc32, crc32_combine  # 27 GB/s, zlib 6

    CRC_ENGINE = "isal"
except ImportError:
    from zlib import crc32

    CRC_ENGINE = "zlib"


Burst: TypeAlias = Callable[[], AbstractContextManager[object]]
"""A function that returns a context for many short calls, each of which releases the GIL."""

_BURST_BLOCKS = 4
_POLYNOMIAL = 0xEDB88320  # bit-reversed: the highest bit is x**0


def block_count(nbytes: int) -> int:
    """Return the number of blocks, and so of CRCs, of a payload of ``nbytes``."""
    return -(-nbytes // BLOCK_BYTES)


def block_crcs(view: memoryview, burst: Burst = nullcontext) -> list[int]:
    """Return the CRC of each block in a part of a payload. The part begins at the start of a block."""
    starts = range(0, len(view), BLOCK_BYTES)
    # isal needs some 40 us for a block. To get the GIL back from a busy loop takes many times as long.
    with burst() if CRC_ENGINE == "isal" and len(starts) >= _BURST_BLOCKS else nullcontext():
        return [crc32(view[start : start + BLOCK_BYTES]) for start in starts]


def pack_crcs(crcs: list[int]) -> bytes:
    return struct.pack(f"<{len(crcs)}I", *crcs)


def unpack_crcs(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC of two runs of bytes, one after the other, from the CRC of each (as zlib's ``crc32_combine``)."""
    if CRC_ENGINE == "isal":  # 0.2 us, the other way 8: payloads have a block for each MiB
        return crc32_combine(first, second, second_bytes)
    return _combined(first, second, second_bytes)


def _combined(first: int, second: int, second_bytes: int) -> int:
    return _times(_power_of_x(8 * second_bytes), first) ^ second


def join_blocks(crcs: list[int], nbytes: int) -> int:
    """Return the CRC of a payload of ``nbytes`` from the CRCs of its blocks."""
    if not crcs:
        return 0
    total = crcs[0]
    for index in range(1, len(crcs)):
        total = combine(total, crcs[index], min(BLOCK_BYTES, nbytes - index * BLOCK_BYTES))
    return total


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the polynomial of the CRC."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    """Return ``x ** exponent`` modulo the polynomial of the CRC. To append n zero bits is to multiply a CRC by
    ``x ** n``."""
    power = 0x80000000
    for bit in range(exponent.bit_length()):
        if exponent >> bit & 1:
            power = _times(power, _square(bit))
    return power


@cache
def _square(bit: int) -> int:
    """Return ``x ** (2 ** bit)``."""
    return _times(_square(bit - 1), _square(bit - 1)) if bit else 0x40000000


DIGEST_BYTES = 32

DigestOf: TypeAlias = Callable[[memoryview], bytes]


def digest_of(digest: Digest) -> DigestOf:
    """Return the function that computes the digest of a block. Raises ``MissingExtraError``."""
    found = installed_digest(digest)
    if found is None:
        raise MissingExtraError(
            f"digest={digest!r} needs the package blake3: pip install 'sidestream[digest]'", extra="digest"
        )
    return found


def installed_digest(digest: str | None) -> DigestOf | None:
    """Return the function of ``digest_of``. None without digests, or if the package is not installed."""
    if digest is None or _blake3 is None:
        return None
    return _digest_of_block


def _digest_of_block(block: memoryview) -> bytes:
    found: bytes = _blake3(block).digest()  # type: ignore[misc]  # installed; it releases the GIL from 2 KiB on
    return found
