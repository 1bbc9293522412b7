"""The small examples run as programs. Those called ``*_live.py`` belong to sessions of their own (``nox -l``)."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import struct
import subprocess
import sys
import tty
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import demo_page
import pytest
import torch
import warm

import sidestream

if TYPE_CHECKING:
    from train_live_.records import Run

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = sorted(path for path in EXAMPLES.glob("*.py") if not path.stem.endswith("_live"))


@pytest.mark.parametrize("example", SMALL, ids=lambda path: path.stem)
def test_runs(example: Path, tmp_path: Path) -> None:
    done = warm.run(
        [sys.executable, "-W", "error", str(example)],
        cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr.strip()


async def test_the_server_survives_damage_and_refuses_requests_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import inference_server as example

    live = sidestream.Live(example.build())

    async def until(stamp: str | None, problem: str | None) -> None:
        async with asyncio.timeout(60):
            while True:
                health = server.reply("health")
                if health["stamp"] == stamp and (problem or "[]") in str(health["problems"]):
                    return
                await asyncio.sleep(0.01)

    async def save(value: float, *, step: int, damaged: bool = False) -> None:
        model = example.build()
        torch.nn.init.constant_(model.weight, value)
        folder = tmp_path / f"step-{step}"
        if not damaged:
            await checkpoints.save({"model": model}, step=step)
            return
        await sidestream.save({"model": model}, tmp_path / "hidden" / folder.name)
        shard = next((tmp_path / "hidden" / folder.name).glob("*.distcp"))
        raw = bytearray(shard.read_bytes())
        at = raw.index(struct.pack("<f", value))
        raw[at] ^= 1
        shard.write_bytes(raw)
        (tmp_path / "hidden" / folder.name).rename(folder)

    names = sidestream.strip_prefix("model.")
    async with (
        sidestream.Checkpointer(tmp_path) as checkpoints,
        checkpoints.following(live, names=names, poll_s=0.05) as follower,
    ):
        server = example.Server(live, follower)
        assert server.reply([1, 1, 1, 1]) == {"status": 503, "problems": ["no weights yet"]}
        await until(None, None)
        await save(0.25, step=1, damaged=True)
        await until(None, "CorruptCheckpointError")  # nothing is good: still no weights
        assert server.reply([1, 1, 1, 1])["status"] == 503
        await save(0.5, step=2)
        await until("step-2", None)
        await save(0.75, step=3, damaged=True)
        await until("step-2", "step-3")
        assert server.reply([1, 1, 1, 1]) == {"status": 200, "stamp": "step-2", "prediction": 2.0}
        await save(1.0, step=4)
        await until("step-4", None)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def two_rounds(path: Path, load: float) -> list[Run]:
    """Return two runs whose figures differ, as a trainer process writes them and the script reads them."""
    from train_live_.records import Run, Save

    rounds = []
    for number in (1, 2):
        run = Run("any", 1, began=0.0, ended=7.0 + number, ticks=[(1.0, 0.001 * number)], answers=[1.0] * number)
        run.saves = run.saves_alone = [Save(1, "url", 10, 0.5, 0.5 + number, 1.0 + number)]
        run.load_training, run.load_alone = (load, load + 1.0), (5.0, 6.0 + number)
        run.write(path)
        rounds.append(Run.read(path))
        load += 0.5
    return rounds


def test_the_demo_says_how_its_rows_were_taken(tmp_path: Path, demo: None) -> None:
    """Check the order of the rows, and the load during each in both rounds."""
    from train_live_.report import NOTES, figures, table

    rows = figures(*(two_rounds(tmp_path / "run.json", load) for load in (0.25, 1.25, 2.25)))
    heading, *lines = table(rows).splitlines()
    assert heading.endswith("  load")
    assert [" ".join([line.split()[0], *line.split()[-2:]]) for line in lines] == [
        "sidestream 1.2-2.2, 1.8-2.8", "dcp.async_save 2.2-3.2, 2.8-3.8", "dcp.save 5.0-7.0, 5.0-8.0",
        "no 0.2-1.2, 0.8-1.8",
    ]  # fmt: skip
    assert "in two rounds" in NOTES


def test_the_rows_of_the_demo_have_the_saves_of_both_rounds(tmp_path: Path, demo: None) -> None:
    from train_live_.report import figures

    ours, *_, idle = figures(*[two_rounds(tmp_path / "run.json", 0.0)] * 3)
    assert (ours.staged_s, ours.durable_s, ours.alone_s) == (1.5, 2.0, 2.0)
    assert (ours.longest_pause_s, ours.answers_per_s) == (0.002, 3 / 4.0)
    assert (idle.longest_pause_s, idle.answers_per_s, idle.training_s) == (0.002, 3 / 17.0, 8.5)


def test_the_demo_gets_the_phases_of_a_save_from_events(tmp_path: Path, demo: None) -> None:
    """Run a trainer: it reports progress in lines of its own, and each save has its phases, in their order."""
    from train_live_.progress import MARK, Progress
    from train_live_.records import Run

    trainer = warm.run(
        [
            sys.executable, str(EXAMPLES / "train_live.py"), "--role=trainer", "--quick", "--saver=sidestream",
            f"--directory={tmp_path / 'run'}", f"--result={tmp_path / 'run.json'}", "--steps=6", "--save-every=3",
        ],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert trainer.returncode == 0, trainer.stderr
    assert not trainer.stderr
    lines = trainer.stdout.splitlines()
    assert lines
    assert all(line.startswith(MARK) for line in lines)
    assert {Progress.parse(line).steps for line in lines} == {6}
    run = Run.read(tmp_path / "run.json")
    assert [save.step for save in run.saves] == [3, 6]
    for save in run.saves:
        at = save.phases
        assert set(at) == {"started", "planned", "staged", "written", "committed"}
        assert save.started <= at["started"] <= at["planned"] <= at["written"] <= at["committed"] <= save.durable
        assert at["started"] <= at["staged"] <= at["written"]


def read_all(descriptor: int) -> str:
    """Read what was written to a pipe or terminal whose other end has been closed, and close it."""
    parts: list[bytes] = []
    with suppress(OSError), open(descriptor, "rb", buffering=0) as file:  # the end of a terminal is EIO
        while part := file.read(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


FAILS = "import sys; print('progress ' + sys.argv[1], flush=True); raise ValueError('no disk')"


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "log"])
def test_the_demo_shows_progress_on_a_terminal_only(
    terminal: bool, demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check what the script writes while a process reports progress and fails: its error stands on lines of its own."""
    from train_live_.progress import MARK, Display, Progress

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    progress = Progress(3, 18, 4.5, 400.0, "step 3 staged, is being written")
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:
        tty.setraw(writer)
    with open(writer, "w") as out:
        display = Display(out, out)
        display.say("1. a run")
        command = [sys.executable, "-c", FAILS, progress.report().removeprefix(MARK)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            display.follow("sidestream", process.stdout)
        display.say("2. the next one")
    written = read_all(reader)
    shown = [line.rpartition("\x1b[K")[2] for line in written.split("\n")[:-1]]
    assert shown[0] == "1. a run"
    assert shown[1].startswith("Traceback")
    assert shown[-2:] == ["ValueError: no disk", "2. the next one"]
    line = "\r\x1b[K   sidestream: step 3 of 18 | loss 4.50 | 400 tokens/s | step 3 staged, is bein\r"  # 79 columns
    assert (line in written) is terminal
    assert ("\r" in written or "\x1b" in written) is terminal


def test_the_comparison_has_the_figures_of_the_recorded_run() -> None:
    page = demo_page.PAGE.read_text()
    assert demo_page.with_figures(page, json.loads(demo_page.FIGURES.read_text())) == page


def test_there_are_some() -> None:
    assert {path.stem for path in SMALL} >= {"quickstart", "inference_server"}
