"""When a stage that needs memory had better wait for some that is being written than touch fresh memory.

Memory beyond what keeps the writers busy makes the copies end earlier, but not the commit. To touch it for the first
time takes a processor as long as a fast disk needs to write as much, and three times as long where the host has to find
the pages first.
"""

from __future__ import annotations

import time

__all__ = ["Drain"]

_ENOUGH_BYTES = 192 << 20
_ENOUGH_WINDOWS = 4  # so many are written at a time


class Drain:
    """How fast what one stage has staged is written and given back. For the thread that leases memory.

    The stage waits for as long as its writer gives back what it has been given at the rate at which memory was touched
    before. A writer that is slower, or does not write at all, holds it up once, for as long as it takes to touch what
    has been staged by then.
    """

    def __init__(self, returned_bytes: int) -> None:
        self._leased_bytes = 0
        self._before = returned_bytes
        self._since: tuple[float, int, int] | None = None

    def leased(self, nbytes: int) -> None:
        """The stage has been given so much memory."""
        self._leased_bytes += nbytes

    def patience_s(self, nbytes: int, returned_bytes: int, touched_bytes_per_s: float) -> float:
        """Return how long to wait for ``nbytes``, at most 0 if fresh memory should be touched. ``returned_bytes``: what
        the arena has been given back since it was made."""
        in_flight = self._leased_bytes - (returned_bytes - self._before)
        if in_flight < max(_ENOUGH_BYTES, _ENOUGH_WINDOWS * nbytes):
            return 0.0
        now = time.monotonic()
        if self._since is None:
            self._since = now, in_flight, returned_bytes
        since, staged, returned = self._since
        return (staged + returned_bytes - returned) / touched_bytes_per_s - (now - since)
