"""Work in steps: a generator yields between two steps, each of which takes at most some 100 us, and returns the result.

The code that runs the generator decides what happens between two steps (``run_sliced`` of ``threads.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import TypeAlias, TypeVar

__all__ = ["Steps", "at_once", "by_size", "chunked", "collected", "in_turn"]

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]


def collected(items: Iterable[T], every: int = 32) -> Steps[list[T]]:
    """Return a list of ``items``. Each step takes ``every`` of them."""
    found: list[T] = []
    for chunk in chunked(items, every):
        found += chunk
        yield
    return found


def chunked(items: Iterable[T], every: int) -> Iterator[list[T]]:
    """Yield lists of ``every`` items, for loops whose body takes less than a microsecond."""
    left = iter(items)
    while chunk := list(islice(left, every)):
        yield chunk


def by_size(
    items: Iterable[T], size_of: Callable[[T], int], most: int, most_items: int = sys.maxsize
) -> Iterator[list[T]]:
    """Yield lists of ``items``, in their order. A list has at most ``most_items``, of at most ``most`` bytes together.
    A larger item is in a list by itself."""
    some: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if some and (total + size > most or len(some) == most_items):
            yield some
            some, total = [], 0
        some.append(item)
        total += size
    if some:
        yield some


def in_turn(works: Iterable[Steps[T]]) -> Steps[list[T]]:
    """Run the steps of each of ``works``, one after the other, and return their results."""
    found: list[T] = []
    for work in works:
        found.append((yield from work))
    return found


def at_once(steps: Steps[T]) -> T:
    """Run ``steps`` without a pause and return their result. For small numbers of steps."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
