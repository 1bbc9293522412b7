"""Control of the simulated CUDA runtime: hold streams, inject errors, limit queues, keep virtual time, and count.

``run.sh`` starts a command over the simulator and puts this module on the path. torch calls ``load()`` when it is
imported (an entry point of ``torch.backends``), in child processes too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
LAUNCH_FAILURE = 719
ECC_UNCORRECTABLE = 214


def active() -> bool:
    """Whether this process runs on the simulated runtime."""
    return "CUDASIM_BUILD" in os.environ and "libcudart" in os.environ.get("LD_PRELOAD", "")


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcudart.so.13")  # the one that is preloaded
    library.cudasim_report.restype = ctypes.c_long
    library.cudasim_at.restype = ctypes.c_double
    return library


def load() -> None:
    """Replace the operators on CUDA tensors by those that the host executes in stream order."""
    if not active() or os.environ.get("CUDASIM_OPERATORS") == "0":
        return
    import torch

    torch.ops.load_library(Path(os.environ["CUDASIM_BUILD"], "libcudasim_operators.so"))
    torch.backends.cudnn.enabled = False  # the kernels of cuDNN cannot be executed


def hold(stream: Any) -> None:
    """Let ``stream``, one of torch's, start no further operation until ``release()``."""
    _hold(stream, 1)


def release(stream: Any) -> None:
    """Let ``stream`` go on."""
    _hold(stream, 0)


def _hold(stream: Any, held: int) -> None:
    handle = stream.cuda_stream
    if _library().cudasim_hold(ctypes.c_void_p(handle or None), stream.device.index, held):
        raise ValueError(f"the simulator has no such stream: {stream}")


def hold_sides(held: bool = True) -> None:
    """Hold all streams that exist now but the default ones, or release them."""
    _library().cudasim_hold_sides(int(held))


@contextmanager
def held(stream: Any) -> Iterator[None]:
    """Hold ``stream`` within the block."""
    hold(stream)
    try:
        yield
    finally:
        release(stream)


def fail_call(name: str, nth: int = 1, code: int = OUT_OF_MEMORY, times: int = 1) -> None:
    """Let ``times`` calls of a function of the runtime return ``code`` without effect, from its ``nth`` call on."""
    _library().cudasim_fail_call(name.encode(), ctypes.c_long(nth), ctypes.c_long(times), code)


def fail_copy(nth: int = 1, code: int = ILLEGAL_ADDRESS) -> None:
    """Let the ``nth`` copy between host and device from now on fail, which breaks its device."""
    _library().cudasim_fail_copy(ctypes.c_long(nth), code)


def fail_device(device: int = 0, code: int = ILLEGAL_ADDRESS) -> None:
    """Break a device: from now on every call that concerns it returns ``code``."""
    _library().cudasim_fail_device(device, code)


def heal() -> None:
    """Forget all injected errors and the last error of every thread, and repair broken devices, which no real device
    does."""
    _library().cudasim_heal()


def tune(delay_us: float, chance: float = 0.3, seed: int = 0) -> None:
    """Change the schedule: how late operations begin, how often, and the seed of all random choices."""
    _library().cudasim_tune(ctypes.c_double(delay_us), ctypes.c_double(chance), ctypes.c_ulonglong(seed))


class Blocked(NamedTuple):
    """A launch that waited for room in its queue."""

    call: str
    """The function of the runtime, or the name of the operator."""
    thread: int
    """``threading.get_native_id()`` of the thread that made it."""
    device: int
    stream: int
    """``torch.cuda.Stream.cuda_stream``, which is 0 for the default stream."""
    waited: float
    """Real seconds until operations were executed."""
    behind: float
    """Seconds by the virtual clock; 0 where it is off."""


@contextmanager
def queue_limit(operations: int, *, per_device: bool = False) -> Iterator[None]:
    """Let a launch within the block wait while ``operations`` of its stream are enqueued and not executed.

    A launch is a copy, a kernel, an operator, or the record of an event or the wait for one. ``per_device``: all
    streams of a device share one queue. Forgets what ``blocked()`` has recorded before.
    """
    _library().cudasim_limit_queue(ctypes.c_long(operations), int(per_device))
    try:
        yield
    finally:
        _library().cudasim_limit_queue(ctypes.c_long(-1), 0)  # that of the environment


