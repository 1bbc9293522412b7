"""What becomes of the memory of a stager between two saves, in the stager's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .arena import SEGMENT_BYTES, Arena

__all__ = ["Idle"]

_GROW_S = 1.0  # after a save; later if its memory is still in use then
_TRIES = 6
_TRIM_S = 600.0
_KNOWN = 4


class Idle:
    """Memory for states that pass through: a save uses the same few windows again and again, so the arena stays small.

    When a state has been saved for the second time, the arena grows to its size, once, so that later stages end before
    anything is written. When no state has been saved for ten minutes, all of it is unmapped, and the arena does not
    grow before a state has been saved twice again.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._known: dict[tuple[int, ...], int] = {}
        self._wanted: tuple[int, ...] | None = None
        self._tries = 0
        self._most = arena.budget_bytes
        self._grow_at = self._trim_at = float("inf")

    def passed(self, sizes: tuple[int, ...]) -> None:
        """A state has been staged in images of ``sizes``."""
        times = self._known.pop(sizes, 0) + 1
        self._known[sizes] = times
        while len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        if times == 2:
            self._wanted, self._tries = sizes, 0
        self._schedule()

    def grows_to(self, sizes: Sequence[int]) -> bool:
        """Whether the arena should have grown to a state with images of ``sizes``, and was never idle for long enough.
        Then a stage of that state touches what is missing."""
        return self._wanted == tuple(sizes)

    @property
    def wanted_bytes(self) -> int:
        """The size of the state that the arena will grow to."""
        wanted = self._wanted
        return 0 if wanted is None else sum(wanted) + SEGMENT_BYTES

    def set_aside(self, most: int) -> None:
        """Grow to ``most`` bytes at most, and trim also what no state has passed through."""
        self._most = most
        self._schedule()

    def _schedule(self) -> None:
        now = time.monotonic()
        self._trim_at = now + _TRIM_S
        self._grow_at = float("inf") if self._wanted is None else now + _GROW_S

    def due_s(self) -> float | None:
        """Return in how many seconds ``run`` is to be called; None: not before something is staged."""
        at = min(self._grow_at, self._trim_at)
        return None if at == float("inf") else max(0.0, at - time.monotonic())

    def run(self, busy: Callable[[], bool]) -> None:
        """Do what is due, until ``busy()`` says that the thread is needed."""
        now = time.monotonic()
        if now >= self._trim_at:
            self._grow_at = self._trim_at = float("inf")
            self._wanted = None
            self._known.clear()
            self._arena.trim_idle()
        elif now >= self._grow_at and self._wanted is not None:
            self._tries += 1
            if self._arena.grow_for(self._wanted, busy, self._most) or self._tries == _TRIES:
                self._wanted, self._grow_at = None, float("inf")
            else:
                self._grow_at = now + _GROW_S * 2**self._tries
