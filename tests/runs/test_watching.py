"""Newly committed steps, seen by this process and by others, with and without help from the file system."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from _run import blank, ended, flip, is_state_of, leases_in, line_of, process, save_steps, until

import sidestream
from sidestream import KeepLast
from sidestream._load.open.steps import Step
from sidestream._run import watch as watching
from sidestream.errors import CorruptCheckpointError, InvalidOptionError


@pytest.fixture(params=["inotify", "polling"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "inotify":
        pytest.importorskip("watchfiles")
    else:
        monkeypatch.setattr(watching, "_changes", lambda store: None)
    return str(request.param)


async def take(watch: watching.Watch, count: int) -> list[int]:
    async with asyncio.timeout(120):
        return [await anext(watch) for _ in range(count)]


async def test_steps_of_this_process(tmp_path: Path, way: str) -> None:
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        watch = checkpoints.watch(poll_s=0.05, after=0)  # the run does not exist yet
        for step in (1, 2, 2, 7):
            following = asyncio.create_task(take(watch, 1))
            await asyncio.sleep(0)
            await save_steps(checkpoints, step)
            assert await following == [step]


async def test_the_file_system_wakes_a_watch(tmp_path: Path) -> None:
    """Polling comes too late for this test."""
    pytest.importorskip("watchfiles")
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        watch = checkpoints.watch(poll_s=3600, after=0)
        for step in range(1, 6):
            waiting = asyncio.create_task(take(watch, 1))
            await asyncio.sleep(0)
            saved = step
            while not waiting.done():  # what comes before it watches is seen with what comes next
                await save_steps(checkpoints, saved)
                saved += 100
                await asyncio.wait([waiting], timeout=1)
            assert await waiting


async def test_what_is_there_already(tmp_path: Path, way: str) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 3, 3)
        assert await take(checkpoints.watch(after=1, poll_s=0.05), 2) == [2, 3]
        watch = checkpoints.watch(poll_s=0.05, after=3)
        waiting = asyncio.create_task(take(watch, 1))
        await until(lambda: watch._begun, "the first look")
        assert not waiting.done(), "only what comes from now on"
        await save_steps(checkpoints, 2)
        assert await waiting == [2], "a step that was saved again"
        await save_steps(checkpoints, 0)
        assert await take(checkpoints.watch(), 4) == [0, 1, 2, 3]
        assert await take(checkpoints.watch(after=0), 3) == [1, 2, 3]


async def test_the_newest_step_that_can_be_read(tmp_path: Path, way: str) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 2)
        (tmp_path / "step-2.g2" / ".metadata").write_bytes(b"")
        assert await take(checkpoints.watch(newest=True, poll_s=0.05), 1) == [1]


async def test_the_newest_step_only(tmp_path: Path, way: str) -> None:
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(3)) as checkpoints:
        watch = checkpoints.watch(newest=True, poll_s=0.05)
        await save_steps(checkpoints, 0)
        assert await take(watch, 1) == [0]
        await save_steps(checkpoints, 1, 2, 3, 4, 5, 6)  # while the consumer is at work
        assert await take(watch, 1) == [6]
        await save_steps(checkpoints, 5)  # again, and not the newest: restore() would not take it either
        waiting = asyncio.create_task(take(watch, 1))
        late = checkpoints.watch(newest=True, poll_s=0.05)
        assert await take(late, 1) == [6]
        assert not waiting.done()
        await save_steps(checkpoints, 6)
        assert await waiting == [6], "the newest step, in a new generation"
        await checkpoints.prune()  # deletes the first generation of step 6, if no pass has done that yet
        await sidestream.remove(tmp_path / "step-6.g2")
        await save_steps(checkpoints, 5)
        assert await take(watch, 1) == [5], "the run went back"


async def test_a_step_that_is_gone_before_its_turn_is_left_out(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(2)) as checkpoints:
        await save_steps(checkpoints, 1)
        watch = checkpoints.watch(after=0, poll_s=0.05)
        assert await take(watch, 1) == [1]
        await save_steps(checkpoints, 2, 3)
        assert await take(watch, 1) == [2]
        await save_steps(checkpoints, 4, 5, 6)
        await checkpoints.prune()
        assert await take(watch, 2) == [5, 6]


async def test_a_cancel_loses_no_step_and_leaves_nothing(tmp_path: Path, way: str) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        watch = checkpoints.watch(after=0, poll_s=0.1)  # whether or not a look was completed before the save
        before = asyncio.all_tasks()
        for turns in range(8):
            waiting = asyncio.create_task(take(watch, 1))
            for _ in range(turns * 3):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert asyncio.all_tasks() == before
        await save_steps(checkpoints, 1)
        assert await take(watch, 1) == [1]


async def test_damage_is_no_news(tmp_path: Path) -> None:
    steps = [
        Step(1, 1, "step-1"),
        Step(2, 1, "step-2", CorruptCheckpointError("x")),
        Step(3, 1, "step-3"),
        Step(3, 2, "step-3.g2"),
    ]
    assert [step.name for step in watching.new_steps([], steps)] == ["step-1", "step-3.g2"]
    assert [step.name for step in watching.new_steps(["step-1", "step-3"], steps)] == ["step-3.g2"]
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        for options in ({"poll_s": 0}, {"after": -1}, {"after": "1"}):
            with pytest.raises(InvalidOptionError):
                checkpoints.watch(**options)
        with pytest.raises(InvalidOptionError, match=r"^poll_s=0 has to be a positive number"):
            checkpoints.watch(poll_s=0)


WRITER = """
import asyncio, sys
import sidestream
from _run import state_of

async def main():
    flush = sidestream.SaveOptions(durability="flush")
    async with sidestream.Checkpointer(sys.argv[1], keep=sidestream.KeepLast(1), save=flush) as checkpoints:
        for step in range(1, int(sys.argv[2]) + 1):
            await checkpoints.save(state_of(step), step=step)
            if step == 1:
                print("begun", flush=True)

asyncio.run(main())
"""


async def test_a_server_follows_a_trainer_that_keeps_one_step(tmp_path: Path) -> None:
    """Another process saves and prunes as fast as it can; every load here is of exactly one step, and none fails."""
    last = 60
    loaded: list[int] = []
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        with process(WRITER, tmp_path, last) as writer:
            assert await line_of(writer) == "begun"
            async with asyncio.timeout(240):
                while not loaded or loaded[-1] < last:
                    state = blank()
                    step = await checkpoints.restore(state)
                    assert step is not None
                    assert is_state_of(state, step), "a mix of two steps"
                    loaded.append(step)
            assert await ended(writer) == (0, "")
        assert loaded == sorted(loaded)
        async with sidestream.Checkpointer(tmp_path, keep=sidestream.KeepLast(1)) as later:
            await later.prune()  # what was in use when the writer ended
        assert await checkpoints.steps() == [last]
        assert checkpoints.health().ok
    print(f"{len(loaded)} loads of {len(set(loaded))} steps")
    assert leases_in(tmp_path) == []


async def test_a_watch_sees_the_last_step_of_another_process(tmp_path: Path, way: str) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        with process(WRITER, tmp_path, 5) as writer:
            seen = []
            async with asyncio.timeout(240):
                async for step in checkpoints.watch(after=0, poll_s=0.2):
                    seen.append(step)
                    if step == 5:
                        break
            assert seen == sorted(seen)
            assert await ended(writer) == (0, "")


def test_flip_is_damage(tmp_path: Path) -> None:
    """The helper that the other tests rely on."""
    (tmp_path / "x").write_bytes(b"abc")
    flip(tmp_path, "x")
    assert (tmp_path / "x").read_bytes() == b"acc"
