"""``Storage(commit="marker")``: local directories that cannot be renamed."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from keywords import for_load, for_run
from states import assert_same

import sidestream
from sidestream import errors
from sidestream._format.marker import find_marker
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage import Attempt, BytesBody, id_of, locate_run
from sidestream._storage.names import attempt_name, name_with_id
from sidestream.dcp import StorageReader, StorageWriter

MARKER = sidestream.Storage(commit="marker")


def state(seed: int = 1) -> dict[str, Any]:
    return {"w": torch.full((3 << 20,), float(seed)), "small": torch.arange(7), "step": seed, "nested": {"a": [1, "b"]}}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(3 << 20), "small": torch.zeros(7, dtype=torch.int64), "step": 0, "nested": {"a": [0, ""]}}


async def loaded(url: Path, **options: Any) -> dict[str, Any]:
    target = blank()
    await sidestream.load(target, url, **for_load(**options))
    return target


@contextmanager
def mount(code: int = errno.ENOSYS) -> Iterator[None]:
    """A file system that renames no directory, makes no links, and syncs no directory, as mounts of buckets are."""
    rename, link, fsync = os.rename, os.link, os.fsync

    def no_directories(source: Any, target: Any, **options: Any) -> None:
        if os.path.isdir(source):
            raise OSError(code, os.strerror(code))
        rename(source, target, **options)

    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    os.rename, os.link, os.fsync = no_directories, no_links, files_only
    try:
        yield
    finally:
        os.rename, os.link, os.fsync = rename, link, fsync


# --- what is written ------------------------------------------------------------------------------------------------


async def test_everybody_reads_it(tmp_path: Path) -> None:
    info = await sidestream.save(state(), tmp_path / "a", storage=MARKER, files={"config.json": b"{}"})
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert ".metadata" in names
    assert {id_of(name) for name in names - {".metadata"}} == {info.save_id}
    for storage in (None, MARKER):
        assert_same(await loaded(tmp_path / "a", storage=storage), state())
        assert (await sidestream.verify(tmp_path / "a", storage=storage)).ok
        checkpoint = await sidestream.open_checkpoint(tmp_path / "a", storage=storage)
        assert await checkpoint.file("config.json") == b"{}"
        mapped = await checkpoint.state_dict(memory="mapped")
        assert torch.equal(mapped["w"], state()["w"])
    target = {"w": torch.zeros(3 << 20)}
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert torch.equal(target["w"], state()["w"])


async def test_nothing_is_preallocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints, leases of a run, parts, signatures: where nothing can be reserved, libc would write into every
    block."""
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: asked.append(arguments))
    async with sidestream.Checkpointer(tmp_path / "run", storage=MARKER) as checkpoints:
        await checkpoints.save(state(), step=1)
        async with checkpoints.reading(1):
            assert [*(tmp_path / "run" / ".leases").iterdir()]
    store, _ = locate_run(tmp_path / "other", MARKER)
    with time_limit(Deadline.after(60)):
        await store.put("step-1/signature", b"signed", durability="fsync")
    assert asked == []


async def test_a_process_writes(tmp_path: Path) -> None:
    info = await sidestream.save(
        state(), tmp_path / "a", storage=MARKER, options=sidestream.SaveOptions(writer="process", timeout_s=60)
    )
    assert_same(await loaded(tmp_path / "a"), state())
    assert {id_of(path.name) for path in (tmp_path / "a").iterdir()} == {info.save_id, None}


async def test_calls_of_dcp(tmp_path: Path) -> None:
    dcp.save(state(2), storage_writer=StorageWriter(tmp_path / "dcp", storage=MARKER))
    target = blank()
    dcp.load(target, storage_reader=StorageReader(tmp_path / "dcp", storage=MARKER))
    assert_same(target, state(2))
    assert any(id_of(path.name) for path in (tmp_path / "dcp").iterdir())


async def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsafeObjectError):
        await sidestream.save({**state(), "x": object()}, tmp_path / "run" / "a", storage=MARKER)
    pending = sidestream.async_save(state(), tmp_path / "run" / "b", storage=MARKER)
    await pending.staged
    pending.cancel()
    await pending.ended()
    left = [path for path in (tmp_path / "run").rglob("*") if path.name != "b"]
    assert left == [] or pending.outcome == "committed"


