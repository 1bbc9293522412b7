"""One name on object storage, modelled: a kill, a lost request, a rival or another save at every request.

``nox -s stores`` does the same to a real server; here no request takes time, so every one of them has its turn.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from _object_store import WORK, kills, lost_answers, overtaken, races
from _rows import Row, Size

ROUNDS = (10, 200)
"""In the quick form one. What differs from round to round is the order of requests that are made at the same time."""

TRIALS: dict[str, Callable[[], AsyncIterator[tuple[str, list[str]]]]] = {
    **{f"{name} is killed": lambda name=name: kills(name) for name in WORK},  # type: ignore[misc]
    **{f"{name} loses answers": lambda name=name: lost_answers(name) for name in WORK},  # type: ignore[misc]
    "rivals": races,
    "readers are overtaken": overtaken,
}


@pytest.mark.parametrize("name", TRIALS)
async def test_one_name_on_a_modelled_object_store(name: str, row: Callable[..., Row], size: Size) -> None:
    counts = row("one name on object storage, modelled", name)
    rounds = size.of(*ROUNDS)
    for _ in range(rounds):
        async for where, wrong in TRIALS[name]():
            counts.trial(where, wrong)
    counts.end(at_least=2 * rounds)
