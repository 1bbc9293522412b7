"""The decision whether a stage that needs memory waits for memory that is being written, or touches fresh memory.

More memory than keeps the writers busy makes the copies end earlier, but not the commit. A processor needs as long to
touch memory for the first time as a fast disk needs to write as many bytes. In a virtual machine whose host has to find
the pages first, it needs three times as long.
"""

from __future__ import annotations

import time

_ENOUGH_BYTES = 192 << 20
_ENOUGH_WINDOWS = 4  # the number of windows that are written at the same time


class Drain:
    """The rate at which the memory of one stage is returned. Used by the thread that leases memory.

    The stage waits while its writer returns memory at least as fast as fresh memory was last touched. A slower writer,
    or one that does not write at all, delays the stage once, by the time that it takes to touch as many bytes as the
    stage has in flight.
    """

    def __init__(self, returned_bytes: int) -> None:
        self._leased_bytes = 0
        self._before = returned_bytes
        self._since: tuple[float, int, int] | None = None

    def leased(self, nbytes: int) -> None:
        """Count memory that the stage has leased."""
        self._leased_bytes += nbytes

    def patience_s(self, nbytes: int, returned_bytes: int, touched_bytes_per_s: float) -> float:
        """Return how long to wait for ``nbytes``. 0 or less: touch fresh memory. ``returned_bytes`` are the bytes of
        all leases of the arena that have ended."""
        in_flight = self._leased_bytes - (returned_bytes - self._before)
        # Below this the writers could run out of work. Waiting would make the commit later, and touching memory does
        # not.
        if in_flight < max(_ENOUGH_BYTES, _ENOUGH_WINDOWS * nbytes):
            return 0.0
        now = time.monotonic()
        # The time to touch as many bytes as are in flight is a budget that the stage has once. A writer that returns
        # memory faster than that refills it with each window, so the stage never touches more. A slower one uses it up,
        # and the arena grows.
        if self._since is None:
            self._since = now, in_flight, returned_bytes
        since, staged, returned = self._since
        return (staged + returned_bytes - returned) / touched_bytes_per_s - (now - since)
