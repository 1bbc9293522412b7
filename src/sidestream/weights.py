"""Weights of servers: exchanged while requests use them, and taken from a run or from the memory of a trainer."""

from __future__ import annotations

from ._weights.following import Candidate, Follower, FollowerHealth
from ._weights.live import Live, LiveHealth, ServedReading
from ._weights.publisher import Publisher, PublisherHealth
from ._weights.subscriber import Subscriber, VersionImage
from ._weights.versions import AppliedReport, PublishedVersion
from .options import strip_prefix

__all__ = [
    "AppliedReport",
    "Candidate",
    "Follower",
    "FollowerHealth",
    "Live",
    "LiveHealth",
    "PublishedVersion",
    "Publisher",
    "PublisherHealth",
    "ServedReading",
    "Subscriber",
    "VersionImage",
    "strip_prefix",
]