# --- mounts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL, errno.EMFILE, errno.EXDEV])
async def test_the_error_without_it_names_the_remedy(code: int, tmp_path: Path) -> None:
    with mount(code):
        os.fsync = lambda _: None  # of directories too: the rename is what fails here
        with pytest.raises(errors.StorageError, match=r'Storage\(commit="marker"\)'):
            await sidestream.save(state(), tmp_path / "run" / "a")
    assert list((tmp_path / "run").iterdir()) == []


async def everything(tmp_path: Path) -> None:
    """What writes, with ``commit="marker"``, below ``tmp_path``."""
    where: dict[str, Any] = {"storage": MARKER}
    target: dict[str, Any] = {"target_storage": MARKER}
    export = sidestream.HF(tmp_path / "exports" / "step-{step}", select=["w", "small"], **where)
    keep = sidestream.KeepLast(2)
    async with sidestream.Checkpointer(tmp_path / "run", keep=keep, export=export, **for_run(**where)) as checkpoints:
        for step in (1, 2, 3):
            pending = checkpoints.async_save(state(step), step=step, metadata={"loss": step})
            await pending
            await pending.exports[0]
        await checkpoints.prune()
        again = checkpoints.async_save(state(9), step=3)  # another generation
        await again
        restored = blank()
        assert await checkpoints.restore(restored) == 3
        assert_same(restored, state(9))
        assert await checkpoints.steps() == [2, 3]
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["step-1", "step-2", "step-3"]
    await sidestream.copy(tmp_path / "run" / "step-2", tmp_path / "copy", **target)
    await sidestream.copy(tmp_path / "exports" / "step-2", tmp_path / "copied", **target)
    await sidestream.convert(tmp_path / "copy", tmp_path / "model.pt", **target)
    await sidestream.copy(tmp_path / "model.pt", tmp_path / "again.pt", **target)
    await sidestream.convert(tmp_path / "model.pt", tmp_path / "dcp", **target)
    shards = sidestream.convert(
        tmp_path / "dcp",
        tmp_path / "hf",
        format="safetensors",
        select=["w", "small"],
        options=sidestream.ConvertOptions(max_shard_bytes=1 << 20),
        **target,
    )
    assert len((await shards).tensors) == 2
    for name in ("copy", "model.pt", "again.pt", "dcp"):
        assert_same(await loaded(tmp_path / name), state(2))
        with pytest.raises(errors.CheckpointExistsError):
            await sidestream.copy(tmp_path / "run" / "step-2", tmp_path / name, **target)
    for name in ("copied", "hf"):
        found = await sidestream.open_checkpoint(tmp_path / name)
        assert torch.equal(await found.tensor("small"), torch.arange(7))
        with pytest.raises(errors.CheckpointExistsError):
            await sidestream.copy(tmp_path / "exports" / "step-2", tmp_path / name, **target)
    await sidestream.remove(tmp_path / "copy", **where)
    with pytest.raises(errors.CheckpointNotFoundError):
        await sidestream.remove(tmp_path / "copy", **where)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name != "exports")
    assert left == ["again.pt", "copied", "dcp", "hf", "model.pt", "run"]


async def test_everything_on_a_mount(tmp_path: Path) -> None:
    with mount():
        await everything(tmp_path)


@pytest.mark.skipif("SIDESTREAM_TEST_MOUNT" not in os.environ, reason="needs a mount that renames no directory")
async def test_everything_on_a_real_mount() -> None:
    """In the directory that ``SIDESTREAM_TEST_MOUNT`` names, such as one of ``tests/storage/no_renames.py``."""
    root = Path(os.environ["SIDESTREAM_TEST_MOUNT"], f"sidestream-{uuid.uuid4().hex}")
    root.mkdir()
    (root / "empty").mkdir()
    with pytest.raises(OSError, match=f"{root}"):
        os.rename(root / "empty", root / "renamed")
    (root / "empty").rmdir()
    with pytest.raises(errors.StorageError, match=r'Storage\(commit="marker"\)'):
        await sidestream.save(state(), root / "run" / "a")
    assert list((root / "run").iterdir()) == []
    (root / "run").rmdir()
    for writer in ("thread", "process"):
        target = root / f"by-{writer}"
        options = sidestream.SaveOptions(writer=writer, timeout_s=60)
        await sidestream.save(state(), target, storage=MARKER, options=options)
        assert_same(await loaded(target), state())
        assert len(list(target.iterdir())) == 4
        await sidestream.remove(target, storage=MARKER)
    await everything(root)
    shutil.rmtree(root)


