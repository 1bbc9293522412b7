"""Checkpoint a model while it trains and serves, kill it in the middle of a save, and lose nothing.

    python examples/train_live.py [--out DIR] [--steps N] [--quick]

A byte-level GPT of 25 million parameters learns English on an asyncio loop. Its steps run in one worker thread; on
the loop itself an HTTP server answers a client that never stops asking, and a ticker notes whenever the loop was
late. Every few steps the weights and the AdamW state, 300 MB, are saved. This script starts that trainer, as a
process of its own, again and again:

1.  without saves: how long does the loop pause anyway?
2.  with `sidestream.Checkpointer`, undisturbed: the reference for all that follows;
3.  the same, but killed with SIGKILL in the middle of a save, and started again. It must resume from the newest whole
    step and end with exactly the bits of the reference, in every weight and in the state of the optimizer;
4.  its last checkpoint is read by stock `dcp.load`, in a process that never imports sidestream: the same bits again;
5.  with stock `dcp.async_save` instead of sidestream, for comparison.

It prints one table, and writes `train_live.json` (all figures) and `train_live.png` (the loop's pauses over time)
into DIR. A promise that does not hold ends it with an error. It needs about a minute on two cores, and 3 GB of
free disk, which it gives back.

Start reading at `play` below; what the trainer does is in `train_live_/trainer.py`.
"""

import argparse
import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from train_live_.checks import (
    CheckFailed,
    Kill,
    check_resumed,
    check_same_digest,
    check_stock_load,
    kill_during_save,
)
from train_live_.records import Run, StockLoad
from train_live_.report import NOTES, draw, figures, table, write_json
from train_live_.saver import STEPS

SCRIPT = Path(__file__).resolve()
SAVES = 6


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the trainers work, and how to start them."""

    scratch: Path
    steps: int
    quick: bool

    @property
    def save_every(self) -> int:
        return self.steps // SAVES

    def directory(self, name: str) -> Path:
        return self.scratch / name

    def train(self, name: str, saver: str, *, alone: bool = False) -> Run:
        """Run a trainer to its end and return what it measured."""
        os.sync()  # what an earlier run left to the page cache must not slow this one down
        trainer = self.start_trainer(name, saver, alone=alone)
        if trainer.wait():
            raise CheckFailed(f"the trainer of {name!r} ended with exit status {trainer.returncode}")
        return Run.read(self.result(name))

    def train_until_killed(self, name: str) -> Kill:
        trainer = self.start_trainer(name, "sidestream")
        try:
            return kill_during_save(trainer, self.directory(name) / STEPS)
        finally:
            trainer.kill()
            trainer.wait()

    def start_trainer(self, name: str, saver: str, *, alone: bool = False) -> subprocess.Popen[bytes]:
        return self.start(
            "trainer",
            f"--saver={saver}",
            f"--directory={self.directory(name)}",
            f"--result={self.result(name)}",
            f"--steps={self.steps}",
            f"--save-every={self.save_every}",
            *(["--alone"] if alone else []),
        )

    def load_with_stock_dcp(self, checkpoint: Path) -> StockLoad:
        result = self.result("stock_load")
        loader = self.start("loader", f"--directory={checkpoint}", f"--result={result}")
        if loader.wait():
            raise CheckFailed(f"stock dcp.load could not read {checkpoint} (exit status {loader.returncode})")
        return StockLoad(**json.loads(result.read_text()))

    def start(self, role: str, *arguments: str) -> subprocess.Popen[bytes]:
        quick = ["--quick"] if self.quick else []
        return subprocess.Popen([sys.executable, SCRIPT, f"--role={role}", *quick, *arguments])

    def result(self, name: str) -> Path:
        return self.scratch / f"{name}.json"

    def clear(self, name: str) -> None:
        shutil.rmtree(self.directory(name), ignore_errors=True)


def play(stage: Stage, out: Path) -> None:
    """Tell the whole story, check every promise, and report."""
    print(f"1. {stage.steps} steps without saves")
    idle = stage.train("no_saves", "none")
    print(f"   {idle.parameters / 1e6:.1f} M parameters, loss {idle.losses[1]:.2f} -> {idle.losses[stage.steps]:.2f}")

    print(f"2. the same with sidestream, a save after every {stage.save_every} steps")
    ours = stage.train("sidestream", "sidestream", alone=True)
    stage.clear("sidestream")
    check_same_digest("the run without saves", idle.digest, ours)
    print("   saving changed no bit of what was learned")

    print("3. the same, killed in the middle of a save and started again")
    kill = stage.train_until_killed("killed")
    print(f"   SIGKILL in the save of step {kill.interrupted_step}: {kill.interrupted_nbytes:,} bytes, not committed")
    resumed = stage.train("killed", "sidestream")
    check_resumed(resumed, kill, ours)
    print(f"   resumed from step {resumed.resumed_from}; final weights and optimizer state are bit-identical")

    print("4. its last checkpoint, read by stock dcp.load in a process without sidestream")
    loaded = stage.load_with_stock_dcp(Path(resumed.saves[-1].url))
    check_stock_load(loaded, stage.steps, ours)
    stage.clear("killed")
    print("   bit-identical")

    print("5. the same training with stock dcp.async_save")
    theirs = stage.train("dcp", "dcp", alone=True)
    stage.clear("dcp")
    check_same_digest("the run with dcp.async_save", theirs.digest, ours)

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
        {"no_saves": idle, "sidestream": ours, "resumed": resumed, "dcp": theirs},
    )
    draw(out / "train_live.png", ours, theirs)
    print(f"\n{table(rows)}\n\n{NOTES}\n\nwritten: {out / 'train_live.json'}, {out / 'train_live.png'}")


def main() -> None:
    arguments = parse_arguments()
    if arguments.role == "trainer":
        be_trainer(arguments)
    elif arguments.role == "loader":
        be_loader(arguments)
    else:
        play_in_scratch(arguments)


def play_in_scratch(arguments: argparse.Namespace) -> None:
    """Tell the story in a temporary directory beside the results: on the disk that the user chose."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="train_live-", dir=arguments.out) as scratch:
        stage = Stage(Path(scratch).resolve(), arguments.steps, arguments.quick)
        try:
            play(stage, arguments.out)
        except CheckFailed as failure:
            sys.exit(f"FAILED: {failure}")


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
