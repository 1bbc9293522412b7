"""Work in steps: what the helpers return, and where they pause."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidestream._runtime.steps import Steps, at_once, chunked, collected


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8])
def test_items_are_collected_in_order(count: int) -> None:
    assert at_once(collected(iter(range(count)), 4)) == list(range(count))
    assert [one for chunk in chunked(range(count), 4) for one in chunk] == list(range(count))


def test_a_step_takes_as_many_items_as_it_says() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(10):
            taken.append(number)
            yield number

    pauses = [len(taken) for _ in collected(items(), 4)]
    assert pauses == [4, 8, 10]


def test_an_error_between_two_steps_is_raised() -> None:
    def fails() -> Steps[None]:
        yield
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        at_once(fails())
