"""Ranges of one file that lie close together, joined into one request each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .store import ReadRange

__all__ = ["coalesce"]


def coalesce(ranges: Iterable[ReadRange], *, gap_bytes: int, most: int, most_bytes: int) -> Iterator[list[ReadRange]]:
    """Yield runs of at most ``most`` ranges. Each range of a run begins at most ``gap_bytes`` after the end of the one
    before it.

    Runs and ranges are ordered by their offsets. A run of several ranges spans at most ``most_bytes``. Ranges that
    overlap are in different runs. Empty ranges are left out.
    """
    run: list[ReadRange] = []
    end = 0
    for one in sorted(ranges, key=lambda one: one.offset):
        if not len(one.into):
            continue
        fits = len(run) < most and one.offset + len(one.into) - run[0].offset <= most_bytes if run else True
        if run and not (fits and 0 <= one.offset - end <= gap_bytes):
            yield run
            run = []
        run.append(one)
        end = one.offset + len(one.into)
    if run:
        yield run
