"""``Costs``: what saves cost the training, by cause."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from .._runtime.public import Displayed, Table, readable_bytes
from ..events import (
    CallerWaited,
    Event,
    SaveCommitted,
    SaveContext,
    SaveEvent,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
)
from .observer import EventObserver
from .phases import WorkInProgress

_FEWEST_STEPS = 20
_KEPT_STEPS = 1024
_KEPT_WAITS = 256


@dataclass(frozen=True, slots=True, repr=False)
class CostReport(Displayed):
    """The time that saves have cost the training, by cause.

    Attributes:
        run_s: The length of the run so far, in seconds.
        seconds: The seconds that the run lost, by cause: ``"call"``, ``"staged"`` and ``"fence"`` as in
            ``events.CallerWaited``, and ``"dilation"``, by which steps beside a save were longer. A second in which
            several callers waited counts once. No dilation without 20 steps beside saves and 20 without one.
        waited_for: How many of these seconds callers waited for a slot, for ranks, for memory and for copies.
        saves: The number of committed saves.
        failed: The number of saves that failed or were cancelled.
        skipped: The number of saves that were skipped.
        nbytes: The bytes of committed saves, of all their ranks.
        saving_s: The seconds from the start of each committed save to its commit, added up.
        last_step: The step that was committed last, or None.
        last_durable_age_s: The seconds since the last commit, or None.
        steps_beside: The number of training steps beside a save.
        steps_without: The number of training steps without a save.
    """

    run_s: float
    seconds: Mapping[str, float]
    waited_for: Mapping[str, float]
    saves: int = 0
    failed: int = 0
    skipped: int = 0
    nbytes: int = 0
    saving_s: float = 0.0
    last_step: int | None = None
    last_durable_age_s: float | None = None
    steps_beside: int = 0
    steps_without: int = 0

    @property
    def lost_s(self) -> float:
        """The seconds that the run lost, for all causes."""
        return sum(self.seconds.values())

    @property
    def gb_per_s(self) -> float:
        """The bytes of committed saves over the time that they took, in GB/s; 0 without a save."""
        return self.nbytes / self.saving_s / 1e9 if self.saving_s else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the report as numbers by name, for any ``log(dict, step=)``. What is not known is left out.

        Returns:
            The names end in ``_s`` for seconds and in ``_share`` for shares of the run.
        """
        found: dict[str, float] = {"run_s": self.run_s, "lost_s": self.lost_s, "lost_share": self._share(self.lost_s)}
        for cause, seconds in self.seconds.items():
            found |= {f"{cause}_s": seconds, f"{cause}_share": self._share(seconds)}
        found |= {f"waited_for_{reason}_s": seconds for reason, seconds in self.waited_for.items()}
        counts = ("saves", "failed", "skipped", "nbytes", "gb_per_s", "steps_beside", "steps_without")
        numbers = {name: getattr(self, name) for name in (*counts, "last_step", "last_durable_age_s")}
        return found | {name: value for name, value in numbers.items() if value is not None}

    def __str__(self) -> str:
        rows = list(self._table().rows)
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"  {what:<{widths[0]}}  {value:>{widths[1]}}  {share}".rstrip() for what, value, share in rows]
        return "\n".join([self._summary(), *lines])

    def _share(self, seconds: float) -> float:
        return seconds / self.run_s if self.run_s else 0.0

    def _summary(self) -> str:
        return f"{self.lost_s:.3f} s of {self.run_s:.1f} s lost to {self.saves} saves ({self._share(self.lost_s):.2%})"

    def _table(self) -> Table:
        rows = [[cause, f"{seconds:.3f} s", f"{self._share(seconds):.2%}"] for cause, seconds in self.seconds.items()]
        rows += [[f"waited for {reason}", f"{seconds:.3f} s", ""] for reason, seconds in self.waited_for.items()]
        rows += [["saves", str(self.saves), ""]]
        rows += [[name, str(count), ""] for name in ("failed", "skipped") if (count := getattr(self, name))]
        rows += [["bytes", readable_bytes(self.nbytes), ""], ["rate", f"{self.gb_per_s:.3f} GB/s", ""]]
        if self.last_durable_age_s is not None:
            step = "" if self.last_step is None else f"step {self.last_step}"
            rows.append(["age of the last commit", f"{self.last_durable_age_s:.1f} s", step])
        return Table(("cause", "seconds", "share of the run"), rows, len(rows))


