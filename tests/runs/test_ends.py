"""How a process may end with a save in flight, and what is there afterwards: real processes, really signalled."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from _run import PATIENCE_S, blank, is_state_of, line_of, process, save_steps, until
from held import HeldStager

import sidestream
from sidestream.errors import InvalidOptionError, UnsafeObjectError

SERVER = (Path(__file__).parent / "_end.py").read_text()


@dataclass
class Trainer:
    """One that has step 1 committed and step 2 in flight."""

    run: Path
    server: subprocess.Popen[str]
    pid: int
    stdin: IO[str]
    stdout: IO[str]
    stderr: Path
    said: list[str] = field(default_factory=list)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def let_go(self) -> None:
        """The save in flight may go on."""
        self.stdin.write("\n")
        self.stdin.flush()

    async def line(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return (await asyncio.to_thread(self.stdout.readline)).rstrip("\n")

    async def says(self, what: str) -> None:
        while (line := await self.line()) != what:
            assert line, f"it ended without having said {what!r}: {self.stderr.read_text()}"
            self.said.append(line)
        self.said.append(what)

    async def end(self) -> tuple[int, str]:
        """Its exit code and what it said on stderr."""
        while line := await self.line():
            self.said.append(line)
        return int(await line_of(self.server)), self.stderr.read_text()

    async def steps(self) -> list[int]:
        """What is committed, each of them whole."""
        async with sidestream.Checkpointer(self.run, lease_s=2) as checkpoints:
            steps = await checkpoints.steps()
            for step in set(steps) - {3}:
                state = blank()
                await checkpoints.restore(state, step)
                assert is_state_of(state, step)
            return steps

    def attempts(self) -> list[str]:
        return sorted(name for name in os.listdir(self.run) if name.endswith(".partial"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with process(SERVER) as server:
        yield server


@pytest.fixture
def trainer(server: subprocess.Popen[str], tmp_path: Path) -> Any:
    return partial(started, server, tmp_path)


@asynccontextmanager
async def started(server: subprocess.Popen[str], folder: Path, run: Path, way: str) -> AsyncIterator[Trainer]:
    async with sidestream.Checkpointer(run) as checkpoints:
        await save_steps(checkpoints, 1)
    streams = [folder / f"{uuid.uuid4().hex}.{name}" for name in ("in", "out", "err")]
    for path in streams[:2]:
        os.mkfifo(path)
    streams[2].touch()
    assert server.stdin is not None
    server.stdin.write(json.dumps({"run": str(run), "way": way, "streams": [str(path) for path in streams]}) + "\n")
    server.stdin.flush()
    pid = int(await line_of(server))
    # Neither end of a pipe may wait for the other for ever, should the child not come that far.
    stdin = os.fdopen(os.open(streams[0], os.O_RDWR), "w")
    stdout = await asyncio.wait_for(asyncio.to_thread(open, streams[1]), PATIENCE_S)
    one = Trainer(run, server, pid, stdin, stdout, streams[2])
    try:
        await one.says("in flight")
        yield one
    finally:
        if sys.exc_info()[0] is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await line_of(server)
        stdin.close()
        stdout.close()


@pytest.mark.parametrize(("way", "code"), [("return", 0), ("exception", 1), ("sys.exit", 3)])
async def test_leaving_the_block_waits_for_the_save(run: Path, trainer: Any, way: str, code: int) -> None:
    async with trainer(run, way) as one:
        await one.says("finally")
        one.let_go()
        assert (await one.end())[0] == code
    assert await one.steps() == [1, 2]


@pytest.mark.parametrize(
    ("way", "code"),
    [("preempt exit", 128 + signal.SIGTERM), ("preempt code", 7), ("preempt signal", -signal.SIGTERM)],
)
async def test_preemption_finishes_what_is_in_flight(run: Path, trainer: Any, way: str, code: int) -> None:
    async with trainer(run, way) as one:
        one.send(signal.SIGUSR1 if way == "preempt code" else signal.SIGTERM)
        one.let_go()
        assert await one.end() == (code, "")
        assert ("finally" in one.said) == (way != "preempt signal"), "a finally runs, unless the signal kills"
    assert await one.steps() == [1, 2]
    assert one.attempts() == []


async def test_preemption_saves_at_once(run: Path, trainer: Any) -> None:
    async with trainer(run, "preempt save") as one:
        one.send(signal.SIGTERM)
        await one.end()
    assert await one.steps() == [1, 2, 3]


async def test_preemption_that_stays(run: Path, trainer: Any) -> None:
    async with trainer(run, "preempt stay") as one:
        one.let_go()
        one.send(signal.SIGTERM)
        assert await one.end() == (0, "")
        assert f"preempted by {signal.SIGTERM:d}" in one.said
    assert await one.steps() == [1, 2]


async def test_grace_is_bounded_and_a_second_signal_ends_it(run: Path, trainer: Any) -> None:
    async with trainer(run, "preempt grace") as one:
        one.send(signal.SIGTERM)
        code, said = await one.end()
        assert code == 128 + signal.SIGTERM
        assert "the grace time of 0.2 s is over" in said
    assert await one.steps() == [1]
    assert one.attempts() == [], "the save that was cut off has cleaned up"
    async with trainer(run, "preempt twice") as one:
        one.send(signal.SIGTERM)
        await one.says(f"preempted by {signal.SIGTERM:d}")
        one.send(signal.SIGTERM)
        assert (await one.end())[0] == 128 + signal.SIGTERM
    assert await one.steps() == [1]


async def test_a_failure_before_the_end_is_told(run: Path, trainer: Any) -> None:
    async with trainer(run, "preempt failing") as one:
        one.send(signal.SIGTERM)
        one.let_go()
        code, said = await one.end()
        assert code == 128 + signal.SIGTERM
        assert "the save on preemption failed: UnsafeObjectError" in said


async def test_ctrl_c(run: Path, trainer: Any) -> None:
    """It cancels the program; leaving the block then waits for the save, as an exception does."""
    async with trainer(run, "sigint") as one:
        one.send(signal.SIGINT)
        await one.says("cancelled")
        one.let_go()
        code, said = await one.end()
        assert code != 0
        assert "KeyboardInterrupt" in said
    assert await one.steps() == [1, 2]
    assert one.attempts() == []


async def test_ctrl_c_twice(run: Path, trainer: Any) -> None:
    async with trainer(run, "sigint") as one:
        one.send(signal.SIGINT)
        await one.says("leaving")
        one.send(signal.SIGINT)
        code, _ = await one.end()
        assert code != 0
    assert await one.steps() == [1]


@pytest.mark.parametrize(
    ("way", "number", "code"),
    [("sigterm", signal.SIGTERM, -signal.SIGTERM), ("sigkill", signal.SIGKILL, -signal.SIGKILL), ("os._exit", 0, 4)],
)
async def test_without_a_word(run: Path, trainer: Any, way: str, number: int, code: int) -> None:
    """The process is gone at once: nothing is visible, older steps are untouched, and what is left is collected."""
    async with trainer(run, way) as one:
        if number:
            one.send(number)
        assert (await one.end())[0] == code
    assert await one.steps() == [1]
    async with sidestream.Checkpointer(run, lease_s=2) as checkpoints:

        async def clean() -> bool:
            await checkpoints.prune()
            return os.listdir(run) == ["step-1"]

        await until(clean, "what the dead process left to be collected")
        await save_steps(checkpoints, 2)
    assert await one.steps() == [1, 2]


async def test_a_closing_loop(run: Path, trainer: Any) -> None:
    """The save goes on. Closing the loop cancels the program, and leaving the block waits for the save."""
    async with trainer(run, "closing loop") as one:
        await one.says("cancelled")
        one.let_go()
        code, said = await one.end()
        assert code == 1
        assert "Event loop stopped before Future completed" in said
    assert await one.steps() == [1, 2]
    assert one.attempts() == []


async def test_signals_need_the_main_thread(run: Path) -> None:
    async with sidestream.Checkpointer(run) as checkpoints:
        for options in ({"grace_s": 0}, {"then": "die"}):
            with pytest.raises(InvalidOptionError):
                checkpoints.on_preemption(**options)  # type: ignore[arg-type]
        with pytest.raises(InvalidOptionError, match=r"^grace_s=0 has to be a positive number"):
            checkpoints.on_preemption(grace_s=0)
        with pytest.raises(InvalidOptionError, match="cannot be caught"):
            checkpoints.on_preemption(signal.SIGKILL)
        before = signal.getsignal(signal.SIGTERM)
        checkpoints.on_preemption()
        assert signal.getsignal(signal.SIGTERM) != before
        assert checkpoints.preempted is None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "closing gives the signal back"


async def test_a_wrong_call_leaves_the_handler_of_the_first_one(run: Path) -> None:
    async with sidestream.Checkpointer(run) as checkpoints:
        checkpoints.on_preemption(signal.SIGUSR1, signal.SIGUSR2, then="stay")
        for signals, options in (((), {"grace_s": -1}), ((signal.SIGUSR1, signal.SIGKILL), {}), (([1],), {})):
            with pytest.raises(InvalidOptionError):
                checkpoints.on_preemption(*signals, **options)  # type: ignore[arg-type]
        assert signal.SIG_DFL not in (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2))
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: checkpoints.preempted == signal.SIGUSR1, "the signal")
        checkpoints.on_preemption(signal.SIGUSR1, then="stay")
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL, "the new call is in place of the first one"
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: checkpoints.preempted == signal.SIGUSR1, "the signal")
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


async def test_the_last_save_is_made_whatever_failed_before(tmp_path: Path) -> None:
    checkpoints = sidestream.Checkpointer(tmp_path)
    with pytest.raises(UnsafeObjectError):  # nobody has awaited it, so closing tells it
        async with checkpoints:
            failing = checkpoints.async_save({"bad": object()}, step=1)
            await failing.ended()
            checkpoints.on_preemption(signal.SIGUSR1, save=lambda: ({"w": torch.ones(3)}, 2), then="stay")
            os.kill(os.getpid(), signal.SIGUSR1)
            await until(lambda: (tmp_path / "step-2").exists(), "the last save")


async def test_leaving_the_block_waits_for_the_last_save(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        checkpoints.on_preemption(signal.SIGUSR1, save=lambda: ({"w": torch.ones(3)}, 2), then="stay")
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: checkpoints.preempted is not None, "the signal")
    assert (tmp_path / "step-2").is_dir()


async def test_a_second_ctrl_c_within_the_block_waits_for_no_save(tmp_path: Path) -> None:
    held = HeldStager()
    with pytest.raises(KeyboardInterrupt):
        async with sidestream.Checkpointer(tmp_path, stager=held) as checkpoints:
            pending = checkpoints.async_save({"w": torch.ones(3)}, step=1)
            await until(lambda: bool(held.held), "the stage")
            raise KeyboardInterrupt
    assert pending.outcome == "absent"
    with pytest.raises(asyncio.CancelledError):
        await pending
