"""An export that begins when the test says so: between the commit and that, everything may happen."""

from __future__ import annotations

import threading
from typing import Any

from sidestream import HF
from sidestream._runtime.threads import io_threads

__all__ = ["Late"]


class Late:
    """``HF``, whose export waits for ``begins``. With ranks, those other than 0 open the checkpoint before that."""

    def __init__(self, export: HF) -> None:
        self._export = export
        self.begins = threading.Event()

    def sink(self, **options: Any) -> Late:
        self._sink = self._export.sink(**options)
        return self

    async def prepare(self, save: Any) -> None:
        await io_threads().run(self.begins.wait, 60.0)
        await self._sink.prepare(save)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)
