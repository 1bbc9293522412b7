"""Thousands of saves of one process: memory, descriptors and threads stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import median

import pytest
from _growing import KINDS, MOST_OBJECTS, growth
from _rows import Row, Size
from _trials import Trials

SHORT, LONG = 2_000, 50_000
"""The quick form has no fewer: the allocator has not settled after 200 saves, which grew by 200 to 1,700 bytes each."""
MOST_BYTES_PER_SAVE = 256
EVERY = 25
SHORT_EACH, LONG_EACH = 150, 3_000


def slope(points: list[tuple[int, int]]) -> float:
    """Return the slope of the line through them, by the median of all pairs: a single jump of the allocator is none."""
    return median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))


def growth_of(points: list[tuple[int, int]]) -> float:
    """Return the smallest slope of three stretches: a leak grows in each of them, and the allocator here and there."""
    length = len(points) // 3
    return min(slope(points[at : at + length]) for at in (0, length, 2 * length))


def test_saves_without_end(place: Path, children: Trials, row: Callable[..., Row], size: Size) -> None:
    counts = row("soak")
    saves = max(SHORT, size.of(SHORT, LONG))
    told = children.run(work="soak", root="/nonexistent", run=place / "run", saves=saves, every=EVERY)
    samples = [report for report in told.reports if "after" in report]
    settled = samples[len(samples) // 2 :]
    points = [(sample["after"], sample["rss"]) for sample in settled]
    growth = growth_of(points)
    wrong = [f"a save failed: {told.error}"] if told.error else []
    wrong += [f"{growth:.0f} bytes more per save: {settled}"] if growth >= MOST_BYTES_PER_SAVE else []
    for what in ("fds", "threads"):
        # The least of several: one sample may fall into the pass of retention that goes on in the background.
        first, last = (min(sample[what] for sample in part) for part in (settled[:5], settled[-5:]))
        wrong += [f"{what} went from {first} to {last}: {samples}"] if last > first else []
    counts.trial("soak", wrong, count=samples[-1]["after"])
    counts.note("bytes of growth per save", round(growth))
    counts.end(at_least=saves)


@pytest.mark.parametrize("kind", KINDS)
async def test_garbage_collection_is_disabled(kind: str, place: Path, row: Callable[..., Row], size: Size) -> None:
    """Some programs disable garbage collection to reduce latency: then reference cycles are never freed."""
    counts = row("garbage collection disabled", kind)
    rounds = max(SHORT_EACH, size.of(SHORT_EACH, LONG_EACH))
    objects, blocks, more = await growth(kind, place, rounds)
    wrong = (
        [f"{objects:.1f} objects and {blocks:.1f} blocks stay of each: {more}"]
        if max(objects, blocks) > MOST_OBJECTS
        else []
    )
    counts.trial(kind, wrong, count=rounds)
    counts.end(at_least=rounds)
