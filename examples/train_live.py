"""Checkpoint a model while it trains and serves, kill it in the middle of a save, and lose nothing.

    python examples/train_live.py [--out DIR] [--steps N] [--quick]

A byte-level GPT of 25 million parameters learns English on an asyncio loop. Its steps run in one worker thread; on
the loop itself an HTTP server answers a client that never stops asking, and a ticker notes whenever the loop was
late. Every few steps the weights and the AdamW state, 300 MB, are saved. This script starts that trainer, as a
process of its own, again and again:

1.  without saves, with `sidestream.Checkpointer`, and with stock `dcp.async_save` for comparison;
2.  the same in the reverse order: a machine that becomes slower or faster meanwhile favors none of the three. All six
    runs must end with the same bits, in every weight and in the state of the optimizer;
3.  with sidestream once more, but killed with SIGKILL in the middle of a save, and started again. It must resume from
    the newest whole step and end with the same bits as the runs that were never killed;
4.  its last checkpoint is read by stock `dcp.load`, in a process that never imports sidestream: the same bits again.

It prints one table, and writes `train_live.json` (all figures) and `train_live.png` (the loop's pauses over time, and
the phases of the saves) into DIR. A promise that does not hold ends it with an error. It needs about a minute and a
half on two cores, and 3 GB of free disk, which it gives back.

Start reading at `play` below; what the trainer does is in `train_live_/trainer.py`.
"""

import argparse
import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from train_live_.checks import (
    CheckFailed,
    Kill,
    check_resumed,
    check_same_digest,
    check_stock_load,
    kill_during_save,
)
from train_live_.picture import draw
from train_live_.progress import Display
from train_live_.records import Run, StockLoad
from train_live_.report import NOTES, figures, sentence, table, write_json
from train_live_.saver import STEPS

