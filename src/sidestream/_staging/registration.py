"""Registrations of host memory with an accelerator, and the thread that ends them.

The last reference to a mapping dies in any thread: in a finalizer, in a garbage collection, on the event loop.
Unregistering the memory there would end the captures of other threads, create a context on that thread's current
device, block the thread, and leave an error in it. A finalizer therefore only puts the mapping into a queue, which
keeps it mapped. One thread of the process takes it from the queue, unregisters the memory and unmaps it. A mapping that
cannot be unregistered is kept, because the device may still use its pages.

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

from .._runtime.threads import Deadline, interpreter_ends
from ..errors import ArenaExhaustedError

__all__ = ["Fate", "Pinner", "Registration", "give_back", "register", "settle"]

Fate: TypeAlias = Literal["unmapped", "kept", "unmapped late"]
"""The outcome for a mapping whose registration was ended; ``"unmapped late"`` can only follow ``"kept"``."""


class Pinner(Protocol):
    """Registers host memory with a device, so that the copy engine of the device can access it."""

    def register(self, device: Hashable, address: int, nbytes: int) -> None:
        """Register memory. Raises ``ArenaExhaustedError`` if there is too little memory for it, ``DeviceError``."""

    def unregister(self, device: Hashable, address: int) -> None:
        """End a registration. Called in a dedicated thread. Raises ``DeviceError`` if the memory remains
        registered."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A registration of ``address`` by ``pinner`` on ``device``. The thread that ends it calls ``ended``."""

    pinner: Pinner
    device: Hashable
    address: int
    ended: Callable[[Fate], None]
    pid: int


def register(
    pinner: Pinner, device: Hashable, address: int, nbytes: int, ended: Callable[[Fate], None]
) -> Registration:
    """Register memory. Blocks. Raises what ``pinner`` raises, and ``ArenaExhaustedError`` if the system cannot start a
    thread."""
    _unregistering.start()
    pinner.register(device, address, nbytes)
    return Registration(pinner, device, address, ended, os.getpid())


def give_back(registration: Registration, mapping: object) -> None:
    """End ``registration``, then drop ``mapping``. Safe in finalizers: takes no lock, starts no thread, never
    blocks."""
    if registration.pid != os.getpid():
        _never_drop(mapping)
    else:
        _unregistering.handed.put((registration, mapping))


def settle(deadline: Deadline) -> bool:
    """Wait until every mapping in the queue has been unregistered or kept. Returns False if that takes too long."""
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
                raise ArenaExhaustedError(
                    f"the system could not start a thread to unregister memory: {error}"
                ) from error
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
            del item, mapping  # unmaps the memory, before settle() returns
            registration.ended("unmapped")
        else:
            self._kept.append((registration, mapping))
            registration.ended("kept")
        return None

    def _retry(self) -> None:
        """Try again to unregister kept memory: a capture that prevented it may have ended."""
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
        return False  # the driver may be unloaded already; the memory ends with the process
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
    """Keep a reference to the object for ever, past the end of the interpreter. A forked child does not inherit
    registered memory. Other memory may be mapped at its addresses, and an unmap would remove that."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


os.register_at_fork(after_in_child=_after_fork)
