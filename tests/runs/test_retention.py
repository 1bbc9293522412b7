"""Which steps stay, as pure decisions; and that the decisions are carried out, in the right order, on real files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sidestream
from sidestream import KeepAll, KeepBest, KeepEvery, KeepLast, Retention, SavedStep
from sidestream._run.pruning import abandoned
from sidestream._run.retention import deletable_steps, needs_metadata, unknown_metrics
from sidestream._storage import Leftover
from sidestream.errors import InvalidOptionError


def saved(*steps: int, **losses: float) -> list[SavedStep]:
    return [SavedStep(step, saved_at=step * 10, metadata={"loss": losses.get(f"s{step}", 100.0)}) for step in steps]


def gone(steps: list[SavedStep], keep: Retention, *protected: int) -> list[int]:
    return [each.step for each in deletable_steps(steps, keep, frozenset(protected))]


def test_each_policy() -> None:
    steps = saved(0, 300, 700, 1000, 1900, 2100)
    assert gone(steps, KeepAll()) == []
    assert gone(steps, KeepLast(2)) == [0, 300, 700, 1000]
    assert gone(steps, KeepLast(9)) == []
    assert gone(steps, KeepEvery(steps=1000)) == [300, 700, 1900]
    assert gone(steps, KeepEvery(seconds=10_000)) == [300, 700, 1900]
    assert gone(saved(1, 2, 3, 4, s2=0.5), KeepBest("loss")) == [1, 3]
    assert gone(saved(1, 2, 3, 4, s2=0.5), KeepBest("loss", 2, "max")) == [1, 2]


def test_policies_compose() -> None:
    steps = saved(1, 2, 3, 4, 5, 6, s2=0.5)
    assert gone(steps, KeepLast(2) | KeepBest("loss")) == [1, 3, 4]
    assert gone(steps, KeepLast(1) | KeepBest("loss") | KeepEvery(steps=4)) == [3, 5]
    assert gone(steps, KeepLast(1) | KeepAll()) == []


def test_a_policy_of_the_users_own() -> None:
    class Even:
        def kept(self, steps: list[SavedStep]) -> set[int]:
            return {each.step for each in steps if each.step % 2 == 0}

    assert gone(saved(1, 2, 3, 4), KeepLast(1) | Even()) == [1, 3]
    assert needs_metadata(KeepLast(1) | Even())
    assert not needs_metadata(KeepLast(1) | KeepEvery(steps=3))
    with pytest.raises(TypeError):
        KeepLast(1) | 3  # type: ignore[operator]


class Odd:
    """A policy that is not derived from anything."""

    def __init__(self, kept: object = None) -> None:
        self.returned = kept

    def kept(self, steps: object) -> Any:
        return {1} if self.returned is None else self.returned

    def __repr__(self) -> str:
        return "Odd()"


def test_a_policy_of_the_users_own_on_either_side() -> None:
    for keep in (Odd() | KeepLast(1), KeepLast(1) | Odd()):
        assert gone(saved(1, 2, 3), keep) == [2]
    assert repr(Odd() | KeepLast(3)) == "Odd() | KeepLast(n=3)"
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = 3 | KeepLast(1)  # type: ignore[operator]


@pytest.mark.parametrize("kept", [(), [1], {"1"}, "none"])
def test_what_a_policy_returns_is_checked(kept: object) -> None:
    for keep in (Odd(kept), KeepLast(1) | Odd(kept)):
        with pytest.raises(InvalidOptionError, match=r"keep=Odd\(\) returned .* set of step numbers"):
            gone(saved(1, 2, 3), keep)


def test_metrics_that_are_none() -> None:
    metadata: list[dict[str, object]] = [{}, {"loss": "low"}, {"loss": True}, {"loss": math.nan}, {"loss": {"x": 1}}]
    steps = [SavedStep(index, metadata=each) for index, each in enumerate(metadata)]
    steps += [SavedStep(7, metadata={"loss": math.inf}), SavedStep(8)]
    assert gone(steps, KeepBest("loss", 3)) == [0, 1, 2, 3, 4]
    nested = [SavedStep(1, metadata={"val": {"loss": 1.0}}), SavedStep(2, metadata={"val.loss": 0.5}), SavedStep(3)]
    assert gone(nested, KeepBest("val.loss")) == [1]
    assert gone(nested, KeepBest("val.loss", mode="max")) == [2]
    even = [SavedStep(step, metadata={"loss": 1.0}) for step in (1, 2, 3, 4)]
    assert gone(even, KeepBest("loss", 2)) == [1, 2], "of equal ones the newer"
    large = [SavedStep(1, metadata={"tokens": 10**400}), SavedStep(2, metadata={"tokens": 0.5}), SavedStep(3)]
    assert gone(large, KeepBest("tokens", mode="max")) == [2], "no float is as large"


def test_a_step_that_was_saved_again_counts_once() -> None:
    steps = [SavedStep(1), SavedStep(2), SavedStep(2, 2), SavedStep(2, 3), SavedStep(3)]
    assert [each.order for each in deletable_steps(steps, KeepLast(2))] == [(1, 1), (2, 1), (2, 2)]
    assert deletable_steps(steps, KeepAll()) == []


@pytest.mark.parametrize("metadata", [{}, {"accuracy": 0.5}, {"loss": "low"}, {"loss": math.nan}])
def test_a_metric_that_no_step_has_deletes_nothing(metadata: dict[str, Any]) -> None:
    steps = [SavedStep(step, metadata=metadata) for step in range(1, 6)]
    keep = KeepLast(1) | KeepBest("loss", 3)
    assert deletable_steps(steps, keep) == []
    assert unknown_metrics(keep, steps) == ["loss"]
    judged = [*steps, SavedStep(6, metadata={"loss": 1.0})]
    assert deletable_steps(judged, keep) == steps
    assert unknown_metrics(keep, judged) == []


def test_what_was_saved_last_is_protected_after_going_back() -> None:
    steps = saved(100, 200, 300, 400, 250)
    assert gone(steps, KeepLast(2), 250) == [100, 200]


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepLast(2.0),  # type: ignore[arg-type]
        lambda: KeepEvery(),
        lambda: KeepEvery(steps=2, seconds=3),
        lambda: KeepEvery(steps=0),
        lambda: KeepBest(""),
        lambda: KeepBest("loss", 0),
        lambda: KeepBest("loss", 1, "best"),  # type: ignore[arg-type]
    ],
)
def test_policies_are_checked(make: object) -> None:
    with pytest.raises(InvalidOptionError):
        make()  # type: ignore[operator]


_policies = st.recursive(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 5)),
        st.builds(lambda n: KeepEvery(steps=n), st.integers(1, 40)),
        st.builds(lambda n: KeepEvery(seconds=n), st.integers(1, 40)),
        st.builds(KeepBest, st.just("loss"), st.integers(1, 4), st.sampled_from(["min", "max"])),
    ),
    lambda inner: st.builds(lambda a, b: a | b, inner, inner),
    max_leaves=4,
)
_steps = st.lists(
    st.builds(
        SavedStep,
        st.integers(0, 60),
        st.integers(1, 3),
        st.integers(0, 100),
        st.dictionaries(st.just("loss"), st.one_of(st.integers(0, 5), st.floats(), st.none())),
    ),
    unique_by=lambda each: each.order,
    max_size=25,
)


@given(_steps, _policies)
def test_whatever_the_policy(steps: list[SavedStep], keep: Retention) -> None:
    going = deletable_steps(steps, keep)
    left = [each for each in steps if each not in going]
    assert {each.order for each in going} <= {each.order for each in steps}
    assert bool(left) == bool(steps), "something is always left"
    if steps:
        newest = max(steps, key=lambda each: each.order)
        assert newest in left
        assert all(each.order < newest.order for each in going), "a newer one is left for each"
    assert deletable_steps(left, keep) == [], "what was kept once is kept: a second pass deletes nothing"
    assert len({each.step for each in left}) == len(left), "one generation of each"


@given(_steps, st.integers(1, 5))
def test_one_step_after_the_other(steps: list[SavedStep], n: int) -> None:
    """Pruned after each save or once at the end: the last ``n`` are there in any case."""
    there: list[SavedStep] = []
    for each in sorted(steps, key=lambda each: each.order):
        there.append(each)
        going = deletable_steps(there, KeepLast(n))
        there = [one for one in there if one not in going]
    assert {each.step for each in there} == set(sorted({each.step for each in steps})[-n:])


def test_which_leftovers_are_abandoned() -> None:
    def attempt(name: str, age_s: float) -> Leftover:
        return Leftover(name, "attempt", age_s)

    old = attempt(".step-1.aa.partial", 1000.0)
    again = attempt(".step-1.g2.bb.partial", 1000.0)
    young = attempt(".step-2.cc.partial", 10.0)
    foreign = attempt(".weights.dd.partial", 10_000.0)
    retired = Leftover(".retired-step-3-ee", "retired", 0.0)
    in_place = attempt("step-4/upload-7", 1000.0)
    everything = [old, again, young, foreign, retired, in_place]

    def chosen(live: set[str], ended: set[str], after_s: float) -> list[Leftover]:
        return abandoned(everything, live, ended, ended_s=60.0, after_s=after_s)

    assert chosen(set(), set(), 900.0) == [old, again, retired, in_place]
    assert chosen(set(), set(), 2000.0) == [retired]
    assert chosen({"step-1"}, set(), 900.0) == [again, retired, in_place], "a long save that is alive"
    assert chosen(set(), {"step-1", "step-2"}, 2000.0) == [old, retired], "its writer is known to be dead"
    assert chosen({"step-1"}, {"step-1"}, 0.0) == [again, young, retired, in_place], "one writer is dead, one is not"


async def test_the_best_step(tmp_path: Path) -> None:
    """The one that ``KeepBest`` keeps, as long as it is good; a metric that no step has is refused by name."""
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        assert await checkpoints.best("loss") is None
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.1)):
            metadata = {"loss": loss, "eval": {"acc": step}, "note": "text"}
            await checkpoints.save({"step": step}, step=step, metadata=metadata)
        await checkpoints.save({"step": 5}, step=5)
        assert await checkpoints.best("loss") == 4  # the newer of two
        assert await checkpoints.best("loss", mode="max") == 3
        assert await checkpoints.best("eval.acc", "max") == 4
        with pytest.raises(InvalidOptionError, match=r"'lsos'.*are: eval\.acc, loss$"):
            await checkpoints.best("lsos")
        with pytest.raises(InvalidOptionError, match="mode"):
            await checkpoints.best("loss", "least")  # type: ignore[arg-type]
        next((tmp_path / "step-4").glob("manifest-*")).write_bytes(b"{}")
        assert await checkpoints.best("loss") == 2
        state = {"step": 0}
        await checkpoints.restore(state, step=await checkpoints.best("loss"))
        assert state["step"] == 2


def test_the_best_step_without_a_loop(tmp_path: Path) -> None:
    with sidestream.blocking.Checkpointer(tmp_path) as checkpoints:
        for step, loss in ((1, 0.1), (2, 0.5)):
            checkpoints.save({"step": step}, step=step, metadata={"loss": loss})
        assert (checkpoints.best("loss"), checkpoints.best("loss", mode="max")) == (1, 2)
