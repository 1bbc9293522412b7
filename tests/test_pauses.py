"""Points for pauses in long work: what the helpers return, and where they may pause."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidestream._runtime import pauses as pauses_module
from sidestream._runtime.pauses import chunked, collected


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8])
def test_items_are_collected_in_order(count: int) -> None:
    assert collected(iter(range(count)), 4) == list(range(count))
    assert [one for chunk in chunked(range(count), 4) for one in chunk] == list(range(count))


def test_there_is_a_point_for_pauses_after_so_many_items(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    pauses: list[int] = []

    def items() -> Iterator[int]:
        for number in range(10):
            taken.append(number)
            yield number

    monkeypatch.setattr(pauses_module, "pause_point", lambda: pauses.append(len(taken)))
    assert collected(items(), 4) == list(range(10))
    assert pauses == [4, 8, 10]
