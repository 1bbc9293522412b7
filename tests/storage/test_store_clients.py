"""How clients are made: late, in a thread, and once; and what nobody may wait for without end."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import uuid
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from _places import Place, policy, s3_place
from _s3_server import KEY, SECRET, S3Server
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from keywords import for_run, for_save
from late import late
from leases import all_returned

import sidestream
from sidestream import errors
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage.clients.engine import Engine, LateEngine
from sidestream._storage.clients.lazy import EngineCache, frozen
from sidestream._storage.clients.requests import Requests, failure_kind

ENGINES = ["obstore", "fsspec"]
STATE = {"large": torch.arange(3 << 20, dtype=torch.float32), "step": 7}


@pytest.fixture
def profiles(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of the AWS tools, which has no profile yet."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "config").write_text("")
    return tmp_path


def by_profile(server: S3Server, engine: str, name: str) -> Place:
    options = {"profile": name, "endpoint_url": server.endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    return Place(f"s3://{server.bucket}/run", {"storage": sidestream.Storage(options, policy=policy(engine))}, server)


async def exists(path: Path) -> None:
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("engine", ENGINES)
async def test_the_loop_runs_while_credentials_are_looked_up(s3: S3Server, profiles: Path, engine: str) -> None:
    """By a program that ends well only when the loop has made a file."""
    given = {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET}
    (profiles / "given.json").write_text(json.dumps(given))
    (profiles / "program.py").write_text(
        "import pathlib, sys, time\n"
        f"here = pathlib.Path({str(profiles)!r})\n"
        "(here / 'asked').touch()\n"
        "end = time.monotonic() + 60\n"
        "while not (here / 'go').exists():\n"
        "    time.monotonic() < end or sys.exit('the loop stood still')\n"
        "    time.sleep(0.01)\n"
        "print((here / 'given.json').read_text())\n"
    )
    (profiles / "config").write_text(
        f"[profile {engine}]\ncredential_process = {sys.executable} {profiles / 'program.py'}\n"
    )
    place = by_profile(s3, engine, engine)  # fsspec keeps clients, too
    pending = sidestream.async_save(STATE, place.url(), **for_save(**place.keywords))
    await exists(profiles / "asked")
    (profiles / "go").touch()
    await pending
    assert "run/ckpt/.metadata" in s3.objects


async def test_what_cannot_be_looked_up_is_tried_again(s3: S3Server, profiles: Path) -> None:
    place = by_profile(s3, "obstore", "later")
    async with sidestream.Checkpointer(place.base, **for_run(**place.keywords)) as checkpoints:
        with pytest.raises(errors.InvalidOptionError, match="later"):
            await checkpoints.steps()
        (profiles / "credentials").write_text(f"[later]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
        assert await checkpoints.steps() == []


def test_what_is_kept_of_clients(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the same options in the same surroundings, and not too many."""
    kept = EngineCache(2)

    def get(options: Any) -> Engine:
        return kept.get(frozen(options), lambda: cast(Engine, object()))

    first = get({"key": "k", "client_kwargs": {"a": [1, True]}})
    assert get({"client_kwargs": {"a": [1, True]}, "key": "k"}) is first
    assert get({"key": "k", "client_kwargs": {"a": [1, 1]}}) is not first
    assert get({"key": "k", "client_kwargs": {"a": [1, True]}}) is first
    (profiles / "credentials").write_text("[rotated]\n")
    second = get({"key": "k", "client_kwargs": {"a": [1, True]}})
    assert second is not first
    monkeypatch.setenv("AWS_PROFILE", "rotated")
    assert get({"key": "k", "client_kwargs": {"a": [1, True]}}) is not second
    assert kept._kept.cache_info().currsize == 2
    with pytest.raises(TypeError):
        frozen({"session": object()})


async def test_saves_share_a_client(s3: S3Server) -> None:
    """A second one opens no connection of its own for what the first one's can carry."""
    place = s3_place(s3, "obstore")
    from sidestream._storage import locate_directory

    storage = place.keywords["storage"]
    engines = [vars(locate_directory(place.url(), storage).store)["_bucket"].engine for _ in range(2)]
    assert await engines[0].get() is await engines[1].get()


async def test_a_client_that_hangs_is_waited_for_until_the_deadline() -> None:
    go = threading.Event()
    made = cast(Engine, object())

    def make() -> Engine:
        assert go.wait(60)
        return made

    engine = LateEngine("hangs", make)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await engine.get()
    go.set()
    assert await engine.get() is made  # the one who gave up has not ended it


@pytest.mark.parametrize("around", [False, True])
async def test_an_upload_joins_no_transaction_of_fsspec(around: bool) -> None:
    """There it would stay in memory, and a transaction of the user would publish it."""
    memory = MemoryFileSystem(skip_instance_cache=True)
    filesystem = DirFileSystem(path="/", fs=memory) if around else memory
    storage = sidestream.Storage(filesystem=filesystem, policy=policy())
    await sidestream.save(STATE, f"{uuid.uuid4().hex}/ckpt", **for_save(storage=storage))
    assert list(memory.transaction.files) == []


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_kept_error_keeps_no_staging_memory(s3: S3Server, engine: str) -> None:
    place = s3_place(s3, engine, retries=0)
    s3.always("part", 500)
    async with sidestream.AsyncStager() as stager:
        with pytest.raises(errors.StorageError) as kept:
            await sidestream.save(STATE, place.url(), stager=stager, **for_save(**place.keywords))
        await all_returned(stager)
        assert kept.value.errno


async def test_an_earlier_try_stays_uncertain() -> None:
    """Whatever ends a later one: the first may still be carried out."""
    failures: list[Exception] = [errors.StorageError(5, "later", "x"), ConnectionResetError("first")]

    async def fail() -> None:
        raise failures.pop()

    with pytest.raises(errors.StorageError, match="later") as raised, time_limit(Deadline.after(60)):
        await Requests("s3://bucket/run", "bucket/run", policy()).run("writing", "x", fail)
    assert errors.is_uncertain(raised.value)


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("Server returned non-2xx status code: 400 Bad Request: <Error><Code>SlowDown</Code>", "throttled"),
        ("status code: 500: <?xml version='1.0'?>\n<Error><Code>ThrottlingException</Code></Error>", "throttled"),
        ("status code: 404: <Code>NoSuchKey</Code><Message>slow down</Message>", "absent"),
        (
            "status code: 500: <Code>InternalError</Code><Key>my slowdown</Key><Resource>/b/my slowdown</Resource>",
            "transient",
        ),
        ("'bucket/slowdown/x' failed: no route", "final"),
        ("s3://bucket/preconditionfailed: connection reset", "transient"),
        ('connection reset\n\nDebug source:\nGeneric { path: "slowdown" }', "transient"),
        ("please slow down", "throttled"),
        ("bad\n\nDebug source:\nGeneric { body: None }", "final"),
    ],
)
def test_words_of_messages(text: str, failure: str) -> None:
    assert failure_kind(OSError(text)) == failure


async def test_throttling_without_a_status_is_uncertain() -> None:
    tries: list[int] = []

    async def fail() -> None:
        tries.append(1)
        raise OSError("slow down")

    async def write(timeout_s: float) -> None:
        with time_limit(Deadline.after(timeout_s)):
            await Requests("s3://bucket/run", "bucket/run", policy()).run("writing", "x", fail)

    error = await late(write, lambda: tries)
    assert isinstance(error, errors.DeadlineExceededError)
    assert errors.is_uncertain(error)
