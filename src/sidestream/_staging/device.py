"""Staging from an accelerator: the order of its calls on streams. The driver makes the calls.

- The caller's thread copies small storages, and those that must not wait, into device memory on the current stream of
  their device, and records a ready event.
- The stager's thread makes a side stream wait for that event, enqueues the copies in chunks, and records an end event.
- One thread per device waits for the end event, moves small tensors to their places, and calls ``done``.

Sources are referred to until then. ``docs/gpu.md`` has the reasons and their origins.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .._runtime.rate import RateLimiter
from .._runtime.threads import Deadline, Stop, Threads, TorchThreads, paced
from .._runtime.torch_probes import extent_bytes, lazy_bits, neg_view, storage_key
from ..errors import (
    ArenaExhaustedError,
    ClosedError,
    DeviceError,
    GraphCaptureError,
    InvalidOptionError,
    SidestreamError,
)
from ..options import StageMode
from .arena import Allocation, Arena
from .captured import named
from .driver import TorchDriver
from .host import HostEngine, check_extent, elements_of, move, pieces_in, raw_start, rows_with
from .image import Copy

_SMALL_BYTES = 1 << 20
_CHUNK_BYTES = 32 << 20
_CHUNKS = 128  # of a large state: a launch blocks when some 1,000 operations are queued on a stream
_SCRATCH_BYTES = 256 << 20
_MANY = 256  # copies that are made one by one; of more, neighbours are gathered on the device
_BETWEEN_BYTES = 64 << 10  # the most between neighbours
_EVERY = 64
_CONVERTED_BYTES = 8 << 20  # for each piece, in device memory that the next piece uses again
_NAMED = 3  # keys in a message
# torch.cat is known to support these on every device. Others are copied as raw bytes.
_GATHERED_AS_THEY_ARE = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32}
)


@dataclass(slots=True)
class _Side:
    """The part of one device in one stage. Storages are identified by key, because a resize changes the address."""

    device: Hashable
    stream: Any
    ready: Any
    """Recorded on the caller's stream after the copies on the device."""
    scratch: list[torch.Tensor]
    """The bytes of small storages, one after the other (uint8)."""
    slots: dict[int, tuple[int, int]]
    """Start and length of each small storage in ``scratch``."""
    clones: dict[int, torch.Tensor]
    lazily: bool
    """Whether sources are still read after ``stage()`` has returned."""
    chunk_bytes: int
    """The most that is copied at once."""
    gathers: bool
    """Whether there are so many copies that neighbours are gathered."""
    small: Allocation | None = None
    begun: bool = False
    since_gap: int = 0
    last: Any = None
    """The event after everything that was enqueued so far."""

    @property
    def scratch_bytes(self) -> int:
        return sum(one.nbytes for one in self.scratch)


class DeviceStage:
    """The device parts of one stage, from the call until the last read of a source."""

    def __init__(self, tensors: list[torch.Tensor], root: Mapping[Any, Any] | None) -> None:
        self.sides: dict[Hashable, _Side] = {}
        self._tensors: list[torch.Tensor] | None = tensors  # keeps their memory from being allocated again
        self._root = root

    @property
    def scratch(self) -> list[int]:
        """The bytes of host memory through which small tensors are copied, for each device that has such tensors."""
        return [side.scratch_bytes for side in self.sides.values() if side.scratch]

    def names(self, storages: Collection[int] | None = None) -> list[str]:
        """Return the names of ``storages`` in the state dict; with None, of all storages on devices."""
        root, tensors = self._root, self._tensors
        if root is None or tensors is None:
            return []
        return named(root, set(map(storage_key, tensors)) if storages is None else storages)

    @property
    def lazily(self) -> bool:
        """Whether a writer of the sources has to wait for more than the copies on the device."""
        return any(side.lazily for side in self.sides.values())

    @property
    def held(self) -> set[int]:
        """Keys of the storages that have a copy on the device, so that later changes of them do not matter."""
        return {key for side in self.sides.values() for key in (*side.slots, *side.clones)}

    def drop(self) -> None:
        """Drop the references to all device memory. Called when no copy is in flight or will be."""
        self._tensors = self._root = None
        for side in self.sides.values():
            side.scratch, side.clones, side.small = [], {}, None
        self.sides = {}


