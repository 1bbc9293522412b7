"""Registrations of host memory with an accelerator, and the thread that ends them.

The last reference to a mapping dies in any thread: in a finalizer, in a garbage collection, on the event loop. To
unregister there would end the captures of other threads, create a context on that thread's current device, block it,
and leave an error behind in it. A finalizer therefore only puts the mapping into a queue, which keeps it mapped. One
thread of the process takes it from there: it unregisters the memory and unmaps it. A mapping that cannot be
unregistered stays, because the device may go on using its pages.

The thread is started before the first registration. A finalizer must not start one: it may run inside
``Thread.start()``, which holds locks that another start would wait for.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from .._threads import Deadline, interpreter_ends
from ..errors import ArenaExhausted

__all__ = ["Fate", "Pinner", "Registration", "give_back", "register", "settle"]

Fate: TypeAlias = Literal["unmapped", "kept", "unmapped late"]
"""What became of a mapping that was given back; the last of these comes after ``"kept"`` only."""


class Pinner(Protocol):
    """Registers host memory with a device, so that its copy engine reaches it."""

    def register(self, device: Hashable, address: int, nbytes: int) -> None:
        """Raises ``ArenaExhausted`` where there is too little memory for it, ``DeviceFailed``."""

    def unregister(self, device: Hashable, address: int) -> None:
        """Called in a thread that does nothing else. Raises ``DeviceFailed`` if the memory remains registered."""


@dataclass(frozen=True, slots=True)
class Registration:
    """``address`` is registered by ``pinner`` on ``device``. ``ended`` is called by the thread that ends it."""

    pinner: Pinner
    device: Hashable
    address: int
    ended: Callable[[Fate], None]
    pid: int


def register(
    pinner: Pinner, device: Hashable, address: int, nbytes: int, ended: Callable[[Fate], None]
) -> Registration:
    """Register memory. Blocks. Raises what ``pinner`` raises, ``ArenaExhausted`` if the system grants no thread."""
    _unregistering.start()
    pinner.register(device, address, nbytes)
    return Registration(pinner, device, address, ended, os.getpid())


def give_back(registration: Registration, mapping: object) -> None:
    """End ``registration``, then drop ``mapping``. For finalizers: takes no lock, starts no thread, does not block."""
    if registration.pid != os.getpid():
        _never_drop(mapping)
    else:
        _unregistering.handed.put((registration, mapping))


def settle(deadline: Deadline) -> bool:
    """Wait until everything that was given back so far has been unregistered, or kept. False if it takes too long."""
    return _unregistering.settle(deadline)


class _Unregistering:
    """The queue, its thread, and the mappings that could not be unregistered."""

    def __init__(self) -> None:
        # Its put() is reentrant, so that a garbage collection within put() or get() may put as well.
        self.handed: queue.SimpleQueue[tuple[Registration, object] | threading.Event] = queue.SimpleQueue()
        self._kept: list[tuple[Registration, object]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="sidestream-unregister", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise ArenaExhausted(f"the system granted no thread that can unregister memory: {error}") from error
            self._thread = thread

    def settle(self, deadline: Deadline) -> bool:
        if self._thread is None:
            return True  # nothing was ever registered
        done = threading.Event()
        self.handed.put(done)
        return done.wait(deadline.remaining_s())

    def _run(self) -> None:
        while True:
            done = self._next()
            if done is not None:
                self._retry()
                done.set()

    def _next(self) -> threading.Event | None:
        item = self.handed.get()
        if isinstance(item, threading.Event):
            return item
        registration, mapping = item
        if _unregistered(registration):
            del item, mapping  # unmapped here, before anybody counts on the memory
            registration.ended("unmapped")
        else:
            self._kept.append((registration, mapping))
            registration.ended("kept")
        return None

    def _retry(self) -> None:
        """Try again to unregister what was refused: a capture that was in the way may have ended."""
        kept, self._kept = self._kept, []
        while kept:
            registration, mapping = kept.pop()
            if _unregistered(registration):
                del mapping
                registration.ended("unmapped late")
            else:
                self._kept.append((registration, mapping))


def _unregistered(registration: Registration) -> bool:
    if interpreter_ends():
        return False  # the driver may be gone already; the process takes the memory with it
    try:
        registration.pinner.unregister(registration.device, registration.address)
    except Exception:  # the edge of the thread: statistics() counts what is kept
        return False
    return True


_unregistering = _Unregistering()


def _after_fork() -> None:
    global _unregistering
    _never_drop(_unregistering)  # with the mappings in it
    _unregistering = _Unregistering()


def _never_drop(value: object) -> None:
    """Something else may be mapped at the addresses of registered memory, of which a forked child has no part: to unmap
    them would take that away. So the object keeps a reference for ever, past the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
