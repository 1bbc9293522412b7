"""The measures of all saves and loads, for Prometheus and for OpenTelemetry: names, units and labels.

A label has few values: never a URL, a step, a save id, a rank or the name of a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .. import events
from ..events import CallerWaited, Event, LoadEvent, SaveEvent
from .phases import Phase, UnderWay, WorkInProgress

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
    Measure("save.duration", "save_duration_seconds", "histogram", "s", ("operation", "phase"), "Phases of saves"),
    Measure("save.blocked.duration", "save_blocked_seconds", "histogram", "s", ("cause",), "Waits of callers"),
    Measure("save.blocked.reason", "save_blocked_reason_seconds", "counter", "s", ("cause", "reason"), "Their reasons"),
    Measure("saves", "saves", "counter", "{save}", ("operation", "outcome", "error_type"), "Saves that have ended"),
    Measure("save.bytes", "save_bytes", "counter", "By", ("storage",), "Bytes of committed saves, of this rank"),
    Measure("save.active", "saves_in_flight", "updown", "{save}", ("state",), "Saves that have not ended"),
    Measure("checkpoint.last_durable.step", "last_durable_step", "gauge", "{step}", (), "The last committed step"),
    Measure("checkpoint.last_durable.timestamp", "last_durable_timestamp_seconds", "gauge", "s", (), "Its Unix time"),
    Measure("load.duration", "load_duration_seconds", "histogram", "s", ("operation", "phase"), "Phases of loads"),
    Measure("loads", "loads", "counter", "{load}", ("operation", "outcome", "error_type"), "Loads that have ended"),
    Measure("load.bytes", "load_bytes", "counter", "By", ("storage",), "Bytes that successful loads have read"),
    Measure("load.fallbacks", "load_fallbacks", "counter", "{load}", (), "Damaged steps that a restore passed over"),
    Measure("storage.retries", "storage_retries", "counter", "{request}", ("storage",), "Requests sent again"),
    Measure("storage.throttled.duration", "storage_throttled_seconds", "counter", "s", ("storage",), "Throttled waits"),
    Measure("retention.deleted", "retention_deleted", "counter", "{step}", (), "Steps that pruning has deleted"),
    Measure("checkpoint.damaged", "checkpoints_damaged", "gauge", "{step}", (), "Damaged steps known to pruning"),
    Measure("writer.lost", "writer_processes_lost", "counter", "{process}", (), "Writer processes that ended early"),
    Measure("guarantees.lost", "guarantees_lost", "counter", "{guarantee}", (), "Guarantees that do not hold"),
)  # fmt: skip


def _storage_of(url: str) -> str:
    scheme = url.partition("://")[0] if "://" in url else ""
    return _STORAGES.get(scheme.partition("::")[0], "other")


class Measures:
    """Turns events into measures. Any thread may call it.

    ``put`` is called with the name of a measure, a value, and a value for each of its labels, in order.
    """

    def __init__(self, put: Callable[..., object]) -> None:
        self._put = put
        self._lock = threading.Lock()
        self._work = WorkInProgress()

    def take(self, event: Event) -> Phase | None:
        """Record ``event``. Return what it has begun or ended."""
        self._take_itself(event)
        if not isinstance(event, (SaveEvent, LoadEvent)):
            return None
        with self._lock:
            phase = self._work.follow(event)
        if phase is not None:
            self._take_phase(phase)
        elif isinstance(event, events.SaveSkipped):  # skipped before it had started
            self._put("saves", 1, event.save.operation, "skipped", "")
        return phase

    def under_way(self) -> list[UnderWay]:
        """Return the saves and loads that have not ended."""
        with self._lock:
            return list(self._work.under_way)

    def _take_phase(self, phase: Phase) -> None:
        put, one, kind = self._put, phase.of, phase.of.kind
        if kind == "save":
            self._take_state(phase)
        if phase.name is None:
            return
        operation = one.context.operation
        put(f"{kind}.duration", (phase.ended[0] - phase.began[0]) / 1e9, operation, phase.name)
        if phase.outcome is not None:
            put(f"{kind}s", 1, operation, phase.outcome, phase.error_type)
        if phase.outcome in ("committed", "applied"):
            put(f"{kind}.duration", (phase.ended[0] - one.began[0]) / 1e9, operation, "total")
            put(f"{kind}.bytes", one.nbytes, _storage_of(one.context.url))

    def _take_state(self, phase: Phase) -> None:
        """Count saves in flight: each is staging first, and writing when it is staged."""
        if phase.name is None:
            self._put("save.active", 1, "staging")
        elif phase.name == "stage":
            self._put("save.active", -1, "staging")
            self._put("save.active", 1, "writing")
        elif phase.outcome is not None:
            self._put("save.active", -1, "writing" if phase.of.staged else "staging")

    def _take_itself(self, event: Event) -> None:
        """Record what needs no other event."""
        put = self._put
        match event:
            case events.SaveCommitted(save=events.SaveContext(operation="save", step=step)):
                put("checkpoint.last_durable.timestamp", event.time_ns / 1e9)
                if step is not None:
                    put("checkpoint.last_durable.step", step)
            case events.LoadFellBack():
                put("load.fallbacks", 1)
            case CallerWaited(cause=cause):
                put("save.blocked.duration", event.seconds, cause)
                for reason, seconds in event.waited_for.items():
                    put("save.blocked.reason", seconds, cause, reason)
            case events.Retried(url=url):
                put("storage.retries", 1, _storage_of(url))
            case events.Throttled(url=url, wait_s=wait_s):
                put("storage.throttled.duration", wait_s, _storage_of(url))
            case events.RunPruned(deleted=deleted, damaged=damaged):
                put("retention.deleted", len(deleted))
                put("checkpoint.damaged", len(damaged))
            case events.WriterProcessLost():
                put("writer.lost", 1)
            case events.GuaranteeLost():
                put("guarantees.lost", 1)
