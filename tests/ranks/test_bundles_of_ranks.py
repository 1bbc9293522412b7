"""Random states and positions of loaders belong to a rank: each gets its own back, and another number of ranks none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Groups


def test_each_rank_gets_its_own_state(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("bundles", 2, tmp_path).results
    for rank, (first, again, batches, shard) in enumerate(results):
        assert first == again
        assert batches == [rank] * rank
        assert shard == [rank, rank + 1, rank + 2]
    assert results[0][0] != results[1][0]


def test_another_number_of_ranks(groups: Groups, tmp_path: Path) -> None:
    groups.run("bundles", 2, tmp_path)
    for world in (1, 3):
        for failures, kept, step in groups.run("resized", world, tmp_path).results:
            assert {(kind, "saved by 2 ranks" in text) for _, kind, text in failures} == {("LoadStateDictError", True)}
            assert (kept, step) == (True, 3)
