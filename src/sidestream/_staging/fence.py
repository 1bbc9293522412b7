"""The wait of a program that changes sources for the copies: before each optimizer step, or at a ``fence()``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._runtime.threads import Deadline
from .._runtime.torch_probes import outside_compile
from ..errors import ArenaExhaustedError, DeadlineExceededError
from .device import DeviceEngine
from .stage import Staging

__all__ = ["Forecast", "guard", "hold_back"]


class Forecast:
    """An estimate of the bytes that are copied before the next fence, from earlier stages."""

    def __init__(self) -> None:
        self._window_s: float | None = None
        self._bytes_per_second: float | None = None

    def lazily_bytes(self) -> float:
        """Return the estimate. It is infinite until there has been a stage and a fence after it."""
        if self._window_s is None or self._bytes_per_second is None:
            return float("inf")
        return self._window_s * self._bytes_per_second

    def fenced(self, staging: Staging[Any]) -> None:
        if staging.first_fence():
            self._window_s = time.monotonic() - staging.started

    def copied(self, nbytes: int, seconds: float) -> None:
        if seconds > 0:
            self._bytes_per_second = nbytes / seconds


def hold_back(stagings: Sequence[Staging[Any]], engine: DeviceEngine | None, deadline: Deadline) -> None:
    """Make the caller, and its current streams, wait until ``stagings`` have read their sources.

    The streams wait for copies from a device. The caller blocks only until those are enqueued. Raises
    ``ArenaExhaustedError`` if a stage still waits for memory when ``deadline`` passes, and ``DeadlineExceededError`` if
    it is late for another reason.
    """
    for staging in stagings:
        if staging.device is not None and engine is not None:
            engine.check_fence(staging.device)
    for staging in stagings:
        staging.pace.lift_limit()
    for staging in stagings:
        if staging.reads_later:
            wait([staging.issued], deadline.remaining_s())
            if not staging.issued.done() and staging.waiting:
                raise ArenaExhaustedError(
                    f"a stage found no memory within timeout_s={deadline.timeout_s:g}, and its sources must not change "
                    "before it has: release() staged state dicts, raise budget_bytes=, or choose when_full="
                )
            if not staging.issued.done():
                raise DeadlineExceededError(f"a stage was not copied within timeout_s={deadline.timeout_s:g}")
        if staging.device is not None and engine is not None:
            engine.fence(staging.device)


def guard(fence: Callable[[], None], optimizer: torch.optim.Optimizer | None) -> Any:
    """Call ``fence`` before each step of ``optimizer``, or of every optimizer. Returns the handle of torch."""
    hook = outside_compile(fence)
    if optimizer is None:
        return register_optimizer_step_pre_hook(hook)
    return optimizer.register_step_pre_hook(hook)
