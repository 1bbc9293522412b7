"""Errors of one rank, sent to the other ranks as data and rebuilt there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

from .._runtime.error_data import data_of, error_from, text_of
from ..errors import RankFailure, RankFailuresError, SidestreamError

_MOST_CHARS = 4000


def rank_died(rank: int, step: str) -> RankFailure:
    """Return the failure of a rank whose connection has ended. The text is the same however a rank has noticed it."""
    text = "the process has ended, its machine cannot be reached, or it has destroyed the process group"
    return RankFailure(rank, step, "RankDied", text)


def pack(rank: int, step: str, error: BaseException) -> dict[str, Any]:
    """Return ``error`` of ``rank`` in ``step`` as JSON data."""
    if isinstance(error, asyncio.CancelledError):
        return _packed(RankFailure(rank, step, "CancelledError", "the call was cancelled"))
    ours = error if isinstance(error, SidestreamError) else None
    return _packed(RankFailure(rank, step, type(error).__name__, text_of(error, _MOST_CHARS), ours))


def _packed(failure: RankFailure) -> dict[str, Any]:
    packed = {"rank": failure.rank, "step": failure.step, "kind": failure.kind, "text": failure.text}
    return packed if failure.error is None else {**packed, "error": data_of(failure.error)}


def unpack(packed: Mapping[str, Any]) -> RankFailure:
    """Return the failure from what ``pack`` returned."""
    error = error_from(packed["error"]) if "error" in packed else None
    ours = error if isinstance(error, SidestreamError) else None  # class name and message are enough for others
    return RankFailure(int(packed["rank"]), str(packed["step"]), str(packed["kind"]), str(packed["text"]), ours)


def pack_all(failures: Iterable[RankFailure]) -> bytes:
    """Return a verdict as bytes."""
    return json.dumps([_packed(failure) for failure in failures]).encode()


def unpack_all(raw: bytes) -> RankFailuresError:
    """Return the verdict from what ``pack_all`` returned."""
    return RankFailuresError([unpack(packed) for packed in json.loads(raw)])
