"""The application with all its commands."""

from __future__ import annotations

from . import looking, recorded, writing  # noqa: F401  # each adds its commands
from .frame import app

__all__ = ["app"]
