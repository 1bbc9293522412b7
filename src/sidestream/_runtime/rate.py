"""How fast a stage may read its sources."""

from __future__ import annotations

import threading
import time

from .threads import Stop

__all__ = ["Pace"]


class Pace:
    """At most ``bytes_per_second`` (None: as fast as it goes), until somebody is in a hurry: a writer at the fence."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._changed = threading.Condition()
        self._hurried = bytes_per_second is None
        self._due = time.monotonic()

    def hurry(self) -> None:
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def spend(self, nbytes: int, stop: Stop) -> None:
        """Wait until ``nbytes`` more may follow what went before. Raises ``ClosedError`` when ``stop`` is set."""
        if self._rate is None or self._hurried:
            return
        with stop.waking(self._wake), self._changed:
            self._due = max(self._due, time.monotonic()) + nbytes / self._rate
            while (rest := self._due - time.monotonic()) > 0 and not self._in_a_hurry():
                stop.check()
                self._changed.wait(rest)
        stop.check()

    def _in_a_hurry(self) -> bool:
        return self._hurried

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
