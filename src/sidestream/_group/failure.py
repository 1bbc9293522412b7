"""Errors of one rank, sent to the other ranks as data and rebuilt there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

from .. import errors
from ..errors import RankFailure, RankFailuresError, SidestreamError

__all__ = ["Stopped", "failure_of", "pack", "pack_all", "rank_died", "unpack", "unpack_all"]

_MAX_CHARS = 4000


class Stopped(Exception):
    """Another rank has failed. The verdict of the operation will say which one, and why."""

    written: tuple[str, ...] = ()
    """For a load: as in ``SidestreamError``."""


def failure_of(rank: int, step: str, error: BaseException) -> RankFailure:
    """Return ``error`` as the other ranks receive it: an error of sidestream as an object of its class, any other as
    its class name and message."""
    return unpack(pack(rank, step, error))


def rank_died(rank: int, step: str) -> RankFailure:
    """Return the failure of a rank whose process has ended. The text is the same however a rank has noticed it."""
    return RankFailure(rank, step, "RankDied", "the process has ended, or its machine cannot be reached")


def pack(rank: int, step: str, error: BaseException) -> dict[str, Any]:
    """Return ``error`` of ``rank`` in ``step`` as JSON data."""
    if isinstance(error, asyncio.CancelledError):
        return {"rank": rank, "step": step, "kind": "CancelledError", "text": "the call was cancelled"}
    text = str(error)[:_MAX_CHARS]
    packed: dict[str, Any] = {"rank": rank, "step": step, "kind": type(error).__name__, "text": text}
    if isinstance(error, SidestreamError) and all(type(one) in (str, int, type(None)) for one in error.args):
        packed["args"], packed["facts"] = _args(error), error.facts()
    return packed


def _args(error: SidestreamError) -> list[Any]:
    """Return the arguments from which an error with the same message can be made."""
    if not isinstance(error, OSError) or error.errno is None:
        return [str(error)]
    filename = error.filename
    return [*error.args, *([str(filename)] if filename is not None else [])]


def unpack(packed: Mapping[str, Any]) -> RankFailure:
    """Return the failure from what ``pack`` returned."""
    kind, text = str(packed["kind"]), str(packed["text"])
    return RankFailure(
        int(packed["rank"]),
        str(packed["step"]),
        kind,
        text,
        _rebuilt(kind, packed.get("args"), packed.get("facts", {})),
    )


def _rebuilt(kind: str, args: Any, facts: Any) -> SidestreamError | None:
    """Return the error as an object, or None if it is not an error of sidestream or its class does not accept
    ``args``."""
    found = getattr(errors, kind, None) if kind in errors.__all__ else None
    if not isinstance(found, type) or not issubclass(found, SidestreamError) or not isinstance(args, list):
        return None
    try:
        return found(*args).with_facts(facts)
    except Exception:  # some need more than data, such as RankFailuresError; class name and message are enough then
        return None


def pack_all(failures: Iterable[RankFailure]) -> bytes:
    """Return a verdict as bytes."""
    return json.dumps(
        [
            {
                "rank": one.rank,
                "step": one.step,
                "kind": one.kind,
                "text": one.text,
                **({} if one.error is None else {"args": _args(one.error), "facts": one.error.facts()}),
            }
            for one in failures
        ]
    ).encode()


def unpack_all(raw: bytes) -> RankFailuresError:
    """Return the verdict from what ``pack_all`` returned."""
    return RankFailuresError([unpack(packed) for packed in json.loads(raw)])
