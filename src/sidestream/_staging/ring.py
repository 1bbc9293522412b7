"""Registered host memory through which loads copy to devices: a ring of slots that all loads of the process share."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch

from .._runtime.memory_maps import address_of, advise
from ..errors import ArenaExhaustedError, DeviceError, allocating
from .arena import MappedMemory
from .driver import TorchDriver

_SLOTS = 8
_KEEP_S = 60.0
_SLOT_BYTES = (16 << 20) + (3 << 20)  # the most that is read together, extended to blocks and aligned
_ALIGN_BYTES = 64  # suits every dtype


class Slot:
    """Host memory from which the bytes that were read are copied to a device."""

    def __init__(self, nbytes: int) -> None:
        with allocating("memory to read into"):
            self._memory = MappedMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise(address_of(self._memory), nbytes, getattr(mmap, "MADV_HUGEPAGE", -1))
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._copied: tuple[TorchDriver, Hashable, Any] | None = None

    def pin(self, driver: TorchDriver, device: Hashable) -> None:
        """Register the memory. Where the system cannot, it stays as it is, and copies from it block their thread."""
        if driver.pinner is not None:
            with suppress(ArenaExhaustedError, DeviceError):
                self._memory.register(driver.pinner, device, 0)

    def views(self, starts: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        view = memoryview(self._memory)
        return [view[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)]

    def give_back(self, driver: TorchDriver, device: Hashable, copied: Any) -> None:
        """Give the slot back. Its memory is used again after ``copied``, an event behind all copies from it."""
        self._copied = driver, device, copied
        _ring.give_back(self)

    def is_copied(self) -> bool:
        """Return whether the copies of the former content have ended."""
        if self._copied is None:
            return True
        driver, device, copied = self._copied
        driver.enter(device)
        return driver.has_occurred(copied)

    def wait(self) -> None:
        """Wait for the copies of the former content. Raises errors of the device."""
        if self._copied is not None:
            (driver, device, copied), self._copied = self._copied, None
            driver.enter(device)
            driver.synchronize(copied)


class _Ring:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: deque[Slot] = deque()
        self.uses = 0
        """How many slots were taken so far."""
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()

    def take(self, nbytes: int) -> Slot | None:
        """Return a slot, or None if it would be too small, or if all are in use."""
        if nbytes > _SLOT_BYTES:
            return None
        with self._lock:
            self.uses += 1
            # The oldest, or a new one if its copies are still in flight.
            if len(self._slots) < _SLOTS and not (self._free and self._free[0].is_copied()):
                slot = Slot(_SLOT_BYTES)
                self._slots.add(slot)
                return slot
            return self._free.popleft() if self._free else None

    def give_back(self, slot: Slot) -> None:
        with self._lock:
            if slot in self._slots:  # and not of a ring that was dropped
                self._free.append(slot)

    def drop(self) -> None:
        with self._lock:
            # A slot that a load uses, or that the error of a load refers to, goes with the last reference to it.
            self._free.clear()
            self._slots = weakref.WeakSet()


_ring = _Ring()


def take_slot(sizes: Sequence[int], driver: TorchDriver, device: Hashable) -> tuple[Slot, list[int]]:
    """Return a slot for pieces of ``sizes``, and where each of them begins. Waits until the device has copied what the
    slot held before. Where the ring has none left, the slot is memory for this one use, from which copies block."""
    ends = list(accumulate(-(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for nbytes in sizes))
    starts = [0, *ends[:-1]]
    slot = _ring.take(ends[-1])
    if slot is None:
        # Not a wait for a slot: those who hold one may need the thread of this one to give it back.
        return Slot(ends[-1]), starts
    slot.wait()
    slot.pin(driver, device)
    return slot, starts


def drop_later() -> None:
    """Unmap the memory of the ring if no load uses it for a minute from now on. Called on the loop of operations, when
    a load has ended."""
    asyncio.get_running_loop().call_later(_KEEP_S, _drop_unless_used, _ring.uses)


def _drop_unless_used(since: int) -> None:
    if _ring.uses == since:
        _ring.drop()


def _forget_after_fork() -> None:
    global _ring
    _ring = _Ring()


os.register_at_fork(after_in_child=_forget_after_fork)
