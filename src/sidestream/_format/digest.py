"""Cryptographic digests of the blocks of a payload. The extra ``digest`` installs blake3."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from ..errors import MissingExtraError
from ..options import Digest, DigestCheck

__all__ = ["DIGEST_BYTES", "DigestCheck", "DigestOf", "digest_check", "digest_of", "installed_digest"]

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


@cache
def installed_digest(digest: str | None) -> DigestOf | None:
    """Return the function of ``digest_of``. None without digests, or if the package is not installed."""
    if digest is None:
        return None
    try:
        from blake3 import blake3
    except ImportError:
        return None

    def of(block: memoryview) -> bytes:
        found: bytes = blake3(block).digest()  # releases the GIL from 2 KiB on
        return found

    return of


def digest_check(digest: str | None) -> DigestCheck | None:
    if digest is None:
        return None
    return "not installed" if installed_digest(digest) is None else "verified"
