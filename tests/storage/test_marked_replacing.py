"""``overwrite=True`` with ``Storage(commit="marker")``: the marker is renamed over the one of the old checkpoint."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import assert_same
from test_marked import MARKER, blank, loaded, mount, state

import sidestream
from sidestream import errors
from sidestream._convert.safetensors import header_of
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage import Attempt, BytesBody, Kind, id_of, locate_run
from sidestream._storage.names import NOTE, name_with_id
from sidestream.dcp import StorageWriter


def ids(directory: Path) -> set[str | None]:
    return {id_of(path.name) for path in directory.iterdir()}


async def replace(target: Path, seed: int, **options: Any) -> sidestream.SaveInfo:
    return await sidestream.save(state(seed), target, storage=MARKER, overwrite=True, **options)


async def test_a_checkpoint_is_replaced_on_a_mount(tmp_path: Path) -> None:
    """Nothing is needed but the rename of a file. Only what was replaced is deleted."""
    with mount():
        await replace(tmp_path / "a", 1, files={"notes": b"one", "more": b"x"})
        other = tmp_path / "a" / name_with_id("__0_1.distcp", "0" * 31 + "1")
        other.touch()  # of a save that goes on
        for seed in (2, 3):
            info = await replace(tmp_path / "a", seed, files={"notes": b"%d" % seed})
            assert_same(await loaded(tmp_path / "a"), state(seed))
            assert ids(tmp_path / "a") == {info.save_id, None, id_of(other.name)}
        checkpoint = await sidestream.open_checkpoint(tmp_path / "a")
        assert checkpoint.files == {"notes": 1}
        assert (await sidestream.verify(tmp_path / "a")).ok
        os.utime(other, (1, 1))
        os.utime(tmp_path / "a" / ".metadata", (1, 1))
        info = await replace(tmp_path / "a", 4)  # an hour later
    assert ids(tmp_path / "a") == {info.save_id, None}
    assert sum(path.name == ".metadata" for path in (tmp_path / "a").iterdir()) == 1
    target = {"w": torch.zeros(3 << 20)}
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert torch.equal(target["w"], state(4)["w"])


async def test_every_way_to_save(tmp_path: Path) -> None:
    options = sidestream.SaveOptions(writer="process", timeout_s=60)
    for number in range(2):
        await replace(tmp_path / "process", number + 1, options=options)
        assert_same(await loaded(tmp_path / "process"), state(number + 1))
        writer = StorageWriter(tmp_path / "dcp", storage=MARKER, overwrite=True)
        dcp.save(state(number + 1), storage_writer=writer, no_dist=True)
        assert_same(await loaded(tmp_path / "dcp"), state(number + 1))
    for name in ("process", "dcp"):
        assert len(ids(tmp_path / name)) == 2


async def test_checkpoints_of_both_kinds_replace_each_other(tmp_path: Path) -> None:
    await sidestream.save(state(1), tmp_path / "a", files={"notes": b"1", "retired": b"2"})
    info = await replace(tmp_path / "a", 2)
    assert ids(tmp_path / "a") == {info.save_id, None}
    assert [path.name for path in (tmp_path / "a").iterdir() if id_of(path.name) is None] == [".metadata"]
    assert_same(await loaded(tmp_path / "a"), state(2))
    await sidestream.save(state(3), tmp_path / "a", overwrite=True)
    assert_same(await loaded(tmp_path / "a"), state(3))
    assert not any(info.save_id in path.name for path in (tmp_path / "a").iterdir())


async def test_what_is_not_replaced(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path / "stock", no_dist=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    await replace(tmp_path / "retired", 1)
    (tmp_path / "retired" / NOTE).touch()  # by a removal that was interrupted
    await replace(tmp_path / "damaged", 1)
    marker = tmp_path / "damaged" / ".metadata"
    altered = bytearray(marker.read_bytes())
    altered[-60] ^= 1
    marker.write_bytes(altered)
    await replace(tmp_path / "torn", 1)
    marker = tmp_path / "torn" / ".metadata"
    marker.write_bytes(marker.read_bytes()[:-2])
    for name, told in {
        "stock": "another writer, and is not replaced",
        "mine": "is not empty",
        "retired": "is being removed",
        "damaged": r"remove\(\) it first",
        "torn": "has an incomplete .metadata",
    }.items():
        before = {path: path.read_bytes() for path in (tmp_path / name).iterdir()}
        with pytest.raises(errors.CheckpointExistsError, match=told):
            await replace(tmp_path / name, 2)
        assert {path: path.read_bytes() for path in (tmp_path / name).iterdir()} == before
    await sidestream.remove(tmp_path / "retired", storage=MARKER)
    await replace(tmp_path / "retired", 2)


async def test_what_fails_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await replace(tmp_path / "a", 1)
    names = set(os.listdir(tmp_path / "a"))
    with pytest.raises(errors.UnsafeObjectError):
        await sidestream.save({"x": object()}, tmp_path / "a", storage=MARKER, overwrite=True)
    pending = sidestream.async_save(state(2), tmp_path / "a", storage=MARKER, overwrite=True)
    await pending.staged
    pending.cancel()
    await pending.ended()
    if pending.outcome == "absent":
        assert set(os.listdir(tmp_path / "a")) == names
        assert_same(await loaded(tmp_path / "a"), state(1))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    names = set(os.listdir(tmp_path / "a"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(errors.StorageError, match="cannot rename a file over another one, save to a new directory"):
            await replace(tmp_path / "a", 3)
    assert set(os.listdir(tmp_path / "a")) == names


async def test_several_at_a_time(tmp_path: Path) -> None:
    """All succeed, whether anything was there before or not, and one of them stays whole."""
    for seed in (0, 10):
        saves = [replace(tmp_path / "a", seed + number) for number in range(4)]
        infos = await asyncio.gather(*saves)
        (winner,) = [info for info in infos if info.save_id == await marked(tmp_path / "a")]
        assert_same(await loaded(tmp_path / "a"), state(seed + infos.index(winner)))
        assert (await sidestream.verify(tmp_path / "a")).ok


async def marked(directory: Path) -> str:
    return (await sidestream.open_checkpoint(directory)).save_id


async def test_a_removal_that_comes_first(tmp_path: Path) -> None:
    """A save whose files are removed before its commit leaves nothing that looks like a checkpoint."""
    await replace(tmp_path / "a", 1)
    with time_limit(Deadline.after(60)):
        store = locate_run(tmp_path, MARKER)[0]
        begun = store.begin(Attempt("a", "replacement", "a" * 32, "fsync"))
        begun.write([("__0_0.distcp", BytesBody(b"of a save that goes on"))])
        os.utime(tmp_path / "a" / begun.committed_name("__0_0.distcp"), (1, 1))  # more than an hour ago
        await sidestream.remove(tmp_path / "a", storage=MARKER)
        with pytest.raises((errors.StorageError, OSError)):
            await begun.commit({".metadata": [b"a marker that is long enough"]})
        assert begun.outcome == "absent"
        await begun.discard()
    with pytest.raises(errors.CheckpointNotFoundError):
        await loaded(tmp_path / "a")


@pytest.mark.parametrize("kind", ["directory", "replacement"])
async def test_a_save_that_commits_after_a_removal(kind: Kind, tmp_path: Path) -> None:
    """The removal keeps its files, which belong to no checkpoint yet."""
    with time_limit(Deadline.after(60)):
        store = locate_run(tmp_path, MARKER)[0]
        begun = store.begin(Attempt("a", kind, "a" * 32, "fsync"))
        begun.write([("__0_0.distcp", BytesBody(b"of a save that goes on"))])
        await replace(tmp_path / "a", 1)
        await sidestream.remove(tmp_path / "a", storage=MARKER)
        file = begun.committed_name("__0_0.distcp")
        assert os.listdir(tmp_path / "a") == [file]
        await begun.commit({".metadata": [b"a marker that is long enough"]})
        assert set(os.listdir(tmp_path / "a")) == {file, ".metadata"}


async def test_a_save_that_commits_during_a_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, while the removal deletes the first file."""
    loop, unlink = asyncio.get_running_loop(), os.unlink
    with time_limit(Deadline.after(60)):
        begun = locate_run(tmp_path, MARKER)[0].begin(Attempt("a", "directory", "a" * 32, "fsync"))
        begun.write([("__0_0.distcp", BytesBody(b"of a save that goes on"))])
        await replace(tmp_path / "a", 1)
        failures: list[BaseException | None] = []

        def commit_first(path: Any, **options: Any) -> None:
            if "__0_1" in str(path) and not failures:
                failures.append(None)
                committing = begun.commit({".metadata": [b"a marker that is long enough"]})
                failures[0] = asyncio.run_coroutine_threadsafe(committing, loop).exception(60)
            unlink(path, **options)

        monkeypatch.setattr(os, "unlink", commit_first)
        await sidestream.remove(tmp_path / "a", storage=MARKER)
        assert isinstance(failures[0], errors.CheckpointExistsError)
        assert "is being removed" in str(failures[0])
        assert begun.outcome == "absent"
        await begun.discard()
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
        await replace(tmp_path / "a", 1)
        hold = Hold(monkeypatch, "open", "/.metadata", number)
        slower = asyncio.create_task(sidestream.remove(tmp_path / "a", storage=MARKER))
        await hold.come()
        await sidestream.remove(tmp_path / "a", storage=MARKER)
        hold.done.set()
        await slower
        file = begun.committed_name("__0_0.distcp")
        assert os.listdir(tmp_path / "a") == [file]
        await begun.commit({".metadata": [b"a marker that is long enough"]})
        assert set(os.listdir(tmp_path / "a")) == {file, ".metadata"}


