"""A reader sees the files of one directory, also if that is renamed meanwhile, and leaves no descriptor open."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from keywords import for_load
from late import late
from states import assert_same
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import sidestream
from sidestream import errors, events
from sidestream._runtime import threads
from sidestream._storage.local import read
from sidestream._storage.local.directories import OpenDirectory
from sidestream.dcp import StorageReader

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable.*:UserWarning"),
]

OLD = {f"t{index}": torch.full((1 << 16,), float(index)) for index in range(4)} | {"step": 1}
NEW = {f"t{index}": torch.full((1 << 16,), 100.0 + index) for index in range(4)} | {"step": 2}


def blank() -> dict[str, Any]:
    return {name: torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0 for name, one in OLD.items()}


class Place:
    """A checkpoint, and another one that can take its place."""

    def __init__(self, folder: Path) -> None:
        self.path, self.folder, self.replaced = folder / "c", folder, 0

    def replace(self) -> None:
        """Rename both, once."""
        self.replaced += 1
        if self.replaced == 1:
            self.path.rename(self.folder / "old")
            (self.folder / "new").rename(self.path)

    def progress(self, done: int, total: int) -> None:
        """Called with 0 when the manifest has been read, and nothing else."""
        self.replace()

    def open(self) -> list[str]:
        """The files and directories here that this process has open."""
        found = []
        for one in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{one}")
            except FileNotFoundError:  # the descriptor of the listing itself
                continue
            if target.startswith(str(self.folder)):
                found.append(target)
        return found

    def closed(self) -> bool:
        return not {str(self.path), str(self.folder / "old")} & set(self.open())


@pytest.fixture
async def place(tmp_path: Path) -> Place:
    await sidestream.save(OLD, tmp_path / "c")
    await sidestream.save(NEW, tmp_path / "new")
    return Place(tmp_path)


# --- a directory that is replaced -------------------------------------------------------------------------------------


async def load_plainly(place: Place) -> Any:
    state = blank()
    await sidestream.load(state, place.path, options=sidestream.LoadOptions(verify="manifest", progress=place.progress))
    return state


async def load_atomically(place: Place) -> Any:
    state = blank()
    await sidestream.load(
        state, place.path, options=sidestream.LoadOptions(verify="manifest", atomic=True, progress=place.progress)
    )
    return state


class Replacing(DefaultLoadPlanner):
    """Replaces the checkpoint when its metadata has been read."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def create_local_plan(self) -> Any:
        self._place.replace()
        return super().create_local_plan()


async def load_by_dcp(place: Place) -> Any:
    state = blank()
    reader = StorageReader(place.path, verify="manifest")
    await asyncio.to_thread(dcp.load, state, storage_reader=reader, planner=Replacing(place), no_dist=True)
    return state


async def convert(place: Place) -> Any:
    target = place.folder / "converted"
    await sidestream.convert(
        place.path, target, format="dcp", options=sidestream.ConvertOptions(verify="manifest", progress=place.progress)
    )
    return await (await sidestream.open_checkpoint(target)).state_dict()


async def copy(place: Place) -> Any:
    await sidestream.copy(place.path, place.folder / "copied", progress=place.progress)
    return await (await sidestream.open_checkpoint(place.folder / "copied")).state_dict()


async def read_all(place: Place) -> Any:
    checkpoint = await sidestream.open_checkpoint(place.path, verify="manifest")
    return await checkpoint.state_dict(progress=place.progress)


@pytest.mark.parametrize("read", [load_plainly, load_atomically, load_by_dcp, convert, copy, read_all])
async def test_a_checkpoint_that_is_replaced_is_read_to_its_end(
    read: Callable[[Place], Awaitable[Any]], place: Place
) -> None:
    found = await read(place)
    assert place.replaced
    assert_same(OLD, found)
    assert place.closed()


