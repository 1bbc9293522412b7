"""SIGKILL at every request of a save, two writers of one target, a reader that never waits; judged from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from _processes import Children, Oracle, Seen, Told, children, oracle
from _proxy import Exchange, Fault, Lane, Proxy
from _servers import Bucket, Endpoint
from _states import PART_BYTES, blank_state, files_of, make_state, seed_in
from keywords import for_load, for_run, for_save

import sidestream

ENGINES = ["obstore", "fsspec"]
MIB = 8


@dataclass(frozen=True)
class Scenario:
    """``before``: the (step, seed) pairs that are there; ``saves``: those that the child makes, by ``work``."""

    before: tuple[tuple[int, int], ...]
    saves: tuple[tuple[int, int], ...]
    work: str = "steps"


SCENARIOS = {
    "a fresh run": Scenario((), ((1, 11),)),
    "the same step again": Scenario(((1, 11), (2, 12)), ((2, 22),)),
    "a plain save": Scenario(((1, 11),), ((2, 12),), "plain"),
}


@pytest.fixture(scope="module")
def child() -> Iterator[Children]:
    with children() as running:
        yield running


@pytest.fixture(scope="module")
def another() -> Iterator[Children]:
    with children() as running:
        yield running


@pytest.fixture(scope="module")
def judge() -> Iterator[Oracle]:
    with oracle() as running:
        yield running


def policy(engine: str) -> dict[str, Any]:
    return {"engine": engine, "part_bytes": PART_BYTES, "request_timeout_s": 30}


class Killer:
    """Ends a process when its ``at``-th request comes, which is then never carried out; or, ``after`` that, when it has
    been carried out and the process does not know yet."""

    def __init__(self, lane: Lane, at: int, after: bool = False) -> None:
        self._at, self._after = at, after
        self.pid = 0
        self.dead = False
        lane.decide = self._decide
        lane.answered = self._answered

    def _kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.dead = True

    def _decide(self, exchange: Exchange) -> Fault | None:
        if exchange.index == self._at and not self._after:
            self._kill()
        return "reset-before" if self.dead else None

    def _answered(self, exchange: Exchange) -> None:
        if exchange.index == self._at and self._after and not self.dead:
            self._kill()


def markers(lane: Lane) -> list[Exchange]:
    """The puts of markers that have come."""
    return [exchange for exchange in lane.of("PutObject") if exchange.name == ".metadata"]


def judged(seen: Seen, told: Told, scenario: Scenario) -> list[str]:
    """What is wrong with what was seen after the child had ended like that."""
    wrong = [f"{name} is visible and not good: {seed}" for name, seed in seen.ours.items() if isinstance(seed, str)]
    wrong += [f"stock DCP reads {seed} in {name}" for name, seed in seen.stock.items() if seed != seen.ours[name]]
    older = {f"step-{step}": seed for step, seed in scenario.before}
    wrong += [f"{name} was harmed" for name, seed in older.items() if seen.ours.get(name) != seed]
    wrong += [f"acknowledged {name} is lost" for name, seed in told.acked.items() if seen.ours.get(name) != seed]
    allowed = {seed for _, seed in scenario.saves}
    wrong += [
        f"{name} came from nowhere" for name, seed in seen.ours.items() if name not in older and seed not in allowed
    ]
    return wrong


SHORT = {("the same step again", "obstore"), ("a plain save", "fsspec")}
"""Of scenarios and engines: the others make the same kinds of requests."""


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(name, engine, marks=() if (name, engine) in SHORT else pytest.mark.long)
        for name in SCENARIOS
        for engine in ENGINES
    ],
)
async def test_kill_at_every_request(
    name: str,
    engine: str,
    seaweed: Endpoint,
    faults: Proxy,
    bucket: Bucket,
    child: Children,
    judge: Oracle,
    prefix: str,
) -> None:
    scenario = SCENARIOS[name]
    how = {"storage": sidestream.Storage(seaweed.options, policy=sidestream.StorePolicy(**policy(engine)))}

    async with sidestream.Checkpointer(seaweed.url(f"{prefix}/before"), **for_run(**how)) as checkpoints:
        for step, seed in scenario.before:
            await checkpoints.save(make_state(seed, MIB), step=step)

    def prepared(run: str) -> str:
        bucket.copy(f"{prefix}/before/", f"{run}/")
        return seaweed.url(run)

    def trial(run: str, lane: Lane, killer: Killer | None) -> Told:
        def started(pid: int) -> None:
            if killer is not None:
                killer.pid = pid

        options = seaweed.at(lane.port)
        return child.run(
            started, work=scenario.work, run=run, options=options, policy=policy(engine), saves=scenario.saves, mib=MIB
        )  # fmt: skip

    with faults.lane() as lane:
        run = prepared(f"{prefix}/whole")
        whole = trial(run, lane, None)
        assert (whole.exit, len(whole.acked)) == (0, 1), whole
        requests = [exchange.operation for exchange in lane.log]
        marker = markers(lane)[-1].index
    assert {"CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "PutObject"} <= set(requests)

    violations, unreached, committed = [], [], 0
    points = [(at, False) for at in range(1, len(requests) + 1)] + [(len(requests), True)]
    for at, after in points:
        run = prepared(f"{prefix}/{at}-{after}")
        with faults.lane() as lane:
            killer = Killer(lane, at, after)
            told = trial(run, lane, killer)
        if not killer.dead or told.exit != -signal.SIGKILL:
            unreached.append((at, after, told))
        seen = judge.look(seaweed.options, run, MIB, [f"step-{step}" for step, _ in scenario.before])
        wrong = judged(seen, told, scenario)
        committed += len(seen.ours) > len(scenario.before)
        async with sidestream.Checkpointer(run, **for_run(**how)) as checkpoints:
            await checkpoints.save({"seed": 99}, step=9)
            if await checkpoints.restore(state := {"seed": 0}) != 9 or state != {"seed": 99}:
                wrong.append(f"a further save gave {state}")
        violations += [(at, requests[at - 1], after, one) for one in wrong]
    print(f"{name}, {engine}: {len(points)} kills, {len(unreached)} not reached, {len(violations)} violations")
    assert violations == []
    assert unreached == []
    assert committed == 1 + len(requests) - marker, "visible from the marker on, and not before"


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_a_killed_save_left_is_found_and_removed(
    engine: str, seaweed: Endpoint, faults: Proxy, bucket: Bucket, child: Children, judge: Oracle, prefix: str
) -> None:
    from sidestream._runtime.threads import Deadline, time_limit
    from sidestream._storage import locate_run

    run = seaweed.url(prefix)
    with faults.lane() as lane:
        killed = False

        def in_the_upload(exchange: Exchange) -> Fault | None:
            nonlocal killed
            if exchange.operation == "CompleteMultipartUpload" and not killed:
                killed = True
                os.kill(pid, signal.SIGKILL)
            return "reset-before" if killed else None

        lane.decide = in_the_upload
        trial = {"work": "steps", "run": run, "policy": policy(engine), "saves": [(1, 11)], "mib": MIB}
        pid = child.start(**trial, options=seaweed.at(lane.port))
        child.begin()
        assert child.finish().exit == -signal.SIGKILL
    before = judge.look(seaweed.options, run, MIB)
    assert before.uploads, "a killed process cannot abort its upload: a lifecycle rule does"
    assert before.unmarked

    store, _ = locate_run(run, sidestream.Storage(seaweed.options, policy=sidestream.StorePolicy(**policy(engine))))
    with time_limit(Deadline.after(60)):
        found = await store.leftovers()
        assert {one.kind for one in found} == {"attempt"}
        for one in found:
            await store.discard(one.name)
    after = judge.look(seaweed.options, run, MIB)
    left = [name for name in after.unmarked if not name.startswith(".leases/")]  # which end by themselves
    assert left == []
    with time_limit(Deadline.after(60)):
        assert await store.leftovers() == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("meet", ["at the marker", "by chance"])
def test_of_two_writers_of_one_target_one_wins(
    meet: str, engine: str, seaweed: Endpoint, faults: Proxy, child: Children, another: Children, judge: Oracle,
    prefix: str,
) -> None:  # fmt: skip
    """At the marker: the puts of both are held back until both have come."""
    for number in range(1 if meet == "at the marker" else 3):
        run = seaweed.url(f"{prefix}/{number}")
        with faults.lane() as lane:
            if meet == "at the marker":
                lane.hold = lambda one, lane=lane: one in markers(lane) and len(markers(lane)) < 2
            trial = {
                "work": "plain",
                "run": run,
                "options": seaweed.at(lane.port),
                "policy": policy(engine),
                "mib": MIB,
            }
            child.start(**trial, saves=[(1, 21)])
            another.start(**trial, saves=[(1, 22)])
            child.begin()
            another.begin()
            ends = [child.finish(), another.finish()]
        winners = [end for end in ends if end.acked]
        losers = [end for end in ends if not end.acked]
        assert (len(winners), [end.get("error") for end in losers]) == (1, ["CheckpointExistsError"]), ends
        (seed,) = winners[0].acked.values()
        seen = judge.look(seaweed.options, run, MIB)
        assert (seen.ours, seen.stock, seen.uploads) == ({"plain-1": seed}, {"plain-1": seed}, [])


def loaded(url: str, how: dict[str, Any], mib: int) -> int | str:
    """The seed of the checkpoint, and of its sidecar files if it has some."""
    state = blank_state(mib)
    sidestream.blocking.load(state, url, **for_load(**how))
    seed = seed_in(state, mib)
    checkpoint = sidestream.blocking.open_checkpoint(url, **how)
    files = {name: checkpoint.file(name) for name in checkpoint.files}
    assert files in ({}, files_of(seed))
    return seed


def ids(bucket: Bucket, prefix: str) -> set[str]:
    return {key.rpartition("manifest-")[2] for key in bucket.keys(prefix) if "manifest-" in key}


def test_overwriting_is_killed_at_every_request(
    seaweed: Endpoint, faults: Proxy, bucket: Bucket, child: Children, judge: Oracle, prefix: str
) -> None:
    """The old checkpoint up to the put of the marker, the new one from then on; the next save deletes what is left."""
    how = {"storage": sidestream.Storage(seaweed.options, policy=sidestream.StorePolicy(**policy("obstore")))}
    sidestream.blocking.save(
        make_state(11, MIB), seaweed.url(f"{prefix}/before/last"), files=files_of(11), **for_save(**how)
    )

    def trial(run: str, lane: Lane, killer: Killer | None) -> Told:
        def started(pid: int) -> None:
            if killer is not None:
                killer.pid = pid

        return child.run(
            started, work="over", run=run, options=seaweed.at(lane.port), policy=policy("obstore"), saves=[(1, 12)],
            mib=MIB,
        )  # fmt: skip

    with faults.lane() as lane:
        bucket.copy(f"{prefix}/before/", f"{prefix}/whole/")
        whole = trial(seaweed.url(f"{prefix}/whole"), lane, None)
        assert whole.acked == {"last": 12}, whole
        requests = [exchange.operation for exchange in lane.log]
        marker = markers(lane)[-1].index
    assert ids(bucket, f"{prefix}/whole/").isdisjoint(ids(bucket, f"{prefix}/before/"))
    assert any(operation.startswith("Delete") for operation in requests[marker:]), requests
    found: dict[tuple[int, bool], int | str] = {}
    left = 0
    for at, after in [(at, False) for at in range(1, len(requests) + 1)] + [(marker, True)]:
        below = f"{prefix}/{at}-{after}"
        bucket.copy(f"{prefix}/before/", f"{below}/")
        with faults.lane() as lane:
            killer = Killer(lane, at, after)
            told = trial(seaweed.url(below), lane, killer)
        assert killer.dead, told
        found[at, after] = loaded(seaweed.url(f"{below}/last"), how, MIB)
        if at % 4 == 0 or after:
            seen = judge.look(seaweed.options, seaweed.url(below), MIB)
            assert seen.stock == seen.ours == {"last": found[at, after]}, (at, after, seen)
        left += len(ids(bucket, below)) > 1
        info = sidestream.blocking.save(
            make_state(13, MIB), seaweed.url(f"{below}/last"), overwrite=True, **for_save(**how)
        )
        assert ids(bucket, below) == {info.save_id}
        assert loaded(seaweed.url(f"{below}/last"), how, MIB) == 13
    expected = {(at, after): 12 if at > marker or after else 11 for at, after in found}
    assert found == expected
    assert left, "some were killed between the commit and the deletion"
    print(f"overwriting: {len(found)} kills, {left} of them between the commit and the deletion")


def test_of_two_that_overwrite_one_wins(
    seaweed: Endpoint, faults: Proxy, bucket: Bucket, child: Children, another: Children, prefix: str
) -> None:
    """The puts of both markers are held back until both have come."""
    how = {"storage": sidestream.Storage(seaweed.options, policy=sidestream.StorePolicy(**policy("obstore")))}
    url = seaweed.url(f"{prefix}/last")
    sidestream.blocking.save(make_state(11, MIB), url, **for_save(**how))
    with faults.lane() as lane:
        lane.hold = lambda one: one in markers(lane) and len(markers(lane)) < 2
        trial = {
            "work": "over",
            "run": seaweed.url(prefix),
            "options": seaweed.at(lane.port),
            "policy": policy("obstore"),
            "mib": MIB,
        }
        child.start(**trial, saves=[(1, 21)])
        another.start(**trial, saves=[(1, 22)])
        child.begin()
        another.begin()
        ends = [child.finish(), another.finish()]
    winners = [end for end in ends if end.acked]
    assert (len(winners), [end.get("error") for end in ends if not end.acked]) == (1, ["CheckpointExistsError"]), ends
    assert loaded(url, how, MIB) == winners[0].acked["last"]
    assert len(ids(bucket, prefix)) == 1


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_polling_reader_sees_whole_steps_alone(
    engine: str, seaweed: Endpoint, child: Children, prefix: str
) -> None:
    run, steps = seaweed.url(prefix), 12
    trial = {"work": "polling", "run": run, "options": seaweed.options, "policy": policy(engine), "mib": 1}
    child.start(**trial, until=steps)
    child.begin()
    async with sidestream.Checkpointer(run, storage_options=seaweed.options) as checkpoints:
        for step in range(1, steps + 1):
            await checkpoints.save(make_state(100 + step, 1), step=step)
    told = child.finish()
    assert (told.exit, told.get("error")) == (0, None), told
    seen = told.get("seen")
    assert all(seed == 100 + step for step, seed in seen)
    assert [step for step, _ in seen] == sorted({step for step, _ in seen}), "never backwards"
    print(f"{engine}: {told.get('loads')} loads of {len(seen)} steps")
