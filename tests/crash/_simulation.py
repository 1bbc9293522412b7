"""Programs on virtual time: which of several things comes first is drawn from a seed, and can be had again.

Nothing runs at the same time. Work that the package gives to its threads is done on the loop, at a moment of virtual
time that the seed draws, as a whole: a hop is one step of a schedule, and any other task may come between two of them.
Everything else is real: the flows, the files, the locks. A program in which nobody can go on is a hang, and found at
once instead of at a deadline.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import sys
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest

from sidestream._engine import loop as _operations
from sidestream._runtime import threads as _threads
from sidestream._runtime.tasks import supervise
from sidestream.errors import ClosedError

T = TypeVar("T")

_HOP_S = 0.01
_FIRST = frozenset({"sidestream-stage"})  # the writer's step blocks until its memory is filled


class Hang(Exception):
    """Nobody can go on: no callback is ready, and none is scheduled."""


class _Operations:
    """The loop of operations: the simulated one, on which everything runs."""

    def is_here(self) -> bool:
        return True

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        asyncio.get_running_loop().call_soon(callback, *args)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        supervise(work(), name)


@dataclass
class Simulation:
    """One schedule. ``trace`` is what happened, in order; the same seed gives the same."""

    seed: int
    now: float = 1000.0
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self, program: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of ``program()``. Raises what it raises, and ``Hang``."""
        with pytest.MonkeyPatch.context() as patch:
            self._take_over(patch)
            with asyncio.Runner(loop_factory=lambda: _Loop(self)) as runner:
                return runner.run(program())

    def note(self, what: str) -> None:
        self.trace.append(f"{self.now:.6f} {what}")

    def _take_over(self, patch: pytest.MonkeyPatch) -> None:
        """The clock, the names and the threads of the package."""
        clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: self.now})
        names = SimpleNamespace(**{**vars(uuid), "uuid4": self._uuid})
        chance = SimpleNamespace(**{**vars(random), "uniform": self.random.uniform})
        replaced: dict[str, tuple[ModuleType, Any]] = {
            "time": (time, clock), "uuid": (uuid, names), "random": (random, chance),
        }  # fmt: skip
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "sidestream":
                for attribute, (real, stand_in) in replaced.items():
                    if getattr(module, attribute, None) is real:
                        patch.setattr(module, attribute, stand_in)
        patch.setitem(sys.modules, "watchfiles", None)  # a thread that sleeps in the kernel has no place here
        patch.setattr(_threads.Threads, "submit", self._submitting())
        patch.setattr(_operations, "_the_loop", _Operations())

    def _uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    def _submitting(self) -> Callable[..., Future[Any]]:
        simulation = self

        def submit(threads: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if threads._closed:
                raise ClosedError("these threads take no more work: their owner was closed")
            future: Future[Any] = Future()

            def work() -> None:
                if not future.set_running_or_notify_cancel():
                    return
                simulation.note(f"{threads._name}: {getattr(fn, '__name__', type(fn).__name__)}")
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

            loop = asyncio.get_running_loop()
            if threads._name in _FIRST:
                loop.call_soon(work)
            else:
                loop.call_later(simulation.random.expovariate(1 / _HOP_S), work)
            return future

        return submit


class _Selector(selectors.SelectSelector):
    """Waits in no time. There is nothing to wait for but timers."""

    simulation: Simulation

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Hang("nobody can go on:\n" + "\n".join(self.simulation.trace[-20:]))
        self.simulation.now += max(0.0, timeout)
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, simulation: Simulation) -> None:
        selector = _Selector()
        selector.simulation = simulation
        self._simulation = simulation
        super().__init__(selector)

    def time(self) -> float:
        return self._simulation.now
