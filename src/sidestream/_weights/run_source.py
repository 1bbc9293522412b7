"""``RunSource``: the committed steps of a run, as versions for a ``Follower``."""

from __future__ import annotations

import sys
import time
from types import MappingProxyType
from typing import Any

from .._load.open.steps import Step
from .._run.restore import StepSelector, choose, newest
from .._run.run import Run
from .._run.steps import changed_among, list_generations
from .._run.watch import Pauses
from .._runtime.threads import Stop, current_deadline, io_threads
from .._staging.arena import Arena
from ..errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidOptionError,
    KeyCollisionError,
    SidestreamError,
    StateMismatchError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
from ..options import LoadOptions, Names, check_bool, check_names
from .following import Candidate, NotServed
from .live import Live
from .matching import dtypes_of, match

_NEWEST = StepSelector()

_OF_THE_STEP = (
    CorruptCheckpointError,
    InvalidOptionError,
    KeyCollisionError,
    StateMismatchError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
"""Errors that a step has whenever it is fetched. All others are those of an attempt, which is made again."""


class RunSource:
    """The newest good step of ``run`` for the places of ``live``, read with ``options``."""

    problem = None

    def __init__(
        self, run: Run, options: LoadOptions, live: Live, *, names: Names | None, mapped: bool, poll_s: float
    ) -> None:
        if not isinstance(live, Live):
            raise InvalidOptionError(f"live={live!r} has to be a sidestream.Live")
        check_names(names)
        check_bool("mapped", mapped)
        self.url = run.url
        self.passed_over: dict[str, SidestreamError] = {}
        self.checked: float | None = None
        self._run, self._options, self._live = run, options, live
        self._names, self._mapped = names, mapped
        self._pauses = Pauses(run.store, poll_s)
        self._memory = Arena(sys.maxsize)
        self._fetched: Step | None = None
        self._served: Step | None = None
        self._left_out: dict[str, Step] = {}
        """Steps above the one that is served, which are not served: damaged, refused, or above ``accept_lower``."""
        self._lower = self._goes_back = False

    def accept_lower(self) -> None:
        self._lower = True

    def close(self) -> None:
        self._memory.close()

    async def wait(self) -> None:
        await self._pauses.wait()

    async def look(self) -> bool:
        with self._run.time_limit():
            for changed in await changed_among(self._run.store, list(self._left_out.values())):
                del self._left_out[changed.name]
                self.passed_over.pop(changed.name, None)
            if self._lower:
                await self._exclude_higher()
            step = await newest(self._run.store, _NEWEST, self._left_out)
            news = step is not None and await self._is_news(step)
        self.checked = time.monotonic()
        return news

    async def _is_news(self, step: Step) -> bool:
        """Return whether ``step``, the newest one, is to be served in place of what is served."""
        served = self._served
        if served is None or step.order > served.order:
            return True
        if step.name == served.name:
            return step.marker != served.marker
        return self._goes_back or await served.current(self._run.store) is None

    async def _exclude_higher(self) -> None:
        """If the step that was saved last is lower than the one that is served, leave out the steps above it, and those
        that were not saved later than the one that is served."""
        served = self._served
        if served is None or served.marker is None:
            return
        found = [step for step in await list_generations(self._run.store, {}) if step.name not in self._left_out]
        times = {step: step.marker.saved_at for step in (*found, served) if step.marker}
        last = max(times, key=lambda step: (times[step], step.order))
        if last.order < served.order:
            others = (step for step, time in times.items() if step.order > last.order or time <= times[served])
            self._left_out |= {step.name: step for step in others}
            self._lower, self._goes_back = False, True

    async def fetch(self) -> Candidate | NotServed | None:
        """Choose the newest step, under a lease, and read it."""
        run = self._run
        with run.time_limit(self._options.timeout_s):
            chosen = await choose(run.store, run.leases, _NEWEST, self._left_out)
            if chosen is None:
                return None
            step, lease = chosen
            try:
                if not await self._is_news(step):
                    return None
                self._fetched = step
                return await self._read(step)
            except _OF_THE_STEP as error:
                if lease is None and step.damage is None and await step.current(run.store) is None:
                    raise CheckpointNotFoundError(f"{step.name} was deleted while it was read") from error
                return NotServed(step.name, error)
            finally:
                if lease is not None:
                    await lease.release()

    async def _read(self, step: Step) -> Candidate:
        if step.damage is not None:
            raise step.damage
        places = self._live._shells.places
        checkpoint = await self._run.open(step.name, self._options)
        found = await io_threads().run(match, checkpoint, checkpoint.url, places, self._names, "following()")
        deadline, stop = current_deadline(), Stop()
        tensors = await checkpoint.fetch(
            dtypes_of(found, places),
            lambda nbytes: self._memory.lease(nbytes, deadline=deadline, stop=stop).array,
            mapped=self._mapped,
        )
        by_name: dict[str, Any] = {name: tensors[fqn] for leader, fqn in found.items() for name in places[leader].names}
        named = MappingProxyType(by_name)
        return Candidate(step.name, step.step, checkpoint.save_id, checkpoint.metadata, named)

    async def pass_over(self, error: SidestreamError) -> None:
        assert self._fetched is not None
        self._left_out[self._fetched.name] = self._fetched

    async def served(self, candidate: Candidate) -> None:
        self._served = step = self._fetched
        assert step is not None
        self._left_out = {name: one for name, one in self._left_out.items() if one.order > step.order}
        self.passed_over = {name: one for name, one in self.passed_over.items() if name in self._left_out}
        self._goes_back = False
