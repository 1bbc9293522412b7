"""All the verbs."""

from __future__ import annotations

from .frame import app

__all__ = ["app"]
