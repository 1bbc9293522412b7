"""What several ranks save and load as one."""

from __future__ import annotations
