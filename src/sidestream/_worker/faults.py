"""Errors and events of the writer process, sent to the trainer and rebuilt there with the same types and messages."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .. import errors, events
from .._runtime.marks import is_stuck, is_uncertain, mark_stuck, mark_uncertain
from .._runtime.redact import redacted
from ..errors import SidestreamError
from .wire import pack, unpack

__all__ = ["pack_error", "pack_event", "unpack_error", "unpack_event"]

_DEPTH = 5
_EVENTS = ("Retried", "Throttled", "SlowPart")


def pack_error(error: BaseException) -> bytes:
    """Return ``error`` with its facts, marks, notes and causes as bytes. URLs in it are redacted."""
    return pack(_described(error, _DEPTH))


def _described(error: BaseException, depth: int) -> dict[str, Any]:
    kind = type(error)
    found: dict[str, Any] = {"module": kind.__module__, "type": kind.__qualname__, "message": redacted(str(error))}
    if isinstance(error, OSError) and error.errno is not None:
        found["os"] = [
            error.errno,
            redacted(str(error.strerror)),
            None if error.filename is None else str(error.filename),
        ]
    found["facts"] = error.facts() if isinstance(error, SidestreamError) else {}
    found["marks"] = [is_stuck(error), is_uncertain(error)]
    found["notes"] = [str(note) for note in getattr(error, "__notes__", ())]
    if not isinstance(error, (SidestreamError, OSError)):
        lines = "".join(traceback.format_tb(error.__traceback__))
        found["notes"].append(f"in the writer process:\n{lines}")
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    found["cause"] = None if cause is None or depth == 0 else _described(cause, depth - 1)
    return found


def unpack_error(packed: bytes) -> BaseException:
    """Return the error from what ``pack_error`` returned."""
    return _raised(unpack(packed))


def _raised(found: Mapping[str, Any]) -> BaseException:
    error = _made(found)
    if isinstance(error, SidestreamError):
        error.with_facts(found["facts"])
    stuck, uncertain = found["marks"]
    if stuck:
        mark_stuck(error)
    if uncertain:
        mark_uncertain(error)
    for note in found["notes"]:
        error.add_note(note)
    if found["cause"] is not None:
        error.__cause__ = _raised(found["cause"])
    return error


def _made(found: Mapping[str, Any]) -> BaseException:
    """Return an error of the original type if that is one of sidestream or a builtin, else a ``RuntimeError``. No other
    type is looked up by name."""
    home = {errors.__name__: errors, "builtins": builtins}.get(found["module"])
    kind = None if home is None else getattr(home, found["type"], None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(*found["os"]) if "os" in found else kind(found["message"])
        except TypeError:
            pass
    return RuntimeError(f"{found['type']}: {found['message']}")


def pack_event(event: events.Event) -> bytes | None:
    """Return ``event`` as bytes; None for events that the trainer emits itself."""
    name = type(event).__name__
    return pack({"event": name, **asdict(event)}) if name in _EVENTS else None


def unpack_event(packed: bytes) -> events.Event:
    """Return the event from what ``pack_event`` returned."""
    found = unpack(packed)
    name = found.pop("event")
    made: events.Event = getattr(events, name)(**found) if name in _EVENTS else events.GuaranteeLost("", str(name))
    return made
