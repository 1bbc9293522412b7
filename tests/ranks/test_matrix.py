"""Saved by some ranks, loaded by others, in other placements; ours and stock DCP's, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Groups

WORLDS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def saved(groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[Any]]]:
    directory = tmp_path_factory.mktemp("matrix")
    return directory, {world: groups.run("save_matrix", world, directory).results for world in WORLDS}


@pytest.mark.parametrize("readers", WORLDS)
def test_every_world_reads_every_world(readers: int, groups: Groups, saved: tuple[Path, Any]) -> None:
    groups.run("load_matrix", readers, saved[0], saved=WORLDS)


def test_one_process_reads_and_verifies_what_ranks_wrote(groups: Groups, saved: tuple[Path, Any]) -> None:
    (told,) = groups.run("load_whole", 1, saved[0], saved=WORLDS).results
    assert [found[1:] for found in told] == [[True, []]] * len(WORLDS)


def test_all_ranks_get_the_same_info(saved: tuple[Path, dict[int, list[Any]]]) -> None:
    for results in saved[1].values():
        assert all(told == results[0] for told in results)
        assert len({save_id for save_id, *_ in results[0]}) == 2
