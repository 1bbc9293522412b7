"""An engine that the test holds by the hand, and a system that starts no threads."""

from __future__ import annotations

import threading

import pytest

from sidestream._runtime import threads
from sidestream._runtime.threads import Stop
from sidestream._staging import Copy, HostEngine


class GatedEngine(HostEngine):
    """The host engine, but no copy begins before the test opens the gate; ``fail`` makes it raise instead."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.begun = threading.Event()
        """The first copy is about to be made."""
        self.fail: Exception | None = None

    def copy(self, copy: Copy, address: int, *, stop: Stop) -> None:
        self.begun.set()
        assert self.gate.wait(60)
        if self.fail is not None:
            raise self.fail
        super().copy(copy, address, stop=stop)


def start_no_threads(name: str, patch: pytest.MonkeyPatch) -> None:
    """As if the system had no more threads for the pool of this name."""
    start = threads._start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threads, "_start", start_others)
