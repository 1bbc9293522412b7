"""The events in the life of a load: one for each phase, in order, and one end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from phases import names, watched
from torch.distributed.checkpoint.api import CheckpointException

import sidestream
from sidestream.dcp import StorageReader
from sidestream.errors import CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError
from sidestream.events import LoadEvent

WHOLE = ["LoadStarted", "LoadOpened", "LoadPlanned", "LoadRead", "LoadVerified", "LoadApplied"]


def state() -> dict[str, Any]:
    return {"weights": torch.arange(100_000.0), "step": 7}


def damage(directory: Path) -> None:
    data = max(directory.glob("*.distcp"), key=lambda file: file.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)


async def test_a_load(tmp_path: Path) -> None:
    info = await sidestream.save(state(), tmp_path / "a")
    with watched(LoadEvent) as seen:
        report = await sidestream.load(state(), tmp_path / "a")
    assert names(seen) == WHOLE
    assert {(event.load.operation, event.load.url) for event in seen} == {("load", str(tmp_path / "a"))}
    assert [event.load.save_id for event in seen] == ["", *[info.save_id] * 5]
    last = seen[-1]
    assert seen[3].nbytes == last.nbytes == report.nbytes
    assert list(last.seconds) == ["opened", "planned", "read", "applied"]
    assert list(last.seconds.values()) == sorted(last.seconds.values())
    assert [event.monotonic_ns for event in seen] == sorted(event.monotonic_ns for event in seen)
    for event in seen:
        plain = {one.name: getattr(event, one.name) for one in dataclasses.fields(event)}
        json.dumps(plain | {"load": dataclasses.asdict(event.load), "seconds": dict(plain.get("seconds", {}))})


async def test_what_is_not_verified(tmp_path: Path) -> None:
    await sidestream.save(state(), tmp_path / "a")
    with watched(LoadEvent) as seen:
        await sidestream.load(state(), tmp_path / "a", options=sidestream.LoadOptions(verify="manifest"))
    assert names(seen) == [name for name in WHOLE if name != "LoadVerified"]


async def test_nothing_to_load(tmp_path: Path) -> None:
    with watched(LoadEvent) as seen, pytest.raises(CheckpointNotFoundError):
        await sidestream.load(state(), tmp_path / "a")
    assert names(seen) == ["LoadStarted", "LoadFailed"]
    assert (seen[-1].phase, seen[-1].error_type, seen[-1].written) == ("open", "CheckpointNotFoundError", 0)


async def test_a_target_that_does_not_fit(tmp_path: Path) -> None:
    await sidestream.save(state(), tmp_path / "a")
    with watched(LoadEvent) as seen, pytest.raises(StateMismatchError):
        await sidestream.load({"others": torch.zeros(1)}, tmp_path / "a")
    assert names(seen) == ["LoadStarted", "LoadOpened", "LoadFailed"]
    assert (seen[-1].phase, seen[-1].written) == ("plan", 0)


async def test_damage(tmp_path: Path) -> None:
    await sidestream.save(state(), tmp_path / "a")
    damage(tmp_path / "a")
    with watched(LoadEvent) as seen, pytest.raises(CorruptCheckpointError) as raised:
        await sidestream.load(state(), tmp_path / "a")
    assert names(seen) == ["LoadStarted", "LoadOpened", "LoadPlanned", "LoadFailed"]
    assert (seen[-1].phase, seen[-1].error_type) == ("read", "CorruptCheckpointError")
    assert seen[-1].written == len(raised.value.written) == 1


async def test_an_object_that_refuses(tmp_path: Path) -> None:
    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {"a": torch.zeros(3)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise ValueError("no")

    await sidestream.save({"one": Refuses()}, tmp_path / "a")
    with watched(LoadEvent) as seen, pytest.raises(sidestream.errors.LoadStateDictError):
        await sidestream.load({"one": Refuses()}, tmp_path / "a")
    assert names(seen) == [*WHOLE[:-1], "LoadFailed"]
    assert (seen[-1].phase, seen[-1].written) == ("apply", 1)


async def test_a_restore_that_falls_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with sidestream.Checkpointer(run) as checkpoints:
        for step in (1, 2):
            await checkpoints.save(state(), step=step)
        damage(run / "step-2")
        with watched(LoadEvent) as seen:
            assert await checkpoints.restore(state(), fallback="older") == 1
    assert names(seen) == [*WHOLE[:3], "LoadFailed", *WHOLE, "LoadFellBack"]
    assert {(event.load.operation, event.load.run) for event in seen} == {("restore", str(run))}
    assert [event.load.step for event in seen] == [2] * 4 + [1] * 6 + [2]
    assert seen[-1].taken == f"{run}/step-1"
    assert seen[-1].reason == seen[3].reason


async def test_open_and_what_is_read_then(tmp_path: Path) -> None:
    info = await sidestream.save(state(), tmp_path / "a", files={"notes": b"12345"})
    with watched(LoadEvent) as seen:
        checkpoint = await sidestream.open_checkpoint(tmp_path / "a")
    assert names(seen) == ["LoadStarted", "LoadOpened", "LoadApplied"]
    assert {(event.load.operation, event.load.url) for event in seen} == {("open_checkpoint", str(tmp_path / "a"))}
    assert (seen[-1].load.save_id, list(seen[-1].seconds)) == (info.save_id, ["opened", "applied"])
    calls: dict[str, Any] = {
        "state_dict": checkpoint.state_dict,
        "tensor": lambda: checkpoint.tensor("weights", slice(0, 10)),
        "file": lambda: checkpoint.file("notes"),
    }
    for operation, call in calls.items():
        with watched(LoadEvent) as seen:
            await call()
        assert names(seen) == WHOLE
        assert {event.load.operation for event in seen} == {operation}
        assert [event.load.save_id for event in seen] == ["", *[info.save_id] * 5]
        assert seen[3].nbytes == seen[-1].nbytes > 0
    with watched(LoadEvent) as seen:
        assert await checkpoint.value("step") == 7
    assert names(seen) == [name for name in WHOLE if name != "LoadVerified"]
    assert (seen[-1].load.operation, seen[-1].nbytes) == ("value", 0)


@pytest.mark.parametrize("verify", ["always", "manifest"])
async def test_mapped(verify: Any, tmp_path: Path) -> None:
    await sidestream.save(state(), tmp_path / "a")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "a", verify=verify)
    with watched(LoadEvent) as seen:
        await checkpoint.state_dict(memory="mapped")
    assert names(seen) == [name for name in WHOLE if name != "LoadVerified" or verify == "always"]
    assert seen[-1].nbytes == (400_000 if verify == "always" else 0)


async def test_what_cannot_be_opened_or_read(tmp_path: Path) -> None:
    with watched(LoadEvent) as seen, pytest.raises(CheckpointNotFoundError):
        await sidestream.open_checkpoint(tmp_path / "a")
    assert names(seen) == ["LoadStarted", "LoadFailed"]
    assert (seen[-1].phase, seen[-1].error_type) == ("open", "CheckpointNotFoundError")
    await sidestream.save(state(), tmp_path / "a")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "a")
    damage(tmp_path / "a")
    with watched(LoadEvent) as seen, pytest.raises(CorruptCheckpointError):
        await checkpoint.state_dict()
    assert names(seen) == ["LoadStarted", "LoadOpened", "LoadPlanned", "LoadFailed"]
    assert (seen[-1].phase, seen[-1].error_type, seen[-1].written) == ("read", "CorruptCheckpointError", 0)
    await sidestream.save(state(), tmp_path / "a", overwrite=True)
    with watched(LoadEvent) as seen, pytest.raises(CheckpointNotFoundError, match="replaced"):
        await checkpoint.tensor("weights")
    assert names(seen) == ["LoadStarted", "LoadFailed"]
    assert seen[-1].phase == "open"


async def test_verify(tmp_path: Path) -> None:
    await sidestream.save(state(), tmp_path / "a")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "a")
    for verify in (lambda: sidestream.verify(tmp_path / "a"), checkpoint.verify):
        with watched(LoadEvent) as seen:
            report = await verify()
        assert names(seen) == WHOLE
        assert {event.load.operation for event in seen} == {"verify"}
        assert seen[-1].nbytes == report.nbytes
    damage(tmp_path / "a")
    with watched(LoadEvent) as seen:
        report = await sidestream.verify(tmp_path / "a")
    assert names(seen) == ["LoadStarted", "LoadOpened", "LoadPlanned", "LoadFailed"]
    assert (seen[-1].phase, seen[-1].error_type, seen[-1].reason) == (
        "read",
        "CorruptCheckpointError",
        report.damaged[0].message,
    )
    metadata = tmp_path / "a" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-20])
    with watched(LoadEvent) as seen:
        report = await sidestream.verify(tmp_path / "a")
    assert not report.ok
    assert names(seen) == ["LoadStarted", "LoadFailed"]
    assert seen[-1].phase == "open"


async def test_a_run_is_named(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save(state(), step=5)
        with watched(LoadEvent) as seen:
            async with checkpoints.reading():
                pass
            await checkpoints.verify()
    assert {event.load.run for event in seen} == {str(tmp_path)}
    assert {event.load.step for event in seen if type(event).__name__ == "LoadApplied"} == {5}


def test_inside_dcp(tmp_path: Path) -> None:
    sidestream.blocking.save(state(), tmp_path / "a")
    target = {"weights": torch.zeros(100_000), "step": 0}
    with watched(LoadEvent) as seen:
        dcp.load(target, storage_reader=StorageReader(tmp_path / "a"))
    assert names(seen) == WHOLE
    assert {event.load.operation for event in seen} == {"dcp.load"}
    assert seen[-1].nbytes >= 400_000


def test_damage_inside_dcp(tmp_path: Path) -> None:
    sidestream.blocking.save(state(), tmp_path / "a")
    damage(tmp_path / "a")
    with watched(LoadEvent) as seen, pytest.raises(CheckpointException):
        dcp.load({"weights": torch.zeros(100_000)}, storage_reader=StorageReader(tmp_path / "a"))
    assert names(seen) == ["LoadStarted", "LoadOpened", "LoadPlanned", "LoadFailed"]
    assert (seen[-1].phase, seen[-1].error_type) == ("read", "CorruptCheckpointError")


def test_a_load_that_dcp_does_not_finish(tmp_path: Path) -> None:
    """DCP's planner finds that a key is missing, and calls the reader no more."""
    sidestream.blocking.save(state(), tmp_path / "a")
    reader = StorageReader(tmp_path / "a")
    with watched(LoadEvent) as seen, pytest.raises(CheckpointException):
        dcp.load({"others": torch.zeros(1)}, storage_reader=reader)
    assert names(seen) == ["LoadStarted", "LoadOpened"]
    with watched(LoadEvent) as seen:
        dcp.load({"weights": torch.zeros(100_000)}, storage_reader=reader)
    assert names(seen) == ["LoadFailed", *WHOLE]
    assert (seen[0].phase, seen[0].error_type) == ("plan", "SaveAbortedError")
