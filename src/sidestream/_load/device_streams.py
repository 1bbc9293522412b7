"""Where the copies of a load go on devices: onto the streams that the caller computes on.

So they come after what the caller has enqueued that may still use the old content, and the allocator counts new memory
to the stream that will use it. The threads of a load have other current streams, in no order with those.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .._runtime.caller import run_in_calling_thread
from .._runtime.threads import io_threads
from .._staging.device import translated
from .._staging.driver import Driver, driver_for
from ..errors import DeviceError, GraphCaptureError, InvalidOptionError

__all__ = ["Streams", "current_streams", "streams_of"]


@dataclass(frozen=True, slots=True)
class Streams:
    """The current streams of a thread, on some devices: ``sides`` are driver, device and stream."""

    sides: Sequence[tuple[Driver, Hashable, Any]] = ()

    @property
    def devices(self) -> list[Hashable]:
        return [device for _, device, _ in self.sides]

    @contextmanager
    def current(self, what: str = "") -> Iterator[None]:
        """Make these streams current in the calling thread, and the device of the last one its current device. An error
        that a device reports in the ``with`` block becomes ``DeviceError``, which says ``what`` was being loaded."""
        with _failing(what, self.devices), ExitStack() as stack:
            for driver, device, stream in self.sides:
                driver.enter(device)
                stack.enter_context(driver.using(stream))
            yield

    def finish(self) -> None:
        """Wait, in a worker thread, for what they were given so far: then every other stream may use it too."""
        with _failing("", self.devices):
            for driver, device, stream in self.sides:
                driver.enter(device)
                driver.synchronize(driver.record(stream))


async def streams_of(devices: Collection[torch.device]) -> Streams:
    """Return the current streams of this thread; for a blocking call, of the thread that made the call. Raises
    ``GraphCaptureError`` if a graph is being captured on one of them, ``InvalidOptionError`` for a device that this
    machine does not have, ``UnsupportedTensorError`` for a device without streams."""
    devices = [device for device in devices if device.type != "cpu"]
    if not devices:
        return Streams()
    if any(device.type == "cuda" for device in devices) and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # To start it takes seconds; until then the current streams of all threads are the same.
        return await io_threads().run(_current, devices)
    return run_in_calling_thread(_current, devices)


def current_streams(devices: Collection[torch.device]) -> Streams:
    """``streams_of``, in a thread that may block."""
    devices = [device for device in devices if device.type != "cpu"]
    return _current(devices) if devices else Streams()


def _current(devices: Collection[torch.device]) -> Streams:
    kind = torch.accelerator.current_accelerator(check_available=True)
    for device in devices:
        if kind is None or device.type != kind.type or (device.index or 0) >= torch.accelerator.device_count():
            raise InvalidOptionError(f"{str(device)!r} is no device of this machine")
    sides: list[tuple[Driver, Hashable, Any]] = []
    for device in devices:
        driver = driver_for(device)
        with _failing("", [device]):
            stream = driver.current_stream(device)
            capturing = driver.capturing(stream)
        if capturing:
            raise GraphCaptureError(
                f"a graph is being captured on the current stream of {device}: load before or after the capture"
            )
        sides.append((driver, stream.device, stream))  # "cuda" is the caller's current device, not a thread's
    return Streams(sides)


@contextmanager
def _failing(what: str, devices: Sequence[Hashable]) -> Iterator[None]:
    """Convert an error that one of ``devices`` reports to ``DeviceError``, except that a device is out of memory."""
    try:
        yield
    except (torch.AcceleratorError, DeviceError) as error:
        if not devices:
            raise
        phase = f"while loading to {', '.join(map(str, devices))}"
        raise translated(error, phase, lambda: [what] if what else []) from error
