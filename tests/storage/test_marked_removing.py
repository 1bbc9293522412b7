"""``remove`` with ``Storage(commit="marker")``, alone and beside saves; and what such saves refuse to replace."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch.distributed.checkpoint as dcp
from states import assert_same
from test_marked import MARKER, blank, loaded, state
from torch.distributed.checkpoint.api import CheckpointException

import sidestream
from sidestream import errors
from sidestream._convert.safetensors import header_of
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._save.running import Save, SaveOrder
from sidestream._storage import Attempt, BytesBody, locate_directory, locate_run
from sidestream._storage.names import NOTE, name_with_id
from sidestream.dcp import StorageWriter


async def first(target: Path, seed: int = 1) -> sidestream.SaveInfo:
    return await sidestream.save(state(seed), target, storage=MARKER)


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("call", ["save", "async_save", "blocking", "dcp.save"])
async def test_overwrite_is_refused_before_anything_is_changed(call: str, there: bool, tmp_path: Path) -> None:
    """Also where nothing is there yet: a program finds out at its first save, and not at its second."""
    run, target = tmp_path / "run", tmp_path / "run" / "a"
    if there:
        await first(target)
    before, names = contents(run), sorted(run.iterdir()) if there else []
    keywords: dict[str, Any] = {"storage": MARKER, "overwrite": True}
    told = r"save under a new name and remove\(\) the old checkpoint afterwards, or remove\(\) it first"
    if call == "dcp.save":
        writer = StorageWriter(target, **keywords)
        with pytest.raises(CheckpointException) as failed:
            await asyncio.to_thread(dcp.save, state(2), storage_writer=writer, no_dist=True)
        ((error, _),) = failed.value.failures.values()
        assert isinstance(error, errors.UnsupportedError)
        assert re.search(told, str(error))
    else:
        with pytest.raises(errors.UnsupportedError, match=told):
            if call == "save":
                await sidestream.save(state(2), target, **keywords)
            elif call == "async_save":
                sidestream.async_save(state(2), target, **keywords)
            else:
                await asyncio.to_thread(sidestream.blocking.save, state(2), target, **keywords)
    assert run.exists() == there
    assert contents(run) == before
    assert (sorted(run.iterdir()) if there else []) == names
    if there:  # the ways out
        await first(tmp_path / "run" / "b", 2)
        await sidestream.remove(target, storage=MARKER)
    await first(target, 2)
    assert_same(await loaded(target), state(2))


async def test_where_directories_are_renamed_it_is_replaced(tmp_path: Path) -> None:
    info = await first(tmp_path / "a")
    await sidestream.save(state(3), tmp_path / "a", overwrite=True)
    assert_same(await loaded(tmp_path / "a"), state(3))
    assert not any(info.save_id in path.name for path in (tmp_path / "a").iterdir())


async def test_what_is_there_is_refused(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path / "stock", no_dist=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for name in ("ours", "retired", "damaged", "torn"):
        await first(tmp_path / name)
    await sidestream.save(state(1), tmp_path / "renamed")
    (tmp_path / "retired" / NOTE).touch()  # by a removal that was interrupted
    marker = tmp_path / "damaged" / ".metadata"
    altered = bytearray(marker.read_bytes())
    altered[-60] ^= 1
    marker.write_bytes(altered)
    marker = tmp_path / "torn" / ".metadata"
    marker.write_bytes(marker.read_bytes()[:-2])
    remedy = r"save to a new directory, or remove\(\) the checkpoint there first"
    for name, told in {
        "stock": remedy,
        "ours": remedy,
        "renamed": remedy,
        "damaged": remedy,
        "mine": "is not empty, and no checkpoint",
        "retired": "is being removed",
        "torn": "has an incomplete .metadata",
    }.items():
        before = contents(tmp_path / name)
        with pytest.raises(errors.CheckpointExistsError, match=told):
            await first(tmp_path / name, 2)
        assert contents(tmp_path / name) == before
        if told is remedy:
            await sidestream.remove(tmp_path / name, storage=MARKER)
            await first(tmp_path / name, 2)
    await sidestream.remove(tmp_path / "retired", storage=MARKER)
    await first(tmp_path / "retired", 2)


async def test_of_several_at_a_time_one_commits(tmp_path: Path) -> None:
    results = await asyncio.gather(*(first(tmp_path / "a", seed) for seed in range(4)), return_exceptions=True)
    (seed,) = [seed for seed, one in enumerate(results) if isinstance(one, sidestream.SaveInfo)]
    for other in results[:seed] + results[seed + 1 :]:
        assert isinstance(other, errors.CheckpointExistsError)
    assert_same(await loaded(tmp_path / "a"), state(seed))
    assert (await sidestream.verify(tmp_path / "a")).ok


async def test_a_removal_that_comes_first(tmp_path: Path) -> None:
    """A save whose files are removed before its commit leaves nothing that looks like a checkpoint."""
    with time_limit(Deadline.after(60)):
        save = Save(locate_directory(tmp_path / "a", MARKER), Deadline.after(60), SaveOrder(durability="fsync"))
        begun = save.transaction
        begun.write([("__0_0.distcp", BytesBody(b"of a save that goes on"))])
        await first(tmp_path / "a")
        os.utime(tmp_path / "a" / begun.committed_name("__0_0.distcp"), (1, 1))  # more than an hour ago
        await sidestream.remove(tmp_path / "a", storage=MARKER)
        with pytest.raises((errors.StorageError, OSError)):
            await save.commit({".metadata": [b"a marker that is long enough"]})
        assert begun.outcome == "absent"
        begun.discard()
    with pytest.raises(errors.CheckpointNotFoundError):
        await loaded(tmp_path / "a")


async def test_a_save_that_commits_after_a_removal(tmp_path: Path) -> None:
    """The removal keeps its files, which belong to no checkpoint yet."""
    with time_limit(Deadline.after(60)):
        store = locate_run(tmp_path, MARKER)[0]
        begun = store.begin(Attempt("a", "directory", "a" * 32, "fsync"))
        begun.write([("__0_0.distcp", BytesBody(b"of a save that goes on"))])
        await first(tmp_path / "a")
        await sidestream.remove(tmp_path / "a", storage=MARKER)
        file = begun.committed_name("__0_0.distcp")
        assert os.listdir(tmp_path / "a") == [file]
        begun.commit({".metadata": [b"a marker that is long enough"]})
        assert set(os.listdir(tmp_path / "a")) == {file, ".metadata"}


async def test_a_save_that_commits_during_a_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, while the removal deletes the first file."""
    unlink = os.unlink
    with time_limit(Deadline.after(60)):
        begun = locate_run(tmp_path, MARKER)[0].begin(Attempt("a", "directory", "a" * 32, "fsync"))
        begun.write([("__0_0.distcp", BytesBody(b"of a save that goes on"))])
        await first(tmp_path / "a")
        failures: list[BaseException | None] = []

        def commit_first(path: Any, **options: Any) -> None:
            if "__0_1" in str(path) and not failures:
                failures.append(None)
                with time_limit(Deadline.after(60)), pytest.raises(errors.CheckpointExistsError) as failure:
                    begun.commit({".metadata": [b"a marker that is long enough"]})
                failures[0] = failure.value
            unlink(path, **options)

        monkeypatch.setattr(os, "unlink", commit_first)
        await sidestream.remove(tmp_path / "a", storage=MARKER)
        assert isinstance(failures[0], errors.CheckpointExistsError)
        assert "is being removed" in str(failures[0])
        assert begun.outcome == "absent"
        begun.discard()
    assert not (tmp_path / "a").exists()


