"""Steps of a transformers Trainer that save a checkpoint, with its own checkpoints and with those of sidestream.

    python benchmarks/trainer_steps.py [--rounds 3] [--width 512] [--directory DIR] [--json FILE]

The two trainers take turns in one process, in the reverse order in every second round, after one round to warm up. Each
trains a GPT-2 on the CPU and saves every third step. A step with a save lasts from the end of the step that is saved to
the end of the next one: it has the call of the save, and what the save in progress costs that step. The other steps are
those without a save, but for the first two. The Trainer does not sync its files, so each turn is followed by ``sync``,
which is not measured. sidestream syncs its own while the training goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from _common import describe, headline, write_json

from sidestream.integrations.transformers import SidestreamTrainer

TRAINERS = {"Trainer": transformers.Trainer, "SidestreamTrainer": SidestreamTrainer}
EVERY, STEPS = 3, 12


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 8192, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Clock(transformers.TrainerCallback):
    """Times from the end of each step, before it is saved, to the end of the next one."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self, *, saving: bool) -> list[float]:
        """Step ``n`` ends at ``ends[n - 1]``, and is saved after that if ``EVERY`` divides ``n``."""
        spans = [later - earlier for earlier, later in zip(self.ends, self.ends[1:], strict=False)]
        return [span for n, span in enumerate(spans, 1) if (n % EVERY == 0) == saving and (saving or n > 2)]


def train(kind: str, width: int, folder: Path) -> tuple[Clock, int]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=6, n_head=8, n_embd=width, vocab_size=8192, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    args = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, save_steps=EVERY, save_total_limit=2, per_device_train_batch_size=1, use_cpu=True,
        report_to=[], disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    clock = Clock()
    model = transformers.GPT2LMHeadModel(config)
    TRAINERS[kind](model=model, args=args, train_dataset=Tokens(), callbacks=[clock]).train()
    found = max(folder.glob("checkpoint-*"), key=os.path.getmtime)
    nbytes = sum(file.stat().st_size for file in found.iterdir())
    shutil.rmtree(folder)
    os.sync()
    return clock, nbytes


def main(options: argparse.Namespace) -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # threads of OpenMP that spin beside other programs would be most of what is measured
    run = describe("transformers", "accelerate")
    print(headline(run), flush=True)
    clocks: dict[str, list[Clock]] = {name: [] for name in TRAINERS}
    nbytes = 0
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for number in range(options.rounds + 1):
            for name in list(TRAINERS)[:: 1 if number % 2 else -1]:
                clock, nbytes = train(name, options.width, Path(folder, name))
                if number:  # the first round is to warm up
                    clocks[name].append(clock)
    found = {
        name: {kind: statistics.median(seconds) for kind, seconds in spans_of(several).items()}
        for name, several in clocks.items()
    }
    print(f"a checkpoint has {nbytes / 1e6:.0f} MB")
    print(f"{'':18} {'with a save':>12} {'without':>9} {'lost':>8}")
    for name, one in found.items():
        print(f"{name:18} {one['saving']:10.3f} s {one['plain']:7.3f} s {one['saving'] - one['plain']:6.3f} s")
    ratios = [
        statistics.median(own.seconds(saving=True)) / statistics.median(stock.seconds(saving=True))
        for own, stock in zip(clocks["SidestreamTrainer"], clocks["Trainer"], strict=True)
    ]
    print("steps with a save, SidestreamTrainer / Trainer, by round:", " ".join(f"{one:.2f}" for one in ratios))
    write_json(options.json, run | {"median_s": found, "ratios": ratios, "nbytes": nbytes})


def spans_of(several: list[Clock]) -> dict[str, list[float]]:
    return {
        kind: [one for clock in several for one in clock.seconds(saving=saving)]
        for kind, saving in (("saving", True), ("plain", False))
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=512, help="of the model: 512 makes 24 million parameters")
    parser.add_argument("--directory", type=Path, help="where to write")
    parser.add_argument("--json", help="where the figures go, too")
    main(parser.parse_args())
