"""The measures of all saves and loads, for Prometheus and for OpenTelemetry: names, units and labels.

A label has few values: never a URL, a step, a save id, a rank or the name of a tensor.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, Protocol

from ..events import (
    CallerWaited,
    Event,
    GuaranteeLost,
    LoadEvent,
    LoadFellBack,
    Retried,
    RunPruned,
    SaveCommitted,
    SaveEvent,
    SaveSkipped,
    Throttled,
    WriterProcessLost,
)
from .phases import Phase, UnderWay, WorkInProgress

__all__ = ["BOUNDARIES", "MEASURES", "Instruments", "Measure", "Measures"]

BOUNDARIES = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""The boundaries of all histograms, in seconds."""

_STORAGES = {"": "file", "file": "file", "local": "file", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
_STORAGES |= {"az": "az", "abfs": "az", "abfss": "az", "memory": "memory"}


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure. ``unit`` is that of OpenTelemetry; ``prometheus`` is its name there, without ``_total``."""

    name: str
    prometheus: str
    kind: Literal["counter", "updown", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    about: str


MEASURES = (
    Measure("save.duration", "save_duration_seconds", "histogram", "s", ("operation", "phase"),
            "The phases of saves, and committed saves as a whole (total)"),
    Measure("save.blocked.duration", "save_blocked_seconds", "histogram", "s", ("cause",),
            "How long callers were held up by saves"),
    Measure("save.blocked.reason", "save_blocked_reason_seconds", "counter", "s", ("cause", "reason"),
            "What callers that were held up waited for"),
    Measure("saves", "saves", "counter", "{save}", ("operation", "outcome", "error_type"), "Saves that have ended"),
    Measure("save.bytes", "save_bytes", "counter", "By", ("storage",), "Bytes of committed saves, of this rank"),
    Measure("save.active", "saves_in_flight", "updown", "{save}", ("state",), "Saves that have not ended"),
    Measure("checkpoint.last_durable.step", "last_durable_step", "gauge", "{step}", (), "The last committed step"),
    Measure("checkpoint.last_durable.timestamp", "last_durable_timestamp_seconds", "gauge", "s", (),
            "The Unix time of the last commit"),
    Measure("load.duration", "load_duration_seconds", "histogram", "s", ("operation", "phase"),
            "The phases of loads, and successful loads as a whole (total)"),
    Measure("loads", "loads", "counter", "{load}", ("operation", "outcome", "error_type"), "Loads that have ended"),
    Measure("load.bytes", "load_bytes", "counter", "By", ("storage",), "Bytes that successful loads have read"),
    Measure("load.fallbacks", "load_fallbacks", "counter", "{load}", (), "Damaged steps that a restore passed over"),
    Measure("storage.retries", "storage_retries", "counter", "{request}", ("storage",), "Requests sent again"),
    Measure("storage.throttled.duration", "storage_throttled_seconds", "counter", "s", ("storage",),
            "How long requests waited because a storage asked for fewer"),
    Measure("retention.deleted", "retention_deleted", "counter", "{step}", (), "Steps that pruning has deleted"),
    Measure("checkpoint.damaged", "checkpoints_damaged", "gauge", "{step}", (), "Damaged steps known to pruning"),
    Measure("writer.lost", "writer_processes_lost", "counter", "{process}", (), "Writer processes that ended early"),
    Measure("guarantees.lost", "guarantees_lost", "counter", "{guarantee}", (), "Guarantees that do not hold"),
)  # fmt: skip


class Instruments(Protocol):
    """Where measures go, by name, with a value for each of their labels, in order."""

    def add(self, name: str, amount: float, *labels: str) -> None: ...

    def record(self, name: str, seconds: float, *labels: str) -> None: ...

    def set(self, name: str, value: float) -> None: ...


def _storage_of(url: str) -> str:
    scheme = url.partition("://")[0] if "://" in url else ""
    return _STORAGES.get(scheme.partition("::")[0], "other")


class Measures:
    """Turns events into measures. Any thread may call it."""

    def __init__(self, to: Instruments) -> None:
        self._to = to
        self._lock = threading.Lock()
        self._work = WorkInProgress()

    def take(self, event: Event) -> Phase | None:
        """Record ``event``. Return what it has begun or ended."""
        if isinstance(event, (SaveEvent, LoadEvent)):
            with self._lock:
                phase = self._work.follow(event)
            self._take_end(event)
            if phase is not None:
                self._take_phase(phase, "save" if isinstance(event, SaveEvent) else "load")
            elif isinstance(event, SaveSkipped):  # skipped before it had started
                self._to.add("saves", 1, event.save.operation, "skipped", "")
            return phase
        self._take_other(event)
        return None

    def under_way(self) -> list[UnderWay]:
        """Return the saves and loads that have not ended."""
        with self._lock:
            return self._work.all()

    def _take_phase(self, phase: Phase, kind: Literal["save", "load"]) -> None:
        to, one, operation = self._to, phase.of, phase.of.context.operation
        if kind == "save":
            self._take_state(phase)
        if phase.name is None:
            return
        to.record(f"{kind}.duration", phase.seconds, operation, phase.name)
        if phase.outcome is not None:
            to.add(f"{kind}s", 1, operation, phase.outcome, phase.error_type)
        if phase.outcome in ("committed", "applied"):
            to.record(f"{kind}.duration", phase.total_s, operation, "total")
            to.add(f"{kind}.bytes", one.nbytes, _storage_of(one.context.url))

    def _take_state(self, phase: Phase) -> None:
        """Count saves in flight: each is staging first, and writing when it is staged."""
        if phase.name is None:
            self._to.add("save.active", 1, "staging")
        elif phase.name == "stage":
            self._to.add("save.active", -1, "staging")
            self._to.add("save.active", 1, "writing")
        elif phase.outcome is not None:
            self._to.add("save.active", -1, "writing" if phase.of.staged else "staging")

    def _take_end(self, event: SaveEvent | LoadEvent) -> None:
        match event:
            case SaveCommitted(save=save) if save.operation == "save":
                self._to.set("checkpoint.last_durable.timestamp", event.time_ns / 1e9)
                if save.step is not None:
                    self._to.set("checkpoint.last_durable.step", save.step)
            case LoadFellBack():
                self._to.add("load.fallbacks", 1)

    def _take_other(self, event: Event) -> None:
        to = self._to
        match event:
            case CallerWaited(cause=cause, seconds=seconds):
                to.record("save.blocked.duration", seconds, cause)
                for reason, part in event.waited_for.items():
                    to.add("save.blocked.reason", part, cause, reason)
            case Retried(url=url):
                to.add("storage.retries", 1, _storage_of(url))
            case Throttled(url=url, wait_s=wait_s):
                to.add("storage.throttled.duration", wait_s, _storage_of(url))
            case RunPruned(deleted=deleted, damaged=damaged):
                to.add("retention.deleted", len(deleted))
                to.set("checkpoint.damaged", len(damaged))
            case WriterProcessLost():
                to.add("writer.lost", 1)
            case GuaranteeLost():
                to.add("guarantees.lost", 1)
