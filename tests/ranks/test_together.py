"""What ranks agree on, who writes and reads how much, subgroups, and runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Groups


def test_disagreements(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("disagreements", 2, tmp_path).results
    kinds = {case: [[rank, kind] for rank, kind, _ in failures] for case, failures in results[0].items()}
    for told in results[1:]:
        assert told == results[0]
    assert kinds["good"] == []
    assert kinds["conflict"] == [[0, "CheckpointExistsError"]]
    for case in ("names", "values", "shapes"):
        assert kinds[case] == [[0, "InvalidOptionError"]], results[0][case]
    assert "loss" in results[0]["values"][0][2]
    assert {kind for _, kind in kinds["partial"]} == {"UnsupportedTensorError"}
    assert kinds["one_rank"] == [[1, "UnsafeObjectError"]]
    assert kinds["option"] == [[0, "InvalidOptionError"]]
    for case in ("export", "options", "load_options", "run_options"):
        assert kinds[case] == [[1, "InvalidOptionError"]]
    assert kinds["not_shared"] == [[1, "StorageNotSharedError"]]
    assert {kind for _, kind in kinds["missing"]} == {"CheckpointNotFoundError"}
    assert kinds["keys"] == [[1, "MissingKeysError"]]
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".group")}
    assert left <= {"good", "disk0"}


def test_a_cancel_of_a_rank_that_has_failed(groups: Groups, tmp_path: Path) -> None:
    first, second = groups.run("cancelled_after_its_failure", 2, tmp_path).results
    assert second == ["cancelled", "cancelled"]
    assert [1, "CheckpointNotFoundError"] in first[0]
    assert first[1] == [[1, "InvalidOptionError"]]


def test_stages_in_one_checkpoint(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("stages", 3, tmp_path).results
    assert all(told == results[0] for told in results)


def test_names_that_ranks_share_in_part(groups: Groups, tmp_path: Path) -> None:
    for told in groups.run("shared_names", 3, tmp_path).results:
        assert told == [["opt", "raw", "w"], [[0, "InvalidOptionError"]]]


def test_more_states_at_once_than_agreements_are_kept(groups: Groups, tmp_path: Path) -> None:
    assert groups.run("many_states_at_once", 2, tmp_path).results == [["committed"] * 72] * 2


def test_groups_save_at_once(groups: Groups, tmp_path: Path) -> None:
    groups.run("subgroups", 4, tmp_path)
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".group")}
    assert left == {f"{name}{n}" for name in ("actor", "critic") for n in range(3)} | {f"alone{n}" for n in range(4)}


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_are_shared_evenly(world: int, groups: Groups, tmp_path: Path) -> None:
    written = groups.run("replicas", world, tmp_path).results[0]
    assert max(written) <= 1.05 * min(written), written


def test_ranks_read_what_they_need(groups: Groups, tmp_path: Path) -> None:
    groups.run("read_bytes", 3, tmp_path)
    for world in (2, 4):
        assert max(groups.run("read_bytes", world, tmp_path).results) <= 1.05


def test_a_run(groups: Groups, tmp_path: Path) -> None:
    for told in groups.run("a_run", 2, tmp_path).results:
        assert told == [None, 3, 2, 3, True, 2, [2, 3], 7]


def test_a_run_that_is_not_shared(groups: Groups, tmp_path: Path) -> None:
    for told in groups.run("own_disks", 3, tmp_path).results:
        assert told == [[[0, "StorageNotSharedError"]], [1]]


def test_a_step_that_is_deleted_in_part(groups: Groups, tmp_path: Path) -> None:
    assert groups.run("deleted_in_part", 2, tmp_path).results == [[1]] * 2


def test_a_cancelled_save(groups: Groups, tmp_path: Path) -> None:
    first, *others = groups.run("cancelled", 3, tmp_path).results
    assert first == ["cancelled", "absent"]
    for told in others:
        assert told == [[[0, "CancelledError"]], "absent"]


def test_tensors_of_one_name_that_differ_are_told_once(groups: Groups, tmp_path: Path) -> None:
    first, *others = groups.run("differing_replicas", 3, tmp_path).results
    assert others == [[], []]
    [told] = first
    assert told == (
        "D/first: tensors differ between ranks, and one of each is saved: rng (ranks 0 and 1), step (ranks 0 and 1); "
        'give what belongs to a rank a name of its own, such as {"rng": {f"rank{rank}": ...}}'
    )
