"""What observers see of the saves of several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trace_schema

from sidestream.observability.records import read_journal
from sidestream.observability.trace import trace_of

if TYPE_CHECKING:
    from conftest import Groups


def test_the_journals_of_four_ranks_make_one_trace(groups: Groups, tmp_path: Path) -> None:
    groups.run("journaled", 4, tmp_path)
    journals = [read_journal(tmp_path / f"rank{rank}.jsonl") for rank in (2, 0, 3, 1)]
    assert [one.rank for one in journals] == [2, 0, 3, 1]
    trace = trace_of(journals)
    trace_schema.check(trace)
    wanted = [(rank, f"save step {step}", 1, 1) for rank in range(4) for step in (1, 2, 3)]
    assert sorted(trace_schema.saves(trace)) == wanted
    names = {one["pid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}


@pytest.mark.parametrize("in_run", [False, True])
def test_a_caller_waits_for_a_rank_that_is_late(in_run: bool, groups: Groups, tmp_path: Path) -> None:
    on_time, late = groups.run("waits_for_rank", 2, tmp_path, in_run=in_run).results
    seconds, outside, waited_for = on_time
    assert seconds == pytest.approx(outside, rel=0.05)
    assert waited_for["ranks"] >= 0.8 * 0.5
    assert sum(waited_for.values()) <= 1.001 * seconds
    assert late[2].get("ranks", 0.0) < 0.5 * 0.5
