"""Calls of all ranks: ``state_dict()`` of objects is called in the same order, and ranks log that they wait for
others."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Begun, Groups

TOP = ["10", "2", "b"]
ALL = [*TOP, "c", "a", "m", "n"]  # "list" before "nested"; in the list by position
INNER = [f"{name}-inner" for name in [*TOP, "c", "a"]]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("way", ["native", "atomic", "restore", "blocking", "dcp"])
def test_objects_are_asked_in_one_order(way: str, world: int, groups: Groups, tmp_path: Path) -> None:
    """A rank that is in another object's collective makes it raise, or hang."""
    ended = groups.run("ordered", world, tmp_path, way=way)
    names = TOP if way == "dcp" else [*ALL, *INNER]
    top = TOP if way == "dcp" else ALL
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


# --- ranks that wait: their groups run at the same time --------------------------------------------------------------

METHODS = {"state_dict": "match", "load_state_dict": "hand over"}
"""Methods of objects, and the steps of a load in which they are called."""
NEVER = [
    ("save", [1], "save"),
    ("save", [0], "save"),
    ("load", [0, 2], "load"),
    ("load", [1, 2], "load"),
    ("restore", [0], "restore"),
    ("step", [2], "save"),
]
"""Calls, the ranks that do not make them, and what the warnings name the calls."""
BEFORE = [False, True]
WHO = [0, 1]


@pytest.fixture(scope="module")
def waiting(groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[object, ...], Begun]:
    """Begin every group of the tests below: each waits for several seconds and computes for a fraction of one."""

    def begin(case: str, world: int, **options: Any) -> Begun:
        return groups.begin(case, world, tmp_path_factory.mktemp(case), **options)

    begun = {("stuck", method, who): begin("stuck", 3, method=method, who=who) for method in METHODS for who in WHO}
    for (verb, who, _), before in itertools.product(NEVER, BEFORE):
        key = ("never_comes", verb, *who, before)
        begun[key] = begin("never_comes", 3, verb=verb, who=who, before=before, rank_wait_s=15.0)
    return {**begun, ("comes_late",): begin("comes_late", 2)}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(("method", "step"), METHODS.items())
def test_a_method_that_does_not_return(
    method: str, step: str, who: int, waiting: dict[tuple[object, ...], Begun]
) -> None:
    ended = waiting["stuck", method, who].wait()
    for rank, told in enumerate(ended.results):
        assert told["failures"] == [[who, step, "DeadlineExceededError"]], (rank, told)


REMEDY = 'make this call on every rank, or pass process_group="alone" to {} in this process only'


@pytest.mark.parametrize("before", BEFORE, ids=["first", "later"])
@pytest.mark.parametrize(("verb", "who", "kind"), NEVER)
def test_ranks_that_never_come(
    verb: str, who: list[int], kind: str, before: bool, waiting: dict[tuple[object, ...], Begun]
) -> None:
    """The others name them in a warning long before they raise, and say how to save alone."""
    ended = waiting["never_comes", verb, *who, before].wait()
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
        assert said.endswith("It waits for at most rank_wait_s=15")
        assert told["events"] == [[kind, rank, known]]
        assert [one[:3] for one in told["failures"]] == [[one, "start", "DeadlineExceededError"] for one in known]
        first = told["failures"][0][3]
        assert remedy in first
        assert "within rank_wait_s=15" in first


def _spelled(ranks: list[int]) -> str:
    return f"{ranks[0]}-{ranks[1]}" if ranks[1] == ranks[0] + 1 else f"{ranks[0]} and {ranks[1]}"


def test_a_rank_that_comes_late(waiting: dict[tuple[object, ...], Begun]) -> None:
    ended = waiting["comes_late",].wait()
    first, second = ended.results
    assert first["save_id"] == second["save_id"]
    assert ["rank 1" in said for said in first["said"]] == [True]
    assert second["said"] == []


def test_events_of_loads(groups: Groups, tmp_path: Path) -> None:
    for phases, failed in groups.run("load_events", 2, tmp_path).results:
        names = ["LoadStarted", "LoadOpened", "LoadPlanned", "LoadRead", "LoadVerified", "LoadApplied"]
        assert phases[:6] == [["restore", 4, name] for name in names]
        started, *opened, (_, _, last) = phases[6:]  # rank 0 may be stopped before it has opened the checkpoint
        assert started == ["load", None, "LoadStarted"]
        assert opened in ([], [["load", 4, "LoadOpened"]])
        assert last == "LoadFailed"
        assert failed == ["RankFailuresError", 0]
