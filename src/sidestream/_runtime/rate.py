"""A limit on the rate at which a stage reads its sources, and the writer process writes."""

from __future__ import annotations

import time

from .threads import Condition, Stop


class RateLimiter:
    """A limit of ``bytes_per_second`` (None: no limit), until ``lift_limit()``: code that waits at the fence lifts
    it."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._changed = Condition()
        self._lifted = bytes_per_second is None
        self._due = time.monotonic()

    def lift_limit(self) -> None:
        """Remove the limit, also for threads that wait in ``spend``."""
        if self._lifted:
            return  # without the lock: all stages without a limit share one limiter, and a fork may find its lock taken
        with self._changed:
            self._lifted = True
            self._changed.notify_all()

    def spend(self, nbytes: int, stop: Stop) -> None:
        """Block until ``nbytes`` more bytes may be moved. May be called by any thread. Raises ``ClosedError`` when
        ``stop`` is set."""
        if self._rate is None or self._lifted:
            return
        with stop.waking(self._wake), self._changed:
            due = self._due = max(self._due, time.monotonic()) + nbytes / self._rate
            while (rest := due - time.monotonic()) > 0 and not self._is_lifted():
                stop.check()
                self._changed.wait(rest)
        stop.check()

    def _is_lifted(self) -> bool:
        return self._lifted

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
