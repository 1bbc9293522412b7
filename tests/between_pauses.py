"""Counts what is called between two points for pauses, so that no verdict depends on the machine's speed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from sidestream._runtime.pauses import pause_point


def calls_between_pauses(work: Callable[[], object]) -> list[int]:
    """Return how many functions ``work`` calls before its first point for pauses, between the next ones, and after its
    last one. An error of ``work`` is raised."""
    counts = [0]

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is pause_point.__code__:
            counts.append(0)
        else:
            counts[-1] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counts