def test_on_the_command_line(tmp_path: Path) -> None:
    sidestream.blocking.save({"w": torch.ones(3)}, tmp_path / "a")

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from sidestream_cli import main; main()", *words]
        return warm.run(command, capture_output=True, text=True, timeout=120, check=False)

    done = call("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--commit", "marker")
    assert done.returncode == 0, done.stderr
    assert {id_of(path.name) is None for path in (tmp_path / "b").iterdir()} == {True, False}
    wrong = call("copy", str(tmp_path / "a"), str(tmp_path / "c"), "--commit", "link")
    assert wrong.returncode == 2
    assert "--commit" in wrong.stderr


# --- the marker -----------------------------------------------------------------------------------------------------


async def test_an_incomplete_marker_is_none(tmp_path: Path) -> None:
    """A process died while it wrote the marker: readers and runs pass it over, and it is no damage."""
    async with sidestream.Checkpointer(tmp_path, storage=MARKER) as checkpoints:
        for step in (1, 2):
            await checkpoints.save(state(step), step=step)
    marker = tmp_path / "step-2" / ".metadata"
    whole = marker.read_bytes()
    dots = [at + 1 for at in range(len(whole) - 1) if whole[at : at + 1] == b"."]  # as if a pickle ended there
    for at in {0, 1, len(whole) // 2, len(whole) - 3, len(whole) - 2, len(whole) - 1, *dots[:3], *dots[-3:]}:
        marker.write_bytes(whole[:at])
        for storage in (None, MARKER):
            with pytest.raises(errors.CheckpointNotFoundError, match="incomplete"):
                await sidestream.open_checkpoint(tmp_path / "step-2", storage=storage)
            async with sidestream.Checkpointer(tmp_path, storage=storage) as checkpoints:
                target = blank()
                assert await checkpoints.restore(target) == 1
                assert_same(target, state(1))
                assert await checkpoints.steps() == [1]
    hole = bytearray(whole)
    hole[-4096:] = bytes(min(4096, len(whole)))
    marker.write_bytes(hole)
    with pytest.raises(errors.CheckpointNotFoundError, match="incomplete"):
        await sidestream.open_checkpoint(tmp_path / "step-2")


async def test_a_damaged_marker_is_damage(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path, storage=MARKER) as checkpoints:
        await checkpoints.save(state(1), step=1)
        await checkpoints.save(state(2), step=2)
    marker = tmp_path / "step-2" / ".metadata"
    altered = bytearray(marker.read_bytes())
    altered[-60] ^= 1
    marker.write_bytes(altered)
    for storage in (None, MARKER):
        async with sidestream.Checkpointer(tmp_path, storage=storage) as checkpoints:
            with pytest.raises(errors.CorruptCheckpointError):
                await checkpoints.restore(blank())
            assert await checkpoints.restore(blank(), fallback="older") == 1
    assert find_marker((tmp_path / "step-1" / ".metadata").read_bytes()) is not None


async def test_the_rest_of_the_dead_is_waited_for(tmp_path: Path) -> None:
    """An incomplete marker may be one that is being written: a save to that target is refused for an hour."""
    await sidestream.save(state(1), tmp_path / "a", storage=MARKER)
    marker = tmp_path / "a" / ".metadata"
    marker.write_bytes(marker.read_bytes()[:-1])
    with pytest.raises(errors.CheckpointExistsError, match="incomplete"):
        await sidestream.save(state(2), tmp_path / "a", storage=MARKER)
    for path in (tmp_path / "a").iterdir():
        os.utime(path, (1, 1))
    info = await sidestream.save(state(2), tmp_path / "a", storage=MARKER)
    assert {id_of(path.name) for path in (tmp_path / "a").iterdir()} == {info.save_id, None}
    assert_same(await loaded(tmp_path / "a"), state(2))


class Gates:
    """Syncs of markers that wait: the ``number``-th one has been reached when ``reached(number)`` returns, and ends
    when ``open(number)`` is called, perhaps with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
        self._gates = {number: (threading.Event(), threading.Event()) for number in numbers}
        self._errors: dict[int, OSError] = {}
        self._count, self._fsync = 0, os.fsync
        monkeypatch.setattr(os, "fsync", self._wait)

    def _wait(self, descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/.metadata"):
            self._count += 1
            number = self._count
            if number in self._gates:
                reached, opened = self._gates[number]
                reached.set()
                assert opened.wait(60)
            if number in self._errors:
                raise self._errors[number]
        self._fsync(descriptor)

    async def reached(self, number: int) -> None:
        assert await asyncio.to_thread(self._gates[number][0].wait, 60)

    def open(self, number: int, error: OSError | None = None) -> None:
        if error is not None:
            self._errors[number] = error
        self._gates[number][1].set()


@pytest.mark.parametrize("end", [False, True])
async def test_a_failed_save_keeps_the_marker_of_another(
    end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal comes while the marker is being synced, without its end or with it, and then another save."""
    number = 2 if end else 1
    gates = Gates(monkeypatch, number)
    first = sidestream.async_save(state(1), tmp_path / "a", storage=MARKER)
    await gates.reached(number)
    await sidestream.remove(tmp_path / "a", storage=MARKER)
    await sidestream.save(state(2), tmp_path / "a", storage=MARKER)
    gates.open(number)
    with pytest.raises(errors.StorageError, match="another process removed"):
        await first
    assert first.outcome == "absent"
    assert_same(await loaded(tmp_path / "a"), state(2))


async def test_a_failed_save_keeps_the_unfinished_marker_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = Gates(monkeypatch, 2, 3)
    first = sidestream.async_save(state(1), tmp_path / "a", storage=MARKER)
    await gates.reached(2)
    await sidestream.remove(tmp_path / "a", storage=MARKER)
    second = sidestream.async_save(state(2), tmp_path / "a", storage=MARKER)
    await gates.reached(3)
    gates.open(2, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(errors.StorageError, match="Input/output"):
        await first
    gates.open(3)
    await second
    assert_same(await loaded(tmp_path / "a"), state(2))


async def test_a_target_with_files_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(errors.CheckpointExistsError, match="not empty"):
        await sidestream.save(state(2), tmp_path / "a", storage=MARKER)
    (tmp_path / "b").write_text("a file")
    with pytest.raises(errors.CheckpointExistsError):
        await sidestream.save(state(2), tmp_path / "b", storage=MARKER)
    with time_limit(Deadline.after(60)):
        store = locate_run(tmp_path, MARKER)[0]
        begun = store.begin(Attempt("c", "directory", "a" * 32, "fsync"))
        begun.write([("__0_0.distcp", BytesBody(b"of a save that goes on"))])
        info = await sidestream.save(state(2), tmp_path / "c", storage=MARKER)  # it is faster
        with pytest.raises(errors.CheckpointExistsError):
            begun.commit({".metadata": [b"a marker that is long enough"]})
        begun.discard()
    assert {id_of(path.name) for path in (tmp_path / "c").iterdir()} == {info.save_id, None}


@pytest.mark.parametrize("by", ["save", "remove"])
async def test_what_killed_processes_left_is_collected_without_a_rename(by: str, tmp_path: Path) -> None:
    """Files in the target itself, and the hidden directory of an export or a copy."""
    target, save_id = tmp_path / "a", "0" * 31 + "1"
    hidden = tmp_path / attempt_name("a", save_id)
    for directory, file in ((target, name_with_id("__0_1.distcp", save_id)), (hidden, "model.safetensors")):
        directory.mkdir()
        (directory / file).touch()
        os.utime(directory / file, (1, 1))
        os.utime(directory, (1, 1))
    fresh = tmp_path / attempt_name("a", "0" * 31 + "2")
    fresh.mkdir()
    with mount():
        if by == "remove":
            await sidestream.remove(target, storage=MARKER)
            with pytest.raises(errors.CheckpointNotFoundError):
                await sidestream.remove(target, storage=MARKER)
        else:
            await sidestream.save(state(), target, storage=MARKER)
            assert_same(await loaded(target), state())
            assert all(save_id not in path.name for path in target.iterdir())
            await sidestream.convert(target, tmp_path / "pt" / "a", format="torch", target_storage=MARKER)
    assert not (by == "remove" and hidden.exists())
    assert fresh.exists()
