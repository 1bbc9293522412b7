"""A check that boxes tile a shape exactly: no two boxes overlap, and every element is in one.

The boxes are separated along one dimension after the other. For the results of sharding (rows, columns, grids, also
uneven ones) that takes ``n log n`` steps. Boxes that no straight cut separates are compared pair by pair. The number of
steps is limited, because an attacker may have chosen the boxes so that the check would hang.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""``(offsets, sizes)``."""


class TooIntricateError(Exception):
    """The boxes cannot be compared within the limit of steps."""


def volume(boxes: Sequence[Box]) -> int:
    """Return the number of elements in all boxes. If it is that of the shape, and no boxes overlap, they cover the
    shape."""
    return sum(math.prod(sizes) for _, sizes in boxes)


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the indices of two boxes that share an element, or None. Boxes without elements do not overlap.

    All boxes have the same number of dimensions. Raises ``TooIntricateError`` if the check takes far more steps than
    there are boxes.
    """
    steps_left = 128 * len(boxes) + (1 << 17)
    groups = [[index for index, (_, sizes) in enumerate(boxes) if 0 not in sizes]]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        for dim in range(len(boxes[group[0]][0])):
            steps_left -= len(group)
            parts = _cut(boxes, group, dim)
            if len(parts) > 1:
                groups += parts
                break
        else:
            # Counted before the pairs are compared, so that the limit holds for the one group that an attacker has made
            # too large.
            steps_left -= len(group) ** 2
            if steps_left < 0:
                raise TooIntricateError
            found = _compare_all(boxes, group)
            if found:
                return found
        if steps_left < 0:
            raise TooIntricateError
    return None


def _cut(boxes: Sequence[Box], group: list[int], dim: int) -> list[list[int]]:
    """Divide ``group`` into parts whose extents along ``dim`` do not overlap."""
    parts: list[list[int]] = []
    reached = -1
    for index in sorted(group, key=lambda index: boxes[index][0][dim]):
        offsets, sizes = boxes[index]
        if offsets[dim] >= reached:
            parts.append([])
        parts[-1].append(index)
        reached = max(reached, offsets[dim] + sizes[dim])
    return parts


def _compare_all(boxes: Sequence[Box], group: list[int]) -> tuple[int, int] | None:
    for first, second in combinations(group, 2):
        extents = zip(*boxes[first], *boxes[second], strict=True)
        if all(start < other + other_size and other < start + size for start, size, other, other_size in extents):
            return first, second
    return None
