"""How long callers are held up, and for which reasons. ``events.CallerWaited`` tells observers of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from ..events import CallerWaited, SaveContext, WaitCause, WaitReason, emit

_LEAST_S = 1e-4
"""What is shorter is not recorded."""


class WaitReasons:
    """The reason for which a caller that waits for the sources of one stage has to wait, from time to time.

    One thread at a time changes it, and any thread may read it."""

    __slots__ = ("_changes",)

    def __init__(self, reason: WaitReason | None = "copies") -> None:
        self._changes: list[tuple[float, WaitReason | None]] = [(time.monotonic(), reason)]

    @property
    def now(self) -> WaitReason | None:
        return self._changes[-1][1]

    def change(self, reason: WaitReason | None) -> None:
        """Record that from now on a wait has this ``reason``; None if nothing has to be waited for."""
        now, changes = time.monotonic(), self._changes
        if len(changes) > 1 and now - changes[-1][0] < _LEAST_S:
            # Memory that is there at once does not count, and a stage with many windows must not add up a long list.
            changes[-1] = (changes[-1][0], reason)
        elif reason != changes[-1][1]:
            changes.append((now, reason))

    def add_to(self, found: dict[WaitReason, float], began: float, ended: float) -> float:
        """Add the seconds between two times to ``found``, by reason. Return when there was no reason to wait any more,
        or ``ended`` if there still is one."""
        changes = list(self._changes)
        for (since, reason), (until, _) in zip(changes, [*changes[1:], (ended, None)], strict=True):
            seconds = min(until, ended) - max(since, began)
            if reason is not None and seconds > 0:
                found[reason] = found.get(reason, 0.0) + seconds
        since, reason = changes[-1]
        return ended if reason is not None else min(max(since, began), ended)


def waited_for(stages: Iterable[WaitReasons], began: float, ended: float | None = None) -> dict[WaitReason, float]:
    """Return for which reasons a caller waited that waits for one stage after the other: since ``began``, until
    ``ended`` or now, as ``time.monotonic()`` seconds."""
    found: dict[WaitReason, float] = {}
    until = time.monotonic() if ended is None else ended
    for stage in stages:
        began = stage.add_to(found, began, until)
    return {reason: seconds for reason, seconds in found.items() if seconds >= _LEAST_S}


def caller_waited(
    cause: WaitCause,
    began: float,
    reasons: Iterable[WaitReasons] | Mapping[WaitReason, float],
    save: SaveContext | None = None,
) -> None:
    """Emit that a caller was held up from ``began`` until now, unless that is less than 0.1 ms. ``reasons`` are those
    of the stages that it waited for, in this order, or the seconds by reason."""
    now = time.monotonic()
    if now - began >= _LEAST_S:
        found = reasons if isinstance(reasons, Mapping) else waited_for(reasons, began, now)
        emit(CallerWaited(cause, now - began, found, save))


@contextmanager
def caller_waits(cause: WaitCause, reasons: Iterable[WaitReasons], save: SaveContext | None = None) -> Iterator[None]:
    """Do ``caller_waited`` for the time of the ``with`` block, however it ends."""
    began = time.monotonic()
    try:
        yield
    finally:
        caller_waited(cause, began, reasons, save)
