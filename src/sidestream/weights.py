"""Weights of servers: exchanged while requests use them, and taken from the newest step of a run."""

from __future__ import annotations

from ._weights.following import Candidate, Follower, FollowerHealth
from ._weights.live import Live, LiveHealth, ServedReading
from .options import strip_prefix

__all__ = ["Candidate", "Follower", "FollowerHealth", "Live", "LiveHealth", "ServedReading", "strip_prefix"]
