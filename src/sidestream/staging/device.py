"""Staging from an accelerator: what is ordered where. The calls themselves are the driver's.

On the caller's thread, per device: small storages, and those that must not wait, are copied into device memory on the
current stream, and a ready event is recorded. In the stager's thread: a side stream waits for that event and copies in
chunks; an event marks the end. In a thread per device: wait for that event, put small tensors in their places, and say
so. Sources are referred to until then. The reasons, and who found them out, stand in ``docs/gpu.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .._threads import Stop, Threads
from .._torch import neg_view
from ..errors import CapturingGraph
from .arena import Lease
from .driver import Driver
from .host import HostEngine, raw_start, rows_with
from .image import Copy
from .pace import Pace

__all__ = ["DeviceEngine", "DeviceStage", "StageMode", "held_back"]

StageMode = Literal["lazy", "snapshot", "hybrid"]

_SMALL_BYTES = 1 << 20
_CHUNK_BYTES = (32 << 20, 512 << 20)
_GAP_BYTES = 24 << 20
_CHUNKS = 350  # a stream's queue takes some 1,000 operations before a launch blocks; each chunk has a gap beside it


def held_back(sizes: Sequence[int], mode: StageMode, lazily_bytes: float, free_bytes: float) -> set[int]:
    """Which storages to copy on the device first, by index: in hybrid mode the last ones, those that would not be
    copied within the ``lazily_bytes`` that pass before the next fence, as far as half of the free memory takes them."""
    if mode == "snapshot":
        return set(range(len(sizes)))
    if mode == "lazy":
        return set()
    chosen: set[int] = set()
    excess, room = sum(sizes) - lazily_bytes, free_bytes / 2
    for index in reversed(range(len(sizes))):
        if excess <= 0:
            break
        if sizes[index] <= room:
            chosen.add(index)
            excess -= sizes[index]
            room -= sizes[index]
    return chosen


@dataclass(slots=True)
class _Side:
    """One device's part in one stage. Storages are known by their address."""

    device: Hashable
    stream: Any
    ready: Any
    """Recorded on the caller's stream after the copies on the device."""
    scratch: torch.Tensor | None
    slots: dict[int, tuple[int, int]]
    """Where in ``scratch`` the bytes of a small storage are: start and length."""
    clones: dict[int, torch.Tensor]
    lazily: bool
    """Whether sources are still read after the call."""
    small: Lease | None = None
    begun: bool = False
    since_gap: int = 0
    last: Any = None
    """The end of everything that was issued so far."""
    scatter: list[Copy] = field(default_factory=list)


class DeviceStage:
    """The device parts of one stage, from the call until nothing reads a source any more."""

    def __init__(self, sides: dict[Hashable, _Side], tensors: list[torch.Tensor]) -> None:
        self.sides = sides
        self._tensors: list[torch.Tensor] | None = tensors  # or the allocator would hand out their memory

    @property
    def scratch_bytes(self) -> dict[Hashable, int]:
        """Host memory that the small tensors of each device pass through."""
        return {key: side.scratch.nbytes for key, side in self.sides.items() if side.scratch is not None}

    @property
    def lazily(self) -> bool:
        """Whether a writer has to wait for more than the copies on the device."""
        return any(side.lazily for side in self.sides.values())

    def drop(self) -> None:
        """No copy is in flight and none will be: let go of all device memory."""
        self._tensors = None
        self.sides = {}


@dataclass(frozen=True, slots=True)
class _Part:
    """What one device contributes to one image: done when ``end`` has passed and ``scatter`` is in place."""

    side: _Side
    end: Any
    scatter: tuple[Copy, ...]
    lease: Lease


