"""What killed saves, exports, conversions and copies leave beside a target, and what collects it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import warm

import sidestream
from sidestream import events
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage import LocalStore, space
from sidestream._storage.local import orphans as local_orphans
from sidestream.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError

STATE = {"a": torch.arange(1000.0), "b": torch.ones(300, 300)}

KILLED = """
    import asyncio, os, signal, sys
    import torch
    import sidestream
    from sidestream import events
    from sidestream._storage.local import publishing

    what, target, source, at = sys.argv[1:]
    state = {"a": torch.arange(1000.0), "b": torch.ones(300, 300)}

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def seen(event):
        if isinstance(event, events.SaveWritten) and event.save.operation == what.split()[0]:
            die()

    if at == "exchanged":
        real = publishing.exchange
        publishing.exchange = lambda *paths: (real(*paths), die())
    else:
        observed = events.observe(seen)
        observed.__enter__()

    async def main():
        if what == "save":
            await sidestream.save(state, target, overwrite=at == "exchanged")
        elif what == "export":
            await sidestream.save(state, source + "-saved", export=sidestream.HF(target))
        elif what == "convert":
            await sidestream.convert(source, target)
        else:
            await sidestream.copy(source, target)

    asyncio.run(main())
"""


def kill(what: str, target: Path, source: Path, at: str = "written") -> None:
    """Run ``what`` in a process that is killed before it commits, or just after it has exchanged two directories."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(KILLED), what, str(target), str(source), at]
    ended = warm.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def orphans(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.name.startswith("."))


def without_lock(orphan: Path) -> None:
    """As on a file system that has no locks."""
    (orphan / ".writer.partial").unlink()


def age(path: Path, seconds: float) -> None:
    """As if nobody had written to it for so long."""
    now = path.stat().st_mtime - seconds
    for one in (*path.rglob("*"), path):
        os.utime(one, (now, now))


async def collects(verb: str, target: Path, source: Path) -> None:
    if verb == "save":
        await sidestream.save(STATE, target)
    elif verb == "overwrite":
        await sidestream.save(STATE, target, overwrite=True)
    elif verb == "export":
        info = await sidestream.save(STATE, target.parent / "beside", export=sidestream.HF(target))
        assert isinstance(info.exports[0], sidestream.ConvertReport)
    elif verb == "convert":
        await sidestream.convert(source, target)
    elif verb == "copy":
        await sidestream.copy(source, target)
    else:
        await sidestream.remove(target)


VERBS = ["save", "overwrite", "export", "convert", "copy", "remove"]


