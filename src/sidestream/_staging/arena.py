"""Host memory for staging: large segments that are mapped once, touched once, leased, and used again.

The first touch of fresh memory makes a naive copy slow (0.7-1.5 GB/s against 9-20 GB/s into warm memory on the machines
measured), so segments are kept until the arena is closed. Memory is returned by reference count. A lease makes one
ctypes array over its extent. Every tensor and memoryview over the array keeps it alive, and a finalizer of the array
returns the extent. Memory that can still be read is therefore never leased again.

With an accelerator, its driver registers each segment once, so that copies run by DMA. The pinned allocator of torch
rounds sizes up to powers of two and costs several times as much per byte. A registered segment counts against the
budget until it has been unregistered and unmapped (``registration``).
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import queue
import sys
import threading
import time
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .._runtime.memory_maps import MemoryMap, UnmapOutcome, address_of, advise, pieces, wait_unmapped
from .._runtime.public import public
from .._runtime.threads import Deadline, Stop
from ..errors import ArenaExhaustedError, ClosedError, DeadlineExceededError
from ..options import Backing
from .drain import Drain
from .placement import place
from .registration import Pinner, Registration, register

PAGE_BYTES = 4096
SEGMENT_BYTES = 8 << 20
"""The size of a segment, at least, as far as the budget allows."""
_HUGE_PAGE_BYTES = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; the modules of Python lack the name
_GAP_S = 0.2e-3  # between two of these calls, for threads that map memory
_GROWTH_BYTES = 256 << 20  # the most that is touched at once, before the first copy into it
_STEP_BYTES = 32 << 20  # in a small arena: the first window is written while memory for the next is touched
_STEP_SHARE = 4  # of the reserved memory, in a larger arena
_UNMAPPED_S = 5.0  # a lease with ``at_once`` also waits this long for memory that is being unmapped
_PIECE_BYTES = 256 << 20  # the most that is registered at once
_COUNTED_STAGES = 16  # a budget for more of them has room for segments that are rounded up
_numbers = itertools.count(1)


@public
@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """The memory of a stager, in bytes.

    Attributes:
        budget_bytes: The most that may be mapped.
        reserved_bytes: The memory that is mapped now.
        registered_bytes: The part of it that is registered with an accelerator.
        leased_bytes: The part of it that is in use now.
        peak_leased_bytes: The most that was in use at one time.
        leases: How many pieces are in use now.
        waiters: How many threads wait for memory.
        kept_bytes: The part that is not used any more, and stays mapped because its accelerator did not unregister it.
    """

    budget_bytes: int
    reserved_bytes: int
    registered_bytes: int
    leased_bytes: int
    peak_leased_bytes: int
    leases: int
    waiters: int
    kept_bytes: int = 0


class MappedMemory(MemoryMap):
    """A mapping that may be registered with a device. Shared memory has a descriptor that can be sent to another
    process, and is sealed, so that its size never changes."""

    descriptor: int | None = None
    """None for private memory."""
    number: int = 0
    """The number of this shared memory. No other mapping of this process has ever had the same."""
    _pieces: dict[int, Registration | None] | None = None
    """The pieces that were registered, or could not be, by number."""
    _close = staticmethod(os.close)

    def register(self, pinner: Pinner, device: Hashable, start: int) -> int:
        """Register the piece that has byte ``start``, unless it is. Returns where it ends. A copy must not cross an
        end.

        A registration holds locks of the driver, longer the larger it is, and the copies into earlier pieces are made
        meanwhile. Called by one thread at a time. Blocks; raises what ``pinner`` raises."""
        number, address = start // _PIECE_BYTES, address_of(self)
        first, end = number * _PIECE_BYTES, min((number + 1) * _PIECE_BYTES, len(self))
        if self._pieces is None:
            # On older kernels, the parent's next write after a fork may give the parent a new page, while the device
            # still uses the old one. The child therefore does not inherit the mapping.
            advise(address, len(self), getattr(mmap, "MADV_DONTFORK", -1))
            self.inherited, self._pieces = False, {}
            place(self, device)
        if number not in self._pieces:
            _touch(address + first, end - first)
            self._pieces[number] = register(pinner, device, address + first, end - first)
        return end

    @property
    def registered_bytes(self) -> int:
        numbers = [number for number, piece in list((self._pieces or {}).items()) if piece is not None]
        return sum(min((number + 1) * _PIECE_BYTES, len(self)) - number * _PIECE_BYTES for number in numbers)

    def unused(self) -> bool:
        pieces = self._pieces or {}
        for number, piece in list(pieces.items()):
            if piece is not None and not piece.end():
                return False
            del pieces[number]
        return True

    def __del__(self) -> None:
        if self.descriptor is not None:
            self._close(self.descriptor)
        super().__del__()


@dataclass(slots=True)
class _Segment:
    memory: MappedMemory
    nbytes: int
    free: list[tuple[int, int]] = field(default_factory=list)  # sorted, disjoint, never adjacent (start, end)

    def idle(self) -> bool:
        return self.free == [(0, self.nbytes)]


class Allocation:
    """``nbytes`` of page-aligned host memory. The caller of ``lease`` has to ``release()`` it. Tensors and views over
    it stay valid."""

    __slots__ = ("__weakref__", "_arena", "_array", "_memory", "nbytes", "start")

    def __init__(
        self, arena: Arena, memory: MappedMemory, start: int, array: ctypes.Array[ctypes.c_char], nbytes: int
    ) -> None:
        self._arena = weakref.ref(arena)
        self._memory = weakref.ref(memory)
        self.start: int = start
        self._array: ctypes.Array[ctypes.c_char] | None = array
        self.nbytes: int = nbytes

    @property
    def shared(self) -> MappedMemory | None:
        """The shared memory that has these bytes at ``start``, for another process. None for private memory."""
        memory = self._memory()
        return None if memory is None or memory.descriptor is None else memory

    def offer(self, take_back: Callable[[], None], *, by_sink: bool = False) -> Callable[[], None]:
        """Offer this memory to stages that wait for memory. It is needed only after a failure, or only ``by_sink``.

        When a thread would otherwise wait for memory, it calls ``take_back``, which releases the memory. ``take_back``
        is called at most once and must not block. Returns a function that withdraws the offer."""
        arena = self._arena()
        return _nothing if arena is None else arena.take_offer(take_back, by_sink=by_sink)

    @property
    def array(self) -> ctypes.Array[ctypes.c_char]:
        """The memory. It is not reused while an object over it exists (``torch.frombuffer``, ``memoryview``)."""
        if self._array is None:
            raise ClosedError("this staging memory was released")
        return self._array

    @property
    def view(self) -> memoryview:
        return memoryview(self.array).cast("B")

    @property
    def address(self) -> int:
        return ctypes.addressof(self.array)

    def register(self, start: int) -> int:
        """Make byte ``start`` ready for copies from a device. Returns up to which byte it then is. Blocks, and raises
        what the pinner of the arena raises. Called in the stager's thread."""
        arena, memory = self._arena(), self._memory()
        if arena is None or memory is None:
            raise ClosedError("this staging memory was released")
        return min(arena.register(memory, self.start + start) - self.start, self.nbytes)

    def release(self) -> None:
        """Drop the reference to the memory. It is reused once the last tensor or view over it is gone. Idempotent."""
        self._array = None


