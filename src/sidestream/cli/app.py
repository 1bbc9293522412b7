"""All the verbs."""

from __future__ import annotations

from . import changing, looking  # noqa: F401  # each adds its verbs
from .frame import app

__all__ = ["app"]
