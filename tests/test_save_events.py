"""The events in the life of a save: one for each phase, in order, and one end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from keywords import for_save
from phases import names, watched
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import sidestream
from sidestream import events
from sidestream._runtime.threads import io_threads, report
from sidestream._save.lifecycle import Lifecycle
from sidestream.dcp import StorageWriter
from sidestream.errors import CheckpointExistsError, NoSpaceError, SkippedError, UnsafeObjectError
from sidestream.events import SaveContext, SaveEvent

WHOLE = ["SaveStarted", "SavePlanned", "SaveStaged", "SaveWritten", "SaveCommitted"]


def state() -> dict[str, Any]:
    return {"weights": torch.arange(100_000.0), "step": 7}


@pytest.mark.parametrize("options", [{}, {"writer": "process"}], ids=["thread", "process"])
async def test_a_save(options: dict[str, Any], tmp_path: Path) -> None:
    with watched(SaveEvent) as seen:
        info = await sidestream.save(state(), tmp_path / "a", **for_save(**options))
    # Staging may end before or after the plan is passed on.
    assert sorted(names(seen)) == sorted(WHOLE)
    assert names(seen)[0] == "SaveStarted"
    assert names(seen)[-2:] == ["SaveWritten", "SaveCommitted"]
    assert {event.save.url for event in seen} == {str(tmp_path / "a")}
    assert {event.save.save_id for event in seen[1:]} <= {info.save_id, ""}
    last = seen[-1]
    assert (last.save.save_id, last.nbytes, dict(last.seconds)) == (info.save_id, info.nbytes, dict(info.seconds))
    assert [event.monotonic_ns for event in seen] == sorted(event.monotonic_ns for event in seen)
    for event in seen:
        plain = {one.name: getattr(event, one.name) for one in dataclasses.fields(event)}
        json.dumps(plain | {"save": dataclasses.asdict(event.save), "seconds": dict(plain.get("seconds", {}))})


@pytest.mark.parametrize("options", [{}, {"writer": "process"}], ids=["thread", "process"])
async def test_an_observer_may_wait_for_the_loop(options: dict[str, Any], tmp_path: Path) -> None:
    loop, loop_thread = asyncio.get_running_loop(), threading.get_ident()
    waited: list[bool] = []

    def wait_for_the_loop(event: Any) -> None:
        if isinstance(event, events.SavePlanned):
            assert threading.get_ident() != loop_thread
            turned = threading.Event()

            def turn(left: int) -> None:
                # The callbacks of the staging are among those turns: the loop must not wait for this observer.
                loop.call_later(0.001, turn, left - 1) if left else turned.set()

            loop.call_soon_threadsafe(turn, 100)
            waited.append(turned.wait(20))

    with watched(SaveEvent) as seen, events.observe(wait_for_the_loop):
        await sidestream.save(state(), tmp_path / "a", **for_save(**options))
    assert waited == [True]
    assert sorted(names(seen)) == sorted(WHOLE)
    assert names(seen)[0] == "SaveStarted"
    assert names(seen)[-2:] == ["SaveWritten", "SaveCommitted"]
    assert [event.monotonic_ns for event in seen] == sorted(event.monotonic_ns for event in seen)


def test_events_that_an_observer_brings_about_come_after_the_one_that_it_is_called_with() -> None:
    """Every observer sees the events of a save in one order, also if one of them ends the save."""
    lifecycle = Lifecycle(SaveContext("save", "a"))

    def end(event: Any) -> None:
        if isinstance(event, events.SavePlanned):
            lifecycle.failed(RuntimeError("the observer ends the save"), "absent")
            lifecycle.staged()  # too late

    with events.observe(end), watched(SaveEvent) as seen:
        lifecycle.started()
        lifecycle.planned("0" * 32)
        lifecycle.committed(0, {})
    assert names(seen) == ["SaveStarted", "SavePlanned", "SaveFailed"]


async def test_a_cancel_takes_back_no_event() -> None:
    """A call of observers is cancelled while it waits for a thread."""
    free, threads = threading.Event(), io_threads()
    with watched(events.RunPruned) as seen:
        for _ in range(threads._size + 32):  # there may be more threads, after others of the process were stuck
            threads.submit(free.wait, 60)
        reporting = asyncio.ensure_future(report(events.emit, events.RunPruned("run", ("step-1",), ())))
        await asyncio.sleep(0)
        reporting.cancel()
        await asyncio.sleep(0)
        assert not seen
        free.set()
        with pytest.raises(asyncio.CancelledError):
            await reporting
    assert names(seen) == ["RunPruned"]


async def test_a_step_of_a_run(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        with watched(SaveEvent) as seen:
            await checkpoints.save(state(), step=5)
            await checkpoints.save(state(), step=5)
    assert [
        (event.save.run, event.save.step, event.save.generation) for event in seen if "Committed" in str(event)
    ] == [
        (str(tmp_path / "run"), 5, 1),
        (str(tmp_path / "run"), 5, 2),
    ]


async def test_a_value_that_is_refused(tmp_path: Path) -> None:
    with watched(SaveEvent) as seen, pytest.raises(UnsafeObjectError):
        await sidestream.save({"bad": object()}, tmp_path / "a")
    assert names(seen)[0] == "SaveStarted"
    assert names(seen)[-1] == "SaveFailed"
    assert names(seen).count("SaveFailed") == 1
    assert (seen[-1].phase, seen[-1].error_type, seen[-1].outcome) == ("plan", "UnsafeObjectError", "absent")


async def test_a_target_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    with watched(SaveEvent) as seen, pytest.raises(CheckpointExistsError):
        await sidestream.save(state(), tmp_path / "a")
    assert (seen[-1].phase, seen[-1].error_type, seen[-1].outcome) == ("write", "CheckpointExistsError", "absent")
    assert seen[-1].reason


async def test_a_full_disk_at_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def full(source: Any, target: Any, **options: Any) -> None:
        if str(target).endswith("/a"):
            raise OSError(28, "No space left on device")
        rename(source, target, **options)

    monkeypatch.setattr("os.rename", full)
    with watched(SaveEvent) as seen, pytest.raises(NoSpaceError):
        await sidestream.save(state(), tmp_path / "a")
    assert names(seen)[-2:] == ["SaveWritten", "SaveFailed"]
    assert (seen[-1].phase, seen[-1].outcome) == ("commit", "absent")


async def test_a_cancel(tmp_path: Path) -> None:
    with watched(SaveEvent) as seen:
        cancelled = threading.Event()
        held = sidestream.SaveOptions(names=lambda name: name if cancelled.wait(60) else None)
        pending = sidestream.async_save(state(), tmp_path / "a", options=held)
        while not seen:  # a save that is cancelled before its first step has not started
            await asyncio.sleep(0)
        assert pending.cancel()
        cancelled.set()
        await pending.ended()
    assert names(seen)[-1] == "SaveFailed"
    assert seen[-1].error_type == "CancelledError"


async def test_a_save_that_is_cancelled_before_its_first_step(tmp_path: Path) -> None:
    with watched(SaveEvent) as seen:
        pending = sidestream.async_save(state(), tmp_path / "a")
        assert pending.cancel()
        await pending.ended()
    assert not {"SaveCommitted", "SaveWritten"} & set(names(seen))
    assert names(seen).count("SaveFailed") == names(seen).count("SaveStarted")


async def test_a_newer_save_comes_first(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path / "run", when_full="latest", slots=1) as checkpoints:
        with watched(SaveEvent) as seen:
            called = threading.Event()  # the first one keeps its slot until all have been called
            held = sidestream.SaveOptions(names=lambda name: name if called.wait(60) else None)
            pendings = [
                checkpoints.async_save(state(), step=step, options=held if step == 1 else None) for step in (1, 2, 3)
            ]
            called.set()
            ended = await asyncio.gather(*pendings, return_exceptions=True)
    skipped = [step for step, one in zip((1, 2, 3), ended, strict=True) if isinstance(one, SkippedError)]
    assert skipped
    assert [event.save.step for event in seen if isinstance(event, events.SaveSkipped)] == skipped


def test_an_end_of_the_loop(tmp_path: Path) -> None:
    pendings = []

    async def start() -> None:
        pendings.append(sidestream.async_save({"w": torch.ones(3_000_000)}, tmp_path / "a"))
        await asyncio.sleep(0)

    with watched(SaveEvent) as seen:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(start())
        loop.close()
        pendings[0].result(60)
    assert sorted(names(seen)) == sorted(WHOLE)
    assert names(seen)[-1] == "SaveCommitted"


async def test_conversions_and_copies(tmp_path: Path) -> None:
    await sidestream.save(state(), tmp_path / "a")
    with watched(SaveEvent) as seen:
        await sidestream.convert(tmp_path / "a", tmp_path / "a.pt")
        await sidestream.copy(tmp_path / "a", tmp_path / "b")
    assert [(event.save.operation, type(event).__name__) for event in seen] == [
        (operation, name) for operation in ("convert", "copy") for name in WHOLE if name != "SaveStaged"
    ]


def test_a_save_of_dcp(tmp_path: Path) -> None:
    with watched(SaveEvent) as seen:
        dcp.save(state(), storage_writer=StorageWriter(tmp_path / "a"))
    assert names(seen) == [name for name in WHOLE if name != "SaveStaged"]
    with watched(SaveEvent) as seen, pytest.raises(CheckpointException, match="the planner fails"):
        dcp.save(state(), storage_writer=StorageWriter(tmp_path / "b"), planner=Failing())
    assert names(seen).count("SaveCommitted") == 0


class Failing(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise ValueError("the planner fails")


async def test_nothing_is_emitted_twice_and_observers_do_no_harm(tmp_path: Path) -> None:
    def fail(event: Any) -> None:
        raise RuntimeError("the observer fails")

    with events.observe(fail):
        await sidestream.save(state(), tmp_path / "a")
