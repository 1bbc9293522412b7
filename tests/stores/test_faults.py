"""Everything that can go wrong between client and server, at every request of a save and of a load.

Each case has a prefix of its own, by which the proxy knows it, and is judged by what is really in the server. Cases run
side by side, since most of them wait. Waits are the library's; a case that has not ended long after its deadline has
hung.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

import pytest
from _proxy import FAULTS, Exchange, Fault, Lane
from _servers import Bucket, Endpoint
from _states import PART_BYTES, blank_state, make_state, seed_in, tensors
from keywords import for_load, for_save

import sidestream
from sidestream import errors, events

ENGINES = ["obstore", "fsspec"]
MIB = 8
AT_ONCE = 16
WAITING_AT_ONCE = 32
"""Of cases that may fail, most of which wait for their deadline."""
HUNG_S = 150
PASSING = tuple(fault for fault in FAULTS if fault != "412")
"""What may pass if the request is sent again. 412 says that it will not."""

SOME = ("503", "409", "reset-before", "stall-before", "lost-500", "lost-reset", "truncated", "trickle")
"""Where two requests are treated alike, one of them meets these alone."""

LASTING: tuple[Fault, ...] = ("503", "500", "412", "reset-before", "stall-before", "lost-500")


@dataclass(frozen=True)
class Point:
    """The ``nth`` request of one kind."""

    operation: str
    name: str
    nth: int

    def __str__(self) -> str:
        return f"{self.operation} {self.name} {self.nth}"


@dataclass
class Case:
    point: Point
    fault: Fault
    times: int
    seed: int = 7
    came: int = 0
    """Requests of the kind."""
    met: int = 0
    """Those among them that the fault befell."""
    notes: list[str] = field(default_factory=list)

    def decide(self, exchange: Exchange) -> Fault | None:
        if kind_of(exchange) != (self.point.operation, self.point.name):
            return None
        self.came += 1
        if not self.point.nth <= self.came < self.point.nth + self.times:
            return None
        self.met += 1
        return self.fault

    def __str__(self) -> str:
        return f"{self.fault} x {self.times} at {self.point}"


def kind_of(exchange: Exchange) -> tuple[str, str]:
    name = exchange.name
    for start, plain in (("manifest-", "manifest"), ("__0_0", "values"), ("__0_1", "tensors"), (".metadata", "marker")):
        if name.startswith(start):
            return exchange.operation, plain
    return exchange.operation, "-"


def points_of(log: list[Exchange]) -> list[Point]:
    """One for each request; of many parts the first and the last."""
    counts: dict[tuple[str, str], int] = {}
    for exchange in log:
        counts[kind_of(exchange)] = counts.get(kind_of(exchange), 0) + 1
    return [Point(*kind, nth) for kind, count in counts.items() for nth in sorted({1, count})]


def fails_upstream(engine: str, case: Case) -> bool:
    """obstore repeats no request whose answer broke off after its head, and the upload has not begun: the save fails as
    it should, with a typed error and nothing left behind."""
    broken = case.fault in ("truncated", "reset-in-answer", "stall-in-answer")
    return engine == "obstore" and case.point.operation == "CreateMultipartUpload" and broken


def met_by(points: list[Point], faults: Iterable[Fault], engine: str, long: bool) -> list[Case]:
    """Return a case for each point and fault. In the short form, a request that is treated like others meets half of
    the faults in ``SOME``, and the next such request the other half; with the other engine it is the other way round.
    """
    cases, turn = [], ENGINES.index(engine)
    for point in points:
        alike = point.nth > 1 or point.name in ("values", "manifest", "-")
        turn += alike
        some = SOME if long else SOME[turn % 2 :: 2]
        cases += [Case(point, fault, 1) for fault in faults if not alike or fault in some]
    return cases


def lasting(points: list[Point], faults: Iterable[Fault], engine: str, long: bool) -> list[Case]:
    """Return a case for the first request of each kind and each fault, which lasts. In the short form an engine meets
    half of them: one request half of the faults, the next request the other half."""
    first = [point for point in points if point.nth == 1]
    return [
        Case(point, fault, 10**6)
        for number, point in enumerate(first, ENGINES.index(engine))
        for turn, fault in enumerate(faults, number)
        if long or turn % 2
    ]


def policy(engine: str, **also: Any) -> sidestream.StorePolicy:
    return sidestream.StorePolicy(
        engine=engine, part_bytes=PART_BYTES, **{"request_timeout_s": 4, "retries": 4, **also}
    )


@pytest.fixture(scope="module")
def judge(seaweed: Endpoint) -> Iterator[Bucket]:
    bucket = Bucket(seaweed)
    yield bucket
    bucket.close()


async def direct_seed(url: str, seaweed: Endpoint) -> int | str | None:
    """What a reader finds who does not go through the proxy; None if there is nothing."""
    state = blank_state(MIB)
    try:
        await sidestream.load(state, url, storage_options=seaweed.options)
        return seed_in(state, MIB)
    except errors.CheckpointNotFoundError:
        return None
    except (Exception, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


async def ended(call: Awaitable[Any]) -> BaseException | None:
    """What it raised. A hang is an error of the test."""
    task = asyncio.ensure_future(call)
    done, _ = await asyncio.wait([task], timeout=HUNG_S)
    if not done:
        task.cancel()
        return AssertionError(f"still not ended after {HUNG_S} s")
    return task.exception()


class Matrix:
    def __init__(self, engine: str, seaweed: Endpoint, lane: Lane, judge: Bucket, prefix: str) -> None:
        self.engine, self.seaweed, self.lane, self.judge, self.prefix = engine, seaweed, lane, judge, prefix
        # One client serves all cases, and a connection that stalls is one less for the others.
        self.options = {**seaweed.at(lane.port), "config_kwargs": {"max_pool_connections": 200}}

    def how(self, **also: Any) -> dict[str, Any]:
        return {"storage": sidestream.Storage(self.options, policy=policy(self.engine, **also))}

    async def points_of_a_save(self) -> list[Point]:
        await sidestream.save(make_state(1, MIB), self.seaweed.url(f"{self.prefix}/clean"), **for_save(**self.how()))
        return points_of(self.lane.log)

    async def points_of_a_load(self, url: str) -> list[Point]:
        await sidestream.load(blank_state(MIB), url, **for_load(**self.how()))
        return points_of(self.lane.log)

    async def all_of(
        self, cases: list[Case], one: Callable[[Case, str], Awaitable[None]], at_once: int = AT_ONCE
    ) -> str:
        """Complaints of all cases, a line each."""
        turns = asyncio.Semaphore(at_once)
        took: dict[str, float] = {}
        mine = re.compile(rf"{re.escape(self.prefix)}/case-(\d+)")

        def decide(exchange: Exchange) -> Fault | None:
            found = mine.search(unquote(exchange.target))
            return cases[int(found[1])].decide(exchange) if found else None

        async def in_turn(index: int, case: Case) -> None:
            async with turns:
                begun = time.monotonic()
                await one(case, f"{self.prefix}/case-{index}")
                took[str(case)] = time.monotonic() - begun

        self.lane.decide = decide
        await asyncio.gather(*(in_turn(index, case) for index, case in enumerate(cases)))
        for case in cases:
            # How often a client lists or looks differs from save to save, so a later one may not come.
            if not case.met and case.times == 1 and case.point.nth == 1:
                case.notes.append("the request never came")
        complaints = [f"{case}: {note}" for case in cases for note in case.notes]
        print(f"{self.engine}: {len(cases)} cases, {len(complaints)} complaints", *complaints, sep="\n  ")
        print("the longest:")
        print("".join(f"  {took[name]:.1f} s {name}\n" for name in sorted(took, key=lambda name: -took[name])[:8]))
        return "\n".join(complaints)

    async def save(self, case: Case, path: str, timeout_s: float, must_succeed: bool) -> None:
        url = self.seaweed.url(path)
        error = await ended(
            sidestream.save(make_state(case.seed, MIB), url, **for_save(timeout_s=timeout_s, **self.how()))
        )
        found = await direct_seed(url, self.seaweed)
        case.notes += await self.judged(case, path, error, found, must_succeed)
        if found is None:  # the target is as good as new
            again = await ended(sidestream.save({"seed": 8}, url, storage_options=self.seaweed.options))
            if again is not None:
                case.notes.append(f"a further save to the same target gave {again!r}")

    async def judged(
        self, case: Case, path: str, error: BaseException | None, found: Any, must_succeed: bool
    ) -> list[str]:
        notes = []
        if error is None and found != case.seed:
            notes.append(f"FALSE ACKNOWLEDGEMENT, {found!r} is there")
        if error is not None and not isinstance(error, errors.SidestreamError):
            notes.append(f"not a typed error: {error!r}")
        if isinstance(found, str):
            notes.append(f"TORN: {found}")
        committed = isinstance(error, (errors.NotDurableError, errors.OutcomeUnknownError))
        if error is not None and found == case.seed and not committed:
            notes.append(f"FALSE FAILURE: {error!r}")
        if error is not None and must_succeed:
            notes.append(f"did not survive it: {error!r}")
        if error is not None and found is None and not isinstance(error, errors.OutcomeUnknownError):
            left = await asyncio.to_thread(self.judge.keys, path + "/")
            if left:
                notes.append(f"left behind: {sorted(left)} after {error!r}")
        return notes

    async def load(self, case: Case, url: str, timeout_s: float, must_succeed: bool) -> None:
        state = blank_state(MIB)
        error = await ended(sidestream.load(state, url, **for_load(timeout_s=timeout_s, **self.how())))
        if error is None:
            try:
                assert seed_in(state, MIB) == case.seed
            except AssertionError as wrong:
                case.notes.append(f"WRONG BYTES: {wrong}")
            return
        if must_succeed:
            case.notes.append(f"did not survive it: {error!r}")
        if not isinstance(error, errors.SidestreamError):
            case.notes.append(f"not a typed error: {error!r}")
            return
        changed = {name for name, tensor in tensors(state).items() if tensor.any()}
        if not changed <= set(error.written):
            case.notes.append(f"{changed - set(error.written)} changed and are not listed")


@pytest.fixture
def matrix(engine: str, seaweed: Endpoint, lane: Lane, judge: Bucket, prefix: str) -> Matrix:
    return Matrix(engine, seaweed, lane, judge, prefix)


FORMS = ["short", pytest.param("long", marks=pytest.mark.long)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS)
async def test_a_save_survives_every_fault_that_passes(form: str, matrix: Matrix) -> None:
    points = await matrix.points_of_a_save()
    assert {point.operation for point in points} >= {"CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}
    cases = met_by(points, PASSING, matrix.engine, form == "long")

    async def save(case: Case, path: str) -> None:
        passes = case.fault != "409" or case.point.name == "marker"  # S3 says so where there is a condition
        passes = passes and not fails_upstream(matrix.engine, case)
        await matrix.save(case, path, 120, must_succeed=passes)

    assert not await matrix.all_of(cases, save)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS)
async def test_a_save_ends_with_the_truth_when_a_fault_lasts(form: str, matrix: Matrix) -> None:
    cases = lasting(await matrix.points_of_a_save(), LASTING, matrix.engine, form == "long")
    cases.reverse()  # those of the last requests take longest, so they begin first
    save = partial(matrix.save, timeout_s=6, must_succeed=False)
    assert not await matrix.all_of(cases, save, WAITING_AT_ONCE)


async def saved(matrix: Matrix) -> str:
    """The URL of the checkpoint of which every case of a load has a copy."""
    url = matrix.seaweed.url(f"{matrix.prefix}/saved")
    await sidestream.save(make_state(7, MIB), url, storage_options=matrix.seaweed.options)
    return url


def copies(matrix: Matrix, count: int) -> None:
    for index in range(count):
        matrix.judge.copy(f"{matrix.prefix}/saved/", f"{matrix.prefix}/case-{index}/")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS)
async def test_a_load_survives_every_fault_that_passes(form: str, matrix: Matrix) -> None:
    points = await matrix.points_of_a_load(await saved(matrix))
    assert {point.name for point in points} >= {"marker", "manifest", "tensors"}
    faults = [fault for fault in PASSING if "request" not in fault]
    cases = met_by(points, faults, matrix.engine, form == "long")
    copies(matrix, len(cases))

    async def load(case: Case, path: str) -> None:
        await matrix.load(case, matrix.seaweed.url(path), 120, must_succeed=case.fault != "409")

    assert not await matrix.all_of(cases, load)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS)
async def test_a_load_ends_with_a_typed_error_when_a_fault_lasts(form: str, matrix: Matrix) -> None:
    points = await matrix.points_of_a_load(await saved(matrix))
    faults: tuple[Fault, ...] = ("503", "412", "reset-before", "stall-before", "truncated")
    cases = lasting(points, faults, matrix.engine, form == "long")
    copies(matrix, len(cases))

    async def load(case: Case, path: str) -> None:
        await matrix.load(case, matrix.seaweed.url(path), 9, must_succeed=False)

    assert not await matrix.all_of(cases, load, WAITING_AT_ONCE)


@pytest.mark.parametrize("engine", ENGINES)
async def test_throttling_slows_down_and_is_told(matrix: Matrix) -> None:
    """More refusals than ``retries`` allows for errors: to be asked to wait is not to fail."""
    told: list[events.Event] = []
    case = Case(Point("PutObject", "manifest", 1), "slow-down", 3)
    matrix.lane.decide = case.decide
    url = matrix.seaweed.url(matrix.prefix)
    with events.observe(told.append):
        await sidestream.save(make_state(7, MIB), url, **for_save(timeout_s=120, **matrix.how(retries=1)))
    assert case.met == 3
    assert await direct_seed(url, matrix.seaweed) == 7
    throttled = [event for event in told if isinstance(event, events.Throttled)]
    assert throttled
    assert all(event.wait_s > 0 for event in throttled)
    assert matrix.seaweed.secret not in repr(told)
