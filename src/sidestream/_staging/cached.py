"""Stagers for saves without ``stager=``. Each save has one of its own, which is kept with its memory for the next
save."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass

from .._runtime.public import public
from .._runtime.threads import Deadline
from ..errors import InvalidOptionError, SidestreamError
from .stager import AsyncStager, share_of_memory

_DEFAULT_BYTES = 1 << 30
_SHARE = 4  # of the default budget of a stager
_MOST = 8
_CLOSE_S = 1.0


@dataclass(slots=True)
class _Idle:
    key: Hashable
    stager: AsyncStager
    nbytes: int
    """The most memory that it may keep."""


class _Cache:
    """Idle stagers, the newest last. Each save takes one out for as long as it lasts, so saves do not wait for each
    other."""

    def __init__(self, cache_bytes: int | None = None) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self.cache_bytes = cache_bytes

    def take(self, key: Hashable) -> AsyncStager | None:
        with self._lock:
            for index in reversed(range(len(self._idle))):
                if self._idle[index].key == key:
                    return self._idle.pop(index).stager
        return None

    def put(self, key: Hashable, stager: AsyncStager) -> bool:
        """Keep ``stager``, with as much of its memory as there is room for. Returns False if there is no room."""
        with self._lock:
            room = self._most() - sum(one.nbytes for one in self._idle)
            nbytes = min(room, stager.wanted_bytes)
            if nbytes <= 0 or len(self._idle) == _MOST:
                return False
            stager.set_aside(nbytes)  # with the lock: another thread may close the stagers that are in the list
            self._idle.append(_Idle(key, stager, nbytes))
        return True

    def resize(self, cache_bytes: int) -> list[AsyncStager]:
        """Set the bound. Returns the stagers for which there is no room any more; the caller closes them."""
        with self._lock:
            self.cache_bytes = cache_bytes
            dropped: list[AsyncStager] = []
            while self._idle and sum(one.nbytes for one in self._idle) > cache_bytes:
                dropped.append(self._idle.pop(0).stager)
            return dropped

    def _most(self) -> int:
        if self.cache_bytes is None:
            self.cache_bytes = min(_DEFAULT_BYTES, share_of_memory() // _SHARE)
        return self.cache_bytes


_cache = _Cache()


@public
def set_cache_bytes(cache_bytes: int) -> None:
    """Set how much host memory saves without ``stager=`` may keep between them, all of them together.

    Memory that is used again makes a save faster: it has been mapped, touched and registered with the device. The
    default is 1 GiB, or a quarter of a stager's default ``budget_bytes`` if that is less; 0 keeps nothing. A save that
    needs more maps it for itself, and unmaps it when it has ended. What no save has used for ten minutes is unmapped. A
    forked child begins with nothing.

    It concerns ``save`` and ``async_save`` of ``sidestream`` and of ``sidestream.blocking``. A ``Checkpointer`` and an
    ``AsyncStager`` have memory of their own, within ``budget_bytes``.

    Args:
        cache_bytes: The bound, in bytes. Memory that exceeds it is unmapped soon.

    Raises:
        InvalidOptionError: ``cache_bytes`` is not an integer, or is negative.
    """
    if type(cache_bytes) is not int or cache_bytes < 0:
        raise InvalidOptionError(f"cache_bytes={cache_bytes!r} has to be a number of bytes, or 0 to keep none")
    for stager in _cache.resize(cache_bytes):
        stager.close_later()


def borrow(budget_bytes: int | None, *, shared: bool, timeout_s: float) -> AsyncStager:
    """Return a stager that no other save uses, with the memory of an earlier save if there is any."""
    kept = _cache.take((budget_bytes, shared))
    if kept is not None:
        return kept
    return AsyncStager(budget_bytes=budget_bytes, timeout_s=timeout_s, backing="shared" if shared else "private")


def give_back(stager: AsyncStager, budget_bytes: int | None, *, shared: bool) -> bool:
    """Keep a stager that ``borrow`` has returned, and that has no stage in flight, for the next save. Returns False if
    the caller has to close it, because there is no room for it."""
    return _cache.put((budget_bytes, shared), stager)


@atexit.register
def close_all() -> None:
    """Close the idle stagers."""
    cache_bytes = _cache.cache_bytes
    for stager in _cache.resize(-1):
        with suppress(SidestreamError):
            stager.close_by(Deadline.after(_CLOSE_S))
    _cache.cache_bytes = cache_bytes


def _forget_after_fork() -> None:
    global _cache
    _cache = _Cache(_cache.cache_bytes)


os.register_at_fork(after_in_child=_forget_after_fork)