@dataclass(slots=True)
class _Run:
    """Neighbours in an image whose sources are on one device. If there is more than one, they are gathered on the
    device and copied together, and so are the bytes between them, which are undefined."""

    copies: list[Copy]
    between: list[Copy]
    """Copies from host memory to places between them."""

    @property
    def start(self) -> int:
        return self.copies[0].offset

    @property
    def end(self) -> int:
        return self.copies[-1].offset + self.copies[-1].nbytes


@dataclass(frozen=True, slots=True)
class DevicePart:
    """The copies from one device into one image. They are complete when the event ``end`` has occurred and the copies
    in ``scatter`` and ``between`` have been made."""

    stage: DeviceStage
    side: _Side
    end: Any
    scatter: Sequence[Copy]
    between: Sequence[tuple[int, ctypes.Array[ctypes.c_char]]]
    """What lay in host memory, and its offsets."""
    lease: Allocation


class DeviceEngine:
    """Staging from one kind of accelerator, for one stager. ``host`` makes the copies within host memory."""

    def __init__(
        self,
        driver: TorchDriver,
        host: HostEngine | None = None,
        *,
        small_bytes: int = _SMALL_BYTES,
        chunk_bytes: int | None = None,
    ) -> None:
        self.driver = driver
        self.host: HostEngine = host or HostEngine()
        self._small_bytes = small_bytes
        self._chunk_bytes = chunk_bytes
        self._waiters: dict[Hashable, Threads] = {}
        self._lock = threading.Lock()

    def check_not_capturing(self, streams: Iterable[Any]) -> None:
        """Raise ``GraphCaptureError`` if a graph is being captured on one of ``streams``."""
        for stream in streams:
            if self.driver.capturing(stream):
                raise GraphCaptureError(
                    f"a graph is being captured on {stream}, and staging cannot be part of a graph: "
                    "call stage() and fence() before or after the capture"
                )

    # --- the caller's thread ---

    def begin(
        self,
        tensors: list[torch.Tensor],
        *,
        mode: StageMode,
        volatile: Collection[int],
        wait_streams: Sequence[Any],
        root: Mapping[Any, Any] | None = None,
    ) -> DeviceStage:
        """Begin a stage of ``tensors`` as they are at this point of the caller's current streams. Does not wait.

        ``volatile`` are keys of storages that forward changes. Like small ones, they are copied on the device now.
        ``root`` has the names of the tensors, for messages. Raises ``ArenaExhaustedError`` if the device has too little
        memory for the copies, ``GraphCaptureError`` before anything is enqueued, and ``DeviceError``.
        """
        stage = DeviceStage(tensors, root)
        try:
            with failing("at the call", stage.names):
                groups: dict[Hashable, dict[int, torch.Tensor]] = {}
                for tensor in tensors:
                    if tensor.untyped_storage().nbytes():
                        group = groups.setdefault(self.driver.device_of(tensor), {})
                        key = storage_key(tensor)
                        if key not in group or not _covers(group[key]):
                            group[key] = tensor
                # All streams are looked at before anything is enqueued on one of them. An error in the middle would
                # leave copies in flight, or a part of them in the graph that is being captured.
                currents = {device: self.driver.current_stream(device) for device in groups}
                try:
                    self.check_not_capturing([*currents.values(), *wait_streams])
                except (AttributeError, TypeError) as error:
                    problem = f"wait_streams={wait_streams!r} must be streams of the device: {error}"
                    raise InvalidOptionError(problem) from error
                for device, views in groups.items():
                    current = currents[device]
                    # The current stream waits for these, and the ready event is recorded on the current stream. So one
                    # event stands for all of them.
                    for stream in wait_streams:
                        self.driver.wait(current, self.driver.record(stream))
                    stage.sides[device] = self._hold(device, current, views, mode, volatile)
        except BaseException:
            stage.drop()
            raise
        return stage

    def _hold(
        self,
        device: Hashable,
        current: Any,
        views: dict[int, torch.Tensor],
        mode: StageMode,
        volatile: Collection[int],
    ) -> _Side:
        """Copy storages on ``device`` and record the ready event. ``views`` has one tensor for each storage: one that
        covers it, if there is one."""
        sizes = {key: view.untyped_storage().nbytes() for key, view in views.items()}
        small = self._small(sizes)
        try:
            scratch, slots = self._gather({key: views[key] for key in small})
        except ArenaExhaustedError as error:
            if mode == "eager":
                raise ArenaExhaustedError(f'{error}, or stage with mode="lazy"') from error
            scratch, slots = [], {}  # the device is full: each is copied to the host when its turn comes
        large = [key for key in views if key not in slots]
        clones = {}
        for key in large:
            if mode == "eager" or key in volatile:
                try:
                    clones[key] = self.driver.clone(_raw(views[key].untyped_storage()))
                except ArenaExhaustedError as error:
                    if key in volatile:  # it needs a copy in every mode
                        raise
                    raise ArenaExhaustedError(f'{error}, or stage with mode="lazy"') from error
        # After the copies on the device: this event means that small, volatile and cloned storages may change. Large
        # ones are still read by the side stream, until ``last``.
        ready = self.driver.record(current)
        stream, lazily = self.driver.side_stream(device), len(clones) < len(large)
        chunk_bytes = self._chunk_bytes or max(sum(sizes.values()) // _CHUNKS, _CHUNK_BYTES)
        return _Side(device, stream, ready, scratch, slots, clones, lazily, chunk_bytes, len(large) > _MANY)

    def _small(self, sizes: dict[int, int]) -> set[int]:
        """Return the storages to coalesce: the smallest ones, up to ``_SCRATCH_BYTES`` together."""
        chosen: set[int] = set()
        total = 0
        for key in sorted(sizes, key=sizes.__getitem__):
            total += sizes[key]
            if sizes[key] > self._small_bytes or total > _SCRATCH_BYTES:
                break
            chosen.add(key)
        return chosen

    def _gather(self, views: dict[int, torch.Tensor]) -> tuple[list[torch.Tensor], dict[int, tuple[int, int]]]:
        """Copy small storages into scratch memory, with one launch for each dtype. Returns the scratch and the slots.

        A tensor that covers its storage is passed as it is, because a view of raw bytes costs several times as much as
        the rest."""
        groups: dict[torch.dtype | None, dict[int, torch.Tensor]] = {}
        for key, view in views.items():
            whole = view.dtype in _GATHERED_AS_THEY_ARE and _covers(view)
            groups.setdefault(view.dtype if whole else None, {})[key] = view
        scratch, slots, position = [], {}, 0
        for dtype, group in groups.items():
            sources = [_raw(view.untyped_storage()) for view in group.values()] if dtype is None else [*group.values()]
            scratch.append(self.driver.gather(sources))
            for key, source in zip(group, sources, strict=True):
                slots[key] = (position, source.nbytes)
                position += source.nbytes
        return scratch, slots

    def fence(self, stage: DeviceStage) -> None:
        """Make the caller's current streams wait until the sources of ``stage`` have been read.

        The lazy copies must have been enqueued before: a stream does not wait for an event that was never recorded.
        """
        with failing("at the fence", stage.names):
            for device, side in list(stage.sides.items()):
                event = side.last if side.lazily else side.ready
                if event is not None:
                    self.driver.wait(self.driver.current_stream(device), event)

    def check_fence(self, stage: DeviceStage) -> None:
        """Raise ``GraphCaptureError`` if a graph is being captured on a stream that ``fence`` would make wait."""
        with failing("at the fence", stage.names):
            self.check_not_capturing([self.driver.current_stream(device) for device in list(stage.sides)])

    # --- the stager's thread ---

    def pin(self, arena: Arena, device: Hashable, names: Callable[[], Sequence[str]] = tuple) -> None:
        """Register the memory of ``arena`` with ``device``. Called before the first other call that may reach the
        driver, because this enters the device: the current device of a new thread is device 0, and calls of a thread
        that has not entered a device would break captures."""
        with failing(f"before copies from {device}", names):
            self.driver.enter(device)
        if (pinner := self.driver.pinner) is not None:
            arena.pin(pinner, device)

    def lease_scratch(self, stage: DeviceStage, lease: Callable[[int], Allocation]) -> None:
        """Lease host memory for the small tensors. Called before the stage leases any other memory."""
        for side in stage.sides.values():
            if side.scratch:
                side.small = lease(side.scratch_bytes)

    def issue(
        self, stage: DeviceStage, copies: Iterable[Copy], lease: Allocation, *, pace: RateLimiter, stop: Stop
    ) -> tuple[list[DevicePart], list[Copy]]:
        """Enqueue those of the ``copies`` into ``lease`` whose sources are on devices. The caller passes every returned
        part to ``watch`` or ``land``, and makes the returned copies, which are from host memory.

        When this raises, no copy into ``lease`` is in flight.
        """
        runs, scatter, host = self._runs(stage, copies)
        parts: list[DevicePart] = []
        try:
            for device in dict.fromkeys([*runs, *scatter]):
                with failing(f"while enqueueing copies from {device}", stage.names):
                    self.driver.enter(device)
                    side = stage.sides[device]
                    with self.driver.using(side.stream):
                        between = self._issue_side(stage, side, runs.get(device, ()), lease, pace, stop)
                    side.last = self.driver.record(side.stream)
                    parts.append(DevicePart(stage, side, side.last, scatter.get(device, ()), between, lease))
        except BaseException:
            # The caller releases the lease next. Copies that were enqueued before the error still write into it, so
            # they are waited for.
            for side in stage.sides.values():
                with suppress(Exception):  # the first error has more information
                    self.driver.synchronize(self.driver.record(side.stream))
            raise
        return parts, host

    def _runs(
        self, stage: DeviceStage, copies: Iterable[Copy]
    ) -> tuple[dict[Hashable, list[_Run]], dict[Hashable, list[Copy]], list[Copy]]:
        """Divide copies, which are sorted by offset, by their sources: on devices, in scratch memory of devices, and in
        host memory."""
        runs: dict[Hashable, list[_Run]] = {}
        scatter: dict[Hashable, list[Copy]] = {}
        host: list[Copy] = []
        run: _Run | None = None  # may go on
        run_device: Hashable = None
        between: list[Copy] = []  # the copies from host memory behind the run
        for copy in copies:
            device = self.driver.device_of(copy.source)
            if device is None:
                between.append(copy)
                continue
            side = stage.sides[device]
            if storage_key(copy.source) in side.slots:
                scatter.setdefault(device, []).append(copy)
                if device != run_device:  # it may be moved to its place before the run has been copied
                    run = None
                continue
            gathered = side.gathers and copy.nbytes <= side.chunk_bytes // 4
            near = run is not None and device == run_device and copy.offset - run.end <= _BETWEEN_BYTES
            if run is not None and near and gathered and copy.offset + copy.nbytes - run.start <= side.chunk_bytes:
                run.copies.append(copy)
                run.between += between
            else:
                host += between
                run, run_device = _Run([copy], []), device
                runs.setdefault(device, []).append(run)
                if not gathered:
                    run = None
            between = []
        return runs, scatter, host + between

    def _issue_side(
        self, stage: DeviceStage, side: _Side, runs: Iterable[_Run], lease: Allocation, pace: RateLimiter, stop: Stop
    ) -> list[tuple[int, ctypes.Array[ctypes.c_char]]]:
        """Enqueue copies on the side stream, which is the current one. Returns the contents of what is between them."""
        if not side.begun:
            # Once for each stage and device. The side stream then runs behind the ready event, and the scratch travels
            # first, because each image may need small tensors out of it.
            side.begun = True
            self.driver.wait(side.stream, side.ready)
            position = 0
            for scratch in side.scratch:
                assert side.small is not None
                self._copy(stage, side, scratch, side.small, position, pace, stop)
                position += scratch.nbytes
        kept = []
        for run in runs:
            for copy in run.between:
                content = (ctypes.c_char * copy.nbytes)()
                self.host.copy(copy, ctypes.addressof(content), stop=stop)
                kept.append((copy.offset, content))
            whole = self._gathered(side, run) if len(run.copies) > 1 else None
            if whole is not None:
                self._copy(stage, side, whole, lease, run.start, pace, stop)
                continue
            for copy in run.copies:
                pieces = (copy,) if copy.dtype is None else pieces_in(copy, _CONVERTED_BYTES)
                with failing(f"while enqueueing a copy from {side.device}", partial(_names_of, stage, copy)):
                    for piece in pieces:
                        self._copy(stage, side, self._source(side, piece), lease, piece.offset, pace, stop)
        return kept

    def _gathered(self, side: _Side, run: _Run) -> torch.Tensor | None:
        """Enqueue the copies of ``run`` to device memory. Returns None if the device has too little. The memory belongs
        to the side stream, so the next run may have it at once."""
        try:
            pieces = [self._source(side, copy) for copy in paced(run.copies, _EVERY)]
            return self.driver.laid_out(pieces, [copy.offset - run.start for copy in run.copies], run.end - run.start)
        except ArenaExhaustedError:
            return None

    def _copy(
        self,
        stage: DeviceStage,
        side: _Side,
        raw: torch.Tensor,
        lease: Allocation,
        offset: int,
        pace: RateLimiter,
        stop: Stop,
    ) -> None:
        start = 0
        while start < raw.nbytes:
            stop.check()
            with failing("while registering host memory", stage.names):
                ready = lease.register(offset + start)
            size = min(side.chunk_bytes, raw.nbytes - start, ready - offset - start)
            pace.spend(size, stop)
            self.driver.copy(_host(lease, offset + start, size), raw[start : start + size])
            start += size
            side.since_gap += size
            # Without gaps a copy of the training, such as that of ``loss.item()``, would wait for all copies of the
            # stage.
            if side.since_gap >= side.chunk_bytes // 4 * 3:
                self.driver.gap(side.device)
                side.since_gap = 0

    def _source(self, side: _Side, copy: Copy) -> torch.Tensor:
        """Return the bytes to copy: those of the clone if there is one, otherwise those of the source."""
        tensor, start = copy.source, raw_start(copy)
        clone = side.clones.get(storage_key(tensor))
        if clone is not None:
            tensor = _replica(tensor, clone.untyped_storage())
        if copy.dtype is not None:
            tensor, skip = elements_of(copy._replace(source=tensor))
            tensor, start = self._made(side, tensor, copy.dtype), skip * copy.dtype.itemsize
        elif start is None:
            tensor, start = rows_with(tensor, copy.skip, copy.nbytes)
            tensor = self._made(side, tensor, None)
        check_extent(tensor.untyped_storage(), start + copy.nbytes)
        return _raw(tensor.untyped_storage(), start, copy.nbytes)

    def _made(self, side: _Side, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the elements of ``tensor`` row by row, converted to ``dtype`` if there is one. They are on the device,
        or in host memory if the device is full."""
        check_extent(tensor.untyped_storage(), extent_bytes(tensor))
        make = self.driver.contiguous if dtype is None else partial(self.driver.converted, dtype=dtype)
        try:
            return make(tensor)
        except ArenaExhaustedError:
            start = int(tensor.storage_offset()) * tensor.itemsize
            raw = _raw(tensor.untyped_storage(), start, extent_bytes(tensor) - start)
            content = torch.empty(raw.nbytes, dtype=torch.uint8)
            self.driver.copy(content, raw)
            self.driver.synchronize(self.driver.record(side.stream))
            return make(_replica(tensor, content.untyped_storage(), 0))

    # --- one thread per device ---

    def watch(self, part: DevicePart, stop: Stop, done: Callable[[BaseException | None], None]) -> None:
        """Call ``done`` in the device's thread when all of ``part`` is in host memory, or with the error."""
        try:
            self._waiter(part.side.device).submit(self.land, part, stop, done)
        except (ClosedError, RuntimeError):  # closed meanwhile, or the system starts no thread: copies are in flight
            self.land(part, stop, done)

    def watch_ready(self, stage: DeviceStage, done: Callable[[BaseException | None], None]) -> None:
        """Call ``done`` when the copies on the devices have ended, so that the sources may change."""
        events = [(side.device, side.ready) for side in stage.sides.values()]
        if events:
            # In a thread of its own: the device's thread may be waiting for copies of an earlier stage to the host.
            self._waiter(("snapshots", events[0][0])).submit(self._readied, stage, events, done)

    def _waiter(self, name: Hashable) -> Threads:
        with self._lock:
            if name not in self._waiters:
                self._waiters[name] = TorchThreads(f"sidestream-{name}", 1)
            return self._waiters[name]

    def _readied(
        self, stage: DeviceStage, events: list[tuple[Hashable, Any]], done: Callable[[BaseException | None], None]
    ) -> None:
        error: BaseException | None = None
        try:
            for device, event in events:
                self.driver.enter(device)
                self.driver.synchronize(event)
        except BaseException as failure:
            error = translated(failure, "while waiting for the copies on it", stage.names)
        done(error)

    def land(self, part: DevicePart, stop: Stop, done: Callable[[BaseException | None], None]) -> None:
        """Wait for ``part`` in the calling thread, as ``watch`` does in the device's thread."""
        error: BaseException | None = None
        try:
            self.driver.enter(part.side.device)
            self.driver.synchronize(part.end)
            for copy in paced(part.scatter, _EVERY):
                self._scatter(part, copy, stop)
            for offset, content in paced(part.between, _EVERY):
                move(ctypes.addressof(content), part.lease.address + offset, len(content))
        except BaseException as failure:
            error = translated(failure, f"while waiting for copies from {part.side.device}", part.stage.names)
        done(error)

    def _scatter(self, part: DevicePart, copy: Copy, stop: Stop) -> None:
        small = part.side.small
        assert small is not None
        at, nbytes = part.side.slots[storage_key(copy.source)]
        target = part.lease.address + copy.offset
        start = raw_start(copy)
        if start is not None:
            assert start + copy.nbytes <= nbytes
            move(small.address + at + start, target, copy.nbytes)
            return
        storage = _host(small, at, nbytes).clone().untyped_storage()  # in the scratch its elements may not be aligned
        replica = _replica(copy.source, storage)
        self.host.copy(copy._replace(source=replica), target, stop=stop)

    def close(self) -> None:
        """Close the threads. Each ends when the copies that it waits for have ended."""
        with self._lock:
            for threads in self._waiters.values():
                threads.close()

    def join(self, deadline: Deadline) -> None:
        """Wait, after ``close()``, until the threads have ended or ``deadline`` passes."""
        with self._lock:
            waiters = list(self._waiters.values())
        for threads in waiters:
            threads.join(deadline)


@contextmanager
def failing(phase: str, names: Callable[[], Sequence[str]] = tuple) -> Iterator[None]:
    """Convert errors of the device in the ``with`` block to ``DeviceError`` with the ``phase`` and the keys."""
    try:
        yield
    except Exception as error:
        found = translated(error, phase, names)
        if found is error:
            raise
        raise found from error


def translated(error: BaseException, phase: str, names: Callable[[], Sequence[str]]) -> BaseException:
    """Return ``error`` as a ``DeviceError`` with the phase and the keys. Other errors of sidestream, and those that are
    not an ``Exception``, are returned unchanged."""
    ours = isinstance(error, SidestreamError) and not (isinstance(error, DeviceError) and error.call is None)
    if ours or not isinstance(error, Exception):
        return error
    found = names()
    keys = ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
    text = str(error).partition("\n")[0]  # torch appends advice for debugging
    kind = "" if isinstance(error, DeviceError) else f"{type(error).__name__}: "
    return DeviceError(
        f"{keys + ': ' if keys else ''}the device failed {phase}: {kind}{text}; the cause may be earlier work of the "
        "device; if every call fails from now on, restart the process",
        call=phase,
    )


def _names_of(stage: DeviceStage, copy: Copy) -> list[str]:
    return stage.names({storage_key(copy.source)})


def _covers(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor``, in order, are all the bytes of its storage."""
    plain = tensor.is_contiguous() and not lazy_bits(tensor)
    return plain and tensor.nbytes == tensor.untyped_storage().nbytes()


def _raw(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """Return a run of bytes. It has to lie within ``storage``, because ``set_`` would otherwise enlarge the storage."""
    count = storage.nbytes() - start if nbytes is None else nbytes
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (count,), (1,))


def _replica(tensor: torch.Tensor, storage: torch.UntypedStorage, start: int | None = None) -> torch.Tensor:
    """Return the view that ``tensor`` is, over another storage with the same bytes, or with those from its first
    element on (``start=0``)."""
    view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    view.set_(storage, int(tensor.storage_offset()) if start is None else start, tensor.shape, tensor.stride())
    if tensor.is_conj():
        view = view.conj()
    return neg_view(view) if tensor.is_neg() else view


def _host(lease: Allocation, start: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(lease.array, dtype=torch.uint8, count=nbytes, offset=start)