async def test_a_checkpoint_that_is_replaced_is_verified_to_its_end(place: Place) -> None:
    save_id = (await sidestream.open_checkpoint(place.path)).save_id
    report = await sidestream.verify(place.path, progress=place.progress)
    assert place.replaced
    assert report.ok, report.damaged
    assert report.save_id == save_id
    assert place.closed()


async def test_an_open_checkpoint_that_was_replaced(place: Place) -> None:
    """It holds nothing open: files of the other one, which have the same names, are never taken for its own."""
    checkpoint = await sidestream.open_checkpoint(place.path, verify="manifest")
    place.replace()
    for call in (checkpoint.tensor("t0"), checkpoint.value("step"), checkpoint.state_dict()):
        with pytest.raises(errors.CheckpointNotFoundError, match="is not there any more"):
            await call
    assert place.closed()
    again = await sidestream.open_checkpoint(place.path, verify="manifest")
    assert_same(NEW, await again.state_dict())


@pytest.mark.parametrize("link", [False, True])
async def test_another_writers_checkpoint_that_is_replaced(link: bool, tmp_path: Path) -> None:
    """Its items are located after the manifest was read. The URL may be a symbolic link to the directory."""
    for name, state in (("at", OLD), ("new", NEW)):
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    place = Place(tmp_path)
    if link:
        place.path.symlink_to("at")
    else:
        (tmp_path / "at").rename(place.path)
    found = await load_by_dcp(place)
    assert_same(OLD, found)
    assert place.closed()


# --- descriptors ------------------------------------------------------------------------------------------------------


class Overwritten:
    """Another process puts a new checkpoint in the place of one that is read, and deletes the old one."""

    def __init__(self, url: str, new: str) -> None:
        self.url, self.new, self.told = url, new, 0

    def progress(self, done: int, total: int) -> None:
        self.told += 1
        if self.told == 1:
            files = fsspec.filesystem(self.url.partition("://")[0])
            files.rm(self.url, recursive=True)
            if self.new:
                files.mv(self.new, self.url, recursive=True)


@pytest.fixture(params=["file", "memory"])
async def overwritten(request: pytest.FixtureRequest, tmp_path: Path) -> Overwritten:
    root = f"{request.param}://{tmp_path}"
    await sidestream.save(OLD, f"{root}/c")
    await sidestream.save(NEW, f"{root}/new")
    return Overwritten(f"{root}/c", f"{root}/new")


@pytest.mark.parametrize("options", [{}, {"verify": "manifest"}, {"atomic": True}], ids=str)
async def test_a_load_that_loses_its_files_to_another_checkpoint_starts_over(
    overwritten: Overwritten, options: dict[str, Any]
) -> None:
    state, seen = blank(), []
    with events.observe(lambda event: seen.append(event) if isinstance(event, events.LoadEvent) else None):
        report = await sidestream.load(state, overwritten.url, **for_load(progress=overwritten.progress, **options))
    assert_same(state, NEW)
    opened = [event.load.save_id for event in seen if isinstance(event, events.LoadOpened)]
    assert len(set(opened)) == 2
    assert opened[-1] == report.save_id == seen[-1].load.save_id
    assert isinstance(seen[-1], events.LoadApplied)


async def test_a_load_that_loses_its_files_to_none_does_not(overwritten: Overwritten) -> None:
    overwritten.new = ""
    with pytest.raises(errors.CheckpointNotFoundError, match="no committed checkpoint"):
        await sidestream.load(blank(), overwritten.url, options=sidestream.LoadOptions(progress=overwritten.progress))


