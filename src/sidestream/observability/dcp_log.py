"""``DCPLog``: the events for handlers of DCP's logger."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from .. import events
from ..events import Event, LoadEvent, SaveEvent
from .observer import QueuedObserver
from .phases import context_of

_EVENTS: dict[type[SaveEvent | LoadEvent], str] = {
    events.SaveStarted: "start",
    events.LoadStarted: "start",
    events.SaveCommitted: "end",
    events.LoadApplied: "end",
    events.SaveFailed: "exception",
    events.LoadFailed: "exception",
}
"""DCP's words. The phases of a save or load have their own names."""


class DCPLog(QueuedObserver):
    """Logs each event to the logger that DCP's handlers listen to, as a dict like those of DCP.

    ``event`` is ``"start"``, ``"end"`` or ``"exception"`` as in DCP, or the name of the event's class; ``time`` is in
    nanoseconds, ``uuid`` the id of the save. Failures have the level ERROR, all other events DEBUG. A thread of its own
    calls the handlers.

    Raises:
        ImportError: This torch has no ``torch.distributed.checkpoint``.
    """

    def __init__(self) -> None:
        from .._runtime.torch_probes import dcp_logger

        self._logger = dcp_logger()
        super().__init__("DCPLog")

    def _take(self, event: Event, noted: int) -> None:
        level = logging.ERROR if _EVENTS.get(type(event)) == "exception" else logging.DEBUG  # type: ignore[arg-type]
        if self._logger.isEnabledFor(level):
            self._logger.log(level, _message(event))


def _message(event: Event) -> dict[str, Any]:
    kind = type(event)
    message: dict[str, Any] = {field.name: getattr(event, field.name) for field in fields(event)}
    message |= {"event": kind.__name__, "log_exceptions": True}
    if isinstance(event, (SaveEvent, LoadEvent)):
        about = context_of(event)
        del message["save" if isinstance(event, SaveEvent) else "load"]
        message |= {
            "event": _EVENTS.get(type(event), kind.__name__),
            "func_name": about.operation,
            "checkpoint_id": about.url,
            "uuid": about.save_id,
            "time": event.time_ns,
            "step": about.step,
            "global_rank": about.rank,
            "world_size": about.world,
        }
    if isinstance(event, (events.SaveFailed, events.LoadFailed)):
        message["error"] = event.reason
    if isinstance(event, (events.SaveCommitted, events.LoadApplied)):
        message["times_spent"] = int(max(event.seconds.values(), default=0.0) * 1e9)
    return message
