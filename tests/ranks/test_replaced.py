"""Ranks that load a checkpoint while another one takes its place: all of them load that one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sidestream._load import operation

if TYPE_CHECKING:
    from conftest import Groups


def loaded_new(results: list[dict[str, Any]], *, opened: list[list[int]]) -> None:
    """Every rank has loaded the second checkpoint. ``opened``: which of the two each rank has opened, in order."""
    saved = results[0]["saved"]
    for told, order in zip(results, opened, strict=True):
        assert "failures" not in told, told
        assert told["save_id"] == saved[1]
        assert [saved.index(one) for one in told["opened"]] == order


@pytest.mark.parametrize("others", ["read", "reading", "losing"])
@pytest.mark.parametrize(("world", "who"), [(2, 0), (2, 1), (3, 1), (4, 0)])
def test_a_rank_that_loses_its_files(others: str, world: int, who: int, groups: Groups, tmp_path: Path) -> None:
    results = groups.run("replaced_while_read", world, tmp_path, who=who, others=others).results
    loaded_new(results, opened=[[0, 1]] * world)


@pytest.mark.parametrize(("world", "who"), [(2, 0), (2, 1), (4, 2)])
def test_ranks_that_open_different_checkpoints(world: int, who: int, groups: Groups, tmp_path: Path) -> None:
    results = groups.run("seen_by_some", world, tmp_path, who=who).results
    loaded_new(results, opened=[[0, 1] if rank == who else [1, 1] for rank in range(world)])


@pytest.mark.parametrize("who", [0, 1])
def test_a_checkpoint_that_takes_the_place_and_does_not_fit(who: int, groups: Groups, tmp_path: Path) -> None:
    """The errors have the tensors that were read of the first one."""
    results = groups.run("replaced_while_read", 3, tmp_path, who=who, others="read", fits=False).results
    for rank, told in enumerate(results):
        assert told["failures"] == results[0]["failures"]
        assert {kind for _, kind, _ in told["failures"]} == {"MissingKeysError"}
        assert "rows" in told["written"] or rank == who
    assert any(len(told["opened"]) == 2 for told in results)


def test_a_rank_that_dies_after_all_have_started_over(groups: Groups, tmp_path: Path) -> None:
    ended = groups.run_any("replaced_while_read", 3, tmp_path, who=1, others="read", then="die")
    assert ended.codes == [0, 0, -signal.SIGKILL], ended.said
    for told in ended.results[:2]:
        assert [[rank, kind] for rank, kind, _ in told["failures"]] == [[2, "RankDied"]]


def test_a_rank_that_is_cancelled_after_all_have_started_over(groups: Groups, tmp_path: Path) -> None:
    *others, last = groups.run("replaced_while_read", 3, tmp_path, who=1, others="read", then="cancel").results
    assert last["cancelled"]
    for told in others:
        assert [[rank, kind] for rank, kind, _ in told["failures"]] == [[2, "CancelledError"]]


@pytest.mark.parametrize("file", ["__1_1.distcp", "manifest-*.1"])
def test_a_file_that_was_altered(file: str, groups: Groups, tmp_path: Path) -> None:
    for told in groups.run("altered", 3, tmp_path, file=file).results:
        assert {kind for _, kind, _ in told["failures"]} == {"CorruptCheckpointError"}
        if file.startswith("manifest"):
            assert [text for *_, text in told["failures"] if str(tmp_path / "run" / "c") not in text] == []
        assert len(told["opened"]) == 1


def test_a_directory_that_is_not_shared(groups: Groups, tmp_path: Path) -> None:
    for told in groups.run("own_directories", 3, tmp_path, changing=False).results:
        assert [[rank, kind] for rank, kind, _ in told["failures"]] == [[0, "StorageNotSharedError"]]
        assert "rank 1 reads another checkpoint at this URL than rank 0" in told["failures"][0][2]
        assert len(told["opened"]) == 1


def test_a_directory_that_is_not_shared_and_changes(groups: Groups, tmp_path: Path) -> None:
    """Ranks that start over each time never open the same checkpoint, so the number of times is bounded."""
    for told in groups.run("own_directories", 2, tmp_path, changing=True).results:
        assert [[rank, kind] for rank, kind, _ in told["failures"]] == [[1, "StorageNotSharedError"]]
        assert len(told["opened"]) == 1 + operation._MOST_RESTARTS


def test_a_step_that_is_replaced(groups: Groups, tmp_path: Path) -> None:
    first, *others = groups.run("restored", 3, tmp_path).results
    assert len(set(first["opened"])) == 2
    for told in others:
        assert told["step"] == first["step"] == 1
        assert told["opened"] == [first["opened"][1]] * 2
        assert told["again"] == first["again"]
