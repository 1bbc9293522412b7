"""What another process opens a store with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..options import StorePolicy

__all__ = ["StoreAddress"]


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What another process on this machine opens the same store with: secrets included, which are never shown."""

    url: str = field(repr=False)
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    policy: StorePolicy | None = None

    def __reduce__(self) -> Any:
        raise TypeError("storage options hold credentials: they are not pickled")
