"""A stager whose stages end when the test says so."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import sidestream
from sidestream._runtime.threads import TorchThreads
from sidestream.errors import ClosedError

__all__ = ["HeldStager"]


class HeldStager(sidestream.AsyncStager):
    """A stager that begins to plan and copy a state when ``let_go`` is called: a save that is in flight for as long as
    the test wants. ``held`` has the state of each stage, in the order of the calls."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._threads = TorchThreads("sidestream-stage", 16, self._idle)  # one for each stage that is held
        self.held: list[Any] = []
        self.holds = True
        """Whether later stages are held."""
        self._gates: list[threading.Event] = []
        self._gate_of: weakref.WeakKeyDictionary[Any, threading.Event] = weakref.WeakKeyDictionary()

    def prepare(self, captured: Any, *args: Any, **options: Any) -> Any:
        staging = super().prepare(captured, *args, **options)
        gate = self._gate_of[staging] = threading.Event()
        if not self.holds:
            gate.set()
        self.held.append(captured.root)
        self._gates.append(gate)
        return staging

    def enqueue(self, staging: Any, lay_out: Any) -> None:
        gate = self._gate_of[staging]

        def held(captured: Any) -> Any:
            while not gate.wait(0.01):
                if staging.stop.is_set():
                    raise ClosedError("the stage was given up while it was held")
            return lay_out(captured)

        super().enqueue(staging, held)

    def let_go(self, at: int | None = None) -> None:
        """Let all stages go on, or the one that was begun ``at``-th."""
        for number, gate in enumerate(list(self._gates)):
            if at in (None, number):
                gate.set()
