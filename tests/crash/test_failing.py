"""Every file operation of a save and of a load fails, with real errors where the machine lets us have them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from _injecting import Bench, fail
from _look import attempts_in, seed_of
from _mounts import mounted
from _operations import Intercept, Operation, exists
from _seeded import blank_state, make_state, same
from _trials import Trials
from late import late

import sidestream
from sidestream import errors
from sidestream._runtime import threads as _threads


@pytest.fixture
async def bench(tmp_path: Path) -> Any:
    async with sidestream.AsyncStager(budget_bytes=64 << 20) as stager:
        bench = Bench(tmp_path, stager)
        await bench.prepare()
        yield bench


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EIO, errors.StorageError),
        (errno.ENOSPC, errors.NoSpaceError),
        (errno.EDQUOT, errors.NoSpaceError),
        (errno.EACCES, errors.AccessDeniedError),
        (errno.EROFS, errors.AccessDeniedError),
    ],
)
@pytest.mark.parametrize("name", ["mkdir", "posix_fallocate", "pwrite", "fsync", "rename"])
async def test_a_fault_is_told_as_what_it_is(name: str, number: int, kind: type[Exception], bench: Bench) -> None:
    done = []

    def hook(operation: Operation) -> Any:
        if operation.name == name and not done and operation.path != str(bench.run):
            done.append(operation)
            fail(operation, number)
        return operation.call()

    error, outcome, _ = await bench.save(hook)
    assert done
    assert type(error) is kind
    assert isinstance(error, OSError)
    assert error.errno == number
    assert "step-2" in str(error)
    assert outcome == "absent"
    assert await bench.judge(error, outcome) == []


async def test_a_failed_rename_is_absent(bench: Bench) -> None:
    def hook(operation: Operation) -> Any:
        return fail(operation, errno.EIO) if operation.name == "rename" else operation.call()

    error, outcome, _ = await bench.save(hook)
    assert isinstance(error, errors.StorageError)
    assert outcome == "absent"
    assert await bench.judge(error, outcome) == []


async def test_a_rename_that_took_place_and_failed_is_committed(bench: Bench) -> None:
    """As NFS does when the answer to the first try was lost."""

    def hook(operation: Operation) -> Any:
        result = operation.call()
        return fail(operation, errno.EIO) if operation.name == "rename" else result

    error, outcome, _ = await bench.save(hook)
    assert isinstance(error, errors.NotDurableError)
    assert outcome == "committed"
    assert await bench.judge(error, outcome) == []


@pytest.mark.parametrize("name", ["open", "fsync", "close"])
async def test_a_failed_sync_after_the_rename_is_not_durable_and_committed(name: str, bench: Bench) -> None:
    renamed = []

    def hook(operation: Operation) -> Any:
        if operation.name == "rename":
            renamed.append(operation)
        elif renamed and operation.name == name and operation.path == str(bench.run):
            fail(operation, errno.EIO)
        return operation.call()

    error, outcome, _ = await bench.save(hook)
    assert isinstance(error, errors.NotDurableError)
    assert error.errno == errno.EIO
    assert outcome == "committed"
    assert await bench.judge(error, outcome) == []


async def test_a_rename_that_hangs_is_unknown_and_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that hangs may still publish the attempt at any later time."""
    monkeypatch.setattr(_threads, "_GRACE_S", 0.01)
    reached, released, ended = threading.Event(), threading.Event(), threading.Event()
    pendings: list[sidestream.PendingSave] = []

    def hook(operation: Operation) -> Any:
        if operation.name != "rename":
            return operation.call()
        reached.set()
        assert released.wait(60)
        try:
            return operation.call()
        finally:
            ended.set()

    def save(timeout_s: float) -> sidestream.PendingSave:
        options = sidestream.SaveOptions(timeout_s=timeout_s)
        pendings.append(sidestream.async_save(make_state(1), tmp_path / "target", options=options))
        return pendings[-1]

    with Intercept(tmp_path, hook).installed():
        try:
            assert isinstance(await late(save, reached.is_set), errors.OutcomeUnknownError)
            assert pendings[-1].outcome == "unknown"
            assert len(attempts_in(tmp_path)) == 1
        finally:
            released.set()
        assert ended.wait(60)
    assert attempts_in(tmp_path) == []
    assert await seed_of(tmp_path / "target") == 1