def blocked() -> list[Blocked]:
    """Return the launches that waited for room, since the latest ``queue_limit()``."""
    return [
        Blocked(call, int(thread), int(device), int(stream), float(waited), float(behind))
        for call, thread, device, stream, waited, behind in _rows("blocked")
    ]


class Operation(NamedTuple):
    """An operation by the virtual clock."""

    what: str
    """``H2D``, ``D2H``, ``copy`` (on a device), ``kernel``, ``record``, ``wait`` and others, or the operator's name."""
    thread: int
    """``threading.get_native_id()`` of the thread that enqueued it."""
    device: int
    stream: int
    """``torch.cuda.Stream.cuda_stream``, which is 0 for the default stream."""
    bytes: int
    """Of a copy."""
    called: float
    """The time of the thread when it enqueued the operation."""
    start: float
    end: float


@contextmanager
def clock(
    *,
    to_device: float = 0,
    to_host: float = 0,
    pageable_to_device: float | None = None,
    pageable_to_host: float | None = None,
    on_device: float = 0,
    cost: float = 0,
) -> Iterator[None]:
    """Keep virtual time within the block, from 0 for all threads.

    The rates are bytes per second; copies of rate 0 take no time. Those of pageable memory are those of registered
    memory by default. ``cost`` is what each operation takes besides, in seconds, but for records and waits. Nothing
    sleeps.
    """
    rates = (
        to_device,
        to_host,
        to_device if pageable_to_device is None else pageable_to_device,
        to_host if pageable_to_host is None else pageable_to_host,
        on_device,
        cost,
    )
    _library().cudasim_start_clock(*map(ctypes.c_double, rates))
    try:
        yield
    finally:
        _library().cudasim_stop_clock()


def at() -> float:
    """Return the virtual time of the calling thread in seconds. A wait for a stream, event or device raises it."""
    return float(_library().cudasim_at())


def set_at(seconds: float) -> None:
    """Set the virtual time of the calling thread, for example to what another thread had when it handed work over."""
    _library().cudasim_set_at(ctypes.c_double(seconds))


def advance(seconds: float) -> None:
    """Let the calling thread spend virtual time, for example for what a disk needs."""
    set_at(at() + seconds)


def operations() -> list[Operation]:
    """Return the operations in the order in which they were enqueued, since the latest start of the ``clock()``."""
    return [
        Operation(what, int(thread), int(device), int(stream), int(size), float(called), float(start), float(end))
        for what, thread, device, stream, size, called, start, end in _rows("operations")
    ]


def calls() -> dict[str, int]:
    """Return how often each function of the runtime was called."""
    return {key: int(value) for key, value in _report("calls").items()}


def kernels() -> dict[str, int]:
    """Return which kernels were launched and not executed, with counts.

    ``spin_kernel``, which is ``torch.cuda._sleep``, needs no execution. Any other kernel is a gap in the simulation.
    """
    return {key: int(value) for key, value in _report("kernels").items()}


def queues() -> dict[str, str]:
    """Return the first operation of each stream that has one, and what it waits for."""
    return _report("queues")


def state() -> dict[str, str]:
    """Return the counts of registrations, bytes, streams, events, queued operations and violations, and the contexts.

    ``contexts`` has one digit for each device: 1 if the device has a context.
    """
    return _report("state")


def _report(which: str) -> dict[str, str]:
    return dict(_rows(which))


def _rows(which: str) -> list[list[str]]:
    size = needed = 0
    while size <= needed:  # it may grow between two calls
        size = needed + 4096
        text = ctypes.create_string_buffer(size)
        needed = _library().cudasim_report(which.encode(), text, ctypes.c_long(size))
    return [line.split("\t") for line in text.value.decode().splitlines()]