class Sums:
    """The sums of a run, from its events. Its user has a lock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(("call", "staged", "fence"), 0.0)
        self._waited_for: dict[str, float] = dict.fromkeys(("slot", "ranks", "memory", "copies"), 0.0)
        self._saves = CostReport(0.0, {}, {})
        self._last_ns: int | None = None
        self._waits: list[tuple[int, int]] = []

    def take(self, event: Event) -> None:
        """Add an event to the sums."""
        old = self._saves
        match event:
            case CallerWaited():
                self._take_wait(event)
            case SaveCommitted(save=SaveContext(operation="save", step=step), nbytes=nbytes, seconds=seconds):
                nbytes, saving_s = old.nbytes + nbytes, old.saving_s + seconds.get("committed", 0.0)
                self._saves = replace(old, saves=old.saves + 1, nbytes=nbytes, saving_s=saving_s, last_step=step)
                self._last_ns = event.time_ns
            case SaveFailed(save=SaveContext(operation="save")):
                self._saves = replace(old, failed=old.failed + 1)
            case SaveSkipped(save=SaveContext(operation="save")):
                self._saves = replace(old, skipped=old.skipped + 1)

    def report(self, run_s: float, now_ns: int) -> CostReport:
        """Return the sums of a run of ``run_s`` seconds until ``now_ns``."""
        return replace(
            self._saves,
            run_s=run_s,
            seconds=MappingProxyType(dict(self.seconds)),
            waited_for=MappingProxyType(dict(self._waited_for)),
            last_durable_age_s=None if self._last_ns is None else max(now_ns - self._last_ns, 0) / 1e9,
        )

    def _take_wait(self, event: CallerWaited) -> None:
        """Add the part of a wait in which no other caller has waited. Events come at the end of their waits."""
        whole = event.seconds
        new = self._uncovered(event.time_ns - int(whole * 1e9), event.time_ns) / 1e9
        # A journal may come from a later version, with causes and reasons that this one does not know.
        self.seconds[event.cause] = self.seconds.get(event.cause, 0.0) + new
        for reason, seconds in event.waited_for.items():
            share = seconds * new / whole if whole else 0.0
            self._waited_for[reason] = self._waited_for.get(reason, 0.0) + share

    def _uncovered(self, began: int, ended: int) -> int:
        """Return the part of an interval that no interval before has covered, and add it to these."""
        touching = [one for one in self._waits if one[0] <= ended and one[1] >= began]
        covered = sum(min(until, ended) - max(since, began) for since, until in touching)
        whole = (min(since for since, _ in [(began, ended), *touching]), max(ended, *(one[1] for one in touching), 0))
        self._waits = [*(one for one in self._waits if one not in touching), whole][-_KEPT_WAITS:]
        return max(ended - began - covered, 0)


class Costs(EventObserver):
    """Adds up what saves cost a run, from its construction on.

    ``with costs.step():`` around each training step adds the cause that no call shows: steps beside a save are slower,
    because the save uses processors, memory and the GIL. They are compared with the median of the latest 1,024 steps
    without a save.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._sums = Sums()
        self._work = WorkInProgress()
        self._started = 0
        self._steps = {True: 0, False: 0}
        """The number of steps beside a save, and without one, and their length."""
        self._seconds = {True: 0.0, False: 0.0}
        self._without: deque[float] = deque(maxlen=_KEPT_STEPS)
        super().__init__()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one training step. Time in which a caller waits counts for the cause of the wait, not for the
        step."""
        began, waited, started, saving = time.monotonic(), *self._state()
        yield
        seconds = time.monotonic() - began
        waited_then, started_then, _ = self._state()
        beside = saving or started_then > started
        seconds = max(seconds - (waited_then - waited), 0.0)  # a wait of another task may have begun before the step
        with self._lock:
            self._steps[beside] += 1
            self._seconds[beside] += seconds
            if not beside:
                self._without.append(seconds)

    def report(self) -> CostReport:
        """Return the costs so far."""
        with self._lock:
            found = self._sums.report(time.monotonic() - self._began, time.time_ns())
            beside, beside_s, without = self._steps[True], self._seconds[True], list(self._without)
            found = replace(found, steps_beside=beside, steps_without=self._steps[False])
        if min(beside, len(without)) < _FEWEST_STEPS:
            return found
        dilation_s = max(beside_s - beside * statistics.median(without), 0.0)
        return replace(found, seconds=MappingProxyType({**found.seconds, "dilation": dilation_s}))

    def _observe(self, event: Event) -> None:
        with self._lock:
            self._sums.take(event)
            self._started += isinstance(event, SaveStarted)
            if isinstance(event, SaveEvent):
                self._work.follow(event)

    def _state(self) -> tuple[float, int, bool]:
        """Return the seconds that callers have waited, how many saves have started, and whether one is under way."""
        with self._lock:
            return sum(self._sums.seconds.values()), self._started, bool(self._work.under_way)
