"""Nothing is acknowledged before everything that it rests on has been synced, whatever the file system's journal adds.

ext4 and xfs happen to write more than was asked of them, so a power cut there does not show every missing sync.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _operations import Called, Intercept, Operation
from _seeded import make_state

import sidestream
from sidestream import errors


def unsynced(log: list[Called], root: Path, until: int) -> list[str]:
    """What POSIX alone would not promise after the operations before ``until``: contents and names by path.

    A new name is safe once its directory was synced after it came to be; contents once the file was synced after the
    last write. A rename moves what is below it, synced or not.
    """
    names: set[str] = set()
    contents: set[str] = set()
    renamed: dict[str, str] = {}
    for operation in log[:until]:
        path = operation.path
        if operation.name in ("mkdir", "open") and operation.changes:
            names.add(path)
        if operation.name in ("pwrite", "posix_fallocate"):
            contents.add(path)
        if operation.name == "fsync":
            contents.discard(path)
            names = {name for name in names if os.path.dirname(name) != path}
        if operation.name == "rename":
            target = operation.target
            renamed[path] = target
            names = {_moved(name, path, target) for name in names} | {target}
            contents = {_moved(name, path, target) for name in contents}
    return sorted(f"name of {name}" for name in names) + sorted(f"content of {name}" for name in contents)


def _moved(name: str, source: str, target: str) -> str:
    return target + name[len(source) :] if name == source or name.startswith(source + "/") else name


async def traced(root: Path, work: Callable[[], Any]) -> list[Called]:
    with Intercept(root, Operation.call).installed() as intercept:
        await work()
    return intercept.log


@pytest.mark.parametrize("place", ["target", "new/run/target"])
async def test_everything_is_synced_before_it_is_relied_on(place: str, tmp_path: Path) -> None:
    log = await traced(tmp_path, lambda: sidestream.save(make_state(1), tmp_path / place))
    rename = next(index for index, operation in enumerate(log) if operation.name == "rename")
    attempt = log[rename].path
    before = [one for one in unsynced(log, tmp_path, rename) if one != f"name of {attempt}"]
    assert before == [], "published before it was complete on disk"
    assert unsynced(log, tmp_path, len(log)) == [], "acknowledged before it was durable"
    assert sum(operation.name == "pwrite" for operation in log[:rename]) >= 3
    assert not any(operation.changes for operation in log[rename + 1 :] if operation.name != "fsync")


async def test_an_exchange_is_synced_before_what_it_replaced_is_deleted(tmp_path: Path) -> None:
    await sidestream.save(make_state(1), tmp_path / "target")
    files = {"config.json": b"{}"}
    log = await traced(
        tmp_path, lambda: sidestream.save(make_state(2), tmp_path / "target", overwrite=True, files=files)
    )
    at = next(index for index, one in enumerate(log) if one.name == "exchange" and one.target == f"{tmp_path}/target")
    attempt = log[at].path
    left = [one for one in unsynced(log, tmp_path, at) if not one.endswith((attempt, "/.one", "/.other"))]
    assert left == [], "published before it was complete on disk"
    assert f"{attempt}/config.json" in {one.path for one in log[:at] if one.name == "fsync"}
    after = [(one.name, one.path) for one in log[at + 1 :] if one.changes or one.name in ("unlink", "rmdir")]
    assert after[:2] == [("fsync", str(tmp_path)), ("rename", attempt)]


async def test_a_removal_is_synced_before_files_are_deleted(tmp_path: Path) -> None:
    await sidestream.save(make_state(1), tmp_path / "target")
    log = await traced(tmp_path, lambda: sidestream.remove(tmp_path / "target"))
    names = [one.name for one in log if one.changes or one.name in ("unlink", "rmdir")]
    assert names[:2] == ["rename", "fsync"]
    assert set(names[2:]) == {"unlink", "rmdir"}


async def test_flush_syncs_nothing(tmp_path: Path) -> None:
    log = await traced(
        tmp_path,
        lambda: sidestream.save(make_state(1), tmp_path / "target", options=sidestream.SaveOptions(durability="flush")),
    )
    assert not any(operation.name == "fsync" for operation in log)


async def test_a_directory_that_a_failed_save_made_is_synced_by_the_next(tmp_path: Path) -> None:
    """Its name may not be on disk yet: the first save had made it, and then could not sync."""
    run = tmp_path / "new" / "run"
    failed: list[Operation] = []

    def hook(operation: Operation) -> Any:
        if operation.name == "fsync" and not failed:
            failed.append(operation)
            raise OSError(errno.EIO, "Input/output error")
        return operation.call()

    with Intercept(tmp_path, hook).installed() as first, pytest.raises(errors.StorageError):
        await sidestream.save(make_state(1), run / "step-1")
    log = await traced(tmp_path, lambda: sidestream.save(make_state(1), run / "step-1"))
    made = [one for one in first.log if not (one.name == "fsync" and one.path == failed[0].path)]
    assert [one for one in unsynced([*made, *log], tmp_path, 10**6) if "partial" not in one] == []


async def test_a_directory_that_a_killed_save_made_is_synced_by_the_next(tmp_path: Path) -> None:
    """As above, but nobody was left to clean up: the run is there, and nobody knows whether its name is on disk."""
    (tmp_path / "new" / "run").mkdir(parents=True)
    log = await traced(tmp_path, lambda: sidestream.save(make_state(1), tmp_path / "new" / "run" / "step-1"))
    assert str(tmp_path / "new") in {operation.path for operation in log if operation.name == "fsync"}
