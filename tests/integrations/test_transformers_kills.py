"""Training with ``SidestreamTrainer`` that is killed at any moment of a save, and resumed."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lives import Program
from transformers.trainer_utils import get_last_checkpoint

from sidestream import blocking

PROGRAM = Path(__file__).parent / "transformers_program.py"


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_killed_in_a_save(kills: int, tmp_path: Path) -> None:
    """Each resume takes a complete step, and in the end the weights are those of a run that was not killed."""
    chance = random.Random(seed := int.from_bytes(os.urandom(4), "little"))
    print("seed", seed)
    steps, out = 6 * kills + 4, tmp_path / "killed"
    with Program(PROGRAM) as program:
        program.life(
            trainer="stock", out=str(tmp_path / "whole"), steps=steps, save="no", weights=str(tmp_path / "whole.pt")
        ).end()
        for _ in range(kills):
            newest = _step(get_last_checkpoint(out)) if out.exists() else 0
            life = program.life(trainer="sidestream", out=str(out), steps=steps, weights="")
            begun = int(life.until("begins").split()[1])
            assert begun == newest
            for _ in range(chance.randint(1, 3)):
                life.until("saving")
            time.sleep(chance.uniform(0, 0.06))  # a save takes about as long
            life.kill()
            left = sorted(path.name for path in out.iterdir())
            print("killed in the life from step", begun, left)
            for name in left:
                if name.startswith("checkpoint-"):
                    assert blocking.verify(out / name).ok
        last = program.life(trainer="sidestream", out=str(out), steps=steps, weights=str(tmp_path / "killed.pt"))
        last.end()
    whole, killed = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items())
    assert _step(get_last_checkpoint(out)) == steps


def _step(path: str | None) -> int:
    return 0 if path is None else int(path.rpartition("-")[2])
