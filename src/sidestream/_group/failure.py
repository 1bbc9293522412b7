"""Errors of one rank, told to the others as data and made again there."""

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
    """Another rank cannot go on; the verdict of the operation will say which, and why."""

    written: tuple[str, ...] = ()
    """Of a load: as in ``SidestreamError``."""


def failure_of(rank: int, step: str, error: BaseException) -> RankFailure:
    """``error`` as the other ranks will see it: one of ours by its class, any other by its name and words."""
    return unpack(pack(rank, step, error))


def rank_died(rank: int, step: str) -> RankFailure:
    """The same words to all, however each of them has heard of it."""
    return RankFailure(rank, step, "RankDied", "the process has ended, or its machine cannot be reached")


def pack(rank: int, step: str, error: BaseException) -> dict[str, Any]:
    if isinstance(error, asyncio.CancelledError):
        return {"rank": rank, "step": step, "kind": "CancelledError", "text": "the call was cancelled"}
    text = str(error)[:_MAX_CHARS]
    told: dict[str, Any] = {"rank": rank, "step": step, "kind": type(error).__name__, "text": text}
    if isinstance(error, SidestreamError) and all(type(one) in (str, int, type(None)) for one in error.args):
        told["args"], told["facts"] = _args(error), error.facts()
    return told


def _args(error: SidestreamError) -> list[Any]:
    """Return the arguments that an error with the same message is made of."""
    if not isinstance(error, OSError) or error.errno is None:
        return [str(error)]
    filename = error.filename
    return [*error.args, *([str(filename)] if filename is not None else [])]


def unpack(told: Mapping[str, Any]) -> RankFailure:
    kind, text = str(told["kind"]), str(told["text"])
    return RankFailure(
        int(told["rank"]), str(told["step"]), kind, text, _rebuilt(kind, told.get("args"), told.get("facts", {}))
    )


def _rebuilt(kind: str, args: Any, facts: Any) -> SidestreamError | None:
    """The error as an object, where it is one of ours and its class takes what it was made of."""
    found = getattr(errors, kind, None) if kind in errors.__all__ else None
    if not isinstance(found, type) or not issubclass(found, SidestreamError) or not isinstance(args, list):
        return None
    try:
        return found(*args).with_facts(facts)
    except (
        Exception
    ):  # some are made of more than data, such as RankFailuresError; the name and the words are told anyway
        return None


def pack_all(failures: Iterable[RankFailure]) -> bytes:
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
    return RankFailuresError([unpack(told) for told in json.loads(raw)])
