"""Passes of retention over runs with damaged, leased, foreign and superseded steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from _retaining import trial
from _rows import Row, Size

SHORT, LONG = 100, 5_000


async def test_what_must_stay_stays(place: Path, row: Callable[..., Row], size: Size) -> None:
    counts = row("retention")
    for number in range(size.of(SHORT, LONG)):
        counts.trial(number, await trial(place / str(number), size.random("retention", number)))
    counts.end(at_least=size.of(SHORT, LONG))