async def test_short_writes_are_completed(bench: Bench) -> None:
    def hook(operation: Operation) -> Any:
        if operation.name != "pwrite":
            return operation.call()
        descriptor, buffer, position = operation.args
        return operation.real(descriptor, buffer[: max(1, len(buffer) // 2)], position)

    error, outcome, intercept = await bench.save(hook)
    assert (error, outcome) == (None, "committed")
    assert sum(operation.name == "pwrite" for operation in intercept.log) > 20
    assert await bench.judge(error, outcome) == []


async def test_a_retry_where_the_error_is_caught_finds_the_memory_free(tmp_path: Path) -> None:
    state = {"weight": make_state(1)["model"]["weight"]}

    def hook(operation: Operation) -> Any:
        failing = operation.name == "fsync" and operation.path.endswith(".distcp")
        return fail(operation, errno.EIO) if failing else operation.call()

    async with sidestream.AsyncStager(budget_bytes=state["weight"].nbytes + (8 << 10), timeout_s=60) as stager:
        try:
            with Intercept(tmp_path, hook).installed():
                await sidestream.save(state, tmp_path / "target", stager=stager)
        except errors.StorageError:
            await sidestream.save(
                state, tmp_path / "target", stager=stager, options=sidestream.SaveOptions(timeout_s=60)
            )
    assert same(await (await sidestream.open_checkpoint(tmp_path / "target")).state_dict(), state)


# --- loading ----------------------------------------------------------------------------------------------------------


async def test_short_reads_are_completed(bench: Bench) -> None:
    def hook(operation: Operation) -> Any:
        if operation.name != "preadv":
            return operation.call()
        descriptor, buffers, *where = operation.args
        if len(buffers) > 1:  # the first ones in full, and part of one
            return operation.real(descriptor, [*buffers[: len(buffers) // 2], buffers[len(buffers) // 2][:1]], *where)
        return operation.real(descriptor, [buffers[0][: max(1, len(buffers[0]) // 2)]], *where)

    state = blank_state()
    with Intercept(bench.folder, hook).installed():
        await sidestream.load(state, bench.folder / "base" / "step-1")
    assert same(state, make_state(11))


async def test_a_run_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    async with sidestream.Checkpointer(tmp_path / "file") as checkpoints:
        for attempt in (checkpoints.steps, checkpoints.latest, lambda: checkpoints.restore(blank_state())):
            with pytest.raises(errors.SidestreamError):
                await attempt()
        with pytest.raises(errors.SidestreamError):
            await checkpoints.save(make_state(1), step=1)
    for url in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / "file" / "x" / "y"):
        with pytest.raises(errors.SidestreamError):
            await sidestream.save(make_state(1), url)
        with pytest.raises(errors.SidestreamError):
            await sidestream.load(blank_state(), url)
    assert (tmp_path / "file").read_text() == "not a directory"


async def test_the_directory_is_taken_away_during_a_save(bench: Bench) -> None:
    def hook(operation: Operation) -> Any:
        if operation.name == "fsync":
            shutil.rmtree(bench.run)
        return operation.call()

    error, outcome, _ = await bench.save(hook)
    assert isinstance(error, errors.SidestreamError), repr(error)
    assert outcome == "absent"
    assert attempts_in(bench.folder) == []


# --- what the machine itself refuses ----------------------------------------------------------------------------------


async def failure(work: Coroutine[Any, Any, Any]) -> Exception | None:
    try:
        await work
    except Exception as error:
        return error
    return None


async def test_a_full_disk(tmp_path: Path) -> None:
    """Every size of a disk from nothing to more than enough; then room is made, and the same save works."""
    kinds: Counter[str] = Counter()
    for pages in range(3, 90, 6):
        with mounted(tmp_path / f"disk-{pages}", "-t", "tmpfs", "-o", f"size={pages * 4096}", "tmpfs") as disk:
            error = await failure(sidestream.save(make_state(1), disk / "target"))
            if error is not None:
                kinds["full"] += 1
                assert type(error) is errors.NoSpaceError
                assert error.errno == errno.ENOSPC
                assert str(disk) in str(error)
                assert os.listdir(disk) == []
                subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
                await sidestream.save(make_state(1), disk / "target")
            else:
                kinds["saved"] += 1
            assert await seed_of(disk / "target") == 1
    assert kinds["full"] >= 5, kinds
    assert kinds["saved"] >= 2, kinds


async def test_a_read_only_file_system(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as disk:
        await sidestream.save(make_state(1), disk / "step-1")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(errors.AccessDeniedError) as caught:
            await sidestream.save(make_state(2), disk / "step-2")
        assert caught.value.errno == errno.EROFS
        assert str(disk) in str(caught.value)
        assert await seed_of(disk / "step-1") == 1


@pytest.mark.parametrize("limit", [4096, 20_000, 90_000])
async def test_a_file_size_limit(limit: int, tmp_path: Path, children: Trials) -> None:
    told = children.run(root=tmp_path, run=tmp_path, work="limited", limit=limit)
    assert told.exit == 0
    assert told.error is not None
    assert (told.error["error"], told.error["number"]) == ("NoSpaceError", errno.EFBIG)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_a_directory_of_somebody_else(children: Trials) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        await sidestream.save(make_state(1), folder / "run" / "step-1")
        for run in (folder / "run", folder / "new"):
            told = children.run(root=folder, run=run, saves=[(2, 12)], uid=65534)
            assert told.exit == 0
            assert told.error is not None
            assert told.error["error"] == "AccessDeniedError"
            assert str(run) in told.error["message"]
            assert told.acked == {}
        assert os.listdir(folder) == ["run"]
        assert os.listdir(folder / "run") == ["step-1"]
        assert stat.S_IMODE((folder / "run" / "step-1").stat().st_mode) & 0o700 == 0o700
        assert await seed_of(folder / "run" / "step-1") == 1


# --- files of a save are removed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["thread", "process"])
async def test_files_that_are_removed_under_a_save(saver: Any, tmp_path: Path) -> None:
    """Files are removed at every operation of the save, as ``rm -r`` of the run does: no checkpoint with a missing file
    becomes visible."""
    at, removed, refused = 0, True, 0
    while removed:
        at, removed, seen = at + 1, False, 0
        run = tmp_path / str(at)

        def hook(operation: Operation, run: Path = run, at: int = at) -> Any:
            nonlocal removed, seen
            if operation.index >= at and not removed:
                seen = operation.index
                removed = take_a_file(run)
            return operation.call()

        with Intercept(run, hook).installed() as intercept:
            pending = sidestream.async_save(make_state(1), run / "step-1", options=sidestream.SaveOptions(writer=saver))
            await pending.ended()
        if pending.outcome == "absent":
            assert "another process removed" in str(pending.unretrieved)
            pending.mark_retrieved()
            refused += 1
            assert not exists(str(run / "step-1"))
            assert attempts_in(run) == []
            continue
        last_look = max(number for number, call in enumerate(intercept.log, 1) if call.name == "listdir")
        assert not removed or seen > last_look, f"committed, though a file was taken at operation {seen} of {last_look}"
    assert refused > 3


_listdir, _unlink = os.listdir, os.unlink


def take_a_file(run: Path) -> bool:
    """Remove a data file of the attempt, without a call that is intercepted. False if there is none."""
    for folder in _listdir(run) if exists(str(run)) else ():
        for name in _listdir(run / folder) if folder.endswith(".partial") or folder == "step-1" else ():
            if name.startswith("__"):
                _unlink(run / folder / name)
                return True
    return False
