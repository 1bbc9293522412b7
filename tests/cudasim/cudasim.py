"""Control of the simulated CUDA runtime: hold streams, inject errors, and count.

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
from typing import Any

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
    library = _library()
    size = library.cudasim_report(which.encode(), None, ctypes.c_long(0)) + 4096  # it may grow until the second call
    text = ctypes.create_string_buffer(size)
    library.cudasim_report(which.encode(), text, ctypes.c_long(size))
    lines = text.value.decode().splitlines()
    return dict(line.split("\t", 1) for line in lines)