async def test_what_was_written_before_a_load_started_over(tmp_path: Path) -> None:
    """The checkpoint that takes the place does not fit: the error knows what was read of the first one."""
    large = {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}
    await sidestream.save(large, tmp_path / "c")
    await sidestream.save({"a": torch.ones(1 << 20)}, tmp_path / "new")
    data = max((tmp_path / "c").glob("*.distcp"), key=lambda file: file.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[-(1 << 20)] ^= 1
    data.write_bytes(raw)

    def progress(done: int, total: int) -> None:
        if done == 0 and (tmp_path / "new").exists():
            (tmp_path / "c").rename(tmp_path / "old")
            (tmp_path / "new").rename(tmp_path / "c")

    with pytest.raises(errors.StateMismatchError) as raised:
        await sidestream.load(
            {name: torch.zeros(1 << 20) for name in "ab"},
            tmp_path / "c",
            options=sidestream.LoadOptions(progress=progress),
        )
    assert "b" in raised.value.written


async def test_nothing_stays_open_after_a_load(place: Place) -> None:
    await sidestream.load(blank(), place.path)
    checkpoint = await sidestream.open_checkpoint(place.path)
    assert place.closed()
    await checkpoint.tensor("t0")
    await checkpoint.value("step")
    await checkpoint.state_dict()
    assert (await checkpoint.verify()).ok
    assert place.closed()
    mapped = await checkpoint.state_dict(memory="mapped")
    assert place.closed()
    assert_same(OLD, mapped)


async def damaged(place: Place) -> None:
    data = max(place.path.iterdir(), key=lambda one: one.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 3] ^= 1
    data.write_bytes(raw)
    await sidestream.load(blank(), place.path)


async def without_a_file(place: Place) -> None:
    def remove(done: int, total: int) -> None:
        max(place.path.iterdir(), key=lambda one: one.stat().st_size).unlink(missing_ok=True)

    await sidestream.load(blank(), place.path, options=sidestream.LoadOptions(progress=remove))


async def of_another_shape(place: Place) -> None:
    await sidestream.load({"t0": torch.zeros(3)}, place.path)


async def without_a_manifest(place: Place) -> None:
    for one in place.path.glob("manifest-*"):
        one.unlink()
    await sidestream.load(blank(), place.path)


async def without_a_marker(place: Place) -> None:
    (place.path / ".metadata").unlink()
    await sidestream.load(blank(), place.path)


async def of_a_file_that_is_none(place: Place) -> None:
    await sidestream.load(blank(), place.path / ".metadata")


@pytest.mark.parametrize(
    "load",
    [
        damaged,
        without_a_file,
        of_another_shape,
        without_a_manifest,
        without_a_marker,
        of_a_file_that_is_none,
    ],
)
async def test_nothing_stays_open_after_a_load_that_fails(
    load: Callable[[Place], Awaitable[None]], place: Place
) -> None:
    """Also while the error is kept, whose traceback refers to all that took part."""
    with pytest.raises(errors.SidestreamError) as error:
        await load(place)
    assert place.closed()
    assert error.value.__traceback__ is not None


class Hanging:
    """A system call that hangs for files of one kind, as it does on a server that has gone away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
        self._open, self._suffix = os.open, suffix
        self.directory: int | None = None
        self.entered, self.goes_on, self.left = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr(os, "open", self)

    def __call__(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not str(path).endswith(self._suffix):
            return self._open(path, flags, mode, dir_fd=dir_fd)
        self.directory = dir_fd
        self.entered.set()
        self.goes_on.wait(60)
        try:
            return self._open(path, flags, mode, dir_fd=dir_fd)
        finally:
            self.left.set()


async def load_within(place: Place, timeout_s: float) -> None:
    await sidestream.load(blank(), place.path, options=sidestream.LoadOptions(timeout_s=timeout_s))


async def test_nothing_stays_open_after_a_load_that_is_cancelled(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(monkeypatch, ".distcp")
    loading = asyncio.create_task(sidestream.load(blank(), place.path))
    assert await asyncio.to_thread(hanging.entered.wait, 60)
    assert str(place.path) in place.open()
    loading.cancel()
    hanging.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert place.closed()


async def test_a_thread_that_is_left_behind_keeps_its_directory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is not closed, and used for another file, while the system call that has it goes on."""
    monkeypatch.setattr(threads, "_GRACE_S", 0.1)
    hanging = Hanging(monkeypatch, ".distcp")
    error = await late(lambda timeout_s: load_within(place, timeout_s), hanging.entered.is_set)
    assert isinstance(error, errors.DeadlineExceededError)
    assert hanging.directory is not None
    assert os.readlink(f"/proc/self/fd/{hanging.directory}") == str(place.path)
    hanging.goes_on.set()
    assert await asyncio.to_thread(hanging.left.wait, 60)
    async with asyncio.timeout(60):
        while not place.closed():  # the thread closes it when it has returned from the system call
            await asyncio.sleep(0.01)


async def test_a_thread_that_hangs_while_it_opens_the_directory_closes_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_GRACE_S", 0.1)
    hanging = Hanging(monkeypatch, "/c")
    error = await late(lambda timeout_s: load_within(place, timeout_s), hanging.entered.is_set)
    assert isinstance(error, errors.DeadlineExceededError)
    hanging.goes_on.set()
    assert await asyncio.to_thread(hanging.left.wait, 60)
    async with asyncio.timeout(60):
        while not place.closed():
            await asyncio.sleep(0.01)
    assert error.__traceback__ is not None  # nor does it keep the directory open


def test_a_directory_that_is_refused_before_it_is_open(place: Place) -> None:
    directory = OpenDirectory(place.path)
    assert not directory.refuse()
    with pytest.raises(errors.ClosedError), directory.descriptor():
        pass
    assert place.closed()


def test_threads_that_open_a_directory_at_once_use_one_descriptor(place: Place) -> None:
    directory, barrier = OpenDirectory(place.path), threading.Barrier(8)
    found: list[int] = []

    def use() -> None:
        barrier.wait()
        with directory.descriptor() as descriptor:
            found.append(descriptor)
            barrier.wait()

    started = [threading.Thread(target=use) for _ in range(8)]
    for one in started:
        one.start()
    for one in started:
        one.join(60)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert place.open() == [str(place.path)]
    directory.close()
    assert not place.open()


def test_a_directory_is_closed_by_its_last_user(place: Place) -> None:
    directory = OpenDirectory(place.path)
    with directory.descriptor(), directory.descriptor():
        directory.close()
        with pytest.raises(errors.ClosedError), directory.descriptor():
            pass
        assert place.open()
    assert not place.open()
    directory.close()


def test_a_directory_that_nobody_closes_is_closed_with_its_object(place: Place) -> None:
    directory = OpenDirectory(place.path)
    with directory.descriptor():
        pass
    assert place.open()
    del directory
    assert not place.open()


async def test_a_directory_that_is_deleted_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another checkpoint has taken its place: a load starts over, and takes neither directory for a single file."""
    await sidestream.save(OLD, tmp_path / "one")
    await sidestream.save(NEW, tmp_path / "new")
    scan, exchanged = os.scandir, []

    def listed_late(where: Any) -> Any:
        entries = scan(where)
        if isinstance(where, int) and not exchanged:
            exchanged.append(os.fstat(where).st_ino)
            found = list(entries)
            (tmp_path / "one").rename(tmp_path / "old")
            (tmp_path / "new").rename(tmp_path / "one")
            shutil.rmtree(tmp_path / "old")
            entries = nullcontext(found)
        return entries

    monkeypatch.setattr(os, "scandir", listed_late)
    target = blank()
    await sidestream.load(target, tmp_path / "one")
    assert exchanged
    assert_same(target, NEW)


async def test_a_directory_that_appears_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not there when it is listed, and there when the name is taken for that of a file."""
    await sidestream.save(OLD, tmp_path / "made")
    size_of = read.size_of

    def appear(path: Path, within: OpenDirectory | None) -> int:
        if path == tmp_path / "c" and not path.exists():
            (tmp_path / "made").rename(path)
        return size_of(path, within)

    monkeypatch.setattr(read, "size_of", appear)
    state = blank()
    await sidestream.load(state, tmp_path / "c")
    assert_same(state, OLD)
