"""Reading the snapshot of a save, as a sink does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def payloads(snapshot: Any, stop: Any, inside: Callable[[int], None]) -> list[bytes]:
    """Return the payload of every item, in the order of the plan. ``inside(number)`` is called inside of a window."""
    number = 0
    found: list[bytes] = []
    for layout in snapshot.plan(stop).shards:
        content = bytearray(layout.nbytes)
        for window in layout.windows:
            with snapshot.window(number, stop) as view:
                inside(number)
                content[window.start : window.end] = view[: window.end - window.start]
            number += 1
        found += [bytes(content[item.payload_offset : item.trailer_offset]) for item in layout.items]
    return found
