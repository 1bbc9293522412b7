"""The streams on which a load copies to devices. They are the current streams of the caller.

So the copies are ordered after the work of the caller that may still use the old content, and the allocator assigns new
memory to the stream that will use it. The threads of a load have other current streams, which are not ordered with
those of the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .._runtime.caller import run_by_caller
from .._runtime.threads import doing, io_threads
from ..errors import DeviceError, GraphCaptureError, InvalidOptionError
from .device import translated
from .driver import TorchDriver, driver_for
from .ring import Slot, drop_later, take_slot


@dataclass(frozen=True, slots=True)
class Streams:
    """The current streams of a thread on some devices. Each of ``sides`` is a driver, a device and a stream."""

    sides: Sequence[tuple[TorchDriver, Hashable, Any]] = ()

    @property
    def devices(self) -> list[Hashable]:
        return [device for _, device, _ in self.sides]

    @contextmanager
    def current(self, what: str = "") -> Iterator[None]:
        """Make these streams current in the calling thread, and make the device of the last one its current device. An
        error that a device reports in the ``with`` block is converted to ``DeviceError``, which names ``what`` was
        being loaded."""
        with _failing(what, self.devices), ExitStack() as stack:
            if self.sides and what:
                stack.enter_context(doing(f"copying {what} to {self._names()}"))
            for driver, device, stream in self.sides:
                driver.enter(device)
                stack.enter_context(driver.using(stream))
            yield

    def slot(self, sizes: Sequence[int]) -> tuple[Slot, list[int]]:
        """Return host memory for pieces of ``sizes`` that are copied to the only device, and where each of them
        begins."""
        ((driver, device, _),) = self.sides
        with _failing("", self.devices):
            return take_slot(sizes, driver, device)

    def drop_slots_later(self) -> None:
        """Unmap the slots if no load uses them for a minute. Called on the loop of operations."""
        drop_later()

    def give_back(self, slot: Slot) -> None:
        """Give a slot back, from which all copies have been enqueued on the only stream."""
        ((driver, device, stream),) = self.sides
        slot.give_back(driver, device, driver.record(stream))

    def of(self, device: Hashable) -> Streams:
        """Return the one of these streams that is on ``device``."""
        return Streams([side for side in self.sides if side[1] == device])

    def apart(self) -> Streams:
        """Return the side streams of the process on the same devices, for work that comes after what is enqueued on
        these so far."""
        with _failing("", self.devices):
            sides = []
            for driver, device, stream in self.sides:
                driver.enter(device)
                own = driver.side_stream(device)
                driver.wait(own, driver.record(stream))
                sides.append((driver, device, own))
            return Streams(sides)

    def join(self, others: Streams) -> None:
        """Make these streams wait for what is enqueued on ``others`` so far. Does not block the host."""
        with _failing("", self.devices):
            for (driver, device, stream), (_, _, other) in zip(self.sides, others.sides, strict=True):
                driver.enter(device)
                driver.wait(stream, driver.record(other))

    def marks(self) -> dict[Any, tuple[Hashable, Any]]:
        """Record an event on each of these streams, and return the device and the event by stream."""
        with _failing("", self.devices):
            return {stream: (device, driver.record(stream)) for driver, device, stream in self.sides}

    def wait_for(self, marks: Collection[tuple[Hashable, Any]]) -> None:
        """Make each of these streams wait for the events on its device. Does not block the host."""
        with _failing("", self.devices):
            for driver, device, stream in self.sides:
                driver.enter(device)
                for where, event in marks:
                    if where == device:
                        driver.wait(stream, event)

    def finish(self) -> None:
        """Wait for the work that was enqueued on these streams so far. Then every other stream may use its results too.
        Called in a worker thread."""
        with _failing("", self.devices), doing(f"waiting for the copies to {self._names()}"):
            for driver, device, stream in self.sides:
                driver.enter(device)
                # The copies are on the caller's streams. Other streams of the program, and the host, may use the
                # tensors when the load has returned, so it ends when they have ended.
                driver.synchronize(driver.record(stream))

    def _names(self) -> str:
        return ", ".join(map(str, self.devices))


async def streams_of(devices: Collection[torch.device]) -> Streams:
    """Return the current streams of the thread that made the call. Raises
    ``GraphCaptureError`` if a graph is being captured on one of them, ``InvalidOptionError`` for a device that this
    machine does not have, ``UnsupportedTensorError`` for a device without streams."""
    devices = [device for device in devices if device.type != "cpu"]
    if not devices:
        return Streams()
    if any(device.type == "cuda" for device in devices) and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Starting CUDA takes seconds. Until then all threads have the same current streams.
        return await io_threads().run(_current, devices)
    return await run_by_caller(_current, devices)


def current_streams(devices: Collection[torch.device]) -> Streams:
    """Return the current streams of this thread, which may block."""
    devices = [device for device in devices if device.type != "cpu"]
    return _current(devices) if devices else Streams()


def _current(devices: Collection[torch.device]) -> Streams:
    kind = torch.accelerator.current_accelerator(check_available=True)
    for device in devices:
        if kind is None or device.type != kind.type or (device.index or 0) >= torch.accelerator.device_count():
            raise InvalidOptionError(f"{str(device)!r} is not a device of this machine")
    sides: list[tuple[TorchDriver, Hashable, Any]] = []
    for device in devices:
        driver = driver_for(device)
        with _failing("", [device]):
            stream = driver.current_stream(device)
            capturing = driver.capturing(stream)
        if capturing:
            raise GraphCaptureError(
                f"a graph is being captured on the current stream of {device}: load before or after the capture"
            )
        sides.append((driver, stream.device, stream))  # not ``device``: "cuda" depends on the thread
    return Streams(sides)


@contextmanager
def _failing(what: str, devices: Sequence[Hashable]) -> Iterator[None]:
    """Convert an error of one of ``devices`` to ``DeviceError``, unless the device is out of memory."""
    try:
        yield
    except (torch.AcceleratorError, DeviceError) as error:
        if not devices:
            raise
        phase = f"while loading to {', '.join(map(str, devices))}"
        raise translated(error, phase, lambda: [what] if what else []) from error
