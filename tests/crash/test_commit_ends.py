"""The thread that has written commits: what becomes of its commit when something ends the save meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from _own_stores import DictStore
from states import assert_same

import sidestream
from sidestream import blocking, errors
from sidestream._runtime import threads
from sidestream._save import writer
from sidestream._storage.local import publishing
from sidestream._storage.local import transaction as local
from sidestream.events import SaveEvent, SaveFailed, SaveStaged, observe


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1000,), value)}


@pytest.mark.parametrize("work", ["copy", "convert"])
async def test_more_of_them_than_threads_that_make_requests(work: str) -> None:
    """A file system without coroutines makes its requests in threads of a pool that is small."""
    base = f"memory://{uuid.uuid4().hex}"
    await sidestream.save(state(1.0), f"{base}/source")
    targets = [f"{base}/target{number}" for number in range(3 * threads._IO_THREADS)]
    call = sidestream.copy if work == "copy" else sidestream.convert
    limit: dict[str, Any] = {"timeout_s": 60} if work == "copy" else {}
    await asyncio.gather(*(call(f"{base}/source", target, **limit) for target in targets))
    for target in targets:
        assert_same(state(1.0), await (await sidestream.open_checkpoint(target)).state_dict())


class Late(DictStore):
    """The put of the marker is carried out when ``arrive`` is set, whatever becomes of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.arrive = threading.Event(), threading.Event()
        self.landing: asyncio.Task[None] | None = None

    async def put(self, name: str, content: bytes, *, mode: Any) -> None:
        if not name.endswith(".metadata"):
            await super().put(name, content, mode=mode)
            return

        async def land() -> None:
            await asyncio.to_thread(self.arrive.wait)
            await DictStore.put(self, name, content, mode=mode)

        self.landing = asyncio.create_task(land())
        self.sent.set()
        await asyncio.shield(self.landing)


async def test_a_put_that_was_sent_and_stopped_is_not_taken_for_absent() -> None:
    """As the end of a program stops it after a second Ctrl-C: its files stay, because it may still arrive."""
    store = Late()
    storage = sidestream.Storage(filesystem=store)
    others = set(threads._all_stops())  # of what earlier tests have left running
    pending = sidestream.async_save(state(1.0), "own://x/t", storage=storage)
    await asyncio.to_thread(store.sent.wait)
    for stop in set(threads._all_stops()) - others:
        stop.set()
    with pytest.raises(errors.OutcomeUnknownError):
        await pending
    assert pending.outcome == "unknown"
    store.arrive.set()
    loaded = state(0.0)
    while store.landing is None or not store.landing.done():
        await asyncio.sleep(0.01)
    await sidestream.load(loaded, "own://x/t", storage=storage)
    assert_same(state(1.0), loaded)


async def test_a_cancel_beside_a_sync_that_hangs_keeps_what_was_replaced(tmp_path: Path, monkeypatch: Any) -> None:
    hung, release, sync = threading.Event(), threading.Event(), publishing.sync_directory

    def hangs(path: Path, *others: Any) -> None:
        if Path(path) == tmp_path:
            hung.set()
            release.wait()
        sync(path, *others)

    await sidestream.save(state(1.0), tmp_path / "t")
    monkeypatch.setattr(publishing.sync_visible, "__defaults__", (hangs,))
    pending = sidestream.async_save(
        state(2.0), tmp_path / "t", overwrite=True, options=sidestream.SaveOptions(timeout_s=2)
    )
    try:
        await asyncio.to_thread(hung.wait)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        assert pending.outcome == "committed"
        (kept,) = [path for path in tmp_path.iterdir() if path.name != "t"]
        assert_same(state(1.0), await (await sidestream.open_checkpoint(kept)).state_dict())
    finally:
        release.set()


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupt_beside_the_commit_tells_observers_its_outcome(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committing, interrupted, publish = threading.Event(), threading.Event(), local.publish
    seen: list[SaveFailed] = []
    failed = threading.Event()

    def slow(*arguments: Any) -> None:
        committing.set()
        interrupted.wait(60)
        publish(*arguments)

    def interrupt(stage: object) -> None:
        committing.wait(60)
        raise KeyboardInterrupt

    def note(event: SaveEvent) -> None:
        if isinstance(event, SaveFailed):
            seen.append(event)
            failed.set()

    if overwrite:
        blocking.save(state(1.0), tmp_path / "t")
    monkeypatch.setattr(local, "publish", slow)
    monkeypatch.setattr(writer.LiveWriter, "wait_if_eager", interrupt)
    with observe(note):
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, interrupted.set).start()
            blocking.save(state(2.0), tmp_path / "t", overwrite=overwrite)
        assert failed.wait(60)
    assert [event.outcome for event in seen] == ["committed"]
    assert_same(state(2.0), blocking.open_checkpoint(tmp_path / "t").state_dict())
    deadline = time.monotonic() + 60
    while [path.name for path in tmp_path.iterdir()] != ["t"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["t"], "what was replaced is removed"


class Held(DictStore):
    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    async def put(self, name: str, content: bytes, *, mode: Any) -> None:
        await asyncio.to_thread(self.release.wait)
        await super().put(name, content, mode=mode)


async def test_observers_know_of_the_staging_before_anything_is_written() -> None:
    store, staged = Held(), threading.Event()

    def note(event: SaveEvent) -> None:
        if isinstance(event, SaveStaged):
            staged.set()

    with observe(note):
        pending = sidestream.async_save(state(1.0), "own://x/t", storage=sidestream.Storage(filesystem=store))
        await pending.staged
        assert await asyncio.to_thread(staged.wait, 60)
        store.release.set()
        await pending
