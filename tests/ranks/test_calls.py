"""Calls of all ranks: ``state_dict()`` of objects is called in the same order, and ranks log that they wait for
others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Groups

TOP = ["10", "2", "b"]
ALL = [*TOP, "c", "a", "m", "n"]  # "list" before "nested"; in the list by position
INNER = [f"{name}-inner" for name in [*TOP, "c", "a"]]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("way", ["native", "atomic", "restore", "blocking", "dcp", "planner", "stager"])
def test_objects_are_asked_in_one_order(way: str, world: int, groups: Groups, tmp_path: Path) -> None:
    """A rank that is in another object's collective makes it raise, or hang."""
    ended = groups.run("ordered", world, tmp_path, way=way)
    names = TOP if way in ("dcp", "planner", "stager") else [*ALL, *INNER]
    top = TOP if way in ("dcp", "planner", "stager") else ALL
    saved, loaded = ended.results[0]
    called = [f"{name}.state_dict" for name in names]
    if way != "dcp":
        assert [one for one in saved if one != "|"] == called
        assert loaded == [*called, *(f"{name}.load_state_dict" for name in top)]
    for one in ended.results:
        assert one == ended.results[0]


def test_a_rank_skips_the_objects_that_it_lacks(groups: Groups, tmp_path: Path) -> None:
    ended = groups.run("by_parts", 2, tmp_path)
    order = ["10", "2", "a", "b", "c"]
    held: list[set[str]] = [set(), set()]
    for rank, (log,) in enumerate(ended.results):
        names = [name for name in order if f"{name}.load_state_dict" in log]
        held[rank] = set(names)
        asked = [f"{name}.state_dict" for name in names]
        assert log == [*asked, "|", *asked, *(f"{name}.load_state_dict" for name in names)]
    assert held[0] != held[1]
    assert held[0] & held[1]


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("method", "step"), [("state_dict", "match"), ("load_state_dict", "hand over")])
def test_a_method_that_does_not_return(method: str, step: str, who: int, groups: Groups, tmp_path: Path) -> None:
    ended = groups.run("stuck", 3, tmp_path, method=method, who=who)
    for rank, told in enumerate(ended.results):
        assert told["failures"] == [[who, step, "DeadlineExceeded"]], (rank, told)
        about = [said for said in told["said"] if "has not returned" in said]
        assert len(about) == (rank == who), told
    (said,) = [one for one in ended.results[who]["said"] if "has not returned" in one]
    assert said.startswith(f"rank {who} of 3: m.thing: stuck.<locals>.Stuck.{method}() has not returned for ")


REMEDY = 'make this call on every rank, or pass process_group="alone" to {} in this process only'


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    ("verb", "who", "kind"),
    [
        ("save", [1], "save"),
        ("save", [0], "save"),
        ("load", [0, 2], "load"),
        ("load", [1, 2], "load"),
        ("restore", [0], "restore"),
        ("step", [2], "save"),
    ],
)
def test_ranks_that_never_come(
    verb: str, who: list[int], kind: str, before: bool, groups: Groups, tmp_path: Path
) -> None:
    """The others name them in a warning long before they raise, and say how to save alone."""
    ended = groups.run("never_comes", 3, tmp_path, verb=verb, who=who, before=before, rank_wait_s=7.0)
    remedy = REMEDY.format(kind)
    for rank, told in enumerate(ended.results):
        if rank in who:
            assert told == {"said": [], "events": []}
            continue
        known = who if before or rank == 0 or 0 not in who else [0]  # only rank 0 knows which other ranks are missing
        names = f"rank {known[0]}" if len(known) == 1 else f"ranks {_spelled(known)}"
        (said,) = told["said"]
        assert f" s for {names}, which did not join this {kind}: {remedy}. " in said, said
        assert said.startswith(f"rank {rank} has waited ")
        assert said.endswith("It waits for at most rank_wait_s=7")
        assert told["events"] == [[kind, rank, known]]
        assert [one[:3] for one in told["failures"]] == [[one, "start", "DeadlineExceeded"] for one in known]
        first = told["failures"][0][3]
        assert remedy in first
        assert "within rank_wait_s=7" in first


def _spelled(ranks: list[int]) -> str:
    return f"{ranks[0]}-{ranks[1]}" if ranks[1] == ranks[0] + 1 else f"{ranks[0]} and {ranks[1]}"


def test_a_rank_that_comes_late(groups: Groups, tmp_path: Path) -> None:
    ended = groups.run("comes_late", 2, tmp_path)
    first, second = ended.results
    assert first["save_id"] == second["save_id"]
    assert ["rank 1" in said for said in first["said"]] == [True]
    assert second["said"] == []