class Hold:
    """The ``number``-th call of ``os.<name>`` on a path that ends like this, by any thread: ``reached`` is set before
    it, and it is done when ``done`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, end: str, number: int = 1) -> None:
        self.reached, self.done = threading.Event(), threading.Event()
        self._real, self._end, self._number = getattr(os, name), end, number
        self._lock, self._count = threading.Lock(), 0
        monkeypatch.setattr(os, name, self._call)

    def _call(self, path: Any, *args: Any, **options: Any) -> Any:
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
        with self._lock:
            self._count += name.endswith(self._end)
            held = name.endswith(self._end) and self._count == self._number
        if held:
            self.reached.set()
            assert self.done.wait(60)
        return self._real(path, *args, **options)

    async def come(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 60)


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_two_removals_at_once_keep_the_files_of_a_save(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower removal opens the marker when the faster one has deleted it. The save has begun before both."""
    with time_limit(Deadline.after(60)):
        begun = locate_run(tmp_path, MARKER)[0].begin(Attempt("a", "directory", "a" * 32, "fsync"))
        begun.write([("__0_0.distcp", BytesBody(b"of a save that goes on"))])
        await first(tmp_path / "a")
        hold = Hold(monkeypatch, "open", "/.metadata", number)
        slower = asyncio.create_task(sidestream.remove(tmp_path / "a", storage=MARKER))
        await hold.come()
        await sidestream.remove(tmp_path / "a", storage=MARKER)
        hold.done.set()
        await slower
        file = begun.committed_name("__0_0.distcp")
        assert os.listdir(tmp_path / "a") == [file]
        begun.commit({".metadata": [b"a marker that is long enough"]})
        assert set(os.listdir(tmp_path / "a")) == {file, ".metadata"}