class Arena:
    """Leases out of at most ``budget_bytes`` of mapped memory. All methods may be called from any thread."""

    def __init__(self, budget_bytes: int, *, segment_bytes: int = SEGMENT_BYTES, backing: Backing = "private") -> None:
        self.budget_bytes = budget_bytes
        self._segment_bytes = segment_bytes
        self._backing = backing
        self._pinner: tuple[Pinner, Hashable] | None = None
        # Offers are leased memory that its holder could do without. What a writer process has written is offered until
        # its receipt arrives, because it is needed only if the process is lost. What only sinks still read is offered
        # too. Without offers a state that is larger than the budget would never pass through a writer process.
        self._offers: dict[object, Callable[[], None]] = {}
        self._sink_offers: dict[object, Callable[[], None]] = {}
        self._segments: list[_Segment] = []
        self._lock = threading.Lock()
        # A finalizer runs in the thread that drops the last reference, which may hold a lock of the arena. So it may
        # only use this queue, whose put() is reentrant.
        self._returned: queue.SimpleQueue[tuple[_Segment | None, int, int] | _Ended | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._reserved = self._leased = self._peak = self._leases = self._waiters = 0
        self._touched_bytes_per_s = 0.0  # when memory was last mapped
        self._given_back = 0
        """Bytes of all leases that have ended."""
        self._stage_bytes = 0
        """Of the stage that requests leases now."""
        self._leaving = self._kept = 0
        """Reserved bytes of dropped segments that are still mapped. ``_kept`` are those of them that could not be
        unregistered."""
        self._closed = threading.Event()

    def lease(
        self,
        nbytes: int,
        *,
        deadline: Deadline,
        stop: Stop,
        coming: Callable[[], Iterable[int]] = tuple,
        at_once: bool = False,
        drain: Drain | None = None,
    ) -> Allocation:
        """Wait for ``nbytes`` (rounded up to pages) and return them with undefined contents. Blocks: not for the loop.

        ``coming()`` returns the sizes of the leases that follow. If memory has to be mapped, memory for some of them is
        mapped too, and the budget that they need is left to them. ``at_once``: wait only for memory that is being
        unmapped. ``drain`` returns how long to wait for memory that is in use before new memory is mapped.

        Raises ``ArenaExhaustedError`` at once if ``nbytes`` exceed the budget, and when ``deadline`` passes.
        Raises ``ClosedError`` when ``stop`` is set or the arena is closed meanwhile.
        """
        size = whole_pages(nbytes)
        if size > self.budget_bytes:
            raise ArenaExhaustedError(
                f"{size} bytes of staging memory are needed at once, the budget is {self.budget_bytes}: "
                "raise budget_bytes= of the stager"
            )
        request = _Request(size, coming, deadline, stop, at_once, drain)
        with stop.waking(self.wake):
            segment, start = self._acquire(request)
        # The array is the owner of the extent. The allocation, every view and every tensor refer to it, and its
        # finalizer puts the extent into the queue. No call gives memory back, so no caller can give it back while a
        # reader still has a view.
        array = (ctypes.c_char * size).from_buffer(segment.memory, start)
        back = (segment, start, start + size)
        weakref.finalize(array, self._give_back, self._returned, self._closed, self._pid, back).atexit = False
        return Allocation(self, segment.memory, start, array, nbytes)

    def share(self) -> None:
        """Lease shared memory from now on. Private segments are dropped when they fall free. Does not take the lock, so
        it does not wait for threads that wait for memory."""
        self._backing = "shared"

    def shared_memory(self) -> list[MappedMemory]:
        return [s.memory for s in list(self._segments) if s.memory.descriptor is not None]

    def take_offer(self, take_back: Callable[[], None], *, by_sink: bool) -> Callable[[], None]:
        """Register an offer (``Allocation.offer``)."""
        key, offers = object(), self._sink_offers if by_sink else self._offers
        offers[key] = take_back
        if self._waiters:
            self.wake()
        return lambda: offers.pop(key, None) and None

    def pin(self, pinner: Pinner, device: Hashable) -> None:
        """Let ``Allocation.register`` register memory with ``pinner`` through ``device``."""
        self._pinner = (pinner, device)

    @property
    def registers(self) -> bool:
        return self._pinner is not None

    def register(self, memory: MappedMemory, start: int) -> int:
        """Register memory (``MappedMemory.register``), if it is to be."""
        return len(memory) if self._pinner is None else memory.register(*self._pinner, start)

    def has_room(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` (or the whole budget, if that is less) are free now. Takes offered memory back."""
        while True:
            self._collect()
            if self._leased + min(nbytes, self.budget_bytes) <= self.budget_bytes - self._kept:
                return True
            if not self._take_back():
                return False

    @property
    def free_bytes(self) -> int:
        """The bytes of the budget that are not leased now."""
        self._collect()
        return self.budget_bytes - self._leased - self._kept

    @property
    def given_back_bytes(self) -> int:
        """The bytes of all leases that have ended."""
        self._collect()
        return self._given_back

    def make_way(self, sizes: Sequence[int]) -> None:
        """Prepare for leases of ``sizes``, which will be requested in this order and held together. If they fit into
        the budget, but neither into the free extents nor into memory that can still be mapped, drop idle segments."""
        wanted = [whole_pages(size) for size in sizes]
        with self._lock:
            self._stage_bytes = sum(wanted)
            self._drain()
            if self._backing == "shared":
                self._drop_private()
            excess = self._staying() + sum(wanted) - self.budget_bytes
            idle = sum(segment.nbytes for segment in self._segments if segment.idle())
            if 0 < excess <= idle and _missing(self._free_sizes(), wanted):
                self._drop_idle_segments(excess)

    def grow_for(self, sizes: Sequence[int], busy: Callable[[], bool], most: int) -> bool:
        """Map and touch the memory that leases of ``sizes``, held together, still need. At most ``most`` bytes are
        reserved then. Returns False if memory is in use, or once ``busy()`` is true."""
        # A thread that holds the lock may be waiting for memory, for as long as its deadline allows. Growing is work
        # for idle time, so it does not wait behind that.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._drain()
            # While memory is in use the arena is not idle: growing would compete with the stage for the budget and for
            # the cores.
            if self._leases or self._closed.is_set():
                return False
            left, most = _missing(self._free_sizes(), map(whole_pages, sizes)), min(most, self.budget_bytes)
            while left:
                if busy():
                    return False
                room = most - self._staying()
                wanted = _segment_bytes(left, room, self._segment_bytes, _GROWTH_BYTES, sum(map(whole_pages, sizes)))
                if self._reserved + wanted > most:
                    break
                segment = _Segment(_map(wanted, self._backing), wanted, [(0, wanted)])
                if self._pinner is not None:
                    place(segment.memory, self._pinner[1])
                whole = touch(address_of(segment.memory), wanted, busy)
                self._add(segment)
                if not whole:  # the first copies into it fault the rest in
                    return False
                left = _missing([wanted], left)
            return True
        except ArenaExhaustedError:  # the next stage that needs the memory raises it
            return True
        finally:
            self._lock.release()

    def trim_idle(self, most: int = 0) -> None:
        """Unmap idle segments until at most ``most`` bytes are reserved. Does nothing while a stage waits for
        memory."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._drain()
            self._drop_idle_segments(self._staying() - most)
        finally:
            self._lock.release()

    def trim(self, deadline: Deadline) -> None:
        """Unmap the idle segments. Blocks until they are unmapped. Raises ``DeadlineExceededError``."""
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise deadline.exceeded("trim(), which had to wait for a stage that waits for memory,")
        try:
            self._drain()
            self._drop_idle_segments(self._reserved)
        finally:
            self._lock.release()
        self.wait_unmapped(deadline)

    def wait_unmapped(self, deadline: Deadline) -> None:
        """Wait until all dropped segments have been unmapped, except those that cannot be unregistered.
        Raises ``DeadlineExceededError``."""
        if self._leaving and not wait_unmapped(deadline):
            raise DeadlineExceededError(
                f"memory was not released within timeout_s={deadline.timeout_s:g}: it is being unmapped, or the device "
                "that it is registered with does not respond"
            )

    def wake(self) -> None:
        """Make waiting threads look at their stop flag."""
        self._returned.put(None)

    def statistics(self) -> ArenaStatistics:
        self._collect()
        registered = sum(segment.memory.registered_bytes for segment in list(self._segments))
        registered += self._leaving if self._pinner is not None else 0
        return ArenaStatistics(
            self.budget_bytes,
            self._reserved,
            registered,
            self._leased,
            self._peak,
            self._leases,
            self._waiters,
            self._kept,
        )

    def close(self) -> None:
        """Drop all segments. Each is unmapped when the last reference to its memory is gone, and counts as reserved
        until then; existing leases stay valid."""
        self._closed.set()
        self.wake()
        with self._lock:
            self._drain()
            self._leaving += sum(segment.nbytes for segment in self._segments)
            self._segments.clear()

    def _acquire(self, request: _Request) -> tuple[_Segment, int]:
        # Counted before the lock is acquired. ``take_offer`` reads the count without the lock, to decide whether a
        # waiting thread has to be woken up.
        self._waiters += 1
        try:
            if not self._lock.acquire(timeout=request.deadline.remaining_s()):
                raise self._exhausted(request)
            try:
                return self._wait_for(request)
            finally:
                self._lock.release()
        finally:
            self._waiters -= 1

    # --- everything below runs with the lock held, except _give_back and _collect ---

    def _wait_for(self, request: _Request) -> tuple[_Segment, int]:
        size, unmapped = request.size, Deadline.after(_UNMAPPED_S)
        while True:
            self._drain()
            if self._backing == "shared":
                self._drop_private()
            request.stop.check()
            if self._closed.is_set():
                raise ClosedError("the stager was closed while a stage waited for memory")
            # There are five ways to the memory, tried in this order. A free extent. Memory that is about to come back,
            # if that takes less time than touching new memory (``_recycles``). A new segment. Memory that is being
            # unmapped. Memory that was offered. Each costs the program more than the one before.
            found = self._take(size)
            if found is None:
                if self._recycles(request):
                    continue
                found = self._grow(size, request.coming)
            if found is not None:
                if request.drain is not None:
                    request.drain.leased(size)
                self._leased += size
                self._leases += 1
                self._peak = max(self._peak, self._leased)
                return found
            # Segments that a device did not unregister never come back, so waiting would be in vain.
            if size > self.budget_bytes - self._kept:
                raise self._exhausted(request)
            # Unmapping ends by itself. So it is awaited before an offer is taken, which costs a sink its snapshot, or a
            # save the chance to write its files again.
            unmapping = self._leaving > self._kept and unmapped.remaining_s() > 0
            if not unmapping and self._take_back():
                continue
            patience_s = request.deadline.remaining_s()
            if request.at_once or unmapping:
                patience_s = min(patience_s, unmapped.remaining_s() if unmapping else 0.0)
            try:
                # The thread waits with the lock held. That is safe, because what ends the wait needs no lock:
                # finalizers and ``wake`` only put into the queue. And it is wanted: no later request takes the memory
                # that this one waits for.
                self._take_returned(self._returned.get(timeout=patience_s))
            except queue.Empty:
                if unmapping and request.deadline.remaining_s() > 0:
                    continue
                raise self._exhausted(request) from None

    def _recycles(self, request: _Request) -> bool:
        """Wait for memory that is in use, unless it is faster to map new memory. Returns whether it has waited."""
        if request.drain is None or request.at_once or self._pinner is not None or not self._touched_bytes_per_s:
            return False
        patience_s = request.drain.patience_s(request.size, self._given_back, self._touched_bytes_per_s)
        patience_s = min(patience_s, request.deadline.remaining_s())
        if patience_s <= 0:
            return False
        with suppress(queue.Empty):
            self._take_returned(self._returned.get(timeout=patience_s))
        return True

    def _take_back(self) -> bool:
        """Take the oldest offer, if there is one. Offers of sinks come first: a sink can start again from the
        checkpoint, but a save that loses its writer process fails without the memory that it has offered."""
        for offers in (self._sink_offers, self._offers):
            for key in list(offers):
                take_back = offers.pop(key, None)
                if take_back is not None:  # otherwise another thread has just withdrawn it
                    take_back()
                    return True
        return False

    def _exhausted(self, request: _Request) -> ArenaExhaustedError:
        kept = f" and {self._kept} cannot be unregistered" if self._kept else ""
        return ArenaExhaustedError(
            f"{request.size} bytes of staging memory did not become free within {request.deadline.timeout_s:g} s: "
            f"{self._leased} of {self.budget_bytes} are leased{kept}; release() staged state dicts, or raise "
            "budget_bytes="
        )

    def _add(self, segment: _Segment) -> None:
        arena, nbytes = weakref.ref(self), segment.nbytes

        def ended(outcome: UnmapOutcome) -> None:
            if (one := arena()) is not None:
                one._returned.put(_Ended(nbytes, outcome))

        segment.memory.ended = ended
        self._segments.append(segment)
        self._reserved += nbytes

    def _staying(self) -> int:
        """Return the reserved bytes without those that are about to be unmapped."""
        return self._reserved - self._leaving + self._kept

    def _free_sizes(self) -> list[int]:
        usable = [one for one in self._segments if self._backing != "shared" or one.memory.descriptor is not None]
        return [end - start for segment in usable for start, end in segment.free]

    def _take(self, size: int) -> tuple[_Segment, int] | None:
        """Take an extent by best fit, so that large extents stay whole for large leases."""
        best: tuple[int, _Segment, int] | None = None
        for segment in self._segments:
            if self._backing == "shared" and segment.memory.descriptor is None:
                continue
            for index, (start, end) in enumerate(segment.free):
                if end - start >= size and (best is None or end - start < best[0]):
                    best = (end - start, segment, index)
        if best is None:
            return None
        _, segment, index = best
        start, end = segment.free.pop(index)
        if end - start > size:
            insort(segment.free, (start + size, end))
        return segment, start

    def _grow(self, size: int, coming: Callable[[], Iterable[int]]) -> tuple[_Segment, int] | None:
        sizes = [size, *map(whole_pages, coming())]
        room, most = self.budget_bytes - self._staying(), _GROWTH_BYTES
        if self._pinner is None:
            # In small steps at first: the first window is written while memory for the next one is touched. Memory for
            # a device is mapped in larger steps, because each segment is registered by a call of its own.
            most = min(most, max(_STEP_BYTES, self._reserved // _STEP_SHARE))
        wanted = _segment_bytes(sizes, room, self._segment_bytes, most, self._stage_bytes)
        excess = self._staying() + wanted - self.budget_bytes
        # Idle segments are dropped only if that helps. Otherwise the stage has to wait for leased memory anyway, and
        # would lose warm memory for nothing.
        if excess > 0 and excess <= sum(segment.nbytes for segment in self._segments if segment.idle()):
            self._drop_idle_segments(excess)
        if self._reserved + wanted > self.budget_bytes:
            return None
        segment = _Segment(_map(wanted, self._backing), wanted)
        if self._pinner is None:
            begun = time.perf_counter()
            # Before the first copy. Faults within a copy take longer, come one page at a time, and on the copying
            # threads. Memory for a device is touched when it is registered.
            _touch(address_of(segment.memory), wanted)
            self._touched_bytes_per_s = wanted / max(time.perf_counter() - begun, 1e-9)
        segment.free = [(size, wanted)] if wanted > size else []
        self._add(segment)
        return segment, 0

    def _drop_idle_segments(self, nbytes: int) -> None:
        """Drop idle segments of ``nbytes`` in total. The smallest come first, because a large lease does not fit into
        them: their budget then serves one large segment."""
        for segment in sorted((s for s in self._segments if s.idle()), key=lambda s: s.nbytes):
            if nbytes <= 0:
                return
            self._drop(segment)
            nbytes -= segment.nbytes

    def _drop_private(self) -> None:
        for segment in [s for s in self._segments if s.memory.descriptor is None and s.idle()]:
            self._drop(segment)

    def _drop(self, segment: _Segment) -> None:
        """Drop a segment. It counts as reserved until it has been unmapped."""
        self._segments.remove(segment)
        self._leaving += segment.nbytes

    @staticmethod
    def _give_back(
        returned: queue.SimpleQueue[Any], closed: threading.Event, pid: int, back: tuple[_Segment, int, int]
    ) -> None:
        if os.getpid() == pid:  # a forked child shares the pages, so its finalizers must not return them
            segment, start, end = back
            returned.put((None if closed.is_set() else segment, start, end))  # a closed arena keeps no memory mapped

    def _collect(self) -> None:
        if self._lock.acquire(blocking=False):  # a thread that holds the lock drains the queue itself
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while True:
            try:
                returned = self._returned.get_nowait()
            except queue.Empty:
                return
            self._take_returned(returned)

    def _take_returned(self, returned: tuple[_Segment | None, int, int] | _Ended | None) -> None:
        if returned is None:
            return
        if isinstance(returned, _Ended):
            self._end(returned)
            return
        segment, start, end = returned
        self._given_back += end - start
        self._leased -= end - start
        self._leases -= 1
        if segment is None:
            return
        insort(segment.free, (start, end))
        merged: list[tuple[int, int]] = []
        for extent in segment.free:
            if merged and merged[-1][1] == extent[0]:
                merged[-1] = (merged[-1][0], extent[1])
            else:
                merged.append(extent)
        segment.free = merged

    def _end(self, ended: _Ended) -> None:
        """Update the counts for a dropped segment that has been unmapped or is kept. A kept segment may be unmapped
        later."""
        if ended.outcome == "kept":
            self._kept += ended.nbytes
            return
        if ended.outcome == "unmapped late":
            self._kept -= ended.nbytes
        self._leaving -= ended.nbytes
        self._reserved -= ended.nbytes


@dataclass(frozen=True, slots=True)
class _Request:
    """A requested lease, with the arguments of ``Arena.lease``."""

    size: int
    coming: Callable[[], Iterable[int]]
    deadline: Deadline
    stop: Stop
    at_once: bool
    drain: Drain | None


@dataclass(frozen=True, slots=True)
class _Ended:
    """The outcome for a dropped segment."""

    nbytes: int
    outcome: UnmapOutcome


def whole_pages(nbytes: int) -> int:
    """Return the bytes that a lease of ``nbytes`` uses."""
    return max(PAGE_BYTES, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)


def _segment_bytes(sizes: Sequence[int], room: int, least: int, most: int, stage_bytes: int) -> int:
    """Return the size of the segment to map for the first of ``sizes`` if ``room`` bytes of the budget are left. They
    are the rest of a stage of ``stage_bytes``.

    The segment holds as many whole leases as are worth touching at once (``most`` bytes, unless the first one is
    larger), so that no part of it remains unused. It is rounded up to huge pages if the later leases leave room for
    that."""
    expected, everything = sizes[0], sum(sizes)
    for size in sizes[1:]:
        if expected + size > most:
            break
        expected += size
    wanted = max(least, -(-expected // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES)
    room -= room % PAGE_BYTES
    if everything > room:
        return min(wanted, max(sizes[0], room))
    left, stage_bytes = room - everything, max(stage_bytes, everything)
    # A budget for two stages holds two: what is rounded up must not be the room of another one.
    spare = left % stage_bytes if left // stage_bytes < _COUNTED_STAGES else left
    return min(wanted, expected + spare)


def _missing(free: list[int], sizes: Iterable[int]) -> list[int]:
    """Return those of ``sizes`` that do not fit into extents of ``free`` bytes, with each in the best-fitting one."""
    free, missing = sorted(free), list[int]()
    for size in sizes:
        index = bisect_left(free, size)
        if index == len(free):
            missing.append(size)
            continue
        rest = free.pop(index) - size
        if rest:
            insort(free, rest)
    return missing


def _nothing() -> None:
    """Do nothing: the offers ended with the arena."""


def _map(nbytes: int, backing: Backing) -> MappedMemory:
    try:
        if backing == "shared":
            memory = _map_memfd(nbytes)
        else:
            # Private unless another process has to be handed the memory: after a fork the child of a shared mapping
            # would see its staged tensors change with the next stage of the parent.
            memory = MappedMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ArenaExhaustedError(f"the system did not grant {nbytes} bytes of memory: {error}") from error
    advise(address_of(memory), nbytes, getattr(mmap, "MADV_HUGEPAGE", -1))
    return memory


def _map_memfd(nbytes: int) -> MappedMemory:
    """Map a sealed memfd. Without the seals one process could shrink it, and the next access of the other one would
    end that process."""
    descriptor = os.memfd_create("sidestream", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = MappedMemory(descriptor, nbytes, flags=mmap.MAP_SHARED)
    except BaseException:
        os.close(descriptor)
        raise
    memory.descriptor = descriptor
    memory.number = next(_numbers)
    return memory


def _touch(base: int, nbytes: int) -> None:
    """Fault all pages in, without the GIL. Large memory is divided among a few threads."""
    if nbytes <= 2 * _STEP_BYTES:  # a second thread would save some milliseconds and use twice the processor time
        touch(base, nbytes)
        return
    share = -(-nbytes // max(1, min(4, (os.cpu_count() or 1) // 2)))  # the program needs the other cores
    share = -(-share // PAGE_BYTES) * PAGE_BYTES
    threads = [
        threading.Thread(target=touch, args=(base + start, min(share, nbytes - start)), daemon=True)
        for start in range(0, nbytes, share)
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError:  # the system starts no more threads: the first writes there fault the rest in
        pass
    finally:
        for thread in started:  # also after an error, or the memory would be unmapped while they touch it
            thread.join()


def touch(address: int, nbytes: int, busy: Callable[[], bool] | None = None) -> bool:
    """Fault pages in. Returns False if ``busy()`` became true first. With ``busy``, pauses between pieces.

    ``MADV_POPULATE_WRITE`` (from Linux 5.14) takes half of the time of ``memset``, or a fifth with huge pages."""
    populates = sys.platform == "linux"
    for start, size in pieces(nbytes):
        if busy is not None:
            time.sleep(_GAP_S)
            if busy():
                return False
        populates = populates and advise(address + start, size, _POPULATE_WRITE) == 0
        if not populates:
            ctypes.memset(address + start, 0, size)
    return True
