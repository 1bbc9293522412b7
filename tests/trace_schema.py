"""A check of the JSON trace format of Chrome, as Perfetto reads it, and what a trace says of saves.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Perfetto's own trace
processor is downloaded at its first use, so tests cannot rely on it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

NEEDED = {
    "M": {"args"}, "b": {"ts", "id", "cat"}, "e": {"ts", "id", "cat"}, "C": {"ts", "args"}, "i": {"ts", "s"},
}  # fmt: skip


def check(trace: dict[str, Any]) -> None:
    """Raise ``AssertionError`` if a viewer would drop or misplace an event of ``trace``."""
    json.dumps(trace, allow_nan=False)
    assert isinstance(trace["traceEvents"], list)
    trees: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} | NEEDED[one["ph"]] <= one.keys(), one
        assert one.get("ts", 0) >= 0, one
        if one["ph"] in "be":
            trees[one["cat"], one["id"]].append(one)
        elif one["ph"] == "C":
            assert all(type(value) in (int, float) for value in one["args"].values()), one
    for tree in trees.values():  # slices of one id are nested
        tree.sort(key=lambda one: one["ts"])  # a stable sort, as that of a viewer
        stack: list[str] = []
        for number, one in enumerate(tree):
            assert bool(stack) == (number > 0), "one slice contains all others"
            if one["ph"] == "b":
                stack.append(one["name"])
            else:
                assert stack.pop() == one["name"], one
        assert not stack, "a slice has no end"


def saves(trace: dict[str, Any]) -> list[tuple[int, str, int, int]]:
    """For each save its rank, its name, and how many begins and ends it has."""
    found = [one for one in trace["traceEvents"] if one.get("cat") == "save" and "args" in one]  # phases have none
    begins = Counter(one["id"] for one in found if one["ph"] == "b")
    ends = Counter(one["id"] for one in found if one["ph"] == "e")
    names = {one["id"]: (one["pid"], one["name"]) for one in found}
    return [(*names[each], begins[each], ends[each]) for each in names]


def phases(trace: dict[str, Any]) -> list[str]:
    """The names of the phases of saves and loads, in the order in which they began."""
    return [one["name"] for one in trace["traceEvents"] if one["ph"] == "b" and "args" not in one]