async def test_a_removal_in_a_directory_that_another_one_has_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await replace(tmp_path / "a", 1)
    hold = Hold(monkeypatch, "open", NOTE)
    slower = asyncio.create_task(sidestream.remove(tmp_path / "a", storage=MARKER))
    await hold.come()
    await sidestream.remove(tmp_path / "a", storage=MARKER)
    hold.done.set()
    await slower
    assert os.listdir(tmp_path) == []


async def test_a_save_that_commits_when_a_removal_has_read_the_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal finds out before it deletes the marker, and deletes the files of this save too."""
    await replace(tmp_path / "a", 1)
    hold = Hold(monkeypatch, "open", NOTE)
    removal = asyncio.create_task(sidestream.remove(tmp_path / "a", storage=MARKER))
    await hold.come()
    await replace(tmp_path / "a", 2)
    hold.done.set()
    await removal
    assert os.listdir(tmp_path) == []


async def test_a_removal_when_a_save_has_replaced_the_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save finds the note and fails. The files of the checkpoint that it has replaced are deleted too."""
    await replace(tmp_path / "a", 1)
    renaming = Hold(monkeypatch, "rename", "..metadata")
    save = asyncio.create_task(replace(tmp_path / "a", 2))
    await renaming.come()
    listing = Hold(monkeypatch, "listdir", "/a")
    renaming.done.set()
    await listing.come()
    unlinking = Hold(monkeypatch, "unlink", "/.metadata")
    removal = asyncio.create_task(sidestream.remove(tmp_path / "a", storage=MARKER))
    await unlinking.come()
    listing.done.set()
    with pytest.raises(errors.CheckpointExistsError, match="is being removed"):
        await save
    unlinking.done.set()
    await removal
    assert os.listdir(tmp_path) == []


