"""Registered host memory is released by one thread, on the device that it was registered with, wherever its last
reference is dropped."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_device import FakeDriver
from leases import all_returned

from sidestream._runtime.memory_maps import wait_unmapped
from sidestream._runtime.threads import Deadline
from sidestream._staging import AsyncStager, DeviceEngine
from sidestream._staging import stager as stager_module
from sidestream._staging.arena import MappedMemory
from sidestream.errors import ArenaExhaustedError, DeadlineExceededError, DeviceError

MIB = 1 << 20
THREAD = {"sidestream-unmap"}


def on_fake(driver: FakeDriver, **options: Any) -> AsyncStager:
    options.setdefault("budget_bytes", 64 * MIB)
    return AsyncStager(engine=DeviceEngine(driver), **options)


def put(driver: FakeDriver, nbytes: int, device: int = 1) -> torch.Tensor:
    return driver.put(torch.zeros(nbytes, dtype=torch.uint8), device)


async def staged(driver: FakeDriver, stager: AsyncStager, nbytes: int = MIB) -> Any:
    return await driver.drive(stager.stage({"t": put(driver, nbytes)}))


async def staged_and_released(driver: FakeDriver, stager: AsyncStager, nbytes: int = MIB) -> None:
    (await staged(driver, stager, nbytes)).release()
    await all_returned(stager)


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable garbage collections except those that the test makes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cycle_around(value: Any) -> None:
    """Leave ``value`` to the next garbage collection."""
    ring: list[Any] = [value]
    ring.append(ring)


@contextmanager
def standing_still(driver: FakeDriver) -> Iterator[None]:
    """The call of the driver that unregisters memory does not return."""
    driver.may_unregister.clear()
    try:
        yield
    finally:
        driver.may_unregister.set()


class Collecting(threading.Thread):
    """Its ``start()`` collects garbage while it holds the lock that every other start of a thread needs."""

    armed = False

    def __hash__(self) -> int:
        if self.armed:
            self.armed = False
            gc.collect()
        return id(self)


# --- where the last reference is dropped ---


@pytest.mark.parametrize("last", ["trim", "close", "aclose", "a tensor", "another thread"])
async def test_memory_is_unregistered_by_its_thread_on_its_device(last: str) -> None:
    driver = FakeDriver()
    stager = on_fake(driver)
    copies = await staged(driver, stager)
    kept = copies["t"]
    copies.release()
    del copies
    if last in ("trim", "close", "aclose"):
        del kept
        await all_returned(stager)
    match last:
        case "trim":
            stager.trim()
        case "close":
            await asyncio.to_thread(stager.close)
        case _:
            await stager.aclose()
    if last == "another thread":
        holder = [kept]
        del kept
        thread = threading.Thread(target=holder.clear)
        thread.start()
        thread.join()
    elif last == "a tensor":
        assert driver.registered, "a tensor still lies in it"
        del kept
    if last not in ("trim", "close", "aclose"):  # those have waited for it
        assert wait_unmapped(Deadline.after(60))
    assert not driver.registered
    assert driver.unregistered_in == THREAD
    assert stager.statistics().reserved_bytes == stager.statistics().registered_bytes == 0
    await stager.aclose()


async def test_the_last_reference_dies_in_a_garbage_collection_within_the_start_of_a_thread() -> None:
    driver = FakeDriver()
    stager = on_fake(driver)
    with no_collections():
        copies = await staged(driver, stager)
        kept = copies["t"]
        copies.release()
        del copies
        await stager.aclose()
        thread = Collecting(target=lambda: None, daemon=True)
        cycle_around(kept)
        del kept
        assert driver.registered
        thread.armed = True
        starting = threading.Thread(target=thread.start, daemon=True)  # where it hangs, the test does not
        starting.start()
        starting.join(60)
        assert not starting.is_alive(), "a finalizer waits for a lock that its own thread holds"
    assert not thread.armed
    assert [one.name for one in threading.enumerate()].count("sidestream-unmap") == 1, "a finalizer started one"
    assert wait_unmapped(Deadline.after(60))
    assert not driver.registered
    assert driver.unregistered_in == THREAD


async def test_the_loop_does_not_wait_for_memory_whose_last_reference_dies_on_it() -> None:
    driver = FakeDriver()
    stager = on_fake(driver)
    with no_collections():
        copies = await staged(driver, stager)
        kept = copies["t"]
        copies.release()
        del copies
        await stager.aclose()
        cycle_around(kept)
        del kept
        with standing_still(driver):
            gc.collect()  # returns at once
            assert driver.registered
            assert stager.statistics().registered_bytes == stager.statistics().reserved_bytes > MIB
    assert wait_unmapped(Deadline.after(60))
    assert not driver.registered


# --- calls that wait for it ---


async def test_the_budget_counts_memory_until_it_has_been_unregistered() -> None:
    driver = FakeDriver()
    async with on_fake(driver, budget_bytes=16 * MIB) as stager:
        await staged_and_released(driver, stager, 10 * MIB)
        with standing_still(driver):
            second = stager.stage({"t": put(driver, 15 * MIB)})
            while stager.statistics().waiters == 0 or stager.statistics().registered_bytes == 0:
                await asyncio.sleep(0.001)
            for _ in range(20):
                assert 0 < stager.statistics().reserved_bytes <= 16 * MIB
                await asyncio.sleep(0.001)
            assert sum(driver.registered.values()) == stager.statistics().registered_bytes
        (await driver.drive(second)).release()
        del second
        assert sum(driver.registered.values()) == stager.statistics().registered_bytes <= 16 * MIB


@pytest.mark.parametrize("when_full", ["fail", "skip"])
async def test_policies_that_do_not_wait_wait_for_memory_that_is_on_its_way(when_full: Any) -> None:
    driver = FakeDriver()
    async with on_fake(driver, budget_bytes=16 * MIB, when_full=when_full) as stager:
        await staged_and_released(driver, stager, 10 * MIB)
        await staged_and_released(driver, stager, 15 * MIB)


async def test_what_cannot_be_unregistered_stays_mapped_and_is_shown() -> None:
    driver = FakeDriver()
    driver.refuse = DeviceError("operation not permitted when stream is capturing")
    async with on_fake(driver, budget_bytes=16 * MIB, timeout_s=60) as stager:
        await staged_and_released(driver, stager, 10 * MIB)
        ((address, nbytes),) = driver.registered.items()
        stager.trim()
        statistics = stager.statistics()
        assert statistics.kept_bytes == statistics.reserved_bytes == statistics.registered_bytes == nbytes
        assert mapped(address, nbytes)
        with pytest.raises(ArenaExhaustedError, match=f"{nbytes} cannot be unregistered"):  # at once: it may never be
            await driver.drive(stager.stage({"t": put(driver, 10 * MIB)}))
        await staged_and_released(driver, stager, 2 * MIB)
        driver.refuse = None
        stager.trim()  # tries it again
        assert not driver.registered
        assert not mapped(address, nbytes)
        assert stager.statistics().kept_bytes == stager.statistics().reserved_bytes == 0
        await staged_and_released(driver, stager, 10 * MIB)


def mapped(address: int, nbytes: int) -> bool:
    """Whether all of it is mapped in this process."""
    at = address
    with open("/proc/self/maps") as lines:
        for line in lines:
            start, end = (int(one, 16) for one in line.split()[0].split("-"))
            if start <= at < end:
                at = end
    return at >= address + nbytes


async def trimmed(stager: AsyncStager) -> None:
    stager.trim()


async def closed(stager: AsyncStager) -> None:
    await asyncio.to_thread(stager.close)


@pytest.mark.parametrize("call", [trimmed, closed, AsyncStager.aclose], ids=["trim", "close", "aclose"])
async def test_a_device_that_does_not_answer_is_not_waited_for_beyond_the_deadline(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stager_module, "_GRACE_S", 0.5)
    driver = FakeDriver()
    stager = on_fake(driver, timeout_s=0.5)
    await staged_and_released(driver, stager)
    with standing_still(driver):
        with pytest.raises(DeadlineExceededError, match="was not released"):
            await call(stager)
        assert driver.registered
        assert stager.statistics().registered_bytes > MIB
    assert wait_unmapped(Deadline.after(60))
    assert not driver.registered
    assert stager.statistics().registered_bytes == 0
    await stager.aclose()


# --- fork ---


def registered_with(driver: FakeDriver) -> tuple[MappedMemory, int]:
    """Registered memory and its address, without a stager, whose other threads would refer to the memory too.

    In a forked child the frames of those threads keep their references for ever, so the last one would never die there.
    """
    before = set(driver.registered)
    memory = MappedMemory(-1, MIB)
    memory.register(driver, 1, 0)
    (address,) = set(driver.registered) - before
    return memory, address


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_last_reference_in_a_forked_child_neither_unregisters_nor_unmaps() -> None:
    """The child does not inherit that memory. Its own mappings may be at the same address."""
    driver = FakeDriver()
    memory, address = registered_with(driver)

    def in_the_child() -> bool:
        nonlocal memory
        map_at(address, MIB)
        del memory
        gc.collect()
        return mapped(address, MIB) and not driver.unregistered_in

    assert forked(in_the_child)
    assert driver.registered
    del memory
    assert wait_unmapped(Deadline.after(60))
    assert not driver.registered


def forked(check: Callable[[], bool]) -> bool:
    """What ``check`` returns in a forked child."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 0


def map_at(address: int, nbytes: int) -> None:
    """Map other memory at an address that is free."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    assert not mapped(address, nbytes), "registered memory is not inherited"
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    assert libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0) == address
