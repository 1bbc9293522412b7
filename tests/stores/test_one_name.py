"""One name on a real server: overwriting, removals, exports and sidecar files, with a kill, a fault or a rival at every
request, and readers beside. Old or new is there: never neither, never a mixture. ``test_kills.py`` has overwriting that
is killed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from _processes import Children, Told
from _proxy import Exchange, Fault, Lane, Proxy
from _servers import Bucket, Endpoint
from _states import blank_state, files_of, make_state, seed_in, tensors
from keywords import for_load, for_save
from safetensors.torch import load as tensors_in
from test_faults import (
    FORMS,
    PASSING,
    SOME,
    Case,
    Matrix,
    Point,
    copies,
    ended,
    fails_upstream,
    met_by,
    points_of,
    policy,
)
from test_harness import wait_until
from test_kills import Killer, another, child, ids, judge, loaded  # noqa: F401 - fixtures among them
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import sidestream
from sidestream import errors

MIB = 8
OLD, NEW = 7, 8


def how_of(endpoint: Endpoint) -> dict[str, Any]:
    return {"storage": sidestream.Storage(endpoint.options, policy=policy("obstore", request_timeout_s=30))}


def in_child(work: str, run: str, options: dict[str, Any], seed: int, **more: Any) -> dict[str, Any]:
    asked = {"engine": "obstore", "part_bytes": 5 << 20, "request_timeout_s": 30}
    return {
        "work": work, "run": run, "options": options, "policy": asked, "saves": [(1, seed)], "mib": MIB, **more
    }  # fmt: skip


def killed_at_each(
    work: str, seaweed: Endpoint, faults: Proxy, running: Children, prepared: Callable[[str], str], seed: int
) -> list[tuple[str, int, list[Exchange], Told]]:
    """For each request of ``work``: the run that the kill left, its number, what was requested before, and the end."""

    def trial(run: str, lane: Lane, killer: Killer | None) -> Told:
        def started(pid: int) -> None:
            if killer is not None:
                killer.pid = pid

        return running.run(started, **in_child(work, run, seaweed.at(lane.port), seed))

    with faults.lane() as lane:
        whole = trial(prepared("whole"), lane, None)
        assert (whole.exit, whole.get("error")) == (0, None), whole
        count = len(lane.log)
    left = []
    for at in range(1, count + 1):
        run = prepared(str(at))
        with faults.lane() as lane:
            killer = Killer(lane, at)
            told = trial(run, lane, killer)
            left.append((run, at, list(lane.log), told))
        assert told.exit in (0, -signal.SIGKILL), told
    assert sum(told.exit == -signal.SIGKILL for *_, told in left) >= count - 2
    print(f"{work}: {count} kills")
    return left


def test_a_removal_is_killed_at_every_request(
    seaweed: Endpoint, faults: Proxy, bucket: Bucket, child: Children, prefix: str  # noqa: F811
) -> None:  # fmt: skip
    """There until the marker is deleted, and then not; the next removal continues it."""
    how = how_of(seaweed)
    sidestream.blocking.save(
        make_state(OLD, MIB), seaweed.url(f"{prefix}/before/last"), files=files_of(OLD), **for_save(**how)
    )

    def prepared(name: str) -> str:
        bucket.copy(f"{prefix}/before/", f"{prefix}/{name}/")
        return seaweed.url(f"{prefix}/{name}")

    there = []
    for run, at, _, _ in killed_at_each("remove", seaweed, faults, child, prepared, OLD):
        marked = f"{prefix}/{at}/last/.metadata" in bucket.keys(f"{prefix}/{at}/")
        there.append(marked)
        if marked:
            assert loaded(f"{run}/last", how, MIB) == OLD
        else:
            with pytest.raises(errors.CheckpointNotFoundError):
                loaded(f"{run}/last", how, MIB)
        try:
            sidestream.blocking.remove(f"{run}/last", **how)
        except errors.CheckpointNotFoundError:
            assert not marked
        assert bucket.keys(f"{prefix}/{at}/last/") == {}
    assert there == sorted(there, reverse=True)
    assert {*there} == {True, False}


def exported(bucket: Bucket, prefix: str) -> int | None:
    """The seed of an export; None if there is no index, which comes last."""
    keys = {key.rpartition("/")[2] for key in bucket.keys(prefix)}
    if "model.safetensors.index.json" not in keys:
        return None
    index = json.loads(bucket.get(f"{prefix}model.safetensors.index.json"))
    found: dict[str, Any] = {}
    for name in sorted(set(index["weight_map"].values())):
        found.update(tensors_in(bucket.get(f"{prefix}{name}")))
    assert found.keys() == index["weight_map"].keys()
    seed = int(bucket.get(f"{prefix}seed"))
    assert {name: bucket.get(f"{prefix}{name}") for name in files_of(seed)} == files_of(seed)
    expected = tensors(make_state(seed, MIB))
    assert all(found[name].equal(expected[name]) for name in found)
    return seed


def test_an_export_is_killed_at_every_request(
    seaweed: Endpoint, faults: Proxy, bucket: Bucket, child: Children, prefix: str  # noqa: F811
) -> None:  # fmt: skip
    """It is whole from its index on, and none before; nothing of it harms the checkpoint."""
    how, seen = how_of(seaweed), set()
    for run, at, _, told in killed_at_each(
        "export", seaweed, faults, child, lambda name: seaweed.url(f"{prefix}/{name}"), NEW
    ):
        below = f"{prefix}/{at}"
        seed = exported(bucket, f"{below}/hf/")
        seen.add(seed)
        assert seed in (None, NEW)
        assert seed == NEW or not told.get("exported")
        if f"{below}/plain/.metadata" in bucket.keys(below):
            assert loaded(f"{run}/plain", how, MIB) == NEW
        else:
            assert not told.acked
            sidestream.blocking.save(make_state(NEW, MIB), f"{run}/plain", **for_save(**how))
            assert loaded(f"{run}/plain", how, MIB) == NEW
    assert seen == {None, NEW}


def test_of_a_save_and_a_removal_one_is_first(
    seaweed: Endpoint,
    faults: Proxy,
    bucket: Bucket,
    child: Children,  # noqa: F811
    another: Children,  # noqa: F811
    prefix: str,
) -> None:
    """The put of the marker is held back until the removal has deleted the old one: the save has lost, and says so."""
    how = how_of(seaweed)
    sidestream.blocking.save(make_state(OLD, MIB), seaweed.url(f"{prefix}/last"), **for_save(**how))
    run = seaweed.url(prefix)
    with faults.lane() as lane:
        gone: list[Told] = []
        lane.hold = lambda one: one in markers(lane) and not gone
        child.start(**in_child("over", run, seaweed.at(lane.port), NEW))
        another.start(**in_child("remove", run, seaweed.options, NEW))
        child.begin()
        wait_until(lambda: markers(lane))
        another.begin()
        gone.append(another.finish())
        save = child.finish()
    assert gone[0].get("removed"), gone
    assert save.get("error") == "CheckpointExistsError", save
    assert ids(bucket, prefix) == set()
    with pytest.raises(errors.CheckpointNotFoundError):
        loaded(f"{run}/last", how, MIB)


def markers(lane: Lane) -> list[Exchange]:
    return [exchange for exchange in lane.of("PutObject") if exchange.name == ".metadata"]


# --- readers ----------------------------------------------------------------------------------------------------------

Reader = Callable[[str, dict[str, Any]], Any]


async def verified(url: str, how: dict[str, Any]) -> int:
    state = blank_state(1)
    await sidestream.load(state, url, **for_load(**how))
    return seed_in(state, 1)


async def unverified(url: str, how: dict[str, Any]) -> int:
    state = blank_state(1)
    await sidestream.load(state, url, **for_load(verify="manifest", **how))
    return seed_in(state, 1)


async def opened(url: str, how: dict[str, Any]) -> int | None:
    checkpoint = await sidestream.open_checkpoint(url, **how)
    try:
        seed = seed_in(await checkpoint.state_dict(), 1)
        assert {name: await checkpoint.file(name) for name in checkpoint.files} == files_of(seed)
    except errors.CheckpointNotFoundError:  # it was replaced, and says so
        return None
    return seed


async def verification(url: str, how: dict[str, Any]) -> None:
    report = await sidestream.verify(url, **how)
    assert report.ok, report.damaged


async def stock(url: str, how: dict[str, Any]) -> int | None:
    """It fails where its files are gone, and never reads those of another save: their names have its id."""
    state = blank_state(1)

    def read() -> None:
        reader = FsspecReader(url, use_listings_cache=False, skip_instance_cache=True, **how["storage"].options)
        dcp.load(state, storage_reader=reader, no_dist=True)

    try:
        await asyncio.to_thread(read)
    except (FileNotFoundError, dcp.api.CheckpointException):
        return None
    return seed_in(state, 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable.*:UserWarning")
async def test_readers_beside_one_that_overwrites(
    seaweed: Endpoint, child: Children, prefix: str  # noqa: F811
) -> None:  # fmt: skip
    how, url, count = how_of(seaweed), seaweed.url(f"{prefix}/last"), 40
    await sidestream.save(make_state(1, 1), url, files=files_of(1), **for_save(**how))
    trial = in_child("over", seaweed.url(prefix), seaweed.options, 0, mib=1)
    trial["saves"] = [(1, seed) for seed in range(2, count + 2)]
    child.start(**trial)
    child.begin()
    writing = asyncio.create_task(asyncio.to_thread(child.finish))
    readers: list[Reader] = [verified, unverified, opened, verification, stock]
    newest, reads, replaced = 1, 0, 0
    while not writing.done():
        seed = await readers[reads % len(readers)](url, how)
        reads += 1
        replaced += seed is None
        assert seed is None or seed >= newest, "never backwards"
        newest = max(newest, seed or 0)
    told = await writing
    assert (told.exit, told.get("error")) == (0, None), told
    assert await verified(url, how) == count + 1
    print(f"{reads} reads beside {count} saves, {replaced} without a result")
    assert reads >= 10
    assert newest > 1


# --- faults -----------------------------------------------------------------------------------------------------------


class Over(Matrix):
    """Cases that save over a copy of one checkpoint, or remove it."""

    def __init__(self, seaweed: Endpoint, lane: Lane, bucket: Bucket, prefix: str) -> None:
        super().__init__("obstore", seaweed, lane, bucket, prefix)

    def saving(self, url: str, seed: int, timeout_s: float = 120) -> Any:
        return sidestream.save(
            make_state(seed, MIB),
            url,
            overwrite=True,
            files=files_of(seed),
            **for_save(timeout_s=timeout_s, **self.how()),
        )

    async def prepare(self) -> None:
        url = self.seaweed.url(f"{self.prefix}/saved")
        await sidestream.save(make_state(OLD, MIB), url, files=files_of(OLD), storage_options=self.seaweed.options)

    async def points(self, work: Callable[[str], Any]) -> list[Any]:
        await asyncio.to_thread(self.judge.copy, f"{self.prefix}/saved/", f"{self.prefix}/clean/")
        await work(self.seaweed.url(f"{self.prefix}/clean"))
        # A request that deletes several objects does not name them where the proxy looks.
        return [point for point in points_of(self.lane.log) if point.operation != "DeleteObjects"]

    async def over(self, case: Case, path: str) -> None:
        url = self.seaweed.url(path)
        error = await ended(self.saving(url, NEW))
        try:
            found: Any = await asyncio.to_thread(loaded, url, how_of(self.seaweed), MIB)
        except (Exception, AssertionError) as wrong:
            found = f"{type(wrong).__name__}: {wrong}"
        case.notes += [] if found in (OLD, NEW) else [f"NEITHER OR TORN: {found}"]
        if error is None and found != NEW:
            case.notes.append(f"FALSE ACKNOWLEDGEMENT, {found!r} is there")
        if error is not None and not isinstance(error, errors.SidestreamError):
            case.notes.append(f"not a typed error: {error!r}")
        if (
            error is not None
            and found == NEW
            and not isinstance(error, (errors.NotDurableError, errors.OutcomeUnknownError))
        ):
            case.notes.append(f"FALSE FAILURE: {error!r}")
        conditional = case.point.name == "marker" or case.fault not in ("409", "412")
        if error is not None and conditional and not fails_upstream("obstore", case):
            case.notes.append(f"did not survive it: {error!r}")
        await self.tidied(case, path, url)

    async def tidied(self, case: Case, path: str, url: str) -> None:
        """The next save works, and leaves nothing but its own."""
        options = {"storage_options": self.seaweed.options}
        info = await sidestream.save({"seed": 9}, url, overwrite=True, **for_save(**options))
        left = [key for key in await asyncio.to_thread(self.judge.keys, path + "/") if info.save_id not in key]
        case.notes += [f"left behind: {key}" for key in left if not key.endswith("/.metadata")]

    async def remove(self, case: Case, path: str) -> None:
        url = self.seaweed.url(path)
        error = await ended(sidestream.remove(url, timeout_s=120, **self.how()))
        left = await asyncio.to_thread(self.judge.keys, path + "/")
        if error is not None and not (isinstance(error, errors.SidestreamError) and case.fault in ("409", "412")):
            case.notes.append(f"did not survive it: {error!r}")
        if error is None and left:
            case.notes.append(f"left behind: {sorted(left)}")


@pytest.fixture
async def over(seaweed: Endpoint, lane: Lane, bucket: Bucket, prefix: str) -> Over:
    made = Over(seaweed, lane, bucket, prefix)
    await made.prepare()
    return made


@pytest.mark.parametrize("form", FORMS)
async def test_a_save_over_another_survives_every_fault_that_passes(form: str, over: Over) -> None:
    points = await over.points(lambda url: over.saving(url, NEW))
    assert any(point.name == "marker" and point.operation == "PutObject" for point in points)
    faults: tuple[Fault, ...] = (*PASSING, "412") if form == "long" else SOME
    cases = met_by(points, faults, "obstore", form == "long")
    copies(over, len(cases))
    assert not await over.all_of(cases, over.over)


async def test_a_removal_survives_every_fault_that_passes(over: Over) -> None:
    points = await over.points(lambda url: sidestream.remove(url, **over.how()))
    cases = met_by(points, SOME, "obstore", True)
    copies(over, len(cases))
    assert not await over.all_of(cases, over.remove)


async def test_a_fault_while_objects_are_deleted(
    over: Over, seaweed: Endpoint, faults: Proxy, bucket: Bucket, prefix: str
) -> None:
    """After the commit of a save, and in a removal. Each case has a port of its own."""
    cases = [(what, Case(Point("DeleteObjects", "-", 1), fault, 1)) for what in ("over", "remove") for fault in SOME]
    copies(over, len(cases))

    async def one(number: int, what: str, case: Case) -> None:
        with faults.lane() as lane:
            lane.decide = case.decide
            await getattr(Over(seaweed, lane, bucket, prefix), what)(case, f"{prefix}/case-{number}")

    await asyncio.gather(*(one(number, *case) for number, case in enumerate(cases)))
    assert all(case.met for _, case in cases)
    assert [f"{what}: {case}: {note}" for what, case in cases for note in case.notes] == []