class DeviceEngine:
    """One kind of accelerator under one stager. ``host`` does what remains to be done in host memory."""

    def __init__(
        self,
        driver: Driver,
        host: HostEngine | None = None,
        *,
        small_bytes: int = _SMALL_BYTES,
        chunk_bytes: int | None = None,
    ) -> None:
        self.driver = driver
        self.host = host or HostEngine()
        self._small_bytes = small_bytes
        self._chunk_bytes = chunk_bytes
        self._streams: dict[Hashable, Any] = {}
        self._waiters: dict[Hashable, Threads] = {}
        self._lock = threading.Lock()

    def check_not_capturing(self) -> None:
        if self.driver.capturing():
            raise CapturingGraph(
                "a graph is being captured on this stream, and staging cannot be part of one: "
                "stage() and fence() before or after the capture"
            )

    # --- the caller's thread ---

    def begin(
        self,
        tensors: list[torch.Tensor],
        *,
        mode: StageMode,
        volatile: Collection[int],
        lazily_bytes: float,
        wait_streams: Sequence[Any],
    ) -> DeviceStage:
        """Fix what ``tensors`` hold at this point of the caller's current streams. Launches, and does not wait.

        ``volatile`` are addresses of storages that forward changes: like small ones they are copied on the device now.
        """
        self.check_not_capturing()
        groups: dict[Hashable, dict[int, torch.UntypedStorage]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                groups.setdefault(self.driver.device_of(tensor), {})[storage.data_ptr()] = storage
        sides = {}
        for device, storages in groups.items():
            current = self.driver.current_stream(device)
            for stream in wait_streams:
                self.driver.wait(current, self.driver.record(stream))
            sides[device] = self._hold(device, current, storages, mode, volatile, lazily_bytes)
        return DeviceStage(sides, tensors)

    def _hold(
        self,
        device: Hashable,
        current: Any,
        storages: dict[int, torch.UntypedStorage],
        mode: StageMode,
        volatile: Collection[int],
        lazily_bytes: float,
    ) -> _Side:
        small = {at: one for at, one in storages.items() if one.nbytes() <= self._small_bytes}
        large = [(at, one) for at, one in storages.items() if at not in small]
        free = self.driver.free_bytes(device) if mode == "hybrid" else 0
        chosen = held_back([one.nbytes() for _, one in large], mode, lazily_bytes, free or 0)
        held = {at: one for index, (at, one) in enumerate(large) if index in chosen or at in volatile}
        slots, position = {}, 0
        for at, one in small.items():
            slots[at] = (position, one.nbytes())
            position += one.nbytes()
        scratch = self.driver.gather([_raw(one) for one in small.values()]) if small else None
        clones = {at: self.driver.clone(_raw(one)) for at, one in held.items()}
        ready = self.driver.record(current)
        with self._lock:
            if device not in self._streams:
                self._streams[device] = self.driver.side_stream(device)
        lazily = len(held) < len(large)
        return _Side(device, self._streams[device], ready, scratch, slots, clones, lazily)

    def fence(self, stage: DeviceStage) -> None:
        """The caller's current streams do nothing more before the sources of ``stage`` have been read.

        What is read lazily must have been issued: an event that was never recorded holds nobody back.
        """
        self.check_not_capturing()
        for device, side in list(stage.sides.items()):
            event = side.last if side.lazily else side.ready
            if event is not None:
                self.driver.wait(self.driver.current_stream(device), event)

    # --- the stager's thread ---

    def issue(
        self,
        stage: DeviceStage,
        copies: Iterable[Copy],
        lease: Lease,
        *,
        small: Callable[[int], Lease],
        pace: Pace,
        stop: Stop,
    ) -> list[_Part]:
        """Enqueue ``copies`` into ``lease``. ``small`` gives host memory for the scratch of a device.

        Every part that is returned has to be given to ``watch``. When this raises, nothing writes into ``lease``.
        """
        by_device: dict[Hashable, list[Copy]] = {}
        for copy in copies:
            by_device.setdefault(self.driver.device_of(copy.source), []).append(copy)
        parts: list[_Part] = []
        try:
            for device, mine in by_device.items():
                side = stage.sides[device]
                self.driver.enter(device)
                if side.scratch is not None and side.small is None:
                    side.small = small(side.scratch.nbytes)
                parts.append(self._issue_side(side, mine, lease, pace, stop))
        except BaseException:
            for side in stage.sides.values():
                with suppress(Exception):  # the error that is on its way says more
                    self.driver.synchronize(self.driver.record(side.stream))
            raise
        return parts

    def _issue_side(self, side: _Side, copies: list[Copy], lease: Lease, pace: Pace, stop: Stop) -> _Part:
        chunk_bytes = self._chunk_bytes or _chunk_bytes(sum(copy.nbytes for copy in copies))
        scatter = []
        with self.driver.using(side.stream):
            if not side.begun:
                self.driver.wait(side.stream, side.ready)
                if side.scratch is not None and side.small is not None:
                    self.driver.copy(_host(side.small, 0, side.scratch.nbytes), side.scratch)
                side.begun = True
            for copy in copies:
                if copy.source.untyped_storage().data_ptr() in side.slots:
                    scatter.append(copy)
                    continue
                raw = self._source(side, copy)
                for start in range(0, copy.nbytes, chunk_bytes):
                    size = min(chunk_bytes, copy.nbytes - start)
                    pace.spend(size, stop)
                    stop.check()
                    self.driver.copy(_host(lease, copy.offset + start, size), raw[start : start + size])
                    side.since_gap += size
                    if side.since_gap >= _GAP_BYTES or size == chunk_bytes:
                        self.driver.gap(side.device)
                        side.since_gap = 0
        side.last = self.driver.record(side.stream)
        return _Part(side, side.last, tuple(scatter), lease)

    def _source(self, side: _Side, copy: Copy) -> torch.Tensor:
        """The bytes to copy: of the clone where there is one, else of the source."""
        tensor, start = copy.source, raw_start(copy)
        clone = side.clones.get(tensor.untyped_storage().data_ptr())
        if clone is not None:
            tensor = _replica(tensor, clone.untyped_storage())
        if start is None:
            tensor, start = rows_with(tensor, copy.skip, copy.nbytes)
            tensor = self.driver.contiguous(tensor)
        return _raw(tensor.untyped_storage(), start, copy.nbytes)

    # --- one thread per device ---

    def watch(self, part: _Part, stop: Stop, done: Callable[[BaseException | None], None]) -> None:
        """Call ``done``, in the device's thread, when everything of ``part`` is in host memory, or with the error."""
        self._waiter(part.side.device).submit(self._land, part, stop, done)

    def watch_ready(self, stage: DeviceStage, done: Callable[[BaseException | None], None]) -> None:
        """Call ``done`` when the copies on the devices have ended, so that the sources of a snapshot may change."""
        events = [(side.device, side.ready) for side in stage.sides.values()]
        if events:
            # A thread of its own: the other one may be waiting for the copies to the host of an earlier stage.
            self._waiter(("snapshots", events[0][0])).submit(self._readied, events, done)

    def _waiter(self, name: Hashable) -> Threads:
        with self._lock:
            if name not in self._waiters:
                self._waiters[name] = Threads(f"sidestream-{name}", 1)
            return self._waiters[name]

    def _readied(self, events: list[tuple[Hashable, Any]], done: Callable[[BaseException | None], None]) -> None:
        error: BaseException | None = None
        try:
            for device, event in events:
                self.driver.enter(device)
                self.driver.synchronize(event)
        except BaseException as failure:
            error = failure
        done(error)

    def _land(self, part: _Part, stop: Stop, done: Callable[[BaseException | None], None]) -> None:
        error: BaseException | None = None
        try:
            self.driver.enter(part.side.device)
            self.driver.synchronize(part.end)
            for copy in part.scatter:
                self._scatter(part, copy, stop)
        except BaseException as failure:
            error = failure
        done(error)

    def _scatter(self, part: _Part, copy: Copy, stop: Stop) -> None:
        small = part.side.small
        assert small is not None
        at, nbytes = part.side.slots[copy.source.untyped_storage().data_ptr()]
        target = part.lease.address + copy.offset
        start = raw_start(copy)
        if start is not None:
            self.host.move(small.address + at + start, target, copy.nbytes, stop, lambda _: None)
            return
        storage = _host(small, at, nbytes).clone().untyped_storage()  # its elements need not be aligned in the scratch
        replica = _replica(copy.source, storage)
        self.host.copy(copy._replace(source=replica), target, stop=stop, copied=lambda _: None)

    def close(self) -> None:
        """Threads end when what they wait for has ended."""
        with self._lock:
            for threads in self._waiters.values():
                threads.close()


def _chunk_bytes(total: int) -> int:
    low, high = _CHUNK_BYTES
    return min(max(total // _CHUNKS, low), high)


def _raw(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    count = storage.nbytes() - start if nbytes is None else nbytes
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (count,), (1,))


def _replica(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """The same view of another storage with the same bytes."""
    view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    view.set_(storage, int(tensor.storage_offset()), tensor.shape, tensor.stride())
    if tensor.is_conj():
        view = view.conj()
    return neg_view(view) if tensor.is_neg() else view


def _host(lease: Lease, start: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(lease.array, dtype=torch.uint8, count=nbytes, offset=start)
