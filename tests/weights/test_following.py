"""Following a run: damaged, deleted, repeated and late steps, trainers that are killed, and what refuses weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _modules import TENSORS, Tell, version
from warm import Popen

import sidestream
from sidestream import KeepLast, Live, events
from sidestream.errors import (
    ClosedError,
    DeadlineExceededError,
    InvalidOptionError,
    MissingKeysError,
    ShapeMismatchError,
    StateMismatchError,
)

PATIENCE_S = 120.0
STRIP = sidestream.strip_prefix("model.")
SOURCE = str(Path(sidestream.__file__).parents[1])


def state(number: int) -> dict[str, Any]:
    return {"model": version(number), "optimizer": {"moments": torch.ones(64)}, "epoch": number}


async def save(run: Path | str, *steps: int, says: int | None = None, **options: Any) -> None:
    async with sidestream.Checkpointer(run, **options) as checkpoints:
        for step in steps:
            await checkpoints.save(state(step if says is None else says), step=step)


async def until(condition: Callable[[], object], what: str = "it") -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def looked(follower: sidestream.Follower, times: int = 2) -> None:
    """Wait until it has looked at the run so many times more."""
    for _ in range(times):
        before = follower._source.checked
        await until(lambda: follower._source.checked != before)  # noqa: B023


def leases_in(run: Path) -> list[str]:
    return os.listdir(run / ".leases") if (run / ".leases").exists() else []


def serves(live: Live, stamp: str) -> set[float]:
    with live.reading() as reading:
        assert reading.stamp == stamp
        said = reading.module()
    assert isinstance(said, set)
    return said


@contextlib.asynccontextmanager
async def following(run: Path | str, live: Live, **options: Any) -> AsyncIterator[sidestream.Follower]:
    async with sidestream.Checkpointer(run) as checkpoints:
        given = {"names": STRIP, "poll_s": 0.02, **options}
        async with checkpoints.following(live, **given) as follower:
            yield follower


@contextlib.contextmanager
def observed() -> Any:
    seen: list[Any] = []
    with events.observe(lambda event: seen.append(event) if type(event).__name__.startswith("Version") else None):
        yield seen


# --- the newest one ---


async def test_the_newest_step_comes_first_and_then_each_newer_one(tmp_path: Path) -> None:
    await save(tmp_path / "run", 1, 2, 3)
    live = Live(Tell())
    with observed() as seen:
        async with following(tmp_path / "run", live) as follower:
            await follower.ready(timeout_s=PATIENCE_S)
            assert serves(live, "step-3") == {3.0}
            with live.reading() as reading:
                assert reading.version == 3
                info = await sidestream.open_checkpoint(tmp_path / "run" / "step-3")
                assert reading.save_id == info.save_id == follower.health().save_id
            for step in (4, 10):
                await save(tmp_path / "run", step)
                await until(lambda: live.stamp == f"step-{step}")  # noqa: B023
                assert serves(live, f"step-{step}") == {float(step)}
            await until(lambda: len(seen) == 3)
            health = follower.health()
            assert health.ok, health
            assert health.checked_s is not None
        assert serves(live, "step-10") == {10.0}  # after the end of the block, too
    assert [(one.stamp, one.source) for one in seen] == [(f"step-{step}", str(tmp_path / "run")) for step in (3, 4, 10)]
    assert leases_in(tmp_path / "run") == []


async def test_a_server_that_takes_long_goes_to_the_newest(tmp_path: Path) -> None:
    """What is fetched is the newest when its fetch begins."""
    go, asked = asyncio.Event(), []
    await save(tmp_path, 1)

    async def accept(candidate: sidestream.Candidate) -> bool:
        asked.append(candidate.version)
        await go.wait()
        return True

    live = Live(Tell())
    async with following(tmp_path, live, accept=accept) as follower:
        await until(lambda: asked)
        await save(tmp_path, 2, 3, 4)
        go.set()
        await follower.ready()
        await until(lambda: live.stamp == "step-4")
    assert asked == [1, 4]


async def test_a_run_that_does_not_exist_yet(tmp_path: Path) -> None:
    live = Live(Tell())
    async with following(tmp_path / "run", live) as follower:
        with pytest.raises(DeadlineExceededError, match="there is none yet"):
            await follower.ready(timeout_s=0.2)
        assert not follower.health().ok
        await save(tmp_path / "run", 0)
        await follower.ready(timeout_s=PATIENCE_S)
        assert serves(live, "step-0") == {0.0}


async def test_a_checkpoint_is_not_a_run(tmp_path: Path) -> None:
    live, url = Live(Tell()), tmp_path / "run" / "step-7"
    says = re.escape(f"{url} is a checkpoint, not a run. A run is the directory that contains its checkpoints, here ")
    async with following(url, live) as follower:  # there is nothing yet
        await sidestream.save(state(7), url)
        for _ in range(2):
            with pytest.raises(InvalidOptionError, match=says):
                await follower.ready(timeout_s=PATIENCE_S)
        assert "is a checkpoint, not a run" in str(follower.health().problem)
    with pytest.raises(InvalidOptionError, match=says):
        async with following(url, live):
            pass
    async with following(url.parent, live) as follower:  # what the message says
        await follower.ready(timeout_s=PATIENCE_S)
    assert live.stamp == "step-7"


async def test_a_store_in_memory(tmp_path: Path) -> None:
    url = f"memory://follow-{os.getpid()}-{tmp_path.name}/run"
    live = Live(Tell())
    async with following(url, live) as follower:
        for step in (1, 2):
            await save(url, step)
            await until(lambda: live.stamp == f"step-{step}")  # noqa: B023
            assert serves(live, f"step-{step}") == {float(step)}
        assert follower.health().ok


async def test_steps_of_stock_dcp(tmp_path: Path) -> None:
    dcp.save(state(5), checkpoint_id=tmp_path / "step-5", no_dist=True)
    live = Live(Tell())
    async with following(tmp_path, live) as follower:
        await follower.ready(timeout_s=PATIENCE_S)
        assert serves(live, "step-5") == {5.0}
        with live.reading() as reading:
            assert reading.save_id == ""


# --- damage ---


def flip(step: Path) -> None:
    path = step / "__0_1.distcp"
    raw = bytearray(path.read_bytes())
    middle = len(raw) // 4
    raw[middle] ^= 1
    path.write_bytes(raw)


def truncate(step: Path) -> None:
    os.truncate(step / "__0_1.distcp", 100)


def without_file(step: Path) -> None:
    (step / "__0_1.distcp").unlink()


def without_marker(step: Path) -> None:
    (step / ".metadata").unlink()


def spoiled_manifest(step: Path) -> None:
    (manifest,) = step.glob("manifest-*")
    manifest.write_bytes(b"x" * manifest.stat().st_size)


DAMAGES = [flip, truncate, without_file, without_marker, spoiled_manifest]


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_step_is_passed_over_and_followed_by_the_next_one(
    damage: Callable[[Path], None], mapped: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await save(tmp_path, 1, 2)
    damage(tmp_path / "step-2")
    live = Live(Tell())
    with observed() as seen, caplog.at_level(logging.WARNING, "sidestream"):
        async with following(tmp_path, live, mapped=mapped) as follower:
            await follower.ready(timeout_s=PATIENCE_S)
            assert serves(live, "step-1") == {1.0}
            await looked(follower)
            assert list(follower.health().passed_over) == ["step-2"]
            assert repr(follower.health()).endswith("; passed over step-2>")
            assert not follower.health().ok
            await save(tmp_path, 3)
            await until(lambda: live.stamp == "step-3")
            assert serves(live, "step-3") == {3.0}
            await until(lambda: len(seen) == 3)
            assert follower.health().ok
    assert [type(one).__name__ for one in seen] == ["VersionPassedOver", "VersionServed", "VersionServed"]
    assert (seen[0].stamp, seen[0].error_type) == ("step-2", "CorruptCheckpointError")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"{tmp_path}: step-2 is not served: CorruptCheckpointError: ")
    assert "VersionPassedOver" not in said


async def test_nothing_but_damage(tmp_path: Path) -> None:
    await save(tmp_path, 1)
    flip(tmp_path / "step-1")
    live = Live(Tell())
    async with following(tmp_path, live) as follower:
        await until(lambda: follower.health().passed_over)
        with pytest.raises(DeadlineExceededError, match="step-1: CorruptCheckpointError"):
            await follower.ready(timeout_s=0.01)
        assert live.stamp is None
        shutil.rmtree(tmp_path / "step-1")
        await save(tmp_path, 1)  # saved again under its name: tried again
        await follower.ready(timeout_s=PATIENCE_S)
        assert serves(live, "step-1") == {1.0}
        assert follower.health().ok


async def test_damage_of_the_step_that_is_served_changes_nothing(tmp_path: Path) -> None:
    await save(tmp_path, 1, 2)
    live = Live(Tell())
    async with following(tmp_path, live, mapped=False) as follower:
        await follower.ready(timeout_s=PATIENCE_S)
        without_marker(tmp_path / "step-2")
        await until(lambda: follower.health().passed_over)
        await looked(follower)
        assert serves(live, "step-2") == {2.0}


# --- steps that come again, go, or come late ---


async def test_a_step_that_is_saved_again_is_another_version(tmp_path: Path) -> None:
    live, ids = Live(Tell()), []
    async with following(tmp_path, live) as follower:
        await save(tmp_path, 5, says=1)
        await follower.ready(timeout_s=PATIENCE_S)
        ids.append(follower.health().save_id)
        await save(tmp_path, 5, says=2)
        await until(lambda: live.stamp == "step-5.g2")
        assert serves(live, "step-5.g2") == {2.0}
        ids.append(follower.health().save_id)
        await sidestream.save(state(3), tmp_path / "step-5.g2", overwrite=True)
        await until(lambda: follower.health().save_id not in ids)
        assert serves(live, "step-5.g2") == {3.0}
        ids.append(follower.health().save_id)
        await looked(follower)
    assert len(set(ids)) == live.health().swaps == 3


async def test_a_lower_step_is_served_when_those_above_it_are_gone(tmp_path: Path) -> None:
    await save(tmp_path, 10, 20, 30)
    live = Live(Tell())
    async with following(tmp_path, live) as follower:
        await follower.ready(timeout_s=PATIENCE_S)
        await save(tmp_path, 15)  # a trainer that went back
        await looked(follower)
        assert live.stamp == "step-30"
        await sidestream.remove(tmp_path / "step-30")
        await until(lambda: live.stamp == "step-20")
        await sidestream.remove(tmp_path / "step-20")
        await until(lambda: live.stamp == "step-15")
        assert serves(live, "step-15") == {15.0}


async def test_a_lower_step_is_served_when_the_program_accepts_it(tmp_path: Path) -> None:
    await save(tmp_path, 10, 20, 30)
    live = Live(Tell())
    async with following(tmp_path, live) as follower:
        await follower.ready(timeout_s=PATIENCE_S)
        await asyncio.sleep(1.1)  # markers have whole seconds
        await save(tmp_path, 15)
        await looked(follower)
        assert live.stamp == "step-30"
        follower.accept_lower()
        await until(lambda: live.stamp == "step-15")
        await save(tmp_path, 16)
        await until(lambda: live.stamp == "step-16")
        await save(tmp_path, 30)  # again: no step that was left out
        await until(lambda: live.stamp == "step-30.g2")
        assert serves(live, "step-30.g2") == {30.0}


async def test_a_trainer_went_back_and_its_first_step_is_damaged(tmp_path: Path) -> None:
    await save(tmp_path, 10, 20, 30, 30)
    live = Live(Tell())
    async with following(tmp_path, live) as follower:
        await follower.ready(timeout_s=PATIENCE_S)
        await asyncio.sleep(1.1)  # markers have whole seconds
        await save(tmp_path, 15)
        flip(tmp_path / "step-15")
        follower.accept_lower()
        await until(lambda: follower.health().passed_over)
        await looked(follower)
        assert live.stamp == "step-30.g2"  # and not step 10, nor the first generation of step 30
        await save(tmp_path, 16)
        await until(lambda: live.stamp == "step-16")


async def test_retention_is_no_error_and_what_is_served_outlives_its_files(tmp_path: Path) -> None:
    live = Live(Tell())
    async with following(tmp_path, live) as follower:
        for step in range(1, 13):
            await save(tmp_path, step, keep=KeepLast(1))
            with live.reading() as reading:
                if reading.stamp is not None:
                    assert reading.module() == {float(reading.version or 0)}
        await until(lambda: live.stamp == "step-12")
        await looked(follower)
        assert follower.health().ok, follower.health()
        shutil.rmtree(tmp_path / "step-12")
        assert serves(live, "step-12") == {12.0}


async def test_a_step_below_the_newest_that_comes_late_is_not_served(tmp_path: Path) -> None:
    await save(tmp_path, 7)
    live = Live(Tell())
    async with following(tmp_path, live) as follower:
        await follower.ready(timeout_s=PATIENCE_S)
        await save(tmp_path, 6)
        await looked(follower)
        assert live.stamp == "step-7"
        assert live.health().swaps == 1


async def test_a_store_that_fails_is_tried_again(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    await save(run, 1)
    live = Live(Tell())
    async with following(run, live) as follower:
        await follower.ready(timeout_s=PATIENCE_S)
        run.rename(away)
        run.write_text("not a directory")
        await until(lambda: follower.health().problem)
        assert serves(live, "step-1") == {1.0}
        run.unlink()
        await save(away, 2)
        away.rename(run)
        await until(lambda: live.stamp == "step-2")
        await looked(follower)
        assert follower.health().ok


TRAINER = """
import asyncio, sys
sys.path[:0] = sys.argv[2:]
from _modules import version
import sidestream, torch

