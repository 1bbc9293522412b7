"""What all ranks together save, as rank 0 works it out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream._layout.sharded.assign import Assignment, RankReport
from sidestream._layout.sharded.rank_layout import RankPlan
from sidestream._layout.sharded.rank_table import LocalTable, Row, local_table
from sidestream._staging import Captured, Composite, PlanCache, Sharding
from sidestream.errors import InvalidOptionError


def assigned(*states: dict[str, Any]) -> tuple[list[str], list[LocalTable], list[Assignment]]:
    tables = [
        local_table(PlanCache(), Captured(state, [one for one in state.values() if isinstance(one, torch.Tensor)]))
        for state in states
    ]
    told = [RankReport(table.held.table, table.held.raw_boxes) for table in tables]
    shared, each = Assignment.of_ranks(told, {table.held.table: Row.parse_all(table.held.raw_rows) for table in tables})
    return [row.fqn for row in shared.rows], tables, [Assignment.unpack(one.pack()) for one in each]


def test_a_local_tensor_by_itself_is_another_item() -> None:
    states = []
    for rank in range(2):
        local = torch.ones(4, 4)
        places = ((0, (4 * rank, 0), (4, 4), (0, 0)),)
        sharding = Sharding((8, 4), local.dtype, rank, lambda places=places: places)  # type: ignore[misc]
        whole = Composite("a DTensor", (local,), lambda parts: parts[0], sharding)
        states.append({"w": whole, f"raw{rank}": local, f"tied{rank}": local})
    _, tables, each = assigned(*states)
    for rank, (table, assignment) in enumerate(zip(tables, each, strict=True)):
        plan = RankPlan.of(PlanCache(), 1 << 30, rank, table, table.encode_values(), "", assignment)
        where = {place.fqn: (place.shard, place.item) for place in plan.layout.places}
        assert where["w"] != where[f"raw{rank}"] == where[f"tied{rank}"]


def test_an_empty_dict_with_something_in_it_elsewhere_is_no_row() -> None:
    fqns, tables, each = assigned({"a": 1, "opt": {}, "none": {}}, {"opt": {"x": {}}}, {"opt": {"x": {"y": 2}}, "b": 3})
    assert fqns == ["a", "none", "opt.x.y", "b"]
    assert [one.places for one in each] == [(0, -1, 1), (-1,), (2, 3)]
    plan = RankPlan.of(PlanCache(), 1 << 30, 2, tables[2], tables[2].encode_values(), "", each[2])
    assert [(row, fqn) for row, fqn, *_ in plan.value_places] == [(2, "opt.x.y"), (3, "b")]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"opt": 1}, {"opt": {"x": 1}}, id="a value and a dict"),
        pytest.param({"opt": torch.ones(1)}, {"opt": {"x": {"y": 1}}}, id="a tensor and a dict"),
        pytest.param({"opt": []}, {"opt": [{"x": 1}]}, id="a value and a list"),
        pytest.param({"opt": {}}, {"opt": [{"x": 1}]}, id="an empty dict and a list"),
        pytest.param({"opt": {"x": 1}}, {"opt": [{"x": 1}]}, id="a dict and a list"),
    ],
)
def test_what_is_a_container_to_some_ranks_only(one: dict[str, Any], other: dict[str, Any]) -> None:
    for states in ((one, other), (other, one)):
        with pytest.raises(InvalidOptionError, match="opt"):
            assigned(*states)