@pytest.mark.parametrize("name", ["last", "step-100"])
async def test_an_attempt_is_collected_when_nobody_has_written_to_it_for_an_hour(name: str, tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    await sidestream.save(STATE, source)
    for what, verb in zip(["save", "export", "convert", "copy", "save", "save"], VERBS, strict=True):
        kill(what, root / name, source)
        (orphan,) = orphans(root)
        without_lock(orphan)
        age(orphan, 3500)
        if verb == "remove":
            with pytest.raises(CheckpointNotFoundError):
                await sidestream.remove(root / name)
        else:
            await collects(verb, root / name, source)
            assert orphans(root) == [orphan], verb
            for path in (root / name, root / "beside"):
                shutil.rmtree(path, ignore_errors=True)
        age(orphan, 3700)
        await collects(verb, root / name, source)
        assert orphans(root) == [], verb
        for path in (root / name, root / "beside"):
            shutil.rmtree(path, ignore_errors=True)
    with pytest.raises(CheckpointNotFoundError):
        await sidestream.remove(root / name)


@pytest.mark.parametrize("verb", ["overwrite", "remove"])
async def test_what_a_process_that_was_killed_after_the_exchange_has_replaced(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays for an hour after the exchange, however old it is: its process may live, and the exchange may not be
    durable yet."""
    await sidestream.save(STATE, tmp_path / "last")
    age(tmp_path / "last", 8000)
    kill("save", tmp_path / "last", tmp_path, "exchanged")
    (orphan,) = orphans(tmp_path)
    assert (orphan / ".metadata").exists()
    await sidestream.save(STATE, tmp_path / "beside")
    assert orphans(tmp_path) == [orphan]
    real = local_orphans.storage_time
    monkeypatch.setattr(local_orphans, "storage_time", lambda directory: real(directory) + 3700)
    await collects(verb, tmp_path / "last", tmp_path)
    assert orphans(tmp_path) == []


@pytest.mark.parametrize(
    ("killed", "verb"),
    [("save", "export"), ("export", "save"), ("convert", "copy"), ("copy", "convert"), ("save", "remove")],
)
async def test_an_attempt_of_a_process_that_has_ended_is_collected_at_once(
    killed: str, verb: str, tmp_path: Path
) -> None:
    """Also one at another target, as that of another step of an export."""
    source, root = tmp_path / "source", tmp_path / "root"
    await sidestream.save(STATE, source)
    kill(killed, root / ("last" if verb == "remove" else "step-1"), source)
    assert len(orphans(root)) == 1
    await collects(verb, root / "last", source)
    assert orphans(root) == []


async def test_attempts_at_other_targets_are_collected_by_their_age(tmp_path: Path) -> None:
    for name in ("last", "step-1", "step-1.g2"):
        kill("save", tmp_path / name, tmp_path)
        (orphan,) = (one for one in orphans(tmp_path) if (one / ".writer.partial").exists())
        without_lock(orphan)
    (tmp_path / ".mine.partial").mkdir()
    young = orphans(tmp_path)[-1]
    for orphan in orphans(tmp_path)[:-1]:
        age(orphan, 8000)
    await sidestream.save(STATE, tmp_path / "other")
    assert orphans(tmp_path) == sorted({young, tmp_path / ".mine.partial"})


async def test_an_attempt_whose_process_lives_is_never_collected(tmp_path: Path) -> None:
    """However old it looks: its process was stopped, or waits for a device."""
    kept: list[bool] = []

    def seen(event: object) -> None:
        if isinstance(event, events.SaveWritten) and not kept:
            (orphan,) = orphans(tmp_path)
            age(orphan, 8000)
            code = f"import sidestream; sidestream.blocking.save({{'other': 1}}, {str(tmp_path / 'other')!r})"
            warm.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
            kept.append(orphan.exists())

    with events.observe(seen):
        await sidestream.save(STATE, tmp_path / "last")
    assert kept == [True]
    assert sorted(os.listdir(tmp_path)) == ["last", "other"]


@pytest.mark.parametrize("lock", ["of another boot", "of another mount", "not written yet"])
async def test_a_lock_that_proves_nothing(lock: str, tmp_path: Path) -> None:
    """On some mounts a lock excludes only the processes of one host, or of one container, and what shows that is
    written when the lock is held."""
    kill("save", tmp_path / "last", tmp_path)
    (orphan,) = orphans(tmp_path)
    file = orphan / ".writer.partial"
    boot, mount = file.read_text().split()
    if lock == "of another boot":
        boot = "00000000-0000-0000-0000-000000000000"
    elif lock == "of another mount":
        mount = str(int(mount) + 1)
    file.write_text("" if lock == "not written yet" else f"{boot} {mount}")
    await sidestream.save(STATE, tmp_path / "last")
    assert orphans(tmp_path) == [orphan]
    age(orphan, 3700)
    await sidestream.save(STATE, tmp_path / "last", overwrite=True)
    assert orphans(tmp_path) == []


async def test_a_forked_child_does_not_keep_the_attempt_of_its_parent(tmp_path: Path) -> None:
    code = """
        import os, signal, sys, time
        import torch
        import sidestream
        from sidestream import events

        def seen(event):
            if isinstance(event, events.SaveWritten):
                if os.fork() == 0:
                    print(os.getpid(), flush=True)
                    signal.pause()
                os.kill(os.getpid(), signal.SIGKILL)

        with events.observe(seen):
            sidestream.blocking.save({"a": torch.ones(3)}, sys.argv[1])
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(tmp_path / "last")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.wait(timeout=120)
            assert len(orphans(tmp_path)) == 1
            await sidestream.save(STATE, tmp_path / "other")
            assert orphans(tmp_path) == []
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_run_that_is_started_again_collects_at_once(tmp_path: Path) -> None:
    """Although a lease of the killed writer has not expired."""
    kill("save", tmp_path / "step-1", tmp_path)
    (tmp_path / ".leases").mkdir()
    (tmp_path / ".leases" / f"step-1.save300.{'0' * 32}").touch()
    async with sidestream.Checkpointer(tmp_path) as run:
        assert len(orphans(tmp_path)) == 2
        pruned = await run.prune()
        assert len(pruned.abandoned) == 1
    assert [path.name for path in orphans(tmp_path)] == [".leases"]


async def test_space_that_a_dead_process_holds_is_freed_before_it_is_said_to_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill("save", tmp_path / "last", tmp_path)
    real = space._free
    monkeypatch.setattr(space, "_free", lambda place: 0 if orphans(tmp_path) else real(place))
    monkeypatch.setattr(space, "_kind", lambda device: "ext4")
    await sidestream.save(STATE, tmp_path / "other")
    assert orphans(tmp_path) == []


async def test_directories_of_other_programs_are_no_attempts(tmp_path: Path) -> None:
    """However old they are, and however similar their names."""
    names = [f".download.{'0' * 32}.partial", f".{'0' * 32}.partial", ".step-1.partial", f".a.b.{'1' * 32}.partial"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
        age(tmp_path / name, 8000)
    await sidestream.save(STATE, tmp_path / "last")
    await sidestream.remove(tmp_path / "last")
    assert [path.name for path in orphans(tmp_path)] == sorted(names)


@pytest.mark.parametrize("commit", ["rename", "marker"])
async def test_an_export_that_is_not_complete_is_removed_after_an_hour(commit: str, tmp_path: Path) -> None:
    """As its refusal says."""
    storage = sidestream.Storage(commit="marker") if commit == "marker" else sidestream.Storage()
    export = sidestream.HF(tmp_path / "export", max_shard_bytes=8, storage=storage)
    info = await sidestream.save(STATE, tmp_path / "last", export=export)
    assert isinstance(info.exports[0], sidestream.ConvertReport)
    (tmp_path / "export" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointExistsError, match=r"remove\(\) it an hour after the last write"):
        await sidestream.save(STATE, tmp_path / "export", storage=storage)
    age(tmp_path / "export", 3500)
    with pytest.raises(CheckpointNotFoundError):
        await sidestream.remove(tmp_path / "export", storage=storage)
    age(tmp_path / "export", 200)
    await sidestream.remove(tmp_path / "export", storage=storage)
    await sidestream.save(STATE, tmp_path / "export", storage=storage)


async def test_attempts_of_a_run_are_left_to_the_run(tmp_path: Path) -> None:
    """A lease may say that their writer lives, or the run may have another rule."""
    kill("save", tmp_path / "step-1", tmp_path)
    (orphan,) = orphans(tmp_path)
    without_lock(orphan)
    age(orphan, 8000)
    async with sidestream.Checkpointer(tmp_path, abandoned_after_s=10_000) as run:
        await run.save(STATE, step=1)
        assert orphan.exists()
    (tmp_path / ".leases").mkdir(exist_ok=True)
    await sidestream.remove(tmp_path / "step-1")
    await sidestream.save(STATE, tmp_path / "step-1")
    assert orphan.exists()
    (tmp_path / ".leases").rmdir()
    await sidestream.save(STATE, tmp_path / "step-1", overwrite=True)
    assert not orphan.exists()


async def test_a_writer_whose_attempt_was_collected_cannot_commit(tmp_path: Path) -> None:
    """A process that was stopped for an hour, and goes on."""
    collected: list[str] = []

    def seen(event: object) -> None:
        if isinstance(event, events.SaveWritten) and not collected:
            (orphan,) = orphans(tmp_path)
            collected.append(orphan.name)
            without_lock(orphan)
            age(orphan, 3700)
            other = threading.Thread(target=lambda: asyncio.run(sidestream.save({"other": 1}, tmp_path / "last")))
            other.start()
            other.join()

    with events.observe(seen), pytest.raises(StorageError):
        await sidestream.save(STATE, tmp_path / "last")
    assert collected
    assert list(await sidestream.open_checkpoint(tmp_path / "last")) == ["other"]
    assert orphans(tmp_path) == []


@pytest.mark.parametrize("kept", [False, True])
async def test_a_directory_that_another_process_makes_at_the_same_time(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may also be removed again at once, as that of the leases is when the last one is dropped."""
    real, made = os.mkdir, []

    def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
        real(path, *arguments, **options)
        if not made:
            made.append(path)
            if not kept:
                os.rmdir(path)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    monkeypatch.setattr(os, "mkdir", mkdir)
    with time_limit(Deadline.after(60.0)):
        await LocalStore(tmp_path).put(".leases/one", b"1", durability="flush")
    assert [Path(one).name for one in made] == [".leases"]
    assert (tmp_path / ".leases" / "one").read_bytes() == b"1"
