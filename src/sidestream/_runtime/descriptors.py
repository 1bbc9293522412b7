"""Descriptors that forked children must not keep.

A child, such as a worker of a data loader, would keep a connection open after this process has died, so that its peers
would not notice the death, and it would keep shared memory that all others have dropped. Python closes descriptors
in programs that a child executes, and not in a child that only forks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol


class Descriptor:
    """A descriptor that this object closes: at ``close()``, when it is dropped, and in forked children."""

    def __init__(self, number: int) -> None:
        self._number = number
        close_in_children(self)

    def fileno(self) -> int:
        """Return the number. Raises ``ValueError`` when it is closed."""
        if self._number < 0:
            raise ValueError("this descriptor is closed")
        return self._number

    def detach(self) -> int:
        number, self._number = self._number, -1
        return number

    def close(self) -> None:
        """Close it. Idempotent."""
        with no_fork():  # a child that begins in between would have the descriptor, and not know of it
            self._close()

    def _close(self) -> None:
        number = self.detach()
        if number >= 0:
            os.close(number)

    __del__ = _close  # without ``no_fork``: in a garbage collection a thread may have any lock


class _Detachable(Protocol):
    def detach(self) -> int:
        """Return the descriptor, which this object does not close any more; -1 if it is closed."""


_open: weakref.WeakSet[_Detachable] = weakref.WeakSet()
_no_fork = threading.RLock()


def close_in_children(one: _Detachable) -> None:
    """Close a descriptor or a socket in forked children."""
    _open.add(one)


@contextmanager
def no_fork() -> Iterator[None]:
    """Let no other thread fork: between making something that a child must not have and saying so."""
    with _no_fork:
        yield


def _before_fork() -> None:
    _no_fork.acquire()


def _after_fork_in_parent() -> None:
    _no_fork.release()


def _after_fork() -> None:
    global _no_fork
    for one in list(_open):
        # Not ``shutdown`` of a socket, which would end the connection of the parent too.
        if (number := one.detach()) >= 0:
            with suppress(OSError):  # the others have to be closed all the same
                os.close(number)
    _open.clear()
    _no_fork = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
