"""Step time of a Lightning ``Trainer`` with saves: its own save, its AsyncCheckpointIO, and sidestream's plugin.

    python benchmarks/lightning_steps.py [--rounds 5] [--width 1024] [--steps 25] [--every 6] [--json FILE]

Each round trains once with each of them, in turning order, on the same model and the same disk. ``steps`` is the time
from the second save to the last step, by step, saves included. ``whole`` is the time of the fit until everything is
written. Lightning's own saves are not synced to the disk, so sidestream runs with ``durability="flush"`` as well. The
verdict is the median over the rounds of the ratio to the faster of Lightning's two.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from _common import describe, headline, write_json
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import sidestream
from sidestream.integrations.lightning import SidestreamCheckpointIO

RIVALS = ("default", "async")
PLUGINS: dict[str, Any] = {
    "default": list,
    "async": lambda: [AsyncCheckpointIO()],
    "sidestream": lambda: [SidestreamCheckpointIO()],
    "sidestream, flush": lambda: [SidestreamCheckpointIO(options=sidestream.SaveOptions(durability="flush"))],
}


class Model(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Times(pl.Callback):
    def __init__(self, every: int) -> None:
        self.every, self.began, self.ended = every, 0.0, 0.0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.ended = time.perf_counter()
        if trainer.global_step == 2 * self.every - 1:  # before the step of the second save: memory has been touched
            self.began = self.ended


def fit(name: str, args: argparse.Namespace) -> dict[str, float]:
    times = Times(args.every)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        keep = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=args.every, save_top_k=1)
        trainer = pl.Trainer(
            plugins=PLUGINS[name](), callbacks=[times, keep], max_steps=args.steps, logger=False, accelerator="cpu",
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        data = torch.utils.data.DataLoader(torch.randn(args.steps * 16, args.width), batch_size=16)
        model = Model(args.width)
        began = time.perf_counter()
        trainer.fit(model, data)
        whole = time.perf_counter() - began
    return {"steps": (times.ended - times.began) / (args.steps - 2 * args.every), "whole": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--directory", help="where to save; default: the directory for temporary files")
    parser.add_argument("--json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    run = describe("lightning")
    print(headline(run))
    names = list(PLUGINS)
    fit("sidestream", args)  # what the first fit of a process imports
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        rounds.append({name: fit(name, args) for name in order})
    print(f"\n{args.width * args.width * 8 * 12 / 1e6:.0f} MB with the optimizer, a save each {args.every} steps\n")
    print(f"{'':20}{'step, ms':>10}{'ratio':>8}{'whole, s':>10}{'ratio':>8}")
    for name in names:
        shown = []
        for what, unit in (("steps", 1e3), ("whole", 1)):
            ratios = [one[name][what] / min(one[rival][what] for rival in RIVALS) for one in rounds]
            shown += [statistics.median(one[name][what] for one in rounds) * unit, statistics.median(ratios)]
        print(f"{name:20}{shown[0]:10.1f}{shown[1]:8.2f}{shown[2]:10.2f}{shown[3]:8.2f}")
    write_json(args.json, run | {"rounds": rounds})


if __name__ == "__main__":
    main()