async def test_a_removal_in_a_directory_that_another_one_has_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await first(tmp_path / "a")
    hold = Hold(monkeypatch, "open", NOTE)
    slower = asyncio.create_task(sidestream.remove(tmp_path / "a", storage=MARKER))
    await hold.come()
    await sidestream.remove(tmp_path / "a", storage=MARKER)
    hold.done.set()
    await slower
    assert os.listdir(tmp_path) == []


async def test_another_removal_and_a_save_when_a_removal_has_read_the_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal finds out before it deletes the marker, and deletes the files of this save too."""
    await first(tmp_path / "a")
    hold = Hold(monkeypatch, "open", NOTE)
    removal = asyncio.create_task(sidestream.remove(tmp_path / "a", storage=MARKER))
    await hold.come()
    await sidestream.remove(tmp_path / "a", storage=MARKER)
    await first(tmp_path / "a", 2)
    hold.done.set()
    await removal
    assert os.listdir(tmp_path) == []


async def test_a_new_directory_that_another_process_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a removal does, or a save that has failed there. The directory is made again."""
    mkdir, made = os.mkdir, []

    def make(path: Any, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        made.append(path)
        if len(made) == 1:
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", make)
    await sidestream.save(state(1), tmp_path / "a", storage=MARKER)
    assert len(made) == 2
    assert_same(await loaded(tmp_path / "a"), state(1))


async def test_the_note_where_no_file_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await first(tmp_path / "a")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "rename", refuse)
    await sidestream.remove(tmp_path / "a", storage=MARKER)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["marker", "memory"])
@pytest.mark.parametrize("complete", [True, False])
async def test_an_export_is_deleted_and_no_attempt(complete: bool, place: str, tmp_path: Path) -> None:
    """Neither an export that is still being written, without the file that readers look for, nor files with ids."""
    run = f"memory://{uuid.uuid4().hex}" if place == "memory" else str(tmp_path / "run")
    files = fsspec.filesystem("memory" if place == "memory" else "file", auto_mkdir=True)
    exported = ["model-00001-of-00001.safetensors", "config.json", *["model.safetensors.index.json"] * complete]
    attempt = name_with_id("__0_0.distcp", "a" * 32)
    for name in (attempt, *exported):
        files.pipe_file(f"{run}/step-1/{name}", header_of([], {}))
    with time_limit(Deadline.after(60)):
        store = locate_run(run, MARKER if place == "marker" else sidestream.Storage())[0]
        await store.remove_directory("step-1", durability="fsync")
        left = {path.rpartition("/")[2] for path in files.find(f"{run}/step-1")}
        assert left == ({attempt} if complete else {attempt, *exported})
        await store.remove_directory("step-2", durability="fsync")


async def test_readers_find_no_export_whose_removal_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "z.json"]
    (tmp_path / "step-1").mkdir()
    for name in names:
        (tmp_path / "step-1" / name).write_bytes(header_of([], {}))
    syncs, fsync, unlink = 0, os.fsync, os.unlink

    def count(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1
        fsync(descriptor)

    def fail_the_second(path: Any, **options: Any) -> None:
        if len(os.listdir(tmp_path / "step-1")) < len(names):
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", count)
    monkeypatch.setattr(os, "unlink", fail_the_second)
    with time_limit(Deadline.after(60)), pytest.raises(errors.StorageError, match="Input/output"):
        await locate_run(tmp_path, MARKER)[0].remove_directory("step-1", durability="fsync")
    assert set(names) - set(os.listdir(tmp_path / "step-1")) == {"model.safetensors.index.json"}
    assert syncs == 1


@pytest.mark.parametrize("place", ["marker", "memory"])
async def test_the_rest_of_a_removal_beside_a_later_checkpoint(place: str, tmp_path: Path) -> None:
    """By a save that began before. Only the files that belong to what was removed are deleted."""
    run = f"memory://{uuid.uuid4().hex}" if place == "memory" else str(tmp_path / "run")
    storage = MARKER if place == "marker" else None
    files = fsspec.filesystem("memory" if place == "memory" else "file")
    url = f"{run}/step-1"
    info = await sidestream.save(state(1), url, storage=storage)
    rest = {path: files.cat_file(path) for path in files.ls(url, detail=False) if info.save_id in path}
    await sidestream.remove(url, storage=storage)
    await sidestream.save(state(2), url, storage=storage)
    kept = set(files.ls(url, detail=False))
    for path, content in {**rest, f"{url}/{NOTE}": info.save_id.encode()}.items():
        files.pipe_file(path, content)
    with time_limit(Deadline.after(60)):
        await locate_run(run, storage or sidestream.Storage())[0].discard(f"step-1/{NOTE}")
    assert set(files.ls(url, detail=False)) == kept
    target = blank()
    await sidestream.load(target, url, storage=storage)
    assert_same(target, state(2))
