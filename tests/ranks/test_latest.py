"""``when_full="latest"`` over ranks of different speeds: which saves go and which are skipped is the same on all."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Groups

WORLD = 3


def test_a_slow_rank_has_a_say(groups: Groups, tmp_path: Path) -> None:
    expected = [1, "SkippedError", 2, 4, [1, 2, 4], {"n": 4}]
    for told in groups.run("overtaken", WORLD, tmp_path).results:
        assert told == [expected] * WORLD


def test_saves_through_one_stager(groups: Groups, tmp_path: Path) -> None:
    first, *others = groups.run("two_at_once", WORLD, tmp_path).results
    assert others == [first] * (WORLD - 1)
    outcomes, restored = first
    assert (outcomes[0], outcomes[-1], restored) == (0, 11, 11)


def test_one_step_twice_at_once(groups: Groups, tmp_path: Path) -> None:
    assert groups.run("one_step", 2, tmp_path).results == [[1, 2]] * 2


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_is_killed_while_a_save_waits(who: int, groups: Groups, tmp_path: Path) -> None:
    ended = groups.run_any("killed", WORLD, tmp_path, who=who)
    assert ended.codes[who] == -signal.SIGKILL, ended.said
    for rank in {0, 1, 2} - {who}:
        assert ended.codes[rank] == 0, ended.said[rank]
        waited, seconds, first = ended.results[rank]
        assert waited == first == [[who, "RankDied"]]
        print(f"rank {who} killed while a save waited: rank {rank} knew after {seconds * 1000:.0f} ms")


@pytest.mark.parametrize("who", [0, 2])
def test_what_one_rank_does_while_a_save_waits(who: int, groups: Groups, tmp_path: Path) -> None:
    for rank, told in enumerate(groups.run("in_the_queue", WORLD, tmp_path, who=who).results):
        cancelled = "CancelledError" if rank == who else [[who, "CancelledError"]]
        assert told["cancels"] == [cancelled, 1, 3, [1, 3]]
        assert told["calls_badly"] == [[[[who, "InvalidOptionError"]], 2], 1, 3, [1, 2, 3]]
        assert told["means_another"] == [[[[0, "InvalidOptionError"]], 2], 1, 3, [1, 2, 3]]


def test_a_save_that_cannot_begin(groups: Groups, tmp_path: Path) -> None:
    assert groups.run("cannot_begin", WORLD, tmp_path).results == [[[[1, "UnsafeObjectError"]], 3]] * WORLD


def test_nobody_awaits_a_save_that_fails(groups: Groups, tmp_path: Path) -> None:
    for told in groups.run("dropped", 2, tmp_path).results:
        raised = ["an earlier save", "RankFailuresError", True]
        assert told == {overlap: [raised, 3] for overlap in ("wait", "skip", "fail", "latest")}


def test_a_failure_of_which_nobody_has_heard_ends_one_save_and_not_all(groups: Groups, tmp_path: Path) -> None:
    """The second and the fifth end for the failures before them. No save ends for that in turn; leaving the run raises
    it."""
    ends = ["absent", 1, "absent", 1, "committed", 0, "absent", 1, "absent", 1, ["an earlier save"]]
    assert groups.run("told_by_turns", 2, tmp_path).results == [ends, ends]


def test_the_loop_of_one_rank_is_closed(groups: Groups, tmp_path: Path) -> None:
    """The save that has begun is committed. The one that waits cannot call the objects of that rank any more."""
    assert groups.run("loop_closes", WORLD, tmp_path).results == [[1, [[1, "ClosedError"]]]] * WORLD


def test_a_rank_that_never_calls(groups: Groups, tmp_path: Path) -> None:
    first, *others = groups.run("never_called", WORLD, tmp_path).results
    assert others == [first] * (WORLD - 1)
    assert [1, "DeadlineExceededError"] in first


def test_ranks_that_are_told_to_end_while_a_save_waits(groups: Groups, tmp_path: Path) -> None:
    assert groups.run("told_to_end", WORLD, tmp_path).results == [["SkippedError", 1, 3, [1, 7, 3], [1, 3, 7]]] * WORLD
