"""What happens behind a call, as frozen events, for whoever watches. No torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "Event",
    "Observer",
    "PromiseLost",
    "RanksMissing",
    "ReadAlone",
    "Retried",
    "SaverGone",
    "SlowPart",
    "Throttled",
    "emit",
    "observe",
]

_log = logging.getLogger("sidestream")


@dataclass(frozen=True, slots=True)
class Retried:
    """A request failed in a way that may pass; it is sent again after ``wait_s``. ``attempt`` counts from 1."""

    operation: str
    url: str
    attempt: int
    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Throttled:
    """The storage asked for fewer requests (503, 429, SlowDown): all requests of that store wait for ``wait_s``."""

    operation: str
    url: str
    attempt: int
    wait_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SlowPart:
    """No part of an upload was accepted for ``waited_s``, though some are on their way: a slow or a stalled peer, or a
    client that repeats its requests by itself."""

    url: str
    waited_s: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class PromiseLost:
    """Something that sidestream promises does not hold on this storage, as ``promise`` says. What never holds is told
    once per storage; that uploads could not be listed, whenever it happens."""

    url: str
    promise: str


@dataclass(frozen=True, slots=True)
class SaverGone:
    """The saver process ``pid`` ended in the middle of saving ``url``, for ``reason``. ``again``: a new one writes it
    once more, from the same staged memory."""

    url: str
    pid: int | None
    reason: str
    again: bool


@dataclass(frozen=True, slots=True)
class ReadAlone:
    """The ranks of this machine were to share what they read of ``url``, and cannot, for ``reason``: each reads what it
    needs."""

    url: str
    reason: str


@dataclass(frozen=True, slots=True)
class RanksMissing:
    """This rank waits for others at the beginning of ``operation`` (``"save"``, ``"load"``, ``"restore"``): the ranks
    in ``missing`` have not made the call. Emitted once for each call, after 5 s, and logged as a warning too."""

    operation: str
    rank: int
    missing: tuple[int, ...]
    waited_s: float


Event: TypeAlias = Retried | Throttled | SlowPart | PromiseLost | SaverGone | ReadAlone | RanksMissing
Observer: TypeAlias = Callable[[Event], object]

_observers: tuple[Observer, ...] = ()
_lock = threading.Lock()


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Within, ``observer`` is called with every event of this process, in the thread where it happens: it must be quick
    and must not block. What it raises is logged and goes no further."""
    global _observers
    with _lock:
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _lock:
            remaining = list(_observers)
            remaining.remove(observer)
            _observers = tuple(remaining)


def emit(event: Event) -> None:
    """Tell the observers, and the log: a lost promise or process is a warning there, all else is for debugging."""
    _log.log(logging.WARNING if isinstance(event, (PromiseLost, SaverGone)) else logging.DEBUG, "%s", event)
    for observer in _observers:
        try:
            observer(event)
        except Exception:
            _log.exception("an observer failed on %s", type(event).__name__)
