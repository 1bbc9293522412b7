"""An export that begins when the test says so: between the commit and that, everything may happen."""

from __future__ import annotations

import asyncio
from typing import Any

from sidestream import HF

__all__ = ["Late"]


class Late:
    """``HF``, whose export waits for ``begins``. With ranks, those other than 0 open the checkpoint before that."""

    def __init__(self, export: HF) -> None:
        self._export = export
        self.begins = asyncio.Event()

    def sink(self, **options: Any) -> Late:
        self._sink = self._export.sink(**options)
        return self

    async def prepare(self, save: Any) -> None:
        await self.begins.wait()
        await self._sink.prepare(save)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)
