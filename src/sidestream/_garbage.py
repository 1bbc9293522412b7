"""Full garbage collections, put off for as long as a plan of many small objects is about.

A collection of the oldest generation stops every thread for half a microsecond per object of the whole program: 90 ms
with torch imported and nothing else. Tens of thousands of objects that a plan needs for a moment bring it about two or
three times, although none of them is in a cycle.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._threads import politely

__all__ = ["collected_later", "let_go"]

_LIMIT_S = 2.0
"""After this, collection goes on as usual: a load of many minutes must not keep the garbage of everybody else."""

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def collected_later() -> Iterator[None]:
    """On a running loop: no automatic collection within, for two seconds at most. A program that has switched it off
    keeps it off; ``gc.collect()`` works as ever."""
    held = True

    def release() -> None:
        nonlocal held
        if held:
            held = False
            _release()

    _hold()
    timer = asyncio.get_running_loop().call_later(_LIMIT_S, release)
    try:
        yield
    finally:
        timer.cancel()
        release()


def _hold() -> None:
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1


def _release() -> None:
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0 and _was_enabled:
            gc.enable()


def let_go(*containers: dict[str, Any] | list[Any]) -> None:
    """In a thread: empty them bit by bit. Freed all at once, what is in them would hold the GIL for milliseconds."""
    for container in containers:
        for _ in politely(range(len(container))):
            container.popitem() if isinstance(container, dict) else container.pop()


def _after_fork() -> None:
    global _lock, _holders
    _lock = threading.Lock()
    if _holders and _was_enabled:  # those who held it are not in the child
        gc.enable()
    _holders = 0


os.register_at_fork(after_in_child=_after_fork)
