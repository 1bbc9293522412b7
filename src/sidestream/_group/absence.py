"""Warnings about ranks that have not joined a call of all ranks, long before the ranks that wait for them time out."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from .._runtime.threads import io_threads
from ..events import RanksMissing, emit
from .operation import Operation, remedy

_log = logging.getLogger("sidestream")

WARN_AFTER_S = 5.0
"""How long a rank waits for other ranks before it logs a warning."""
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class BeginMessage:
    """The payload of a BEGUN message. ``waited_s``: the time until the rank was connected to rank 0."""

    kind: str
    rank_wait_s: float
    waited_s: float

    @classmethod
    def of(cls, operation: Operation) -> BeginMessage:
        return cls(operation.kind, operation.rank_wait_s, time.monotonic() - operation.began_at)

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, raw: bytes) -> BeginMessage:
        return cls(**json.loads(raw))


def warn_of_missing(operation: Operation, missing: Sequence[int]) -> None:
    """Log that this rank waits for the ranks in ``missing``."""
    waited_s = time.monotonic() - operation.began_at
    limit_s, limit = min((operation.rank_wait_s, "rank_wait_s"), (operation.deadline.timeout_s, "timeout_s"))
    _log.warning(
        "rank %d has waited %.0f s for %s, which did not join this %s: %s. It waits for at most %s=%g",
        operation.rank,
        waited_s,
        _listed(missing),
        operation.kind,
        remedy(operation.kind),
        limit,
        limit_s,
    )
    # In a thread: observers are code of the user, which must not run on the operation loop.
    io_threads().submit(emit, RanksMissing(operation.kind, operation.rank, tuple(missing), waited_s))


def _listed(ranks: Sequence[int]) -> str:
    """Return ``ranks 1-3 and 7`` for sorted ranks."""
    runs = list(_runs(ranks))
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_SHOWN]]
    if len(runs) > _SHOWN:
        shown.append("others")
    text = ", ".join(shown[:-1]) + " and " + shown[-1] if len(shown) > 1 else shown[0]
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _runs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    ends = [one for one, following in pairwise(ranks) if following != one + 1]
    first = ranks[0]
    for last in [*ends, ranks[-1]]:
        yield first, last
        first = next((one for one in ranks if one > last), last)
