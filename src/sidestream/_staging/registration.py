"""Registrations of host memory with an accelerator, so that its copy engine can access the memory.

Ending one in the thread that drops the last reference to the memory would end the captures of other threads, create a
context on that thread's current device, block the thread, and leave an error in it. The thread that unmaps the memory
ends it instead. Memory that cannot be unregistered stays mapped, because the device may still use its pages.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from .._runtime.memory_maps import start_thread
from .._runtime.threads import interpreter_ends
from ..errors import ArenaExhaustedError

_log = logging.getLogger("sidestream")


class Pinner(Protocol):
    """Registers host memory with a device."""

    def register(self, device: Hashable, address: int, nbytes: int) -> bool:
        """Register memory. Returns False if this system cannot. Raises ``ArenaExhaustedError`` if there is too little
        memory for it, ``DeviceError``."""

    def unregister(self, device: Hashable, address: int) -> None:
        """End a registration. Called in a dedicated thread. Raises ``DeviceError`` if the memory remains
        registered."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A registration of ``address`` by ``pinner`` on ``device``."""

    pinner: Pinner
    device: Hashable
    address: int

    def end(self) -> bool:
        """End the registration. Returns False if the memory remains registered."""
        if interpreter_ends():
            return False  # the driver may be unloaded already; the memory ends with the process
        try:
            self.pinner.unregister(self.device, self.address)
        except Exception:  # the edge of the thread: statistics() counts what is kept
            return False
        return True


def register(pinner: Pinner, device: Hashable, address: int, nbytes: int) -> Registration | None:
    """Register memory. Blocks. Returns None, and warns once, if this system cannot: then copies block their thread.

    Raises what ``pinner`` raises, and ``ArenaExhaustedError`` if there is no thread that could end the registration."""
    if not start_thread():
        raise ArenaExhaustedError("the system could not start a thread to unregister memory")
    if pinner.register(device, address, nbytes):
        return Registration(pinner, device, address)
    _warn_once(device)
    return None


@cache
def _warn_once(device: Hashable) -> None:
    _log.warning("host memory cannot be registered with %s here: copies from and to it are slower", device)