async def main():
    async with sidestream.Checkpointer(sys.argv[1], keep=sidestream.KeepLast(2)) as checkpoints:
        start = await checkpoints.latest() or 0
        print(start, flush=True)
        for step in range(start + 1, start + 100000):
            await checkpoints.save({"model": version(step)}, step=step)

asyncio.run(main())
"""


async def test_a_trainer_is_killed_and_restarted(tmp_path: Path) -> None:
    live, kills, stamps = Live(Tell()), 4, set()
    async with following(tmp_path / "run", live) as follower:
        for _ in range(kills):
            swaps = live.health().swaps
            trainer = Popen([sys.executable, "-c", TRAINER, tmp_path / "run", SOURCE, Path(__file__).parent])
            try:
                await until(lambda: live.health().swaps >= swaps + 3)  # noqa: B023
            finally:
                trainer.send_signal(signal.SIGKILL)
                await asyncio.to_thread(trainer.wait)
            with live.reading() as reading:
                assert reading.module() == {float(reading.version or 0)}
                stamps.add(reading.stamp)
        assert follower.health().passed_over == {}
    assert len(stamps) == kills


# --- what fits, and what is accepted ---


async def test_names_that_do_not_fit_are_said_at_once(tmp_path: Path) -> None:
    await save(tmp_path, 1)
    live = Live(Tell())
    async with following(tmp_path, live, names=None) as follower:
        with pytest.raises(
            MissingKeysError, match=r"names=sidestream.strip_prefix\(.model\..\) to following"
        ) as missing:
            await follower.ready()
        assert len(missing.value.offenders) == TENSORS
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            await checkpoints.save(version(2), step=2)
        await until(lambda: live.stamp == "step-2")
        await follower.ready()


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"t0": torch.ones(3)}, ShapeMismatchError),
        ({"t0": torch.ones(257, dtype=torch.int32)}, StateMismatchError),
        ({"t0": 5}, StateMismatchError),
        ({"t0": torch.eye(257).to_sparse()}, StateMismatchError),
    ],
)
async def test_tensors_that_do_not_fit(changed: dict[str, Any], error: type[Exception], tmp_path: Path) -> None:
    await save(tmp_path, 1)
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save({"model": {**version(2), **changed}}, step=2)
    live = Live(Tell())
    async with following(tmp_path, live) as follower:
        await follower.ready()
        assert live.stamp == "step-1"
        assert "t0" in follower.health().passed_over["step-2"]
    live = Live(Tell())
    await sidestream.remove(tmp_path / "step-1")
    async with following(tmp_path, live) as follower:
        with pytest.raises(error, match="t0"):
            await follower.ready()


async def test_ready_waits_on_when_the_steps_that_do_not_fit_are_gone(tmp_path: Path) -> None:
    await save(tmp_path, 1)
    live = Live(Tell())
    async with following(tmp_path, live, names=None) as follower:
        with pytest.raises(MissingKeysError):
            await follower.ready()
        await sidestream.remove(tmp_path / "step-1")
        await until(lambda: not follower.health().passed_over)
        waiting = asyncio.create_task(follower.ready())
        await asyncio.sleep(0)
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            await checkpoints.save(version(2), step=2)
        await waiting
        assert live.stamp == "step-2"


async def test_names_that_raise(tmp_path: Path) -> None:
    await save(tmp_path, 1)
    live = Live(Tell())
    async with following(tmp_path, live, names=lambda name: {}[name]) as follower:
        await until(lambda: follower.health().passed_over)
        with pytest.raises(DeadlineExceededError, match="names= raised KeyError"):
            await follower.ready(timeout_s=0.01)


async def test_the_program_refuses_weights_and_its_code_runs_on_its_loop(tmp_path: Path) -> None:
    loop, calls = asyncio.get_running_loop(), []

    def accept(candidate: sidestream.Candidate) -> object:
        assert asyncio.get_running_loop() is loop
        calls.append(("accept", candidate.stamp, live.stamp))
        with torch.no_grad():
            said = torch.func.functional_call(Tell(), dict(candidate.tensors), ())
        assert said == {float(candidate.version)}
        return {2: False, 3: None}.get(candidate.version, True) if candidate.version != 4 else {}["no"]

    async def before(candidate: sidestream.Candidate) -> None:
        await asyncio.sleep(0)
        calls.append(("before", candidate.stamp, live.stamp))
        if candidate.version == 5:
            raise ValueError("not now")

    async def after(candidate: sidestream.Candidate) -> None:
        assert asyncio.get_running_loop() is loop
        calls.append(("after", candidate.stamp, live.stamp))
        if candidate.version == 6:
            raise ValueError("too late")

    live = Live(Tell())
    options = {"accept": accept, "before_swap": before, "after_swap": after}
    async with following(tmp_path, live, **options) as follower:
        for step in range(1, 6):
            await save(tmp_path, step)
            await until(lambda: live.stamp == "step-1" and len(follower.health().passed_over) == step - 1)  # noqa: B023
        reasons = list(follower.health().passed_over.values())
        for reason, text in zip(reasons, ("returned False", "returned None", "KeyError", "not now"), strict=True):
            assert text in reason
        await save(tmp_path, 6)
        await until(lambda: ("after", "step-6", "step-6") in calls)
        await until(lambda: "too late" in str(follower.health().problem))
        await looked(follower)
        assert "too late" in str(follower.health().problem)
    assert calls[:3] == [("accept", "step-1", None), ("before", "step-1", None), ("after", "step-1", "step-1")]
    assert [one[:2] for one in calls[3:]] == [
        ("accept", "step-2"), ("accept", "step-3"), ("accept", "step-4"), ("accept", "step-5"), ("before", "step-5"),
        ("accept", "step-6"), ("before", "step-6"), ("after", "step-6"),
    ]  # fmt: skip


async def test_a_hook_that_awaits_what_was_cancelled_refuses_the_step(tmp_path: Path) -> None:
    async def accept(candidate: sidestream.Candidate) -> bool:
        if candidate.version == 1:
            other = asyncio.get_running_loop().create_future()
            other.cancel()
            await other
        return True

    await save(tmp_path, 1)
    live = Live(Tell())
    async with following(tmp_path, live, accept=accept) as follower:
        await until(lambda: follower.health().passed_over or follower._task.done())
        assert "accept= raised CancelledError" in follower.health().passed_over["step-1"]
        await save(tmp_path, 2)
        await follower.ready(timeout_s=PATIENCE_S)
        assert serves(live, "step-2") == {2.0}


async def test_metadata_of_a_candidate(tmp_path: Path) -> None:
    seen = []
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save(state(1), step=1, metadata={"loss": 0.5})
        options = {"names": STRIP, "accept": lambda one: seen.append(one.metadata) is None}
        async with checkpoints.following(Live(Tell()), **options) as follower:
            await follower.ready()
    assert seen == [{"loss": 0.5}]


# --- memory ---


def mapped_names(live: Live) -> set[str]:
    """The names of the tensors that are maps of files of the run."""
    extents = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if ".distcp" in line:
            extents.append(tuple(int(end, 16) for end in line.split()[0].split("-")))
    with live.reading() as reading:
        places = {name: one.data_ptr() for name, one in reading.tensors.items()}
    return {name for name, place in places.items() if any(start <= place < end for start, end in extents)}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
async def test_what_lies_whole_in_its_dtype_is_mapped(tmp_path: Path) -> None:
    await save(tmp_path, 1)
    live = Live(Tell())
    async with following(tmp_path, live) as follower:
        await follower.ready()
        assert mapped_names(live) == set(version(1))
        with live.reading() as reading, torch.no_grad():
            reading.module.t0.fill_(9)  # a private copy of its page
    live = Live(Tell())
    async with following(tmp_path, live, mapped=False) as follower:
        await follower.ready()
        assert mapped_names(live) == set()
        assert serves(live, "step-1") == {1.0}
    half = Live({name: one.bfloat16() if name == "t0" else one for name, one in version(0).items()})
    async with following(tmp_path, half) as follower:
        await follower.ready()
        assert mapped_names(half) == set(version(1)) - {"t0"}
        with half.reading() as reading:
            assert reading.tensors["t0"].dtype == torch.bfloat16
            assert {float(one[0]) for one in reading.tensors.values()} == {1.0}


async def test_memory_is_used_again(tmp_path: Path) -> None:
    live, places = Live(Tell()), set()
    async with following(tmp_path, live, mapped=False) as follower:
        for step in range(1, 9):
            await save(tmp_path, step)
            await until(lambda: live.stamp == f"step-{step}")  # noqa: B023
            with live.reading() as reading:
                places.add(reading.tensors["t0"].data_ptr())
        assert follower._source._memory.statistics().reserved_bytes <= 16 << 20
    assert len(places) <= 3


async def test_a_version_that_waits_for_readings_is_shown(tmp_path: Path) -> None:
    await save(tmp_path, 1)
    live = Live(Tell(), max_old=0)
    async with following(tmp_path, live) as follower:
        await follower.ready()
        with live.reading() as reading:
            await save(tmp_path, 2)
            await until(lambda: live.stamp == "step-2")
            await save(tmp_path, 3)
            await until(lambda: follower.health().waiting)
            assert "step-1 for" in str(live.health().oldest_reading)
            await save(tmp_path, 4)
            assert reading.module() == {1.0}
        await until(lambda: live.stamp == "step-4")
        assert live.health().swaps == 3  # step 3 was never fetched


async def test_weights_that_the_program_installs_come_before_a_step_that_waits(tmp_path: Path) -> None:
    await save(tmp_path, 1)
    live = Live(Tell(), max_old=0)
    async with following(tmp_path, live) as follower:
        await follower.ready()
        with live.reading():
            await save(tmp_path, 2)
            await until(lambda: live.stamp == "step-2")
            await save(tmp_path, 3)
            await until(lambda: follower.health().waiting)
            installing = asyncio.create_task(live.install(version(50), stamp="50"))
            await until(lambda: not follower.health().waiting)
            await looked(follower)
            assert live.health().waiting
        await installing
        await until(lambda: live.stamp == "step-3")
        assert live.health().swaps == 4


# --- its life ---


async def test_arguments_and_order_of_calls(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        for wrong in ({"names": 3}, {"mapped": 1}, {"poll_s": 0}):
            with pytest.raises(InvalidOptionError):
                checkpoints.following(Live(Tell()), **wrong)
        with pytest.raises(InvalidOptionError, match="live"):
            checkpoints.following(Tell())  # type: ignore[arg-type]
        follower = checkpoints.following(Live(Tell()))
        with pytest.raises(ClosedError, match="enter the follower"):
            await follower.ready()
        async with follower:
            with pytest.raises(ClosedError, match="entered before"):
                await follower.__aenter__()
        with pytest.raises(ClosedError, match="has ended"):
            await follower.ready()
    with pytest.raises(ClosedError):
        checkpoints.following(Live(Tell()))


@pytest.mark.parametrize("moment", range(12))
async def test_it_ends_at_any_moment_and_leaves_nothing(moment: int, tmp_path: Path) -> None:
    live = Live(Tell(), max_old=0)
    tasks = asyncio.all_tasks()
    await save(tmp_path, 1)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.004 * moment):
            async with following(tmp_path, live):
                await asyncio.sleep(60)
    assert asyncio.all_tasks() == tasks
    assert leases_in(tmp_path) == []
    async with following(tmp_path, live) as follower:  # no copy was lost
        for step in (2, 3, 4):
            await save(tmp_path, step)
            await until(lambda: live.stamp == f"step-{step}")  # noqa: B023
        assert follower.health().ok
