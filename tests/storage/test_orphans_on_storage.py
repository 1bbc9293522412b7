"""Object storage: what killed saves and exports have left at a target, and exports of a step that is saved again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from _own_stores import DirectoryStore, without
from _s3_server import S3Server, serving
from keywords import for_run, for_save

import sidestream
from sidestream._convert.safetensors import header_of
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage import Attempt, BytesBody, Transaction, locate_directory
from sidestream.errors import CheckpointExistsError, CheckpointNotFoundError, SkippedError

STATE = {"a": torch.arange(1000.0), "b": torch.ones(300, 300)}


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serving() as one:
        yield one


def where_in(server: S3Server) -> dict[str, Any]:
    return {"storage": sidestream.Storage(server.options, policy=sidestream.StorePolicy(engine="obstore"))}


def names(server: S3Server, prefix: str) -> list[str]:
    return sorted(key for key in server.objects if key.startswith(prefix))


def age(server: S3Server, keys: list[str], seconds: float) -> None:
    for key in keys:
        server.modified[key] -= timedelta(seconds=seconds)


async def orphaned(server: S3Server, url: str, prefix: str) -> list[str]:
    """Leave the files of a save that was killed before it put the marker."""
    await sidestream.save(STATE, url, files={"config.json": b"{}"}, **for_save(**where_in(server)))
    del server.objects[f"{prefix}/.metadata"]
    return names(server, prefix)


@pytest.mark.parametrize("verb", ["overwrite", "remove"])
async def test_files_of_a_killed_save(verb: str, server: S3Server) -> None:
    url = f"s3://{server.bucket}/run/last"
    left = await orphaned(server, url, "run/last")
    assert len(left) >= 3
    age(server, left, 3500)
    if verb == "overwrite":
        await sidestream.save(STATE, url, overwrite=True, **for_save(**where_in(server)))
        assert set(left) < set(names(server, "run/last"))
        del server.objects["run/last/.metadata"]
        age(server, names(server, "run/last"), 200)
        age(server, left, 0)
        await sidestream.save(STATE, url, overwrite=True, **for_save(**where_in(server)))
        assert not set(left) & set(names(server, "run/last"))
        assert (await sidestream.verify(url, **where_in(server))).ok
    else:
        with pytest.raises(CheckpointNotFoundError):
            await sidestream.remove(url, **where_in(server))
        assert names(server, "run/last") == left
        age(server, left, 200)
        await sidestream.remove(url, **where_in(server))
        assert names(server, "run/last") == []


@pytest.mark.parametrize("verb", ["overwrite", "remove"])
async def test_files_of_a_killed_copy(verb: str, server: S3Server, tmp_path: Path) -> None:
    url = f"s3://{server.bucket}/copied"
    await sidestream.save(STATE, tmp_path / "c")
    await sidestream.copy(tmp_path / "c", url, target_storage=sidestream.Storage(server.options))
    del server.objects["copied/.metadata"]
    left = names(server, "copied")
    if verb == "overwrite":
        with pytest.raises(CheckpointExistsError):
            await sidestream.save(STATE, url, overwrite=True, **for_save(**where_in(server)))
    age(server, left, 3700)
    if verb == "overwrite":
        await sidestream.save(STATE, url, overwrite=True, **for_save(**where_in(server)))
        assert (await sidestream.verify(url, **where_in(server))).ok
    else:
        await sidestream.remove(url, **where_in(server))
        assert names(server, "copied") == []


async def exported(url: str, step: int, server: S3Server) -> dict[str, torch.Tensor]:
    checkpoint = await sidestream.open_checkpoint(f"{url}/exports/{step}", **where_in(server))
    return {name: await checkpoint.tensor(name) for name in checkpoint}


@pytest.mark.parametrize("road", ["snapshot", "checkpoint"])
@pytest.mark.parametrize("shard_bytes", [5 << 30, 100_000])
async def test_the_export_of_a_step_that_is_saved_again(shard_bytes: int, road: str, server: S3Server) -> None:
    url = f"s3://{server.bucket}/run"
    where = where_in(server)
    export = sidestream.HF(f"{url}/exports/{{step}}", max_shard_bytes=shard_bytes, files={"c.json": b"{}"}, **where)
    budget = {"snapshot": 1 << 28, "checkpoint": 1 << 20}[road]
    async with (
        sidestream.AsyncStager(budget_bytes=budget) as stager,
        sidestream.Checkpointer(url, export=export, stager=stager, **for_run(**where)) as run,
    ):
        for seed in range(3):
            pending = run.async_save({**STATE, "c": torch.full((3,), float(seed))}, step=7)
            await pending
            report = await pending.exports[0]
            found = await exported(url, 7, server)
            assert torch.equal(found["c"], torch.full((3,), float(seed)))
            assert {name.rpartition("/")[2] for name in names(server, "run/exports/7")} == set(report.files)


async def test_what_a_killed_export_left(server: S3Server) -> None:
    url = f"s3://{server.bucket}/run"
    where = where_in(server)
    export = sidestream.HF(f"{url}/exports/{{step}}", max_shard_bytes=100_000, **where)
    async with sidestream.Checkpointer(url, export=export, **for_run(**where)) as run:
        pending = run.async_save(STATE, step=7)
        await pending.exports[0]
        del server.objects["run/exports/7/model.safetensors.index.json"]
        pending = run.async_save(STATE, step=7)
        with pytest.raises(CheckpointExistsError):  # another process may be writing it
            await pending.exports[0]
        age(server, names(server, "run/exports/7"), 3700)
        pending = run.async_save(STATE, step=7)
        await pending.exports[0]
        assert (await exported(url, 7, server)).keys() == STATE.keys()
        server.objects["run/exports/7/notes.txt"] = b"mine"
        server.modified["run/exports/7/notes.txt"] = server.modified["run/exports/7/model-00001-of-00002.safetensors"]
        pending = run.async_save(STATE, step=7)
        await pending.exports[0]
        assert "run/exports/7/notes.txt" not in server.objects  # as in a local directory, which is replaced whole


async def test_what_a_killed_export_of_another_step_left(server: S3Server) -> None:
    """``exports_keep=`` deletes it, when nobody can be writing it any more."""
    url = f"s3://{server.bucket}/run"
    where = where_in(server)
    export = sidestream.HF(f"{url}/exports/{{step}}", max_shard_bytes=100_000, **where)
    async with sidestream.Checkpointer(url, export=export, exports_keep=1, **for_run(**where)) as run:
        await run.save(STATE, step=7)
        del server.objects["run/exports/7/model.safetensors.index.json"]
        await run.save(STATE, step=8)
    assert names(server, "run/exports/7")
    age(server, names(server, "run/exports/7"), 3700)
    async with sidestream.Checkpointer(url, export=export, exports_keep=1, **for_run(**where)) as run:
        await run.save(STATE, step=9)
    assert not names(server, "run/exports/7")
    assert (await exported(url, 9, server)).keys() == STATE.keys()


async def test_of_several_exports_at_once_that_of_the_last_save_stays(server: S3Server) -> None:
    url = f"s3://{server.bucket}/run"
    where = where_in(server)
    export = sidestream.HF(f"{url}/exports/{{step}}", **where)
    async with sidestream.Checkpointer(url, export=export, slots=4, **for_run(**where)) as run:
        await run.async_save(STATE, step=7).exports[0]
        saves = [run.async_save({**STATE, "c": torch.full((3,), float(seed))}, step=7) for seed in range(4)]
        await asyncio.gather(*saves)
        ended = await asyncio.gather(*(save.exports[0] for save in saves), return_exceptions=True)
    assert isinstance(ended.pop(), sidestream.ConvertReport)
    assert all(isinstance(one, SkippedError | sidestream.ConvertReport) for one in ended), ended
    assert int((await exported(url, 7, server))["c"][0]) == 3


@pytest.mark.parametrize("ends", ["commit", "discard"])
async def test_an_export_that_another_one_has_replaced(ends: str, server: S3Server) -> None:
    location = locate_directory(f"s3://{server.bucket}/exports/7", where_in(server)["storage"])

    async def written(content: bytes) -> Transaction:
        attempt = Attempt(location.name, "files", uuid.uuid4().hex, "fsync", replaces_export=True)
        transaction = location.store.begin(attempt)
        await asyncio.to_thread(transaction.write, [("model.safetensors", BytesBody(content))])
        return transaction

    with time_limit(Deadline.after(60)):
        first = await written(header_of([], {}))
        second = await written(header_of([], {}) + b"the second")
        if ends == "commit":
            with pytest.raises(CheckpointExistsError, match=r"exports/7 was replaced meanwhile: another export"):
                first.commit({})
        first.discard()
        second.commit({})
    assert server.objects["exports/7/model.safetensors"] == header_of([], {}) + b"the second"


async def test_a_store_in_memory() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    async with sidestream.Checkpointer(f"{url}/run", export=sidestream.HF(f"{url}/exports/{{step}}")) as run:
        for _ in range(2):
            await run.async_save(STATE, step=7).exports[0]


async def test_a_store_without_conditional_puts_names_the_remedy(tmp_path: Path) -> None:
    store = without(DirectoryStore(tmp_path), create_only=False)
    location = locate_directory("mine://exports/7", sidestream.Storage(filesystem=store))
    content = [("model.safetensors", BytesBody(header_of([], {})))]
    for replaces in (False, True):
        attempt = Attempt(location.name, "files", uuid.uuid4().hex, "fsync", replaces_export=replaces)
        transaction = location.store.begin(attempt)
        with time_limit(Deadline.after(60)):
            if not replaces:
                await asyncio.to_thread(transaction.write, content)
                transaction.commit({})
                continue
            with pytest.raises(
                CheckpointExistsError, match=r"has an export, and .* creates no object conditionally.*: delete it"
            ):
                await asyncio.to_thread(transaction.write, content)
