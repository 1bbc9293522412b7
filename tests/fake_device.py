"""An accelerator whose copies and events happen when the test says so, in any order that streams allow.

Its memory is host memory: a tensor is on the device when the test has put it there. What a real driver enqueues stands
in queues here, one per stream; ``step`` runs the next operation of a stream that is not waiting for an event. So an
ordering that a real device would keep by luck can be taken away from the code under test.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from sidestream._runtime.torch_probes import storage_key
from sidestream._staging.registration import Pinner
from sidestream.errors import ArenaExhaustedError

T = TypeVar("T")


class Event:
    def __init__(self) -> None:
        self.passed = threading.Event()
        self.error: Exception | None = None


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Event | Callable[[], None]] = deque()
        self.capturing = False

    def ready(self) -> bool:
        """Whether its next operation may run now."""
        return bool(self.queue) and (not isinstance(self.queue[0], Event) or self.queue[0].passed.is_set())


class FakeDriver:
    """It has the methods of ``TorchDriver``. Every tensor that ``put`` has seen is on a device, all others are not."""

    def __init__(self, seed: int = 0) -> None:
        self.capture = False
        self.registered: dict[int, int] = {}
        self.registered_on: dict[int, Hashable] = {}
        self.unregistered_in: set[str] = set()
        """Names of the threads that have unregistered memory."""
        self.may_unregister = threading.Event()
        self.may_unregister.set()
        self.refuse: Exception | None = None
        """Raised by ``unregister``."""
        self.refuse_to_register: Exception | None = None
        self.full = False
        """Whether the device has no memory left for copies."""
        self.gaps = 0
        self.gathered: list[int] = []
        """How many pieces were laid out together."""
        self.copies: list[int] = []
        self.fail: Exception | None = None
        """Raised by the device at the next copy."""
        self.fail_copy: Exception | None = None
        """Raised when a copy is enqueued."""
        self.broken: Exception | None = None
        """Raised by every call, as by a device that has met an error."""
        self.waited_for = threading.Event()
        """Set when a thread waits for an event."""
        self.held: set[str] = set()
        """Names of streams that get nowhere."""
        self._devices: dict[int, Hashable] = {}
        self._temporaries: list[torch.Tensor] = []
        self._storages: list[torch.UntypedStorage] = []
        self._current: dict[Hashable, Stream] = {}
        self._streams: list[Stream] = []
        self._sides: dict[Hashable, Stream] = {}
        self._local = threading.local()
        self._lock = threading.RLock()
        self._random = random.Random(seed)

    # --- what a test does with it ---

    def put(self, tensor: torch.Tensor, device: Hashable = 0) -> torch.Tensor:
        """Say that the memory of ``tensor`` is on ``device``."""
        self._devices[storage_key(tensor)] = device
        self._storages.append(tensor.untyped_storage())  # its key stays its own
        return tensor

    def forget(self) -> None:
        """Keep no storage alive that was ``put``."""
        self._storages.clear()

    def launch(self, kernel: Callable[[], Any], device: Hashable = 0) -> None:
        """Enqueue a kernel of the training on the current stream."""
        self._enqueue(self.current_stream(device), kernel)

    @contextlib.contextmanager
    def on(self, stream: Stream, device: Hashable = 0) -> Iterator[None]:
        """Make ``stream`` the current one of ``device``."""
        before = self.current_stream(device)
        self._current[device] = stream
        try:
            yield
        finally:
            self._current[device] = before

    def stream(self, name: str = "user") -> Stream:
        with self._lock:
            stream = Stream(name)
            self._streams.append(stream)
            return stream

    def step(self, *, side_first: bool | None = None) -> bool:
        """Run one operation of a stream that can: of any, or of the side streams (the current ones) first."""
        with self._lock:
            able = [stream for stream in self._streams if stream.ready() and stream.name not in self.held]
            if not able:
                return False
            if side_first is not None:
                favoured = [one for one in able if (one.name == "side") == side_first]
                able = favoured or able
            operation = self._random.choice(able).queue.popleft()
            if not isinstance(operation, Event):
                operation()
            return True

    def run(self) -> None:
        """Everything that can run, in a random order."""
        while self.step():
            pass

    async def drive(self, awaitable: Awaitable[T], *, side_first: bool | None = None) -> T:
        """Keep the device going until ``awaitable`` is done."""
        task = asyncio.ensure_future(awaitable)
        while not task.done():
            moved = self.step(side_first=side_first)
            await asyncio.sleep(0 if moved else 0.0002)  # the threads under test need the GIL to go on
        return await task

    def idle(self) -> bool:
        return not any(stream.queue for stream in self._streams)

    # --- what staging calls ---

    def device_of(self, tensor: torch.Tensor) -> Hashable | None:
        return self._devices.get(storage_key(tensor)) if tensor.layout is torch.strided else None

    def capturing(self, stream: Stream) -> bool:
        self._check()
        return self.capture or stream.capturing

    def enter(self, device: Hashable) -> None:
        self._check()
        self._local.device = device

    def current_stream(self, device: Hashable) -> Stream:
        with self._lock:
            if device not in self._current:
                self._current[device] = self.stream("current")
            return self._current[device]

    def side_stream(self, device: Hashable) -> Stream:
        with self._lock:
            if device not in self._sides:
                self._sides[device] = self.stream("side")
            return self._sides[device]

    @contextlib.contextmanager
    def _using(self, stream: Stream) -> Iterator[None]:
        self._local.stream = stream
        try:
            yield
        finally:
            del self._local.stream

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        return self._using(stream)

    def record(self, stream: Stream) -> Event:
        self._check()
        event = Event()
        self._enqueue(stream, event.passed.set)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._check()
        self._enqueue(stream, event)

    def synchronize(self, event: Event) -> None:
        self.waited_for.set()
        assert event.passed.wait(60), "nobody drives the device"
        self._check()
        if self.fail is not None:
            raise self.fail

    def laid_out(self, pieces: Sequence[torch.Tensor], starts: Sequence[int], nbytes: int) -> torch.Tensor:
        self._check_memory()
        whole = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
        self._temporaries.append(whole)
        self.gathered.append(len(pieces))

        def fill() -> None:
            for one, start in zip(pieces, starts, strict=True):
                whole[start : start + one.nbytes].copy_(one)

        self._enqueue(self._local.stream, fill)
        return whole

    def gather(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        self._check_memory()
        made = torch.empty(sum(source.nbytes for source in sources), dtype=torch.uint8)
        joined = made.view(sources[0].dtype)
        self._enqueue(
            self._stream_of(sources[0]), lambda: joined.copy_(torch.cat([source.reshape(-1) for source in sources]))
        )
        return made

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        self._check_memory()
        made = torch.empty_like(source)
        self._enqueue(self._stream_of(source), lambda: made.copy_(source))
        return made

    def contiguous(self, source: torch.Tensor) -> torch.Tensor:
        made = torch.empty(source.shape, dtype=source.dtype)
        self._temporaries.append(made)  # a real allocator gives it to nobody but later work of the same stream
        self._enqueue(self._local.stream, lambda: made.copy_(source))
        return made

    def converted(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(source.shape, dtype=dtype)
        self._temporaries.append(made)
        self._enqueue(self._local.stream, lambda: made.copy_(source))
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """By address, as a real device: the operation keeps neither memory alive."""
        self._check()
        if self.fail_copy is not None:
            raise self.fail_copy
        assert target.nbytes == source.nbytes
        self.copies.append(source.nbytes)
        arguments = (target.data_ptr(), source.data_ptr(), source.nbytes)
        self._enqueue(self._local.stream, lambda: ctypes.memmove(*arguments))

    def gap(self, device: Hashable) -> None:
        self.gaps += 1

    @property
    def pinner(self) -> Pinner:
        return self

    def register(self, device: Hashable, address: int, nbytes: int) -> bool:
        self._check()
        if self.refuse_to_register is not None:
            raise self.refuse_to_register
        assert nbytes > 0
        self.registered[address] = nbytes
        self.registered_on[address] = device
        return True

    def unregister(self, device: Hashable, address: int) -> None:
        assert self.registered_on[address] == device
        self.unregistered_in.add(threading.current_thread().name)
        assert self.may_unregister.wait(60), "a test keeps the device from answering"
        if self.refuse is not None:
            raise self.refuse
        del self.registered[address]

    # --- inside ---

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def _check_memory(self) -> None:
        if self.full:
            raise ArenaExhaustedError("0 has no bytes left: free device memory")

    def _stream_of(self, tensor: torch.Tensor) -> Stream:
        device = self._devices.get(storage_key(tensor))
        return self.current_stream(device)

    def _enqueue(self, stream: Stream, operation: Event | Callable[[], Any]) -> None:
        with self._lock:
            stream.queue.append(operation)
