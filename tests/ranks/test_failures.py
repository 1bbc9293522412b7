"""One rank fails or is killed, at every phase of a save: all others say the same, soon, and nothing is visible."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Begun, Groups

WORLD = 3
PHASES = ["call", "plan", "assign", "stage", "write", "written", "receipt"]


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(".group"))


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank(phase: str, who: int, groups: Groups, tmp_path: Path) -> None:
    ended = groups.run_any("failing_save", WORLD, tmp_path, phase=phase, how="die", who=who)
    survivors = [rank for rank in range(WORLD) if rank != who]
    assert ended.codes[who] == -signal.SIGKILL, ended.said
    for rank in survivors:
        assert ended.codes[rank] == 0, ended.said[rank]
        told = ended.results[rank]
        assert [[one, kind] for one, _, kind in told["failures"]] == [[who, "RankDied"]], told
        assert told["failures"] == ended.results[survivors[0]]["failures"]
        assert not told["visible"]
        print(f"rank {who} killed at {phase}: rank {rank} knew after {told['seconds'] * 1000:.0f} ms")
    assert not (tmp_path / "failing").exists()
    if who:  # what rank 0 had made is gone; when rank 0 itself is gone its attempt stays, as of any killed process
        assert left(tmp_path) == ["before"]


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_raises(phase: str, who: int, groups: Groups, tmp_path: Path) -> None:
    ended = groups.run("failing_save", WORLD, tmp_path, phase=phase, how="raise", who=who)
    for told in ended.results:
        assert [rank for rank, *_ in told["failures"]] == [who], told
        assert told["failures"] == ended.results[0]["failures"]
        assert not told["visible"]
        assert told["after"] == ended.results[0]["after"]
    assert left(tmp_path) == ["after", "before"]


def test_killed_after_the_commit_was_sent(groups: Groups, tmp_path: Path) -> None:
    """Rank 0 has published and told nobody: the others read the marker."""
    ended = groups.run_any("failing_save", WORLD, tmp_path, phase="published", how="die", who=0)
    assert ended.codes == [-signal.SIGKILL, 0, 0], ended.said
    for told in ended.results[1:]:
        assert "failures" not in told, told
        assert told["visible"]
        assert told["info"] == ended.results[1]["info"]


def test_killed_when_the_commit_was_about_to_be_sent(groups: Groups, tmp_path: Path) -> None:
    """The others are on its machine and see that its process has ended, so that it will not publish any more."""
    ended = groups.run_any("failing_save", WORLD, tmp_path, phase="publish", how="die", who=0)
    assert ended.codes == [-signal.SIGKILL, 0, 0], ended.said
    for told in ended.results[1:]:
        assert [[rank, kind] for rank, _, kind in told["failures"]] == [[0, "RankDied"]]
        assert not told["visible"]
        assert told["outcome"] == ("absent" if sys.platform == "linux" else "unknown")


@pytest.mark.parametrize("phase", ["publish"])
def test_a_commit_that_fails(phase: str, groups: Groups, tmp_path: Path) -> None:
    ended = groups.run("failing_save", WORLD, tmp_path, phase=phase, how="raise", who=0)
    for told in ended.results:
        assert [rank for rank, *_ in told["failures"]] == [0], told
        assert not told["visible"]
        assert told["after"]


HANGING = ["plan", "write"]


@pytest.fixture(scope="module")
def hanging(groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Begun]:
    """Groups that wait for most of their time, at the same time."""
    return {
        phase: groups.begin(
            "failing_save", WORLD, tmp_path_factory.mktemp(phase), phase=phase, how="hang", who=1, timeout_s=3.0
        )
        for phase in HANGING
    }


@pytest.mark.parametrize("phase", HANGING)
def test_a_rank_that_hangs(phase: str, hanging: dict[str, Begun]) -> None:
    """The others are told at the deadline, whatever it does."""
    for told in hanging[phase].wait().results:
        assert 1 in [rank for rank, *_ in told["failures"]], told
        assert not told["visible"]


def test_a_process_group_that_is_destroyed_while_ranks_save(groups: Groups, tmp_path: Path) -> None:
    """Nothing in a save needs it any more."""
    results = groups.run("destroyed_meanwhile", 3, tmp_path).results
    assert all(told == results[0] for told in results)
    assert [tensors for _, tensors in results[0]] == [["model.w", "model.b"]] * 2


def test_a_rank_that_has_left_the_group_is_not_said_to_have_ended(groups: Groups, tmp_path: Path) -> None:
    told, nothing = groups.run("left_behind", 2, tmp_path).results
    assert nothing == []
    [[rank, kind, text]] = told
    assert (rank, kind) == (1, "RankDied")
    assert "or it has destroyed the process group" in text
