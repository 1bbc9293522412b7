"""Cryptographic digests of a payload's blocks: the extra ``digest`` brings blake3."""

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
    """The function that gives a block's digest. Raises ``MissingExtraError``."""
    found = installed_digest(digest)
    if found is None:
        raise MissingExtraError(
            f"digest={digest!r} needs the package blake3: pip install 'sidestream[digest]'", extra="digest"
        )
    return found


@cache
def installed_digest(digest: str | None) -> DigestOf | None:
    """As ``digest_of``; None where there are no digests, or the package is not installed."""
    if digest is None:
        return None
    try:
        from blake3 import blake3
    except ImportError:
        return None

    def of(block: memoryview) -> bytes:
        found: bytes = blake3(block).digest()  # lets go of the GIL from 2 KiB on
        return found

    return of


def digest_check(digest: str | None) -> DigestCheck | None:
    if digest is None:
        return None
    return "not installed" if installed_digest(digest) is None else "verified"
