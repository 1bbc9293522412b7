"""``DCPLog``: the events for handlers of DCP's logger."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from ..events import (
    Event,
    LoadApplied,
    LoadEvent,
    LoadFailed,
    LoadStarted,
    SaveCommitted,
    SaveEvent,
    SaveFailed,
    SaveStarted,
)
from .observer import EventObserver
from .phases import context_of

__all__ = ["DCPLog"]

_EVENTS: dict[type[SaveEvent | LoadEvent], str] = {
    SaveStarted: "start",
    LoadStarted: "start",
    SaveCommitted: "end",
    LoadApplied: "end",
    SaveFailed: "exception",
    LoadFailed: "exception",
}
"""DCP's words. The phases of a save or load have their own names."""


class DCPLog(EventObserver):
    """Logs each event to the logger that DCP's handlers listen to, as a dict like those of DCP.

    ``event`` is ``"start"``, ``"end"`` or ``"exception"`` as in DCP, or the name of the event's class; ``time`` is in
    nanoseconds, ``uuid`` the id of the save. Failures have the level ERROR, all other events DEBUG.

    Raises:
        ImportError: This torch has no ``torch.distributed.checkpoint``.
    """

    def __init__(self) -> None:
        from .._runtime.torch_probes import dcp_logger

        self._logger = dcp_logger()
        super().__init__()

    def _observe(self, event: Event) -> None:
        level = logging.ERROR if isinstance(event, (SaveFailed, LoadFailed)) else logging.DEBUG
        if self._logger.isEnabledFor(level):
            self._logger.log(level, _message(event))


def _message(event: Event) -> dict[str, Any]:
    kind = type(event).__name__
    message: dict[str, Any] = {"event": kind, "log_exceptions": True}
    if isinstance(event, (SaveEvent, LoadEvent)):
        about = context_of(event)
        message |= {
            "event": _EVENTS.get(type(event), kind),
            "func_name": about.operation,
            "checkpoint_id": about.url,
            "uuid": about.save_id,
            "time": event.time_ns,
            "step": about.step,
            "global_rank": about.rank,
            "world_size": about.world,
        }
    if isinstance(event, (SaveFailed, LoadFailed)):
        message["error"] = event.reason
    if isinstance(event, (SaveCommitted, LoadApplied)):
        message["times_spent"] = int(max(event.seconds.values(), default=0.0) * 1e9)
    rest = {field.name: getattr(event, field.name) for field in fields(event)}
    return {key: value for key, value in rest.items() if key not in ("save", "load")} | message
