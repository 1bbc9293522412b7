"""Errors as plain data, for another process, which makes them again with the same types, messages, notes and causes."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .. import errors
from ..errors import SidestreamError, is_stuck, is_uncertain, mark_stuck, mark_uncertain, redacted

_DEPTH = 5  # of causes
_MOST_CHARS = 1 << 14


def data_of(error: BaseException, where: str | None = None, depth: int = _DEPTH) -> dict[str, Any]:
    """Return ``error`` with its facts, marks, notes and causes as data that JSON can hold. URLs in its texts are
    redacted. With ``where``, which names this process, errors from outside of sidestream get a note with their
    traceback."""
    kind = type(error)
    found: dict[str, Any] = {"module": kind.__module__, "type": kind.__qualname__, "args": _args(error)}
    found["message"] = text_of(error)
    found["facts"] = error.facts() if isinstance(error, SidestreamError) else {}
    found["marks"] = [is_stuck(error), is_uncertain(error)]
    notes = getattr(error, "__notes__", ())
    found["notes"] = [text_of(note) for note in notes] if isinstance(notes, (list, tuple)) else []
    if where is not None and not isinstance(error, (SidestreamError, OSError)):
        found["notes"].append(f"in {where}:\n{''.join(traceback.format_tb(error.__traceback__))}")
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    found["cause"] = None if cause is None or depth == 0 else data_of(cause, where, depth - 1)
    return found


def _args(error: BaseException) -> list[Any] | None:
    """Return the arguments from which an error with the same message can be made. None if there are no such ones."""
    if isinstance(error, OSError) and isinstance(error.errno, int):
        filename = [] if error.filename is None else [text_of(error.filename)]
        return [int(error.errno), text_of(error.strerror), *filename]
    if isinstance(error, SidestreamError) and any(type(one) not in (str, int, type(None)) for one in error.args):
        return None
    return [text_of(error)]


def text_of(value: object, most_chars: int = _MOST_CHARS) -> str:
    """Return the first ``most_chars`` of ``str(value)``, redacted. Never raises, although ``value`` may be of any
    class."""
    try:
        return redacted(str(value))[:most_chars]
    except Exception:
        return f"(a {type(value).__name__} without text)"


def error_from(data: Mapping[str, Any]) -> BaseException:
    """Return the error from what ``data_of`` returned. Its type is the original one if that is one of sidestream or a
    builtin, else ``RuntimeError``."""
    error = _made(data)
    if isinstance(error, SidestreamError):
        error.with_facts(data["facts"])
    stuck, uncertain = data["marks"]
    if stuck:
        mark_stuck(error)
    if uncertain:
        mark_uncertain(error)
    for note in data["notes"]:
        error.add_note(note)
    if data["cause"] is not None:
        error.__cause__ = error_from(data["cause"])
    return error


def _made(data: Mapping[str, Any]) -> BaseException:
    home = {errors.__name__: errors, "builtins": builtins}.get(data["module"])
    kind = None if home is None else getattr(home, data["type"], None)  # no other type is looked up by name
    if isinstance(kind, type) and issubclass(kind, Exception) and data["args"] is not None:
        with suppress(Exception):  # some need more than data, such as RankFailuresError
            made: Exception = kind(*data["args"])
            return made
    return RuntimeError(f"{data['type']}: {data['message']}")
