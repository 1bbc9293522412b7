"""Growth and release of the memory of a stager between two saves, in the stager's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .arena import SEGMENT_BYTES, Arena

_GROW_S = 1.0  # after a save; longer if its memory is still in use
_TRIES = 6
_TRIM_S = 600.0
_KNOWN = 4


class IdleMemory:
    """A policy for the arena of a stager whose saves release each window as soon as it is written.

    Such a save uses the same few windows repeatedly, so the arena stays small. When a state has been saved for the
    second time, the arena grows once to the size of the state, so that later stages do not wait for writes. When no
    state has been saved for ten minutes, all memory is unmapped, unless it is registered with a device and its stager
    belongs to the program. After that the arena grows only when a state has again been saved twice.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._known: dict[tuple[int, ...], int] = {}
        self._wanted: tuple[int, ...] | None = None
        self._tries = 0
        self._most = arena.budget_bytes
        self._aside = False
        self._grow_at = self._trim_at = float("inf")

    def note_staged(self, sizes: tuple[int, ...]) -> None:
        """Count a state that was staged in images of ``sizes``, and schedule growth and release."""
        times = self._known.pop(sizes, 0) + 1
        self._known[sizes] = times
        while len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        # Not after the first save: a state that is saved once would leave memory behind that no later save needs.
        # Without the growth, each later save would stage through a few windows, and be staged 1.6 times as late.
        if times == 2:
            self._wanted, self._tries = sizes, 0
        self._schedule()

    def will_grow_to(self, sizes: Sequence[int]) -> bool:
        """Return whether the arena is to grow to a state with images of ``sizes``, but was never idle long enough. A
        stage of that state then maps and touches the rest of the memory itself."""
        return self._wanted == tuple(sizes)

    @property
    def wanted_bytes(self) -> int:
        """The bytes that the arena will grow to."""
        wanted = self._wanted
        return 0 if wanted is None else sum(wanted) + SEGMENT_BYTES

    def set_aside(self, most: int) -> None:
        """Limit growth to ``most`` bytes, and schedule the release of the memory, also if no state was saved."""
        self._most, self._aside = most, True
        self._schedule()

    def _schedule(self) -> None:
        now = time.monotonic()
        self._trim_at = now + _TRIM_S
        self._grow_at = float("inf") if self._wanted is None else now + _GROW_S

    def due_s(self) -> float | None:
        """Return the seconds until ``run`` has to be called. None if that is not before the next stage."""
        at = min(self._grow_at, self._trim_at)
        return None if at == float("inf") else max(0.0, at - time.monotonic())

    def run(self, busy: Callable[[], bool]) -> None:
        """Do what is due. Ends early when ``busy()`` is true, because the thread is needed for a stage."""
        now = time.monotonic()
        if now >= self._trim_at:
            self._grow_at = self._trim_at = float("inf")
            self._wanted = None
            self._known.clear()
            # Registering again takes seconds, for which the fence of the next save would wait.
            if self._aside or not self._arena.registers:
                self._arena.trim_idle()
        elif now >= self._grow_at and self._wanted is not None:
            self._tries += 1
            # Memory may still be in use, by an export or a tensor that the user keeps. Then it is tried again, later
            # each time, and given up after some tries.
            if self._arena.grow_for(self._wanted, busy, self._most) or self._tries == _TRIES:
                self._wanted, self._grow_at = None, float("inf")
            else:
                self._grow_at = now + _GROW_S * 2**self._tries