SCRIPT = Path(__file__).resolve()
SAVES = 6
SAVERS = {"none": "no saves", "sidestream": "sidestream", "dcp": "dcp.async_save"}
"""The rows that are measured in turns."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the trainers work, and how to start them."""

    scratch: Path
    steps: int
    quick: bool
    display: Display = field(default_factory=Display)

    @property
    def save_every(self) -> int:
        return self.steps // SAVES

    def directory(self, name: str) -> Path:
        return self.scratch / name

    def train(self, name: str, saver: str, *, alone: bool = False) -> Run:
        """Run a trainer to its end and return what it measured."""
        os.sync()  # what an earlier run left to the page cache must not slow this one down
        with self.start_trainer(name, saver, alone=alone) as trainer:
            status = trainer.wait()
        if status:
            raise CheckFailed(f"the trainer of {name!r} ended with exit status {status}")
        return Run.read(self.result(name))

    def train_until_killed(self, name: str) -> Kill:
        with self.start_trainer(name, "sidestream") as trainer:
            return kill_during_save(trainer, self.directory(name) / STEPS)

    @contextmanager
    def start_trainer(self, name: str, saver: str, *, alone: bool = False) -> Iterator[subprocess.Popen[bytes]]:
        with self.start(
            SAVERS[saver],
            "trainer",
            f"--saver={saver}",
            f"--directory={self.directory(name)}",
            f"--result={self.result(name)}",
            f"--steps={self.steps}",
            f"--save-every={self.save_every}",
            *(["--alone"] if alone else []),
        ) as trainer:
            yield trainer

    def load_with_stock_dcp(self, checkpoint: Path) -> StockLoad:
        result = self.result("stock_load")
        with self.start("dcp.load", "loader", f"--directory={checkpoint}", f"--result={result}") as loader:
            status = loader.wait()
        if status:
            raise CheckFailed(f"stock dcp.load could not read {checkpoint} (exit status {status})")
        return StockLoad(**json.loads(result.read_text()))

    @contextmanager
    def start(self, name: str, role: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a process, show its progress, and end it on leaving, when all of its output has been read."""
        quick = ["--quick"] if self.quick else []
        command = [sys.executable, str(SCRIPT), f"--role={role}", *quick, *arguments]
        self.display.show(f"   {name}: starting")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        reader = threading.Thread(target=self.display.follow, args=(name, process.stdout), daemon=True)
        reader.start()
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()
            self.display.clear()

    def result(self, name: str) -> Path:
        return self.scratch / f"{name}.json"

    def clear(self, name: str) -> None:
        shutil.rmtree(self.directory(name), ignore_errors=True)


def play(stage: Stage, out: Path) -> None:
    """Tell the whole story, check every promise, and report."""
    say = stage.display.say
    say(f"1. three times {stage.steps} steps: without saves, and with a save after every {stage.save_every} steps")
    rounds = {saver: [measure(stage, saver, 1)] for saver in SAVERS}
    reference = rounds["none"][0]

    say("2. the same in the reverse order")
    for saver in reversed(SAVERS):
        rounds[saver].append(measure(stage, saver, 2))
    for saver, runs in rounds.items():
        for run in runs:
            check_same_digest(f"a run of {SAVERS[saver]!r}", run.digest, reference)
    say(f"   all six end with the same bits in {reference.parameters / 1e6:.1f} M parameters and their optimizer state")

    say("3. with sidestream, killed in the middle of a save and started again")
    kill = stage.train_until_killed("killed")
    say(f"   SIGKILL in the save of step {kill.interrupted_step}: {kill.interrupted_nbytes:,} bytes, not committed")
    resumed = stage.train("killed", "sidestream")
    check_resumed(resumed, kill, reference)
    say(f"   resumed from step {resumed.resumed_from}; final weights and optimizer state are bit-identical")

    say("4. its last checkpoint, read by stock dcp.load in a process without sidestream")
    loaded = stage.load_with_stock_dcp(Path(resumed.saves[-1].url))
    check_stock_load(loaded, stage.steps, reference)
    stage.clear("killed")
    say("   bit-identical")

    idle, ours, theirs = rounds.values()
    rows = figures(idle, ours, theirs)
    story = {
        "training": {"steps": stage.steps, "save_every": stage.save_every, "quick": stage.quick},
        "kill": asdict(kill),
        "stock_load": asdict(loaded),
    }
    write_json(
        out / "train_live.json",
        rows,
        story,
        {"no_saves": idle, "sidestream": ours, "resumed": [resumed], "dcp": theirs},
    )
    draw(out / "train_live.png", ours, theirs)
    say(f"\n{table(rows)}\n\n{NOTES}\n\nwritten: {out / 'train_live.json'}, {out / 'train_live.png'}")


def measure(stage: Stage, saver: str, number: int) -> Run:
    """Run a trainer that is measured, in the round of this number."""
    name = f"{SAVERS[saver].replace(' ', '_')}-{number}"
    run = stage.train(name, saver, alone=saver != "none")
    stage.clear(name)
    stage.display.say(f"   {sentence(SAVERS[saver], run)}")
    return run


def main() -> None:
    arguments = parse_arguments()
    if arguments.role != "play":
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback: the script says that it was interrupted
    if arguments.role == "trainer":
        be_trainer(arguments)
    elif arguments.role == "loader":
        be_loader(arguments)
    else:
        play_in_scratch(arguments)


def play_in_scratch(arguments: argparse.Namespace) -> None:
    """Tell the story in a temporary directory beside the results: on the disk that the user chose."""
    missing = [name for name in ("aiohttp", "matplotlib", "numpy") if find_spec(name) is None]
    if missing:
        sys.exit(f"The demo also needs {', '.join(missing)}: `nox -s demo` installs everything that it needs.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="train_live-", dir=arguments.out) as scratch:
        stage = Stage(Path(scratch).resolve(), arguments.steps, arguments.quick)
        try:
            play(stage, arguments.out)
        except CheckFailed as failure:
            sys.exit(f"FAILED: {failure}")
        except KeyboardInterrupt:
            sys.exit("interrupted")


def be_trainer(arguments: argparse.Namespace) -> None:
    """Train as told by the command line, and leave a record of the run."""
    from train_live_ import model, trainer

    quieten_torch()
    run = asyncio.run(
        trainer.train(
            model.QUICK if arguments.quick else model.FULL,
            saver_name=arguments.saver,
            directory=arguments.directory,
            steps=arguments.steps,
            save_every=arguments.save_every,
            measure_alone=arguments.alone,
        )
    )
    run.write(arguments.result)


def be_loader(arguments: argparse.Namespace) -> None:
    """Load a checkpoint with stock DCP, and leave a record of what was in it."""
    from train_live_ import loader, model

    quieten_torch()
    loaded = loader.load_with_stock_dcp(model.QUICK if arguments.quick else model.FULL, arguments.directory)
    arguments.result.write_text(json.dumps(asdict(loaded)))


def quieten_torch() -> None:
    """Keep DCP's remarks on running without a process group out of the story."""
    warnings.filterwarnings("ignore", module="torch.distributed")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/train_live"), help="where table and picture go")
    parser.add_argument("--steps", type=int, default=None, help="training steps of each run")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: a test, not a measurement")
    hidden = argparse.SUPPRESS  # what the script tells the processes that it starts
    parser.add_argument("--role", choices=["play", "trainer", "loader"], default="play", help=hidden)
    parser.add_argument("--saver", choices=["none", "sidestream", "dcp"], help=hidden)
    parser.add_argument("--directory", type=Path, help=hidden)
    parser.add_argument("--result", type=Path, help=hidden)
    parser.add_argument("--save-every", type=int, help=hidden)
    parser.add_argument("--alone", action="store_true", help=hidden)
    arguments = parser.parse_args()
    if arguments.steps is None:
        arguments.steps = 12 if arguments.quick else 18
    if arguments.steps < SAVES:
        parser.error(f"--steps must be at least {SAVES}, one for each save")
    return arguments


if __name__ == "__main__":
    main()
