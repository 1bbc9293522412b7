"""A check of the JSON trace format of Chrome, as Perfetto reads it, and what a trace says of saves.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Perfetto's own trace
processor is downloaded at its first use, so tests cannot rely on it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

NEEDED = {
    "M": {"args"}, "b": {"ts", "id", "cat"}, "e": {"ts", "id", "cat"}, "X": {"ts", "dur"},
    "C": {"ts", "args"}, "i": {"ts", "s"},
}  # fmt: skip


def check(trace: dict[str, Any]) -> None:
    """Raise ``AssertionError`` if a viewer would drop or misplace an event of ``trace``."""
    json.dumps(trace, allow_nan=False)
    assert isinstance(trace["traceEvents"], list)
    slices: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    open_at: dict[tuple[str, str], float] = {}
    for one in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} | NEEDED[one["ph"]] <= one.keys(), one
        assert one.get("ts", 0) >= 0, one
        if one["ph"] == "X":
            assert one["dur"] >= 0, one
            slices[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
        elif one["ph"] == "b":
            assert (one["cat"], one["id"]) not in open_at, one
            open_at[one["cat"], one["id"]] = one["ts"]
        elif one["ph"] == "e":
            assert one["ts"] >= open_at.pop((one["cat"], one["id"])), one
        elif one["ph"] == "C":
            assert all(type(value) in (int, float) for value in one["args"].values()), one
    assert not open_at, "an asynchronous slice has no end"
    for track in slices.values():  # slices of one track must not overlap
        track.sort()
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(track)), track


def saves(trace: dict[str, Any]) -> list[tuple[int, str, int, int]]:
    """For each save its rank, its name, and how many begins and ends it has."""
    found = [one for one in trace["traceEvents"] if one.get("cat") == "save"]
    begins = Counter(one["id"] for one in found if one["ph"] == "b")
    ends = Counter(one["id"] for one in found if one["ph"] == "e")
    names = {one["id"]: (one["pid"], one["name"]) for one in found}
    return [(*names[each], begins[each], ends[each]) for each in names]
