"""Where the tests of stores save to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from _s3_server import S3Server

import sidestream

__all__ = ["Place", "policy", "s3_place"]


@dataclass
class Place:
    """Where to save to, and the keywords that every call needs for it."""

    base: str
    keywords: dict[str, Any] = field(default_factory=dict)
    server: S3Server | None = None

    def url(self, name: str = "ckpt") -> str:
        return f"{self.base}/{name}"


def policy(engine: str = "auto", **changes: Any) -> sidestream.StorePolicy:
    """With small parts and short patience."""
    options: dict[str, Any] = {"engine": engine, "part_bytes": 5 << 20, "request_timeout_s": 20.0, **changes}
    return sidestream.StorePolicy(**options)


def s3_place(server: S3Server, engine: str, **changes: Any) -> Place:
    keywords = {"storage": sidestream.Storage(server.options, policy=policy(engine, **changes))}
    return Place(f"s3://{server.bucket}/run", keywords, server)