async def test_a_removal_when_a_save_deletes_what_it_has_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await replace(tmp_path / "a", 1)
    renaming = Hold(monkeypatch, "rename", "..metadata")
    save = asyncio.create_task(replace(tmp_path / "a", 2))
    await renaming.come()
    syncing = Hold(monkeypatch, "fsync", "/a")
    renaming.done.set()
    await syncing.come()
    unlinking = Hold(monkeypatch, "unlink", "/.metadata")
    removal = asyncio.create_task(sidestream.remove(tmp_path / "a", storage=MARKER))
    await unlinking.come()
    syncing.done.set()
    await save
    assert NOTE in os.listdir(tmp_path / "a")
    unlinking.done.set()
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
    await replace(tmp_path / "a", 1)

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
        await store.retire("step-1", durability="fsync")
        left = {path.rpartition("/")[2] for path in files.find(f"{run}/step-1")}
        assert left == ({attempt} if complete else {attempt, *exported})
        await store.retire("step-2", durability="fsync")


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
        await locate_run(tmp_path, MARKER)[0].retire("step-1", durability="fsync")
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


async def test_readers_beside_saves(tmp_path: Path) -> None:
    """Old or new, never neither and never a mixture: loads start over."""
    await replace(tmp_path / "a", 1)
    done = False

    async def read() -> int:
        count = 0
        while not done:
            target = blank()
            await sidestream.load(target, tmp_path / "a")
            assert_same(target, state(target["step"]))
            count += 1
        return count

    readers = [asyncio.create_task(read()) for _ in range(2)]
    for seed in range(2, 14):
        await replace(tmp_path / "a", seed, options=sidestream.SaveOptions(durability="flush"))
    done = True
    assert min(await asyncio.gather(*readers)) >= 1


async def test_an_open_checkpoint_that_was_replaced(tmp_path: Path) -> None:
    await replace(tmp_path / "a", 1)
    opened = await sidestream.open_checkpoint(tmp_path / "a")
    await replace(tmp_path / "a", 2)
    with pytest.raises(errors.CorruptCheckpointError, match="another checkpoint has replaced this one"):
        await opened.tensor("w")
