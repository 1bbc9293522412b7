"""What is deleted from object stores, in which order, and what is found of those who died."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch
import warm
from _places import s3_place
from _s3_server import S3Server
from keywords import for_run, for_save

import sidestream
from sidestream import errors
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage import Attempt, BytesBody, id_of, locate_run
from sidestream._storage.names import NOTE
from sidestream._storage.object_store.store import ObjectStore

STATE = {"large": torch.arange(3 << 20, dtype=torch.float32), "step": 7}


def store_of(server: S3Server, engine: str = "obstore", **changes: Any) -> ObjectStore:
    place = s3_place(server, engine, **changes)
    store = locate_run(place.base, place.keywords["storage"])[0]
    assert isinstance(store, ObjectStore)
    return store


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """The deadline of calls that are made here without an operation around them."""
    with time_limit(Deadline.after(60)):
        yield


def killed_while_uploading(server: S3Server, engine: str) -> None:
    """A process that dies with parts on their way."""
    server.always("complete", "stall")
    code = textwrap.dedent(f"""
        import asyncio, torch, sidestream
        state = {{"large": torch.arange(3 << 20, dtype=torch.float32), "step": 7}}
        policy = sidestream.StorePolicy(engine={engine!r}, part_bytes=5 << 20)
        storage = sidestream.Storage({server.options!r}, policy=policy)
        asyncio.run(sidestream.save(state, "s3://{server.bucket}/run/step-1", storage=storage))
    """)
    child = warm.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        server.wait_for("complete")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    server.fault = lambda request: None


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
async def test_what_the_dead_leave_behind(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine)
    await asyncio.to_thread(killed_while_uploading, s3, engine)
    assert len(s3.uploads) == 1
    async with sidestream.Checkpointer(place.base, **for_run(**place.keywords)) as checkpoints:
        assert await checkpoints.steps() == []
        assert await checkpoints.restore({"large": torch.zeros(3 << 20), "step": 0}) is None
    store = store_of(s3, engine)
    found = await store.leftovers()
    assert [one.kind for one in found] == ["attempt"]
    assert found[0].name.startswith("step-1/")
    assert found[0].age_s >= 0
    assert not any(name.startswith("run/.leases") for name in s3.objects)
    for one in found:
        await store.discard(one.name)
    assert s3.objects == {}
    assert await store.leftovers() == []


async def test_the_marker_goes_first(s3: S3Server) -> None:
    place, store = s3_place(s3, "obstore"), store_of(s3)
    await sidestream.save(STATE, place.url("step-1"), **for_save(**place.keywords))
    await sidestream.save(STATE, place.url("step-2"), **for_save(**place.keywords))
    s3.log.clear()
    await store.remove_directory("step-1", durability="fsync")
    deleted = [one for one in s3.log if one.kind.startswith("delete")]
    assert len(deleted) == 3, "the marker, the files, the note"
    assert all(name.startswith("run/step-2/") for name in s3.objects)
    assert await store.leftovers() == []


async def test_many_files_are_deleted_by_few_requests(s3: S3Server) -> None:
    """First the file that readers look for. A client that deletes one object at a time does the same in more."""
    place = s3_place(s3, "obstore")
    state = {f"t{number}": torch.ones(3) for number in range(40)}
    export = sidestream.HF(place.url("hf"), max_shard_bytes=1, **place.keywords)
    info = await sidestream.save(state, place.url("step-1"), export=export, **for_save(**place.keywords))
    assert isinstance(info.exports[0], sidestream.ConvertReport)
    assert sum(name.startswith("run/hf/") for name in s3.objects) == 41
    left: list[int] = []

    def count(request: Any) -> None:
        if request.kind.startswith("delete"):
            assert "run/hf/model.safetensors.index.json" not in s3.objects or not left
            left.append(sum(name.startswith("run/hf/") for name in s3.objects))

    s3.fault = count
    await sidestream.remove(place.url("hf"), **place.keywords)
    assert left == [41, 40]
    assert not any(name.startswith("run/hf/") for name in s3.objects)
    assert "run/step-1/.metadata" in s3.objects


async def test_a_deletion_that_was_interrupted(s3: S3Server) -> None:
    """No checkpoint is left, and what is left of it is found."""
    place, store = s3_place(s3, "obstore", retries=0), store_of(s3, retries=0)
    await sidestream.save(STATE, place.url("step-1"), **for_save(**place.keywords))
    deletions = 0

    def fail_the_second(request: Any) -> int | None:
        nonlocal deletions
        deletions += request.kind.startswith("delete")
        return 500 if request.kind.startswith("delete") and deletions > 1 else None

    s3.fault = fail_the_second
    with pytest.raises(errors.StorageError):
        await store.remove_directory("step-1", durability="fsync")
    s3.fault = lambda request: None
    with pytest.raises(errors.CheckpointNotFoundError):
        await sidestream.open_checkpoint(place.url("step-1"), **place.keywords)
    (found,) = await store.leftovers()
    assert (found.kind, found.name) == ("retired", f"step-1/{NOTE}")
    await store.discard(found.name)
    assert s3.objects == {}


async def test_a_save_that_commits_during_a_removal(s3: S3Server) -> None:
    """Its files stay: the removal deletes those of the checkpoint whose marker it has deleted."""
    place = s3_place(s3, "obstore")
    creating, create, deleting, delete = (threading.Event() for _ in range(4))
    counted = {"create": 0, "delete": 0}

    def wait(request: Any) -> Any:
        kind = request.kind.removesuffix("_many")
        if kind not in counted:
            return None
        counted[kind] += 1
        if kind == "create" and counted[kind] == 1:
            return lambda: (creating.set(), create.wait(60))
        if kind == "delete" and counted[kind] == 2:  # after the marker
            return lambda: (deleting.set(), delete.wait(60))
        return None

    s3.fault = wait
    pending = sidestream.async_save({**STATE, "step": 8}, place.url("step-1"), **for_save(**place.keywords))
    assert await asyncio.to_thread(creating.wait, 60)
    await sidestream.save(STATE, place.url("step-1"), **for_save(**place.keywords))
    removal = asyncio.create_task(sidestream.remove(place.url("step-1"), **place.keywords))
    assert await asyncio.to_thread(deleting.wait, 60)
    create.set()
    info = await pending
    delete.set()
    await removal
    assert {id_of(name.rpartition("/")[2]) for name in s3.objects} == {info.save_id, None}
    target = {"large": torch.zeros(3 << 20), "step": 0}
    await sidestream.load(target, place.url("step-1"), **place.keywords)
    assert target["step"] == 8


async def test_two_removals_at_once_keep_the_files_of_a_save(s3: S3Server) -> None:
    """The slower removal reads the marker when the faster one has deleted it. The save has begun before both."""
    place, store = s3_place(s3, "obstore"), store_of(s3)
    begun = store.begin(Attempt("step-1", "directory", "a" * 32, "fsync"))
    await asyncio.to_thread(begun.write, [("__0_0.distcp", BytesBody(b"of a save that goes on"))])
    await sidestream.save(STATE, place.url("step-1"), **for_save(**place.keywords))
    reading, read = threading.Event(), threading.Event()

    def wait_once(request: Any) -> Any:
        if reading.is_set() or request.kind not in ("get", "head") or not request.key.endswith("/.metadata"):
            return None
        reading.set()
        return lambda: read.wait(60)

    s3.fault = wait_once
    slower = asyncio.create_task(store.remove_directory("step-1", durability="fsync"))
    assert await asyncio.to_thread(reading.wait, 60)
    await store.remove_directory("step-1", durability="fsync")
    read.set()
    await slower
    assert set(s3.objects) == {f"run/step-1/{begun.committed_name('__0_0.distcp')}"}


async def test_a_save_that_commits_when_a_removal_has_read_the_marker(s3: S3Server) -> None:
    """The removal finds out before it deletes the marker, and deletes the files of this save too."""
    place, store = s3_place(s3, "obstore"), store_of(s3)
    await sidestream.save(STATE, place.url("step-1"), **for_save(**place.keywords))
    noting, note = threading.Event(), threading.Event()

    def wait_once(request: Any) -> Any:
        if noting.is_set() or request.kind != "put" or not request.key.endswith(NOTE):
            return None
        noting.set()
        return lambda: note.wait(60)

    s3.fault = wait_once
    removal = asyncio.create_task(store.remove_directory("step-1", durability="fsync"))
    assert await asyncio.to_thread(noting.wait, 60)
    await sidestream.save(STATE, place.url("step-1"), overwrite=True, **for_save(**place.keywords))
    note.set()
    await removal
    assert s3.objects == {}


async def test_a_save_that_finds_a_removal_does_not_commit(s3: S3Server) -> None:
    store = store_of(s3)
    begun = store.begin(Attempt("step-1", "directory", "a" * 32, "fsync"))
    await asyncio.to_thread(begun.write, [("__0_0.distcp", BytesBody(b"x"))])
    s3.objects[f"run/step-1/{NOTE}"] = b"b" * 32
    s3.modified[f"run/step-1/{NOTE}"] = datetime.now(UTC)
    with pytest.raises(errors.CheckpointExistsError, match="is being removed"):
        begun.commit({".metadata": [b"a marker that is long enough"]})
    assert begun.outcome == "absent"
    begun.discard()
    assert set(s3.objects) == {f"run/step-1/{NOTE}"}


async def test_an_attempt_that_was_committed_after_it_was_listed(s3: S3Server) -> None:
    place, store = s3_place(s3, "obstore"), store_of(s3)
    info = await sidestream.save(STATE, place.url("step-1"), **for_save(**place.keywords))
    await store.discard(f"step-1/{info.save_id}")
    assert (await sidestream.verify(place.url("step-1"), **place.keywords)).ok


async def test_a_run_keeps_what_its_policy_says(s3: S3Server) -> None:
    place = s3_place(s3, "auto")
    target = {"large": torch.zeros(3 << 20), "step": 0}
    async with sidestream.Checkpointer(
        place.base, keep=sidestream.KeepLast(1), **for_run(**place.keywords)
    ) as checkpoints:
        for step in (1, 2, 3):
            await checkpoints.save(STATE, step=step)
        assert await checkpoints.restore(target) == 3
    # A lease whose removal failed expires by itself, and is no step.
    assert {name.split("/")[1] for name in s3.objects} - {".leases"} == {"step-3"}
    assert s3.uploads == {}


async def test_the_object_for_the_time_of_a_cancelled_call(s3: S3Server) -> None:
    """It is deleted by a later call, when nobody can be waiting for it any more."""
    store = store_of(s3)
    await store.put("step-1/a", b"a", durability="fsync")
    s3.always("list", "stall", ".leases")
    cancelled = asyncio.create_task(store.ages("step-1"))
    await asyncio.to_thread(s3.wait_for, "list")
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    s3.fault = lambda request: None
    (left,) = {name for name in s3.objects if "clock" in name}
    assert set(await store.ages("step-1")) == {"a"}
    assert left in s3.objects, "another process may be about to list it"
    s3.modified[left] -= timedelta(seconds=3700)
    s3.objects["run/.leases/clock"] = b"of somebody"
    s3.modified["run/.leases/clock"] = s3.modified[left]
    assert set(await store.ages("step-1")) == {"a"}
    assert set(s3.objects) == {"run/step-1/a", "run/.leases/clock"}


async def test_files_are_removed_one_by_one(s3: S3Server) -> None:
    store = store_of(s3)
    s3.objects |= {"run/.leases/a": b"1", "run/.leases/b": b"2"}
    s3.modified |= dict.fromkeys(s3.objects, datetime.now(UTC))
    ages = await store.ages(".leases")
    assert set(ages) == {"a", "b"}
    await store.remove([".leases/a", ".leases/none"])
    assert set(s3.objects) == {"run/.leases/b"}
