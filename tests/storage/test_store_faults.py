"""A server that misbehaves, and what is then true: of the call, of what others see, of what is left on the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from _places import Place, s3_place
from _s3_server import Request, S3Server
from keywords import for_load, for_run, for_save

import sidestream
from sidestream import errors, events
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage.clients import requests
from sidestream._storage.clients.requests import on_io_loop
from sidestream._storage.object_store.store import ObjectStore
from sidestream._storage.object_store.transaction import ObjectTransaction

ENGINES = ["obstore", "fsspec"]


def large() -> dict[str, Any]:
    """Three parts, and a file of plain values."""
    return {"large": torch.arange(3 << 20, dtype=torch.float32), "step": 7}


async def loads(place: Place) -> None:
    target = {"large": torch.zeros(3 << 20), "step": 0}
    await sidestream.load(target, place.url(), **for_load(**place.keywords))
    assert target["step"] == 7
    assert torch.equal(target["large"], large()["large"])


def assert_nothing_left(server: S3Server) -> None:
    assert server.uploads == {}
    assert sorted(server.objects) == []


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_bucket_that_does_not_exist(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine)
    s3.fault = lambda request: 404
    for state in (large(), {"step": 7}):
        with pytest.raises(errors.StorageError, match="no such bucket"):
            await sidestream.save(state, place.url(), **for_save(**place.keywords))
    async with sidestream.Checkpointer(place.base, **for_run(**place.keywords)) as checkpoints:
        with pytest.raises(errors.StorageError, match="no such bucket"):
            await checkpoints.save(large(), step=1)
    with pytest.raises(errors.CheckpointNotFoundError):
        await sidestream.load(large(), place.url(), **for_load(**place.keywords))


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_bucket_that_is_deleted_meanwhile(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine)
    s3.fault = lambda request: None if request.kind == "list" and s3.count("put") == 0 else 404
    with pytest.raises(errors.StorageError, match="no such bucket"):
        await sidestream.save({"step": 7}, place.url(), **for_save(**place.keywords))


async def test_a_removal_that_fails_hides_no_error(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(transaction: ObjectTransaction) -> None:
        raise FileNotFoundError("what was to be removed")

    monkeypatch.setattr(ObjectTransaction, "discard", fail)
    place = s3_place(s3, "obstore")
    s3.fault = lambda request: 403 if request.kind == "put" else None
    with pytest.raises(errors.AccessDeniedError) as raised:
        await sidestream.save({"step": 7}, place.url(), **for_save(**place.keywords))
    assert "could not be removed: what was to be removed" in raised.value.__notes__[0]
    assert raised.value.left_behind is not None


# --- what passes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("list", 503),
        ("put", "lose"),
        ("begin", "lose"),
        ("part", 503),
        ("part", "reset"),
        ("complete", "lose"),
        ("create", 409),
        ("create", 503),
        ("create", "lose"),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
async def test_one_fault_of_a_save(s3: S3Server, engine: str, kind: str, fault: int | str) -> None:
    place = s3_place(s3, engine)
    s3.once(kind, fault, key="run/ckpt")
    await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    await loads(place)
    # If the answer to the begin of an upload is lost, nobody knows its id: a lifecycle rule removes it.
    assert len(s3.uploads) == (kind == "begin")
    assert sum(name.endswith(".metadata") for name in s3.objects) == 1


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
async def test_a_commit_that_may_not_be_read_back(s3: S3Server, engine: str, overwrite: bool) -> None:
    """The answer to the put of the marker is lost. The put is sent again, finds the marker of the first one, and may
    not read it: that is a refusal, and not the marker of another writer or a fault that passes."""
    if overwrite and engine != "obstore":
        pytest.skip("no put on a condition of a version")
    place = s3_place(s3, engine)
    await sidestream.save({"step": 0}, place.url(), **for_save(**place.keywords))
    url = place.url() if overwrite else place.url("other")
    kind, put = ("replace" if overwrite else "create"), list[Request]()

    def fault(request: Request) -> int | str | None:
        if not request.key.endswith(".metadata"):
            return None
        if request.kind == kind:
            put.append(request)
            return "lose" if len(put) == 1 else None
        return 403 if put and request.kind in ("get", "head") else None

    s3.fault = fault
    with pytest.raises(errors.OutcomeUnknownError) as raised:
        await sidestream.save({"step": 7}, url, overwrite=overwrite, **for_save(**place.keywords))
    assert type(raised.value.__cause__) is errors.AccessDeniedError
    assert len(put) == 2
    s3.fault = lambda request: None
    state = {"step": 0}
    await sidestream.load(state, url, **for_load(**place.keywords))
    assert state == {"step": 7}, "what may have been committed is not cleaned up"


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_object_of_another_writer_that_may_not_be_read(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine)
    async with sidestream.Checkpointer(place.base, **for_run(**place.keywords)) as checkpoints:
        store = checkpoints._run.store
        assert isinstance(store, ObjectStore)

        async def create(content: bytes) -> bool:
            with time_limit(Deadline.after(60)):
                return await on_io_loop(lambda: store._bucket.create("x", content), "x")

        assert await create(b"one")
        assert not await create(b"one")
        with pytest.raises(errors.CheckpointExistsError):
            await create(b"two")
        s3.fault = lambda request: 403 if request.kind in ("get", "head") else None
        before = s3.count("create")
        with pytest.raises(errors.AccessDeniedError) as raised:
            await create(b"two")
        assert not errors.is_uncertain(raised.value)
        assert s3.count("create") == before + 1


@pytest.mark.parametrize("fault", [500, "truncate"])
@pytest.mark.parametrize("engine", ENGINES)
async def test_faults_of_a_load(s3: S3Server, engine: str, fault: int | str) -> None:
    place = s3_place(s3, engine)
    await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    s3.once("get", fault, times=3)
    await loads(place)


@pytest.mark.parametrize("name", ["status404", "http404", "(404"])
@pytest.mark.parametrize("engine", ENGINES)
async def test_an_object_whose_name_looks_like_a_status(s3: S3Server, engine: str, name: str) -> None:
    place = s3_place(s3, engine)
    async with sidestream.Checkpointer(place.url(name), **for_run(**place.keywords)) as checkpoints:
        for step in (1, 2):
            await checkpoints.save({"step": step}, step=step)
        s3.once("get", 500, key=f"run/{name}/step-2/.metadata")
        assert await checkpoints.restore({"step": 0}) == 2


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_object_whose_name_looks_like_throttling(s3: S3Server, engine: str) -> None:
    """A status 500 is not sent again for ever, and a put that is cut off is not taken for one that was refused."""
    place = s3_place(s3, engine, retries=1)
    s3.always("put", 500)
    with pytest.raises(errors.StorageError):
        await sidestream.save(large(), place.url("slowdown"), **for_save(timeout_s=30.0, **place.keywords))
    assert s3.count("put") == 2
    s3.always("create", "reset")
    with pytest.raises(errors.OutcomeUnknownError):
        await sidestream.save(large(), place.url("slowdown"), **for_save(**place.keywords))
    assert [name for name in s3.objects if name.endswith(".distcp")] != []


@pytest.mark.parametrize("engine", ENGINES)
async def test_throttled_tries_are_no_retries(s3: S3Server, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_THROTTLED_BASE_S", 0.01)
    place = s3_place(s3, engine, retries=1)
    answers = [503, 503, 503, 500]
    s3.fault = lambda request: answers.pop(0) if request.kind == "create" and answers else None
    await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    assert s3.count("create") == 5
    await loads(place)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_request_that_s3_has_not_received_in_time(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine)
    s3.once("create", 400)
    await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    await loads(place)


async def test_repetitions_can_be_seen(s3: S3Server) -> None:
    place = s3_place(s3, "obstore")
    seen: list[events.Event] = []
    with events.observe(seen.append):
        s3.once("create", 500)
        await sidestream.save(large(), place.url(), **for_save(**place.keywords))
        s3.once("get", 503)
        await loads(place)
    retried = [one for one in seen if isinstance(one, events.Retried)]
    throttled = [one for one in seen if isinstance(one, events.Throttled)]
    assert [one.operation for one in retried] == ["writing"]
    assert [one.operation for one in throttled] == ["reading"]
    assert retried[0].url.endswith("/ckpt/.metadata")


# --- what does not --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["part", "complete"])
@pytest.mark.parametrize("engine", ENGINES)
async def test_a_save_that_fails_leaves_nothing(s3: S3Server, engine: str, kind: str) -> None:
    place = s3_place(s3, engine, retries=1)
    s3.always(kind, 500)
    with pytest.raises(errors.StorageError) as raised:
        await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    assert raised.value.__cause__ is not raised.value
    s3.fault = lambda request: None
    assert_nothing_left(s3)
    await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    await loads(place)


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_upload_is_aborted_by_whoever_began_it(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine, retries=0)
    s3.always("part", 500)
    with pytest.raises(errors.StorageError):
        await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    assert s3.count("abort") == 1
    assert_nothing_left(s3)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_cancelled_upload_is_aborted(s3: S3Server, engine: str) -> None:
    """Between two parts."""
    place = s3_place(s3, engine, concurrency=1)
    loop = asyncio.get_running_loop()
    s3.fault = lambda request: cancel() if request.kind == "part" else None
    pending = sidestream.async_save(large(), place.url(), **for_save(**place.keywords))

    def cancel() -> None:
        loop.call_soon_threadsafe(pending.cancel)

    with pytest.raises(asyncio.CancelledError):
        await pending
    assert_nothing_left(s3)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_stalled_part_ends_with_the_deadline(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine)
    s3.always("part", "stall")
    with pytest.raises(errors.DeadlineExceededError):
        await sidestream.save(large(), place.url(), **for_save(timeout_s=2.0, **place.keywords))
    if engine == "obstore":  # it aborts when the parts in flight have ended, which these do not
        s3.uploads.clear()
    assert_nothing_left(s3)


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_stalls_is_sent_again(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine, request_timeout_s=2.0)
    s3.once("part", "stall")
    await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    s3.once("get", "stall", key=".distcp")
    await loads(place)
    assert s3.uploads == {}


@pytest.mark.parametrize("kind", ["part", "put"])
@pytest.mark.parametrize("engine", ENGINES)
async def test_cancelling_beside_a_stalled_peer(s3: S3Server, engine: str, kind: str) -> None:
    place = s3_place(s3, engine)
    s3.once(kind, "stall", key="run/ckpt")
    pending = sidestream.async_save(large(), place.url(), **for_save(**place.keywords))
    await asyncio.to_thread(s3.wait_for, kind)
    pending.cancel()
    await asyncio.wait_for(pending.ended(), 60)
    with pytest.raises(asyncio.CancelledError):
        await pending
    assert pending.outcome == "absent"
    if (engine, kind) == ("obstore", "part"):  # it aborts when the parts in flight have ended, if they do in time
        s3.uploads.clear()
    assert_nothing_left(s3)


@pytest.mark.parametrize("fault", ["stall", "stall-after"])
@pytest.mark.parametrize("engine", ENGINES)
async def test_a_commit_that_is_cancelled_is_finished(s3: S3Server, engine: str, fault: str) -> None:
    place = s3_place(s3, engine, request_timeout_s=2.0)
    s3.once("create", fault)
    pending = sidestream.async_save(large(), place.url(), **for_save(**place.keywords))
    await asyncio.to_thread(s3.wait_for, "create")
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    assert pending.outcome == "committed"
    await loads(place)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_commit_without_an_answer(s3: S3Server, engine: str) -> None:
    """It may arrive yet, so nothing may be deleted, and nobody may say what came of it."""
    place = s3_place(s3, engine, retries=1)
    s3.always("create", "reset")
    with pytest.raises(errors.OutcomeUnknownError):
        await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    assert [name for name in s3.objects if name.endswith(".distcp")] != []
    assert not any(name.endswith(".metadata") for name in s3.objects)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_commit_without_an_answer_while_the_storage_throttles(
    s3: S3Server, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put of the marker stalls, and until the deadline of the save no request may be sent."""
    monkeypatch.setattr(requests, "_THROTTLED_BASE_S", 5.0)  # a pause of 5 s at least
    place = s3_place(s3, engine, request_timeout_s=1.5)
    faults: dict[str, int | str | None] = {"create": "stall", "list": None}
    s3.fault = lambda request: faults.get(request.kind)
    async with sidestream.Checkpointer(place.base, **for_run(**place.keywords)) as checkpoints:
        await checkpoints.steps()  # makes the client
        for timeout_s in (4.0, 16.0, 64.0):
            pending = checkpoints.async_save(large(), step=1, **for_save(timeout_s=timeout_s))
            while not (sent := s3.count("create")) and not pending.done():
                await asyncio.sleep(0.01)
            if sent:
                break
        faults["list"] = 503
        looking = asyncio.create_task(checkpoints.steps())
        with pytest.raises(errors.OutcomeUnknownError):
            await pending
        looking.cancel()
        assert pending.outcome == "unknown"
    assert [name for name in s3.objects if name.endswith(".distcp")] != []


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_stalled_read_ends_with_the_deadline(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine)
    await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    s3.always("get", "stall", key=".distcp")
    target = {"large": torch.zeros(3 << 20), "step": 0}
    with pytest.raises(errors.DeadlineExceededError):
        await sidestream.load(target, place.url(), **for_load(timeout_s=2.0, **place.keywords))


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_attempt_that_was_removed_cannot_be_published(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine)

    def remove(request: Any) -> None:
        if request.kind == "put" and "manifest-" in request.key:
            for name in [one for one in s3.objects if one.endswith(".distcp")]:
                del s3.objects[name]

    s3.fault = remove
    with pytest.raises(errors.StorageError, match="is gone") as raised:
        await sidestream.save(large(), place.url(), **for_save(**place.keywords))
    assert type(raised.value) is errors.StorageError  # other ranks make it again by its name
    assert not any(name.endswith(".metadata") for name in s3.objects)
