"""``overwrite=True`` on object storage: a put on a condition commits, and what lost or was replaced is deleted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _own_stores import VersionedStore
from _places import Place, s3_place
from _s3_server import Fault, Request, S3Server
from keywords import for_load, for_save

import sidestream
from sidestream import load, remove, save
from sidestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidOptionError,
    SidestreamError,
    UnsupportedError,
)


def state_of(seed: int) -> dict[str, Any]:
    return {"a": torch.full((1000,), float(seed)), "b": torch.full((300, 300), seed), "step": seed}


class Target:
    """One URL, and a look at what is stored below it."""

    def __init__(self, url: str, how: dict[str, Any], names: Callable[[], list[str]]) -> None:
        self.url, self.how, self._names = url, how, names

    def names(self) -> list[str]:
        return sorted(name.rpartition("/")[2] for name in self._names())

    def ids(self) -> set[str]:
        """Of the saves whose manifests are there."""
        return {name.removeprefix("manifest-") for name in self.names() if name.startswith("manifest-")}

    async def save(self, seed: int, **more: Any) -> sidestream.SaveInfo:
        return await save(state_of(seed), self.url, overwrite=True, **for_save(**self.how, **more))

    def save_here(self, seed: int) -> sidestream.SaveInfo:
        """In a thread of the server."""
        return asyncio.run(self.save(seed))

    async def loaded(self) -> int:
        """The seed of the checkpoint, all parts of which have to say the same."""
        state = state_of(-1)
        await load(state, self.url, **for_load(**self.how))
        seeds = {int(value) for tensor in (state["a"], state["b"]) for value in tensor.unique()} | {state["step"]}
        (seed,) = seeds
        return int(seed)


def on_s3(server: S3Server, engine: str = "obstore") -> Target:
    place: Place = s3_place(server, engine)
    return Target(place.url("last"), place.keywords, lambda: list(server.objects))


class OnceAt:
    """At the request number ``at`` of that kind whose key contains ``key``, ``work`` is done before it is."""

    def __init__(self, server: S3Server, kind: str, key: str, work: Callable[[], object], at: int = 1) -> None:
        self.left = at
        self._server, self._kind, self._key, self._work = server, kind, key, work
        server.fault = self._choose

    def _choose(self, request: Request) -> Fault | None:
        if request.kind == self._kind and self._key in request.key and self.left:
            self.left -= 1
            return None if self.left else self._do
        return None

    def _do(self) -> None:
        self._server.fault = lambda request: None
        self._work()


async def test_the_saver_process_replaces(s3: S3Server) -> None:
    target = on_s3(s3)
    for seed in range(2):
        info = await target.save(seed, writer="process")
    assert await target.loaded() == 1
    assert target.ids() == {info.save_id}


async def test_a_save_that_was_overtaken(s3: S3Server) -> None:
    """The other one has deleted its files; it says that it lost, not that they are gone."""
    target = on_s3(s3)
    await target.save(0)
    overtaken: list[sidestream.SaveInfo] = []
    other = OnceAt(s3, "put", "manifest-", lambda: overtaken.append(target.save_here(2)))
    with pytest.raises(CheckpointExistsError, match="replaced"):
        await target.save(1)
    assert not other.left
    assert await target.loaded() == 2
    assert target.ids() == {overtaken[0].save_id}


@pytest.mark.parametrize("fault", ["lose", 409, 500])
async def test_a_commit_whose_answer_is_lost(fault: Any, s3: S3Server) -> None:
    """The request is repeated, and finds its own marker, or that of the checkpoint that is replaced."""
    target = on_s3(s3)
    await target.save(0)
    s3.once("replace", fault, ".metadata")
    await target.save(1)
    assert await target.loaded() == 1
    assert len(target.names()) == 4


async def test_a_removal_meanwhile(s3: S3Server) -> None:
    target = on_s3(s3)
    first = await target.save(0)
    marker = next(key for key in s3.objects if key.endswith(".metadata"))
    OnceAt(s3, "put", "manifest-", lambda: s3.objects.pop(marker))
    with pytest.raises(CheckpointExistsError):
        await target.save(1)
    assert [name for name in target.names() if "distcp" not in name] == [f"manifest-{first.save_id}"]


async def test_nothing_is_deleted_before_the_commit(s3: S3Server) -> None:
    """And what was not deleted after it is deleted by the next save."""
    target = on_s3(s3)
    first = await target.save(0)
    s3.log.clear()
    s3.always("delete_many", 403)
    second = await target.save(1)
    kinds = [(one.kind, one.key.rpartition("/")[2]) for one in s3.log]
    assert kinds.index(("delete_many", "")) > kinds.index(("replace", ".metadata"))
    s3.fault = lambda request: None
    assert target.ids() == {first.save_id, second.save_id}
    assert await target.loaded() == 1
    third = await target.save(2)
    assert target.ids() == {third.save_id}
    assert len(target.names()) == 4


async def test_a_save_that_lives_keeps_its_files(s3: S3Server) -> None:
    """One that begins while another one deletes is not touched by that one, and replaces it."""
    target = on_s3(s3)
    await target.save(0)
    loop, second = asyncio.get_running_loop(), []
    written = threading.Event()

    def begin() -> None:
        """The first save has committed. The second one writes all files, and waits with its marker."""
        OnceAt(s3, "replace", ".metadata", lambda: written.set() or done.wait(60))
        second.append(asyncio.run_coroutine_threadsafe(target.save(2), loop))
        assert written.wait(60)

    done = threading.Event()
    OnceAt(s3, "replace", ".metadata", lambda: OnceAt(s3, "list", "", begin))
    await target.save(1)
    done.set()
    info = await asyncio.wrap_future(second[0])
    assert await target.loaded() == 2
    assert target.ids() == {info.save_id}


@pytest.mark.parametrize("kind", ["get", "list"])
async def test_a_reader_is_overtaken_at_each_request(kind: str, s3: S3Server) -> None:
    """Before its request number n a whole save replaces what it reads."""
    target = on_s3(s3)
    await target.save(0)
    for number in range(1, 30):
        overtaking = OnceAt(s3, kind, "", lambda: target.save_here(number), at=number)  # noqa: B023
        assert await target.loaded() in (number - 1, number)
        s3.fault = lambda request: None
        if overtaking.left:
            break
    assert number >= 2


@pytest.mark.parametrize("kind", ["get", "list"])
async def test_a_verification_is_overtaken_at_each_request(kind: str, s3: S3Server) -> None:
    """By a checkpoint whose files are shorter."""
    target = on_s3(s3)

    def replace() -> None:
        asyncio.run(save({"step": 5}, target.url, overwrite=True, **for_save(**target.how)))

    for number in range(1, 30):
        await target.save(0)
        overtaking = OnceAt(s3, kind, "", replace, at=number)
        report = await sidestream.verify(target.url, **target.how)
        assert report.ok, (number, report.damaged)
        s3.fault = lambda request: None
        if overtaking.left:
            break
    assert number >= 2


async def test_what_is_no_checkpoint_is_not_replaced(s3: S3Server) -> None:
    target = on_s3(s3)
    key = target.url.partition("://")[2].partition("/")[2]
    s3.objects[f"{key}/thesis.tex"], s3.modified[f"{key}/thesis.tex"] = b"years of work", datetime.now(UTC)
    with pytest.raises(CheckpointExistsError):
        await target.save(1)
    assert target.names() == ["thesis.tex"]


async def test_one_of_stock_dcp_is_not_replaced(s3: S3Server, tmp_path: Any) -> None:
    dcp.save(state_of(1), checkpoint_id=tmp_path / "last", no_dist=True)
    target = on_s3(s3)
    await sidestream.copy(tmp_path / "last", target.url, target_storage=target.how["storage"])
    before = target.names()
    with pytest.raises(CheckpointExistsError, match="remove"):
        await target.save(2)
    assert target.names() == before
    assert await target.loaded() == 1


async def test_a_copied_one_is_replaced_whole(s3: S3Server, tmp_path: Any) -> None:
    """Its shard files have no ids in their names."""
    await save(state_of(1), tmp_path / "last")
    target = on_s3(s3)
    await sidestream.copy(tmp_path / "last", target.url, target_storage=target.how["storage"])
    info = await target.save(2)
    assert await target.loaded() == 2
    assert len(target.names()) == 4
    assert all(info.save_id in name or name == ".metadata" for name in target.names())


async def test_dcp_replaces(s3: S3Server) -> None:
    target = on_s3(s3)
    for seed in range(2):
        writer = sidestream.dcp.StorageWriter(target.url, overwrite=True, **target.how)
        await asyncio.to_thread(dcp.save, state_of(seed), storage_writer=writer, no_dist=True)
    assert await target.loaded() == 1
    assert len(target.ids()) == 1


# --- without conditions ---


async def test_a_client_without_conditions(s3: S3Server) -> None:
    with pytest.raises(UnsupportedError, match="remove"):
        await save(state_of(1), "memory://replacing/last", overwrite=True)
    with pytest.raises(UnsupportedError, match="fsspec"):
        await on_s3(s3, "fsspec").save(1)
    assert s3.objects == {}


async def test_a_server_without_conditions(s3: S3Server) -> None:
    """It would take every put. That is noticed before anything is written beside the checkpoint."""
    s3.ignores_conditions = True
    policy = sidestream.StorePolicy(engine="obstore", request_timeout_s=17)  # a client that has not looked yet
    target = on_s3(s3)
    target.how = {**target.how, "storage": sidestream.Storage(target.how["storage"].options, policy=policy)}
    await target.save(0)
    before = target.names()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="condition"):
            await target.save(1)
        assert target.names() == before
    assert await target.loaded() == 0


def test_a_store_that_lacks_the_methods() -> None:
    class Lacking(VersionedStore):
        replace = None  # type: ignore[assignment]

    with pytest.raises(InvalidOptionError, match=r"replace\(\)"):
        sidestream.blocking.save(state_of(1), "run/last", storage=sidestream.Storage(filesystem=Lacking()))


# --- remove ---


async def test_remove_takes_what_attempts_have_left(s3: S3Server) -> None:
    target = on_s3(s3)
    await target.save(0)
    s3.always("delete_many", 403)
    await target.save(1)
    s3.fault = lambda request: None
    await remove(target.url, **target.how)
    left = target.names()
    assert left, "another process may be about to commit them"
    with pytest.raises(CheckpointNotFoundError):
        await remove(target.url, **target.how)
    assert target.names() == left
    for name in s3.objects:
        s3.modified[name] -= timedelta(seconds=3700)
    await remove(target.url, **target.how)
    assert target.names() == []


async def test_an_interrupted_remove_is_continued(s3: S3Server) -> None:
    target = on_s3(s3)
    await target.save(0)
    OnceAt(s3, "delete_many", "", lambda: s3.always("delete_many", 403), at=1)
    with pytest.raises(SidestreamError):
        await remove(target.url, **target.how)
    s3.fault = lambda request: None
    with pytest.raises(CheckpointNotFoundError):
        await target.loaded()
    with pytest.raises(CheckpointExistsError):
        await target.save(1)
    await remove(target.url, **target.how)
    assert target.names() == []
    with suppress(CheckpointNotFoundError):
        await remove(target.url, **target.how)
        pytest.fail("there is nothing any more")
    await target.save(1)
    assert await target.loaded() == 1
