"""Imports, and other work that makes many objects, which a running event loop notices as little as possible."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_under_way = 0
_thresholds: tuple[int, int, int] | None = None


@contextmanager
def collecting_later() -> Iterator[None]:
    """Put off automatic garbage collection while many objects that stay are made in the block.

    They bring about a full collection, which goes through the objects of torch as well and holds the GIL for 100 ms.
    Thresholds that the program sets meanwhile are kept, and ``gc.enable()`` and ``gc.disable()`` mean what they always
    do.
    """
    global _under_way, _thresholds
    with _lock:
        _under_way += 1
        if _under_way == 1 and gc.get_threshold()[0] > 0:
            _thresholds = gc.get_threshold()
            gc.set_threshold(0, *_thresholds[1:])
    try:
        yield
    finally:
        with _lock:
            _under_way -= 1
            if _under_way == 0:
                _restore()


def _restore() -> None:
    global _thresholds
    if _thresholds is not None and gc.get_threshold()[0] == 0:
        gc.set_threshold(*_thresholds)
    _thresholds = None


def _after_fork() -> None:
    """The threads that were importing are not in the child."""
    global _lock, _under_way
    _lock, _under_way = threading.Lock(), 0
    _restore()


os.register_at_fork(after_in_child=_after_fork)
